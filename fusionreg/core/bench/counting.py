"""How many instructions a kernel issues: counted by the device where a profiler is there, else read off the code.

A kernel with much arithmetic per element takes as long as its instructions take to be issued, however few its bytes.
Floor 7.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache import Cache
from ..compiler import compile_source
from ..errors import FusionregError
from ..render import render
from .results import Result, Results
from .subject import Subject

if TYPE_CHECKING:
    from .measure import Bench

LANES = 32


@dataclass(frozen=True)
class Counted:
    """Instructions that the warps of one launch execute.

    Attributes:
        instructions: their number; an instruction of a warp counts once, however many of its lanes take part.
        by: ``ncu`` (executed, as the device counted them) or ``code`` (all that the code holds, at most executed once).
    """

    instructions: int
    by: str


def elements(subject: Subject) -> int:
    """Elements of the largest tensor: what instructions are shared among."""
    return max((prod(t.shape) for t in subject.problem.tensors.values() if t is not None), default=0)


def counted(
    results: Results, subjects: Iterable[Subject], bench: Bench, keys: Sequence[tuple[str, str]], cache: Cache | None
) -> Results:
    """The results with instructions in those rows of ``keys`` whose kernel was timed and that have none yet."""
    wanted = []
    for subject in subjects:
        row = results.find(subject.key)
        if subject.key in keys and row is not None and row.ours_ms and row.instructions is None:
            wanted.append((row, subject))
    if not wanted:
        return results
    executed = bench.executed([subject for _, subject in wanted])
    for (row, subject), number in zip(wanted, executed, strict=True):
        found = Counted(number, "ncu") if number else from_code(subject, cache)
        if found is not None:
            results = results.with_row(_with(row, found, results), results.runs[row.run])
    return results


def _with(row: Result, found: Counted, results: Results) -> Result:
    seconds = results.runs[row.run].ceilings.issuing(found.instructions)
    return row.model_copy(
        update={
            "instructions": found.instructions,
            "counted_by": found.by,
            "issue_ms": None if seconds is None else seconds * 1e3,
        }
    )


# ---- the device's own count -----------------------------------------------------------------------------------------

METRIC = "smsp__inst_executed.sum"


def profiler() -> str | None:
    """Path of Nsight Compute, where it is installed."""
    return _tool("ncu")


def profile(command: Sequence[str], timeout: float) -> list[tuple[str, int]]:
    """(kernel, instructions executed) of every kernel of ours that ``command`` launches, in order.

    :class:`FusionregError` when the profiler cannot count: it may need rights, or a driver that has counters.
    """
    ncu = profiler()
    if ncu is None:
        raise FusionregError("cannot count", "instructions", "ncu is not installed", "Nsight Compute")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        options = ["--metrics", METRIC, "--clock-control", "none", "--cache-control", "none"]
        options += ["--kernel-name-base", "function", "-k", "regex:^fr_", "--csv", "--page", "raw"]
        try:
            ran = subprocess.run(
                [ncu, *options, "--print-units", "base", "--log-file", str(log), *command],
                capture_output=True, text=True, timeout=timeout, check=False,
            )  # fmt: skip
            text = log.read_text() if log.exists() else ""
        except (OSError, subprocess.TimeoutExpired) as e:
            raise FusionregError("cannot count", "instructions", str(e)) from None
        found = read_log(text)
        if not found:
            said = [line for line in (text + ran.stderr).splitlines() if "==ERROR==" in line or "Error" in line]
            why = said[0] if said else f"ncu ended with {ran.returncode}"
            raise FusionregError("cannot count", "instructions", why)
        return found


def read_log(text: str) -> list[tuple[str, int]]:
    """(kernel, value of :data:`METRIC`) of each launch in a log of ``ncu --csv --page raw``."""
    import csv

    lines = [line for line in text.splitlines() if line.startswith('"')]
    found = []
    for row in csv.DictReader(lines):
        value = (row.get(METRIC) or "").replace(",", "")
        if re.fullmatch(r"\d+(\.0*)?", value):  # the row under the header holds units
            found.append((row.get("Kernel Name", "").split("(")[0].strip(), int(float(value))))
    return found


# ---- the code itself ------------------------------------------------------------------------------------------------

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_PREDICATE = re.compile(r"\bU?P\d")
_TARGET = re.compile(r"`?\(?(\.L_\w+)\)?|0x([0-9a-f]+)")


def from_code(subject: Subject, cache: Cache | None = None) -> Counted | None:
    """All instructions of the kernel that dispatch picks, each once; None for a kernel with loops or calls, where that
    says nothing, and where no disassembler is installed."""
    chosen = subject.chosen
    tool = disassembler()
    if chosen is None or tool is None:
        return None
    try:
        code = compile_source(render(subject.entry, chosen.kernel, subject.problem, chosen.params), cache)
    except FusionregError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code.cubin)
        try:
            ran = subprocess.run([*tool, str(path)], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
    once = straight(ran.stdout)
    warps = chosen.launch.blocks * -(-chosen.launch.threads // LANES)
    return None if once is None else Counted(once * warps, "code")


@dataclass(frozen=True)
class _Instruction:
    at: int
    conditional: bool
    word: str
    rest: str


def straight(listing: str) -> int | None:
    """Instructions that a thread can reach in a listing of one kernel; None where one is reached again, or from a jump
    to where the listing does not say."""
    code: list[_Instruction] = []
    places: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            places[label[1]] = len(code)
        elif found := _LINE.search(line):
            places[f"0x{int(found[1], 16):x}"] = len(code)
            code.append(_Instruction(len(code), bool(found[2]), found[3].split(".")[0], found[4]))
    seen: set[int] = set()
    ahead = [0]
    while ahead:
        at = ahead.pop()
        while at < len(code) and at not in seen:
            seen.add(at)
            here = code[at]
            if here.word in ("CALL", "BRX", "JMX", "JMP", "RET"):
                return None
            if here.word in ("BRA", "BSSY"):
                target = _TARGET.search(here.rest)
                to = places.get((target[1] or f"0x{target[2]}") if target else "", -1)
                if to <= at:
                    return None
                ahead.append(to)
            if here.word in ("BRA", "EXIT") and not here.conditional and not _PREDICATE.search(here.rest):
                break
            at += 1
    return sum(1 for i in seen if code[i].word != "NOP") or None


def disassembler() -> tuple[str, ...] | None:
    """Command that lists a cubin's instructions: CUDA's, or the one that Triton carries."""
    for name, options in (("nvdisasm", ("-c",)), ("cuobjdump", ("-sass",))):
        found = _tool(name)
        if found is not None:
            return (found, *options)
    return None


def _tool(name: str) -> str | None:
    from importlib.util import find_spec

    found = shutil.which(name)
    homes = [Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin"]
    triton = find_spec("triton")
    if triton is not None and triton.origin:
        homes.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    return found or next((str(h / name) for h in homes if os.access(h / name, os.X_OK)), None)
