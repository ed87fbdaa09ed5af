"""The one door to NVRTC: CuPy's binding of it, which needs no GPU. Floor 5."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from .. import headers
from ..errors import CompileError, MissingDependencyError
from .cubin import repaired

_INSTALL = "Install it with: pip install 'fusionreg[cuda13]'"
_MISSING_HEADER = re.compile(r'could not open source file "([^"]+)"|cannot open source file "([^"]+)"')
_ERROR = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<text>[^\n]*)", re.M)


@lru_cache(maxsize=1)
def binding() -> Any:
    """CuPy's NVRTC module; :class:`MissingDependencyError` when CuPy or NVRTC's library is missing."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()  # loads the shared library
    except ImportError as e:
        raise MissingDependencyError(
            "cannot compile", "CUDA", f"CuPy cannot be imported ({e})", "CuPy", _INSTALL
        ) from None
    except Exception as e:  # CuPy raises RuntimeError, or one of its own, when libnvrtc does not load
        raise MissingDependencyError(
            "cannot compile", "CUDA", f"NVRTC does not load ({' '.join(str(e).split())})", "NVRTC", _INSTALL
        ) from None
    return nvrtc


@lru_cache(maxsize=1)
def version() -> str:
    """NVRTC's version, e.g. ``"13.5"``."""
    return ".".join(map(str, binding().getVersion()))


@lru_cache(maxsize=1)
def supported() -> frozenset[int]:
    """Compute capabilities (major * 10 + minor) that this NVRTC compiles for; empty when it cannot tell."""
    try:
        return frozenset(int(a) for a in binding().getSupportedArchs())
    except Exception:  # an NVRTC older than the function
        return frozenset()


def check_architecture(arch: str, whom: str = "") -> None:
    """:class:`CompileError` naming the architecture, this NVRTC and what it supports, when it cannot compile for it."""
    number = int(re.sub(r"\D", "", arch) or 0)
    known = supported()
    if known and number not in known:
        raise _unknown(arch, whom, "")


def _unknown(arch: str, whom: str, log: str) -> CompileError:
    known = ", ".join(f"sm_{n}" for n in sorted(supported()))
    return CompileError(
        "cannot compile", whom, f"NVRTC {version()} does not know {arch}", f"one of {known}" if known else "",
        "A newer nvidia-cuda-nvrtc may know it", arch=arch, nvrtc=version(), log=log,
    )  # fmt: skip


def compile_unit(text: str, name: str, arch: str, options: Sequence[str], whom: str) -> tuple[bytes, str]:
    """Compiles one unit to a cubin; returns it whole, with the compiler's log.

    Args:
        text: CUDA C++.
        name: what the compiler calls the unit.
        arch: ``sm_…``.
        options: all options beside ``-arch``.
        whom: for errors.

    Raises: :class:`CompileError` (``facts``: log, arch, file, line), :class:`MissingDependencyError` for a header.
    """
    nvrtc = binding()
    check_architecture(arch, whom)
    program = nvrtc.createProgram(text, name, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch={arch}", *options))
        except nvrtc.NVRTCError as e:
            raise _refused(nvrtc.getProgramLog(program) or str(e), arch, whom) from None
        return repaired(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program) or ""
    finally:
        nvrtc.destroyProgram(program)


def _refused(log: str, arch: str, whom: str) -> CompileError | MissingDependencyError:
    if "--gpu-architecture" in log:  # a family or specific variant, or an NVRTC that lists nothing
        return _unknown(arch, whom, log)
    missing = _MISSING_HEADER.search(log)
    header, directories = (missing[1] or missing[2]) if missing else "", headers.include_directories()
    if header and headers.installable(header, directories):
        return headers.missing(header, whom, directories)
    first = _ERROR.search(log)
    if first:
        found, file, line = f"{first['file']}:{first['line']}: {first['text']}", first["file"], int(first["line"])
    else:
        found, file, line = log.strip().splitlines()[0] if log.strip() else "no reason given", "", 0
    return CompileError(
        "cannot compile", f"{whom} for {arch}", found, "", f"The whole log:\n{log.strip()}\n",
        log=log, arch=arch, nvrtc=version(), file=file, line=line,
    )  # fmt: skip
