"""The problem of a matched site before it runs: what the planner asks the kernels about. Floor 6."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..problem import Problem, Tensor, bind
from ..tensors import Dim, expand

if TYPE_CHECKING:
    from ..matcher.match import Match
    from ..registry.catalog import FusionEntry

#: What a symbolic extent counts as: divisible by whatever a kernel may ask for. The real one is looked at by each call.
SYMBOLIC = 4096


def preview(entry: FusionEntry, match: Match, target: str) -> Problem:
    """The problem that the site will be, contiguous and aligned; :class:`ArgumentError` where it cannot be one.

    A match tells axes, not which form a tensor took: the first combination of forms that the fusion's constraints let
    pass is taken.
    """

    def number(d: Dim) -> int:
        return d if isinstance(d, int) else SYMBOLIC

    axes = {name: number(d) for name, d in match.axes.items()}
    leading = tuple(number(d) for d in match.leading)
    present = {name: t for name, t in entry.inputs.items() if name in match.inputs}
    possible = [[f for f in t.forms if all(a in axes for a in f.names)] for t in present.values()]
    failure: ArgumentError | None = None
    for forms in product(*possible):
        tensors = {
            name: Tensor.contiguous(
                match.dtypes.get(type_.dtype, type_.dtype), tuple(int(d) for d in expand(form, axes, leading))
            )
            for (name, type_), form in zip(present.items(), forms, strict=True)
        }
        try:
            return bind(entry, tensors, match.keywords(entry.spec), target)
        except ArgumentError as e:
            failure = failure or e
    raise failure or ArgumentError("cannot place", str(match), "an axis has no extent", "a match that tells every axis")
