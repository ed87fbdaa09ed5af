"""Builds the runtime library, the precompiled header and units; all of them are cache entries."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import headers
from ..cache import Cache, cache_key
from ..errors import CompileError, MissingDependencyError
from .elf import Variable, uninitialised
from .toolchain import COMPILER_VARIABLE, SHIM, HostCompiler, Mode, host_compiler, shim_digest
from .unit import host_text

#: Copies of units that are loaded at a time: each takes five or six of the 65,530 mappings of a process.
MOST_COPIES = 3000

_HEADERS = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "vector_types.h", "vector_functions.h")


@dataclass(frozen=True)
class Built:
    """A shared library: its bytes, and how it came about. Two of the same digest are the same."""

    data: bytes = field(repr=False, compare=False)
    digest: str
    cached: bool = field(compare=False)
    seconds: float = field(compare=False)

    @cached_property
    def variables(self) -> tuple[Variable, ...]:
        """Its uninitialised variables: the static shared memory."""
        return uninitialised(self.data)


class Builder:
    """Builds with one compiler into one cache; holds a scratch folder as long as it lives."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.compiler: HostCompiler = host_compiler()
        self.directories = headers.include_directories()
        headers.check(_HEADERS, self.directories, "for the simulator")
        self._base = {
            "compiler": self.compiler.identity,
            "shim": shim_digest(),
            "headers": headers.digest(_HEADERS, self.directories),
        }
        self._runtime_parts = {k: v for k, v in self._base.items() if k != "headers"}
        self._runtime_name = f"libfrsim-{cache_key(self._runtime_parts)[:16]}.so"
        self._scratch = tempfile.mkdtemp(prefix="fusionreg-sim-")
        self._runtime: Built | MissingDependencyError | None = None
        self._precompiled: dict[Mode, Path | None] = {}
        # Units build in several threads; the runtime and each header are made once.
        self._runtime_lock = threading.Lock()
        self._copies: OrderedDict[weakref.ref[Any], int] = OrderedDict()  # of loaded units, by kernel
        self._copies_lock = threading.Lock()
        self._header_locks: dict[Mode, threading.Lock] = {m: threading.Lock() for m in ("fast", "checked", "sanitize")}
        weakref.finalize(self, shutil.rmtree, self._scratch, True)

    def _includes(self) -> list[str]:
        return [f"-I{SHIM / 'include'}", f"-I{SHIM}", *(f"-I{d}" for d in self.directories)]

    def loaded(self, kernel: Any, count: int) -> None:
        """``kernel`` has so many copies of its unit loaded and is about to use them; others make room for them."""
        with self._copies_lock:
            mine = weakref.ref(kernel)
            self._copies[mine] = count
            self._copies.move_to_end(mine)
            total = sum(self._copies.values())
            for other in list(self._copies):
                if total <= MOST_COPIES or other == mine:
                    break
                found = other()
                if found is None or found.unload():
                    total -= self._copies.pop(other)

    def begin(self) -> None:
        """Makes the runtime ready; where it has yet to be compiled, the headers that units need beside it.

        :class:`MissingDependencyError` as from :attr:`runtime`.
        """
        if self.cache.get("sim-runtime", cache_key(self._runtime_parts)) is None:
            with ThreadPoolExecutor(2) as pool:
                headers_made = [pool.submit(self._header, mode) for mode in ("fast", "checked")]
                self.runtime  # noqa: B018
                for made in headers_made:
                    made.result()
        self.runtime  # noqa: B018

    @property
    def runtime(self) -> Built:
        """The runtime library; :class:`MissingDependencyError`, found out once, where the compiler does not take it."""
        with self._runtime_lock:
            if self._runtime is None:
                self._runtime = self._made_runtime()
            if isinstance(self._runtime, MissingDependencyError):
                raise self._runtime
            return self._runtime

    def _made_runtime(self) -> Built | MissingDependencyError:
        def build(work: Path) -> Path:
            flags = [*(f for f in self.compiler.flags("fast") if f != "-w"), "-O2"]
            source = str(SHIM / "runtime" / "runtime.cpp")
            name = f"-Wl,-soname,{self._runtime_name}"  # units find it by this name, already loaded
            self.compiler.run(
                [*flags, f"-ffile-prefix-map={work}=.", "-shared", name, source, "-o", "runtime.so", "-pthread"],
                "its runtime",
                work,
            )
            return work / "runtime.so"

        try:
            return self._entry("sim-runtime", "runtime", self._runtime_parts, build)
        except CompileError as e:
            return self._unfit("runtime", e)

    def _unfit(self, what: str, error: CompileError) -> MissingDependencyError:
        """The compiler's fault, where the code is the simulator's own and no kernel's."""
        return MissingDependencyError(
            "cannot simulate", "kernels",
            f"{self.compiler.path} does not compile the simulator's {what}: {error.found}",
            "g++ 9 or clang++ 11 or later, with its C++ library",
            f"Install another one, or name it in {COMPILER_VARIABLE}", log=error.facts["log"],
        )  # fmt: skip

    def unit(self, text: str, entry: str, target: str, mode: Mode, whom: str) -> Built:
        """A kernel's shared library; :class:`CompileError` (``facts``: log) when the host compiler refuses it."""
        code = host_text(text, entry, target)
        flags = self.compiler.flags(mode)
        parts = {**self._base, "flags": " ".join((*flags, *self.compiler.link_flags(mode))), "text": code}

        def build(work: Path) -> Path:
            (work / "unit.cpp").write_text(code)
            header = self._header(mode) or SHIM / "fr_sim.h"
            runtime = work / self._runtime_name
            runtime.write_bytes(self.runtime.data)
            # Two steps: told to link, the compiler would add the sanitizers' own libraries.
            places = [*self._includes(), f"-ffile-prefix-map={work}=."]
            self.compiler.run([*flags, *places, "-include", str(header), "-c", "unit.cpp"], whom, work)
            self.compiler.run(["unit.o", str(runtime), *self.compiler.link_flags(mode), "-o", "unit.so"], whom, work)
            return work / "unit.so"

        return self._entry(f"sim-{mode}", whom, parts, build)

    def _entry(self, kind: str, name: str, parts: dict[str, str], build) -> Built:
        key = cache_key(parts)
        started = time.perf_counter()
        found = self.cache.get(kind, key)
        if found is not None:
            return Built(found, key, True, time.perf_counter() - started)
        with self._work() as work:
            data = build(work).read_bytes()
        noted = {k: v for k, v in parts.items() if k != "text"}
        self.cache.put(kind, key, data, {"name": name, "parts": noted})
        return Built(data, key, False, time.perf_counter() - started)

    @contextmanager
    def _work(self) -> Iterator[Path]:
        work = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _header(self, mode: Mode) -> Path | None:
        """A header whose precompiled form lies beside it; None where the compiler cannot make one.

        It is found once per process: an entry of some 40 MB is verified on every look-up.
        """
        with self._header_locks[mode]:
            if mode not in self._precompiled:
                self._precompiled[mode] = self._make_header(mode)
            return self._precompiled[mode]

    def _make_header(self, mode: Mode) -> Path | None:
        if self.compiler.kind != "gcc":  # clang checks the header's path and time, which a cache does not keep
            return None
        flags = self.compiler.flags(mode)
        folder = Path(self._scratch) / mode
        folder.mkdir(exist_ok=True)
        stub = folder / "fr_sim_pch.h"
        stub.write_text('#include "fr_sim.h"\n')

        def build(work: Path) -> Path:
            self.compiler.run(
                [*flags, *self._includes(), "-x", "c++-header", str(stub), "-o", "out.gch"], "its header", work
            )
            return work / "out.gch"

        # The folders of the headers stand in it, so they are part of its key.
        parts = {**self._base, "flags": " ".join((*flags, *self._includes()))}
        try:
            data = self._entry("sim-header", f"header ({mode})", parts, build).data
        except CompileError as e:
            raise self._unfit("header", e) from e
        except OSError:
            return None
        made = folder / "fr_sim_pch.h.gch"
        temporary = folder / f"gch-{os.getpid()}"
        temporary.write_bytes(data)
        temporary.replace(made)
        return stub
