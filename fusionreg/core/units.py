"""Representative units of a kernel: what ``run`` compiles for every architecture and ``show --source`` prints. Floor 7."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .conformance import cases, coverage
from .problem import select
from .render import KernelSource, Launch, render

if TYPE_CHECKING:
    from .entries import FusionEntry, KernelEntry


class Unit(NamedTuple):
    """One rendered unit, the dtypes it is for, and the launch it would get on the base case."""

    dtypes: str
    source: KernelSource
    launch: Launch


def first_units(entry: FusionEntry, kernel: KernelEntry, target: str) -> list[Unit]:
    """One unit for each combination of dtypes that ``kernel`` accepts on ``target``, with its first parameters."""
    plain, _, _ = coverage.rows(entry, kernel, cases.base_axes(entry), target, 0)
    found = []
    for trial in plain:
        problem = coverage.problem_of(entry, trial, target)
        assert problem is not None, "coverage only makes rows that the fusion admits"
        chosen = next(c for c in select(entry, problem, pending=True).accepted if c.kernel is kernel)
        source = render(entry, kernel, problem, chosen.params)
        found.append(Unit(",".join(trial.dtypes.values()), source, chosen.launch))
    return found
