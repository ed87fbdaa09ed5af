"""When an attribute or a constant of a graph equals what a pattern writes. Floor 2.

Attributes compare after the same normalisation on both sides: an axis counts from the end where the rank is known, a
missing ``perm`` of Transpose is the reversal, numbers of ONNX's 32-bit float attributes equal their decimal spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ir import Graph, Node
from ..pattern.graph import AttributeName, Literal, attribute_names
from ..spec import REQUIRED, OpSpec

#: Operators whose ``axis`` counts in the rank of the result, which a pattern may not normalise by its input.
_OUTPUT_AXIS = frozenset({"OneHot", "Unsqueeze", "ConcatFromSequence"})


def rank_of(graph: Graph, name: str) -> int | None:
    """The rank of a value, None where unknown."""
    value = graph.values.get(name)
    return None if value is None or value.shape is None else len(value.shape)


def normal(op: str, name: str, value: Any, rank: int | None) -> Any:
    """The attribute in its normal form."""
    if isinstance(value, list):
        value = tuple(value)
    if rank is not None:
        if name == "perm" and op == "Transpose" and not value:
            return tuple(range(rank))[::-1]
        if name == "axis" and isinstance(value, int) and op not in _OUTPUT_AXIS:
            return value - rank if 0 <= value < rank else value
        if name == "axes" and isinstance(value, tuple) and op not in _OUTPUT_AXIS:
            return tuple(sorted(v - rank if 0 <= v < rank else v for v in value))
    return value


def equal(a: Any, b: Any) -> bool:
    """Whether two normal attribute values are the same; floats as 32-bit floats, since ONNX stores them so."""
    if a is b or a == b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float | int) and isinstance(b, float | int) and (isinstance(a, float) or isinstance(b, float)):
        from numpy import errstate, float32

        with errstate(over="ignore"):
            return bool(float32(a) == float32(b))
    return False


class AttributeRules:
    """What one alternative of a step demands of a node's attributes."""

    __slots__ = ("defaults", "exact", "names", "plain")

    def __init__(self, op: OpSpec, given: Mapping[str, Any]) -> None:
        self.defaults: dict[str, Any] = {k: (None if v == REQUIRED else v) for k, v in op.attributes.items()}
        self.exact: dict[str, Any] = dict(self.defaults)
        self.names: dict[str, Any] = {}
        for name, value in given.items():
            if any(True for _ in attribute_names(value)):
                self.names[name] = value
                self.exact.pop(name, None)
            else:
                self.exact[name] = value
        self.plain = self.exact == self.defaults
        """Whether a node without attributes always fits."""

    def check(self, graph: Graph, node: Node) -> tuple[dict[str, Any] | None, tuple[str, Any, Any]]:
        """Bound attributes, or None and (attribute, found, expected)."""
        attrs = node.attrs
        if self.plain and not attrs:
            return {}, ("", None, None)
        rank = rank_of(graph, node.inputs[0]) if node.inputs else None
        for name, expected in self.exact.items():
            found = attrs.get(name, self.defaults[name]) if attrs else self.defaults[name]
            if found is expected:
                continue
            a, b = normal(node.op, name, found, rank), normal(node.op, name, expected, rank)
            if not equal(a, b):
                return None, (name, found, expected)
        for name in attrs or ():
            if name not in self.defaults:
                return None, (name, attrs[name], "an attribute that the vocabulary knows")
        bound: dict[str, Any] = {}
        for name, wanted in self.names.items():
            value = normal(node.op, name, attrs.get(name, self.defaults[name]), rank)
            if isinstance(wanted, tuple) and value == ():
                continue  # what the operator leaves open has the fusion's defaults
            wrong = bind(wanted, value, bound)
            if wrong:
                return None, (name, value, wrong[0])
        return bound, ("", None, None)


def bind(wanted: Any, value: Any, bound: dict[str, Any]) -> tuple[Any, ...]:
    """Adds to ``bound`` what the names in an attribute's value, or in a tuple, are at a site; where something does not
    fit, what was expected."""
    pairs = [(wanted, value)]
    if isinstance(wanted, tuple):
        if not isinstance(value, tuple) or len(value) != len(wanted):
            return (f"{len(wanted)} numbers",)
        pairs = list(zip(wanted, value, strict=True))
    for variable, number in pairs:
        known = bound.get(variable.name, number) if isinstance(variable, AttributeName) else variable
        if not equal(known, number):
            return (known,)
        if isinstance(variable, AttributeName):
            bound[variable.name] = number
    return ()


class Constants:
    """Equality of a graph's constants with literals and with each other; each array is looked at once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._uniform: dict[str, Any] = {}
        self._same: dict[tuple[str, str], bool] = {}
        self.compared = 0
        """How often two constants were asked about: what depended on what they hold."""

    def same(self, a: str, b: str) -> bool:
        """Whether two names mean the same value: one name, or constants of equal dtype, shape and bits."""
        if a == b:
            return True
        if not (self.graph.is_constant(a) and self.graph.is_constant(b)):
            return False
        self.compared += 1
        key = (a, b) if a < b else (b, a)
        if key not in self._same:
            x, y = self.graph.constants[a], self.graph.constants[b]
            self._same[key] = x.dtype == y.dtype and x.shape == y.shape and (x is y or x.tobytes() == y.tobytes())
        return self._same[key]

    def is_literal(self, name: str, literal: Literal, axes_rank: int | None = None) -> bool:
        """Whether a value is a constant equal to a literal.

        A number fits a constant all of whose elements equal it after rounding to the constant's dtype; a tuple fits a
        1-D one element by element. ``axes_rank``: the constant holds axes of a tensor of that rank.
        """
        if not name or not self.graph.is_constant(name):
            return False
        array = self.graph.constants[name]
        value = literal.value
        if axes_rank is not None:
            wanted = value if isinstance(value, tuple) else (value,)
            found = tuple(int(v) for v in array.reshape(-1)) if array.size <= 64 else None
            return found is not None and normal("", "axes", found, axes_rank) == normal("", "axes", wanted, axes_rank)
        if isinstance(value, tuple):
            return array.shape == (len(value),) and all(map(_rounds_to, value, array))
        if name not in self._uniform:
            flat = array.reshape(-1)
            uniform = flat.size > 0 and bool(flat[0] == flat[-1]) and (flat.size == 1 or bool((flat == flat[0]).all()))
            self._uniform[name] = flat[0] if uniform else None
        element = self._uniform[name]
        return element is not None and _rounds_to(value, element)


def _rounds_to(value: Any, element: Any) -> bool:
    """Whether a number of the pattern, rounded to the element's dtype, is the element."""
    import numpy as np

    if element.dtype.kind in "biu":
        return float(value).is_integer() and int(element) == int(value)
    if element.dtype.kind in "OSU":
        return False
    with np.errstate(over="ignore"):
        return bool(np.asarray(value).astype(element.dtype) == element)
