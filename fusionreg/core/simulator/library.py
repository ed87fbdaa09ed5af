"""Loaded libraries: the runtime, once per process and content, and copies of units."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock

from ..errors import SimulatorError
from . import abi
from .build import Built
from .elf import Variable


@contextmanager
def as_file(data: bytes, name: str) -> Iterator[str]:
    """The bytes as a file of a path that was never loaded before: the loader knows libraries by path and by inode."""
    folder = tempfile.mkdtemp(prefix="fusionreg-so-")
    path = os.path.join(folder, name)
    try:
        with open(path, "wb") as file:
            file.write(data)
        yield path
    finally:
        with suppress(OSError):
            os.unlink(path)
            os.rmdir(folder)


def load(data: bytes, name: str, folder: Path | None = None) -> ctypes.CDLL:
    """Loads a shared library from its bytes; through anonymous memory where temporary files may not be executed.

    ``folder``: where its file stays, for tools that read line numbers from it; None removes the file at once.
    """
    if folder is not None:
        (folder / name).write_bytes(data)
        return ctypes.CDLL(str(folder / name))
    try:
        with as_file(data, name) as path:
            return ctypes.CDLL(path)
    except OSError as first:
        try:
            handle = os.memfd_create(name)  # stays open: another library must not come by the same path
            os.write(handle, data)
            return ctypes.CDLL(f"/proc/self/fd/{handle}")
        except OSError:
            raise SimulatorError(
                "cannot load", name, str(first), "a library that the loader takes",
                "Set TMPDIR to a folder whose files may be executed", detector="load",
            ) from first  # fmt: skip


_ONE_RUNTIME = Lock()


def runtime(built: Built) -> ctypes.CDLL:
    """The runtime library, once per digest whatever the threads; units loaded later find it by its soname."""
    with _ONE_RUNTIME:
        return _runtime(built)


@lru_cache(maxsize=8)
def _runtime(built: Built) -> ctypes.CDLL:
    return abi.declare(load(built.data, "fusionreg-simulator.so"))


class LoadedUnit:
    """One copy of a unit, with shared memory of its own."""

    def __init__(self, data: bytes, name: str, variables: Sequence[Variable], folder: Path | None = None) -> None:
        self.library = load(data, f"{name}.so", folder)
        # a process has only so many mappings: a unit that nobody holds any more leaves it
        self._unload = weakref.finalize(self, _ctypes.dlclose, self.library._handle)
        self._unload.atexit = False
        self.info = abi.Unit()
        self.library.frsim_unit(ctypes.byref(self.info))
        self.mask = (ctypes.c_uint8 * max(1, self.info.shared_bytes))()
        for v in variables:
            self.mask[v.offset : v.offset + v.bytes] = [1] * v.bytes

    def close(self) -> None:
        """Unloads it; it must not be used again."""
        self._unload()

    def copy(self) -> abi.Copy:
        u, mask = self.info, ctypes.addressof(self.mask)
        return abi.Copy(u.entry, u.shared, u.shared_bytes, mask, u.dynamic, u.image, u.image_bytes)


def source_lines(data: bytes, offsets: Sequence[int]) -> list[tuple[tuple[str, int], ...]]:
    """For each offset of a unit's image the places in its source, innermost inlined function first.

    Empty where ``addr2line`` (of the compiler's binutils) is missing or knows nothing.
    """
    if not offsets:
        return []
    program = shutil.which("addr2line") or shutil.which("llvm-addr2line") or shutil.which("llvm-symbolizer")
    if program is None:
        return [()] * len(offsets)
    with as_file(data, "unit.so") as path:
        asked = [hex(max(0, o - 1)) for o in offsets]  # return addresses: the call is the instruction before
        done = subprocess.run(
            [program, "-a", "-i", "-e", path, *asked], capture_output=True, text=True, errors="replace"
        )
    found: list[list[tuple[str, int]]] = []
    for line in done.stdout.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+:?", line.strip()):
            found.append([])
            continue
        place = re.match(r"(.*):(\d+)", line)
        if place and found and place[2] != "0" and "fr_sim" not in place[1] and place[1] != "driver":
            found[-1].append((os.path.basename(place[1]), int(place[2])))
    return [tuple(f) for f in found] + [()] * (len(offsets) - len(found))


def place_text(lines: Sequence[tuple[str, int]]) -> str:
    """``a.cu.j2:12``, with the caller where the innermost place is a shared header."""
    if not lines:
        return ""
    head = f"{lines[0][0]}:{lines[0][1]}"
    caller = next((f"{f}:{n}" for f, n in lines if not f.endswith((".cuh.j2", ".cuh", ".hpp", ".h"))), "")
    return head if not caller or caller == head else f"{head}, called from {caller}"
