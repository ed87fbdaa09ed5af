"""One place where a rule's pattern fits, and the questions that rules ask about it. Floor 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..dtypes import DTYPES
from ..ir import Graph, Shape, Value
from ..matcher.match import Bindings
from ..pattern.graph import PatternGraph

if TYPE_CHECKING:
    import numpy

#: Relative error that a constant of a public export may have, in float32 and below: 1.41421 is √2, 0.79788 too coarse.
_SPELLED = 3e-6


@dataclass(frozen=True)
class Site:
    """A graph and where the pattern fits in it.

    Attributes:
        graph: the graph.
        found: which values and nodes the pattern's names stand for.
        pattern: the pattern.
    """

    graph: Graph
    found: Bindings
    pattern: PatternGraph

    def name(self, name: str) -> str:
        """The value that a name of the pattern stands for, interior ones included."""
        known = self.found.values.get(name)
        if known is not None:
            return known
        where = ((s, s.outputs.index(name)) for s in self.pattern.steps if name in s.outputs)
        step, index = next(where)
        return self.found.steps[step.index].outputs[index]

    def value(self, name: str) -> Value:
        """Type of the value that a name of the pattern stands for."""
        return self.graph.values[self.name(name)]

    def shape(self, name: str) -> Shape | None:
        return self.value(name).shape

    def rank(self, name: str) -> int | None:
        shape = self.shape(name)
        return None if shape is None else len(shape)

    def array(self, name: str) -> numpy.ndarray | None:
        """The constant that a name stands for; None when it is computed or a caller may replace it."""
        value = self.found.inputs[name]
        return self.graph.constants[value] if self.graph.is_constant(value) else None

    def ints(self, name: str) -> tuple[int, ...] | None:
        """A constant of integers, flat."""
        array = self.array(name)
        if array is None or array.dtype.kind not in "iu" or array.size > 64:
            return None
        return tuple(int(v) for v in array.reshape(-1))

    def number(self, name: str, like: str = "x") -> float | None:
        """The number that all elements of a constant equal, when it broadcasts against ``like`` without changing it."""
        array, shape = self.array(name), self.shape(like)
        if array is None or array.size == 0 or shape is None or array.ndim > len(shape) or array.dtype.kind not in "fV":
            return None
        tail = shape[len(shape) - array.ndim :]
        if any(a != 1 and a != d for a, d in zip(array.shape, tail, strict=True)):
            return None
        flat = array.reshape(-1)
        return float(flat[0]) if flat.size == 1 or bool((flat == flat[0]).all()) else None

    def attribute(self, name: str) -> Any:
        return self.found.attributes[name]

    def last_axes(self, axes: str, x: str = "x") -> int | None:
        """How many axes a constant names, if they are the last ones of ``x``; None otherwise."""
        named, rank = self.ints(axes), self.rank(x)
        if not named or rank is None:
            return None
        counted = sorted(a + rank if a < 0 else a for a in named)
        return len(counted) if counted == list(range(rank - len(counted), rank)) else None


#: Whether a rule may act at a site.
Condition = Callable[[Site], bool]

#: Names of the replacement: numbers and words are attributes, arrays are constants. None refuses the site.
Derive = Callable[[Site], Mapping[str, Any] | None]


def floats(*names: str) -> Condition:
    """All of them have the output's dtype, a float."""

    def holds(site: Site) -> bool:
        kinds = {site.value(n).dtype for n in (*names, *site.found.outputs)}
        return len(kinds) == 1 and (row := DTYPES.get(kinds.pop())) is not None and row.floating

    return holds


def equals(name: str, number: float, like: str = "x") -> Condition:
    """A constant is that number: to one unit in the last place of its dtype, or as coarsely as public exports do."""

    def holds(site: Site) -> bool:
        found = site.number(name, like)
        if found is None:
            return False
        row = DTYPES.get(site.value(name).dtype)
        if row is None:
            return False
        return abs(found - number) <= max(_SPELLED if row.bits <= 32 else 0.0, 2.0**-row.mantissa) * abs(number)

    return holds


def shape_is(name: str, like: str = "y") -> Condition:
    """Two values have one shape, as far as it is known by number or name."""

    def holds(site: Site) -> bool:
        shape = site.shape(name)
        return shape is not None and shape == site.shape(like)

    return holds
