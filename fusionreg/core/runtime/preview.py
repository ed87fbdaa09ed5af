"""The problem of a matched site before it runs: what the planner asks the kernels about. Floor 6."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from math import isfinite
from typing import TYPE_CHECKING

from ..errors import ArgumentError, FusionregError
from ..frozen import EMPTY
from ..planner.costs import EXTENT
from ..problem import Problem, Selection, Tensor, bind, select
from ..problem.selection import estimated
from ..targets import target as target_of
from ..tensors import Dim, expand

if TYPE_CHECKING:
    from ..matcher.match import Match
    from ..registry.catalog import Catalog, FusionEntry

#: What a symbolic extent is for a kernel's `requires`: divisible by whatever one may ask for. The real one is looked at
#: by each call, and times are those of ``planner.costs.EXTENT``.
SYMBOLIC = 4096

#: Seconds of a copy of an operand, and bytes that it moves in each further one: it reads what does not lie in order.
COPY, COPIED = 4e-6, 2e12


def preview(entry: FusionEntry, match: Match, target: str, extent: int = SYMBOLIC) -> Problem:
    """The problem that the site will be: aligned, contiguous where the match says nothing else; :class:`ArgumentError`
    where it cannot be one. ``extent``: of symbolic axes.

    A match tells axes, not which form a tensor took: the first combination of forms that the fusion's constraints let
    pass is taken.
    """

    def number(d: Dim) -> int:
        return d if isinstance(d, int) else extent

    axes = {name: number(d) for name, d in match.axes.items()}
    leading = tuple(number(d) for d in match.leading)
    present = {name: t for name, t in entry.inputs.items() if name in match.inputs}
    possible = [[f for f in t.forms if all(a in axes for a in f.names)] for t in present.values()]
    failure: ArgumentError | None = None
    for forms in product(*possible):
        tensors = {
            name: _laid(
                Tensor.contiguous(
                    match.dtypes.get(type_.dtype, type_.dtype), tuple(int(d) for d in expand(form, axes, leading))
                ),
                match.strides.get(name),
            )
            for (name, type_), form in zip(present.items(), forms, strict=True)
        }
        try:
            return bind(entry, tensors, match.keywords(entry.spec), target)
        except ArgumentError as e:
            failure = failure or e
    raise failure or ArgumentError("cannot place", str(match), "an axis has no extent", "a match that tells every axis")


def _laid(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    fits = strides is not None and len(strides) == len(tensor.shape)
    return replace(tensor, strides=strides) if fits and strides is not None else tensor


def selected(
    entry: FusionEntry, match: Match, target: str, choose: Callable[[FusionEntry, Problem], Selection],
    extent: int = SYMBOLIC,
) -> tuple[Problem, Selection, int]:  # fmt: skip
    """A site's problem, the kernels for it, and the bytes of operands that are copied first: where no kernel takes
    them as they lie, one for contiguous ones runs, as :meth:`.dispatch.Runtime.execute` has it."""
    problem = preview(entry, match, target, extent)
    selection = choose(entry, problem)
    if selection or not match.strides or problem.empty:
        return problem, selection, 0
    dense = preview(entry, replace(match, strides=EMPTY), target, extent)
    moved = sum(t.bytes for n in match.strides if (t := problem.tensors.get(n)) is not None)
    return dense, choose(entry, dense), moved


def told(catalog: Catalog, match: Match, target: str) -> float | None:
    """Seconds of a site as a plugin's ``estimate`` hook tells; None where none does."""
    if not catalog.implements("estimate"):
        return None
    try:
        problem = preview(entry := catalog[match.fusion], match, target, EXTENT)
    except FusionregError:
        return None
    return catalog.estimate(entry, problem, target_of(problem.target))


def estimate(
    catalog: Catalog, match: Match, target: str, measured: Mapping[str, float], pending: bool
) -> float | None:
    """Seconds of the kernel that a device would run at a site, by its own ``estimate``, with the copies that it needs;
    None where it has none.

    Whatever the simulator can execute of them, that says nothing about time.
    """

    def choose(entry: FusionEntry, problem: Problem) -> Selection:
        return select(entry, problem, measured=measured, pending=pending)

    try:
        problem, selection, copied = selected(catalog[match.fusion], match, target, choose, EXTENT)
    except FusionregError:
        return None
    if not selection:
        return None
    best = selection.accepted[0]
    seconds = estimated(best.kernel, problem, best.params)
    return seconds + (COPY + 2 * copied / COPIED if copied else 0.0) if isfinite(seconds) else None
