"""Launches under AddressSanitizer and UndefinedBehaviourSanitizer, in a process of their own.

AddressSanitizer must be in a process from its start, which a Python that is already running is not.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MissingDependencyError, SimulatorError
from .checks import Checks, SimReport
from .memory import regions

if TYPE_CHECKING:
    from ..problem import Launch
    from .kernel import SimKernel

_LIBRARIES = {"gcc": ("libasan.so", "libubsan.so"), "clang": ("libclang_rt.asan-{machine}.so",)}
_MODULE = f"{__package__}.sanitized"
_OPTIONS = "detect_leaks=0:abort_on_error=0:exitcode=99:detect_stack_use_after_return=0:allow_user_segv_handler=1"


def launch_sanitized(
    kernel: SimKernel,
    args: Sequence[Any],
    launch: Launch,
    checks: Checks,
    names: Sequence[str] | None,
    inout: Collection[str],
) -> SimReport:
    """Runs the launch in every order of ``checks`` in a sanitized process; arrays receive the results of the first.

    :class:`SimulatorError` (``facts``: detector ``sanitizer``, report) when a sanitizer stops it,
    :class:`MissingDependencyError` where the compiler comes without the sanitizers' libraries.
    """
    from .sanitized import Request

    started = time.perf_counter()
    libraries, resident = _libraries(kernel), kernel.check(launch)
    values, pointers = kernel.convert(kernel.unit(), args, names, inout)
    found = regions(pointers)
    where = {id(p): (n, p.array.ctypes.data - r.low) for n, r in enumerate(found) for p in r.members}
    request = Request(
        kernel.name, kernel.prepare("sanitize").data, kernel.builder.runtime.data, resident, launch.grid, launch.block,
        tuple(launch.cluster), launch.shared_memory, launch.cooperative, checks.orders,
        tuple((r.original().tobytes(), r.low % 16) for r in found),
        tuple(
            bytes(v) if p is None else (*where[id(p)], getattr(a, "layout", None))
            for a, v, p in zip(args, values, pointers, strict=True)
        ),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="fusionreg-asan-") as folder:
        Path(folder, "request").write_bytes(pickle.dumps(request))
        environment = {
            **os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": _OPTIONS,
            "UBSAN_OPTIONS": "print_stacktrace=1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }  # fmt: skip
        command = [sys.executable, "-c", f"from {_MODULE} import main, Path; main(Path({folder!r}))"]
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=checks.timeout or None,
            )
        except subprocess.TimeoutExpired:
            raise _error(kernel, "timeout", f"it did not end within {checks.timeout} s", "") from None
        answer = Path(folder, "answer")
        if done.returncode or not answer.exists():
            raise _error(kernel, "sanitizer", _headline(done.stderr), done.stderr)
        results = pickle.loads(answer.read_bytes())
    if isinstance(results, Exception):
        raise results
    for r, content in zip(found, results, strict=True):
        if r.writable:
            r.original()[...] = np.frombuffer(content, np.uint8)
    return SimReport({}, checks.orders, (), time.perf_counter() - started)


def _error(kernel: SimKernel, detector: str, text: str, log: str) -> SimulatorError:
    return SimulatorError(
        "the sanitizers stopped", kernel.name, text, "no undefined behaviour",
        f"The whole report:\n{log.strip()}\n" if log.strip() else "", detector=detector, report=log,
    )  # fmt: skip


def _headline(log: str) -> str:
    """What is wrong and where, of a sanitizer's report."""
    what = re.search(r"ERROR: AddressSanitizer: ([\w-]+)[^\n]*\n(?:.*\n)?", log) or re.search(
        r"([^\n]*runtime error: [^\n]*)", log
    )
    access = re.search(r"^((?:READ|WRITE) of size \d+)", log, re.M)
    where = re.search(r"^\s*#\d+ 0x\w+ in \S+ (?!\S*(?:fr_sim|sanitizer_|asan_))([^\s(]+:\d+)", log, re.M)
    if not what:
        return log.strip()[-600:] or "the process ended without a word"
    parts = (what[1], access[1] if access else "", f"at {os.path.basename(where[1])}" if where else "")
    return ", ".join(p for p in parts if p)


def _libraries(kernel: SimKernel) -> list[str]:
    compiler = kernel.builder.compiler
    found = []
    for pattern in _LIBRARIES[compiler.kind]:
        name = pattern.format(machine=os.uname().machine)
        said = subprocess.run([compiler.path, f"-print-file-name={name}"], capture_output=True, text=True)
        path = said.stdout.strip()
        if not os.path.isabs(path):
            raise MissingDependencyError(
                "cannot sanitize", kernel.name, f"{compiler.path} comes without {name}", "the sanitizers' libraries",
                "Install them: apt-get install libasan8 libubsan1 (g++ 12), or libclang-rt-dev", library=name,
            )  # fmt: skip
        found.append(os.path.realpath(path))
    return found
