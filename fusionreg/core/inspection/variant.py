"""One compiled variant of a kernel: its registers and memory, how many fit, what that predicts, what was measured.
Floor 7."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from ..bench import Results, Subject
from ..bench.model import LANES, predict
from ..compiler import compile_source, instructions
from ..frozen import FrozenDict
from ..occupancy import occupancy
from ..problem import Candidate
from ..problem.selection import estimated
from ..render import render
from ..spec import Record
from ..targets import target
from .banks import SharedMemory

if TYPE_CHECKING:
    from ..cache import Cache

_BARRIERS = re.compile(r"used (\d+) barriers")


class Measured(Record):
    """What a file of results has of the variant."""

    gpu: str
    """Where it was measured."""
    date: str
    """When."""
    ms: float
    """Median of its time."""
    floor_ms: float
    """Least time by the ceilings of that run."""
    current: bool
    """Whether it was measured on what is installed now."""


class Variant(Record):
    """A kernel compiled for one problem with one combination of parameters."""

    kernel: str
    """``fusion/kernel``."""
    params: FrozenDict[str, int | float | str]
    """Its tunable parameters."""
    target: str
    """Architecture."""
    problem: str
    """Tensors and attributes in words."""
    grid: tuple[int, ...]
    """Blocks, on that problem."""
    block: tuple[int, ...]
    """Threads of a block."""
    cluster: tuple[int, ...]
    """Blocks of a cluster; empty for none."""
    registers: int
    """Of a thread."""
    spills: int
    """Bytes of a thread that are spilled and reloaded, each counted once in the code."""
    local: int
    """Bytes of local memory of a thread."""
    static_shared: int
    """Bytes of a block that the kernel declares."""
    dynamic_shared: int
    """Bytes of a block that the launch adds."""
    instructions: int
    """Instructions of the code, each counted once."""
    seconds: float
    """What NVRTC took, when it was compiled."""
    blocks: int
    """Blocks that a multiprocessor holds at once."""
    warps: int
    """Their warps."""
    most: int
    """Warps that it could hold at all."""
    limits: FrozenDict[str, int]
    """Resource → blocks that it alone would admit."""
    limiting: tuple[str, ...]
    """The resources that admit no further block."""
    waves: float
    """Blocks of the launch over those that the device holds at once."""
    model: float
    """Share of what the device can issue, by the model of throughput."""
    model_ms: float
    """Milliseconds to issue the code of every warp once at that rate and a clock of 1 GHz."""
    estimate_ms: float | None
    """The kernel's own estimate of its time."""
    measured: Measured | None = None
    """None where nobody measured it."""
    shared: SharedMemory | None = None
    """None where nobody looked."""

    @property
    def occupancy(self) -> float:
        """Resident warps over those that there could be."""
        return self.warps / self.most


def examine(
    made: Subject,
    candidate: Candidate,
    cache: Cache | None = None,
    results: Sequence[Results] = (),
) -> Variant:
    """Compiles ``candidate`` for the problem of ``made`` and reads off what there is to say.

    ``results``: files that may have its time.

    Raises: :class:`CompileError`, :class:`RenderError`, :class:`MissingDependencyError`.
    """
    kernel, launch, problem = candidate.kernel, candidate.launch, made.problem
    code = compile_source(render(made.entry, kernel, problem, candidate.params), cache)
    device = target(problem.target)
    barriers = _BARRIERS.search(code.log)
    held = occupancy(
        device, launch.threads, registers=code.registers, shared=code.shared + launch.shared_memory,
        barriers=int(barriers[1]) if barriers else 0,
    )  # fmt: skip
    seen = predict(candidate, device, problem.multiprocessors, code)
    estimate = estimated(kernel, problem, candidate.params)
    return Variant(
        kernel=kernel.key, params=candidate.params, target=problem.target, problem=str(problem), grid=launch.grid,
        block=launch.block, cluster=launch.cluster, registers=code.registers, spills=code.spills, local=code.local,
        static_shared=code.shared, dynamic_shared=launch.shared_memory,
        instructions=instructions(code.cubin, code.entry)[0], seconds=code.seconds, blocks=held.blocks,
        warps=held.warps, most=device.threads_sm // LANES, limits=held.limits, limiting=held.limiting,
        waves=launch.blocks / (held.blocks * problem.multiprocessors) if held.blocks else 0.0,
        model=seen.share, model_ms=seen.seconds * 1e3, estimate_ms=estimate * 1e3 if isfinite(estimate) else None,
        measured=next((m for found in results if (m := _measured(made, candidate, found)) is not None), None),
    )  # fmt: skip


def _measured(made: Subject, candidate: Candidate, found: Results) -> Measured | None:
    """The time of the kernel in a file of results: those are of the parameters that dispatch takes."""
    row, taken = found.find(made.key), [c.params for c in made.selection.accepted if c.kernel is candidate.kernel]
    if row is None or candidate.params not in taken:
        return None
    run = found.runs[row.run]
    column = next((c for c in row.columns if c.ours and c.name == candidate.kernel.name), None)
    if column is None or column.time is None or run.environment.get("target") != made.problem.target:
        return None
    current = bool(column.digest) and column.digest == _digest(made, candidate, run.environment)
    return Measured(gpu=found.gpu, date=run.date, ms=column.time.median, floor_ms=row.floor_ms, current=current)


def _digest(made: Subject, candidate: Candidate, environment: Mapping[str, str]) -> str:
    return made.kernel_digests(environment).get(candidate.kernel.name, "")
