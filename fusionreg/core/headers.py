"""CUDA's headers without a toolkit: where they are, what a unit includes of them, and what to install. Floor 5.

NVRTC brings no headers along. They come from NVIDIA's pip wheels, else from a toolkit.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from .errors import MissingDependencyError

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.M)

#: Which wheel brings a header, by how its name begins; the last row is for all others.
_WHEELS = (
    (("nv/", "cuda/", "cub/", "thrust/"), "nvidia-cuda-cccl"),
    (("crt/",), "nvidia-cuda-crt"),
    (("nvrtc",), "nvidia-cuda-nvrtc"),
    (("",), "nvidia-cuda-runtime"),
)

#: What CUDA's half and bfloat16 headers need beside themselves: found missing before NVRTC is asked.
_NEEDS = dict.fromkeys(
    ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"), ("nv/target", "vector_types.h", "crt/host_defines.h")
)

_DEFAULT_TOOLKIT = "/usr/local/cuda"
_MARKS = ("cuda_fp16.h", "nv/target", "crt/host_defines.h", "nvrtc.h")


def include_directories() -> tuple[Path, ...]:
    """Folders of CUDA headers, wheels first, then ``CUDA_PATH``, ``CUDA_HOME`` and the toolkit of ``nvcc``."""
    found: dict[Path, None] = {}
    for folder in (*_wheel_folders(), *_toolkit_folders(), *_cupy_folders()):
        if any((folder / name).is_file() for name in _MARKS):  # and not some other package's include folder
            found.setdefault(folder)
    return tuple(found)


def _wheel_folders() -> list[Path]:
    spec = find_spec("nvidia")
    roots = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    versions = [p for root in roots for p in sorted(root.glob("cu[0-9]*"), reverse=True)]
    parts = [
        p for root in roots for p in (root / "cuda_runtime", root / "cuda_nvrtc", root / "cuda_cccl", root / "cuda_crt")
    ]
    return [folder for base in (*versions, *parts) for folder in (base / "include", base / "include" / "cccl")]


def _toolkit_folders() -> list[Path]:
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), nvcc and str(Path(nvcc).resolve().parents[1])]
    bases = [Path(r) for r in (*roots, _DEFAULT_TOOLKIT) if r]
    return [folder for base in bases for folder in (base / "include", base / "include" / "cccl")]


def _cupy_folders() -> list[Path]:
    """CuPy carries a copy of libcu++, which has ``nv/target``."""
    spec = find_spec("cupy")
    roots = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    return [root / "_core" / "include" / "cupy" / "_cccl" / "libcudacxx" for root in roots]


def wheel_of(header: str) -> str:
    """The pip package that brings a header."""
    return next(wheel for beginnings, wheel in _WHEELS if header.startswith(beginnings))


def installable(header: str, directories: Sequence[Path]) -> bool:
    """Whether a header that is not there may be one that CUDA's wheels bring.

    NVRTC has no C++ standard library: ``<vector>`` is never there, and a kernel that asks for it is wrong. So is one
    that asks for any other header beside those of a named wheel, where the runtime's are installed.
    """
    named = any(header.startswith(b) for beginnings, _ in _WHEELS for b in beginnings if b)
    return named or find("cuda_fp16.h", directories) is None


def missing(header: str, whom: str = "", directories: Sequence[Path] = ()) -> MissingDependencyError:
    """The error for a header that is not there: it names the header, the wheel, and the extra that brings all."""
    places = ", ".join(map(str, directories)) or "no folder of CUDA headers"
    package = wheel_of(header)
    return MissingDependencyError(
        "cannot compile", whom, f"CUDA header {header} is not in {places}", f"the one of pip package {package}",
        "Install it with: pip install 'fusionreg[cuda13]', or set CUDA_PATH to a toolkit",
        header=header, package=package,
    )  # fmt: skip


def find(header: str, directories: Iterable[Path]) -> Path | None:
    """The file that ``#include <header>`` would read."""
    return next((p for p in (d / header for d in directories) if p.is_file()), None)


def check(headers: Iterable[str], directories: Sequence[Path], whom: str = "") -> None:
    """:class:`MissingDependencyError` when one of ``headers``, or what it cannot do without, is in no folder."""
    for header in headers:
        for name in (header, *_NEEDS.get(header, ())):
            if find(name, directories) is None:
                raise missing(name, whom, directories)


def digest(headers: Sequence[str], directories: Sequence[Path]) -> str:
    """SHA-256 over the contents of ``headers`` and of all they include, so that no stale cubin outlives an edit."""
    return _digest(tuple(headers), tuple(directories))


@lru_cache(maxsize=64)
def _digest(headers: tuple[str, ...], directories: tuple[Path, ...]) -> str:
    total = hashlib.sha256()
    queue: list[tuple[str, Path | None]] = [(h, find(h, directories)) for h in headers]
    seen: set[Path] = set()
    while queue:
        name, path = queue.pop(0)
        if path is None or path in seen:  # named in a branch that NVRTC does not take
            continue
        seen.add(path)
        data = path.read_bytes()
        total.update(f"{name}:{len(data)}:".encode() + data)
        for found in _INCLUDE.findall(data):
            child = found.decode("utf-8", "replace")
            beside = path.parent / child
            queue.append((child, beside if beside.is_file() else find(child, directories)))
    return total.hexdigest()
