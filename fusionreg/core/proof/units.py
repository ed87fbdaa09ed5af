"""Representative units of a kernel: what ``run`` compiles for each target and ``show --source`` prints. Floor 7."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..cache import Cache
from ..compiler import explain_miss
from ..conformance import cases, coverage
from ..problem import Candidate, choose
from ..render import KernelSource, Launch, render
from ..targets import accepts, target

if TYPE_CHECKING:
    from ..registry.entries import FusionEntry, KernelEntry


class Unit(NamedTuple):
    """One rendered unit, the dtypes it is for, and the launch it would get on the base case."""

    dtypes: str
    source: KernelSource
    launch: Launch


def first_units(entry: FusionEntry, kernel: KernelEntry, arch: str) -> list[Unit]:
    """One unit for each combination of dtypes that ``kernel`` accepts on ``arch``, with its first parameters.

    None of a kernel that calls a library.
    """
    if kernel.library is not None or not any(accepts(declared, target(arch)) for declared in kernel.spec.targets):
        return []
    plain, _, _ = coverage.rows(entry, kernel, cases.base_axes(entry), arch, 0)
    found = []
    for trial in plain:
        problem = coverage.problem_of(entry, trial, arch)
        assert problem is not None, "coverage only makes rows that the fusion admits"
        chosen = choose(kernel, problem, pending=True)
        assert isinstance(chosen, Candidate), "and rows that the kernel accepts"
        source = render(entry, kernel, problem, chosen.params)
        found.append(Unit(",".join(trial.dtypes.values()), source, chosen.launch))
    return found


def cache_misses(entry: FusionEntry, arch: str, cache: Cache) -> list[tuple[str, str, str]]:
    """(kernel, dtypes, why its first unit is not cached) of every kernel; "" where it is."""
    units = [unit for kernel in entry.kernels for unit in first_units(entry, kernel, arch)]
    return [(unit.source.kernel, unit.dtypes, explain_miss(unit.source, cache)) for unit in units]
