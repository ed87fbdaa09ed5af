"""The host's C++ compiler: which one, and how units and the runtime library are built with it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from ..errors import CompileError, MissingDependencyError

Mode = Literal["fast", "checked", "sanitize"]
SHIM = Path(__file__).parent / "shim"
COMPILER_VARIABLE = "FUSIONREG_CXX"

_COMMON = (
    "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno",
    "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fno-stack-protector",
    "-fstack-clash-protection", "-g1", "-w",
)  # fmt: skip
#: A unique symbol would be one for all copies of a unit, which shared variables must not be. A __device__ variable that
#: starts as 0 goes where other initialised ones are (clang's flag of this name would take shared variables along).
_GCC = ("-fno-gnu-unique", "-fno-zero-initialized-in-bss")
#: Every access is reported as the source has it: null pointers are not assumed away, gcc keeps vector accesses whole,
#: clang reports the load of `y[i] += 1` too; volatile accesses are told apart, since flags are polled with them.
_CHECKED = ("-O1", "-fsanitize=thread,alignment,bounds", "-fno-delete-null-pointer-checks")
_CHECKED_GCC = ("-fno-tree-sra",)
_CHECKED_GCC_11 = (*_CHECKED_GCC, "--param=tsan-distinguish-volatile=1")
_CHECKED_CLANG = tuple(
    part for flag in ("distinguish-volatile", "instrument-read-before-write") for part in ("-mllvm", f"-tsan-{flag}=1")
)
_SANITIZE = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
#: Block moves are calls that gcc does not report: the linker leads them to the runtime library.
_WRAP = ("-Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset",)
#: The C++ library comes with the runtime, which is loaded already; finding it again takes half of the link's time.
_LINK_GCC = ("-nodefaultlibs", "-lm", "-lc", "-lgcc")


@dataclass(frozen=True, slots=True)
class HostCompiler:
    """A C++ compiler.

    Attributes:
        path: its program.
        kind: ``gcc`` or ``clang``.
        version: as it says itself, e.g. ``"12.2.0"``.
        identity: everything about it and this machine that a compiled unit depends on.
    """

    path: str
    kind: Literal["gcc", "clang"]
    version: str
    identity: str

    def flags(self, mode: Mode) -> tuple[str, ...]:
        """Compile flags of units; the precompiled header needs the same ones."""
        gcc = self.kind == "gcc"
        flags = [*_COMMON, *_machine(), *(_GCC if gcc else ())]
        if mode == "fast":
            flags.append("-O1")
        elif mode == "checked":
            own = (
                _CHECKED_CLANG if not gcc else _CHECKED_GCC if int(self.version.split(".")[0]) < 11 else _CHECKED_GCC_11
            )
            flags += [*_CHECKED, *own, "-DFUSIONREG_SIM_CHECKED=1"]
        else:
            flags += [*_SANITIZE, "-DFUSIONREG_SIM_SANITIZE=1"]
        return tuple(flags)

    def link_flags(self, mode: Mode) -> tuple[str, ...]:
        if mode == "sanitize":
            return ("-shared", "-fsanitize=address,undefined", "-shared-libasan") if self.kind == "clang" else (
                "-shared", "-fsanitize=address,undefined")  # fmt: skip
        own = _LINK_GCC if self.kind == "gcc" else ()
        return ("-shared", *own, *(_WRAP if mode == "checked" and self.kind == "gcc" else ()))

    def run(self, arguments: Sequence[str], whom: str, cwd: Path) -> str:
        """Runs it and returns its messages; :class:`CompileError` when it fails."""
        command = [self.path, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", cwd=cwd, env=_environment()
            )
        except OSError as e:
            raise CompileError(
                "cannot run the host compiler", whom, str(e), "a program that starts", command=command
            ) from e
        if done.returncode:
            raise CompileError(
                "the simulator cannot compile", whom, _first_errors(done.stderr), "C++ that the host compiler takes",
                _advice(done.stderr), log=done.stderr, arch="host", command=tuple(command),
            )  # fmt: skip
        return done.stderr


def host_compiler() -> HostCompiler:
    """``FUSIONREG_CXX``, ``CXX``, else g++, clang++ or c++ of the search path.

    :class:`MissingDependencyError` when there is none, or when the machine is neither x86-64 nor aarch64.
    """
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64", "aarch64", "arm64") or platform.system() != "Linux":
        raise MissingDependencyError(
            "cannot simulate", "kernels", f"{platform.system()} on {machine}", "Linux on x86-64 or aarch64",
            "The simulator switches stacks in assembly that is written for these two",
        )  # fmt: skip
    chosen = os.environ.get(COMPILER_VARIABLE) or os.environ.get("CXX")
    for name in [chosen] if chosen else ["g++", "clang++", "c++"]:
        path = shutil.which(name)
        found = path and _identify(path)
        if found:
            return found
    raise MissingDependencyError(
        "cannot simulate", "kernels", f"no C++ compiler ({chosen or 'g++, clang++, c++'})",
        "g++ 9 or clang++ 11 or later",
        f"Install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), or set {COMPILER_VARIABLE}",
    )  # fmt: skip


@lru_cache(maxsize=8)
def _identify(path: str) -> HostCompiler | None:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace").stdout
    except OSError:
        return None
    version = re.search(r"\d+\.\d+(\.\d+)?", said)
    if not said or not version:
        return None
    kind: Literal["gcc", "clang"] = "clang" if "clang" in said.lower() else "gcc"
    identity = "\n".join((os.path.realpath(path), said.splitlines()[0], platform.machine(), *_machine()))
    return HostCompiler(path, kind, version[0], identity)


@lru_cache(maxsize=1)
def _machine() -> tuple[str, ...]:
    """Fused multiply-add, wide vectors and half conversions where this processor has them."""
    try:
        found = set(re.findall(r"^flags\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[0].split())
    except (OSError, IndexError):
        return ()
    return ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2") if {"avx2", "fma", "f16c", "bmi1", "bmi2"} <= found else ()


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}  # messages in English, for the patterns below


@lru_cache(maxsize=1)
def shim_digest() -> str:
    """SHA-256 over the shim's sources and over how they are built."""
    total = hashlib.sha256()
    recipe = [SHIM.parent / name for name in ("toolchain.py", "build.py", "unit.py")]
    for path in sorted([*recipe, *(p for p in SHIM.rglob("*") if p.is_file() and p.suffix in (".h", ".cpp"))]):
        total.update(f"{path.relative_to(SHIM.parent)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


def _first_errors(log: str) -> str:
    found = re.findall(r"^(.*?(?:error|Error): .*)$", log, re.M)
    return "; ".join(dict.fromkeys(line.strip() for line in found[:3])) or log.strip()[-400:]


def _advice(log: str) -> str:
    if re.search(r"asm|impossible constraint|no such instruction|Assembler messages", log):
        return (
            "Inline PTX stands between #ifndef FUSIONREG_SIM and #endif; call the fr_sim function of it (fr_sim_api.h)"
        )
    if "No such file or directory" in log:
        return "The simulator reads cuda_fp16.h, cuda_bf16.h, cuda_fp8.h, vector types and cooperative_groups.h"
    return f"The whole log:\n{log.strip()}\n"
