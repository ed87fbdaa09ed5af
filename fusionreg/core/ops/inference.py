"""Dtype and shape inference: the pieces that ``infer`` functions are made of. Floor 1.

An ``infer`` function takes ``(inputs, attributes, constants)``: the operand Values (None where an optional one is
omitted), complete attributes, and the known operands by index. It gives one ``(dtype, shape)`` per output. A shape is
None where even the rank is unknown; an extent is None where it is unknown, and the caller names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import GraphError
from ..ir import Value

Extent = int | str | None
Extents = tuple[Extent, ...] | None
Type = tuple[str, Extents]
Inputs = Sequence[Value | None]
Attributes = Mapping[str, Any]
Constants = Mapping[int, Any]
Infer = Callable[[Inputs, Attributes, Constants], list[Type]]


def fail(found: str, expected: str) -> NoReturn:
    """Raises the :class:`GraphError` of an operand that does not fit; the caller adds the node."""
    raise GraphError("shape inference failed", "", found, expected)


def broadcast(*shapes: Extents) -> Extents:
    """The broadcast shape; a symbol beside a number other than 1 is that number, beside another symbol unknown."""
    if any(s is None for s in shapes):
        return None
    known = [s for s in shapes if s is not None]
    rank = max(map(len, known), default=0)
    return tuple(_join([s[i - rank + len(s)] for s in known if i - rank + len(s) >= 0]) for i in range(rank))


def _join(dims: list[Extent]) -> Extent:
    numbers = {d for d in dims if isinstance(d, int) and d != 1}
    if len(numbers) > 1:
        fail(f"extents {sorted(numbers)} meet", "equal extents or 1 to broadcast")
    if numbers:
        return numbers.pop()
    others = {d for d in dims if d != 1}
    if not others:
        return 1
    return others.pop() if len(others) == 1 else None


def present(inputs: Inputs, index: int) -> bool:
    return index < len(inputs) and inputs[index] is not None


def operand(inputs: Inputs, index: int) -> Value:
    """Input ``index``; :class:`GraphError` when it is missing."""
    value = inputs[index] if index < len(inputs) else None
    if value is None:
        fail(f"input {index} is missing", "a value")
    return value


def elementwise(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    """The first operand's dtype, all operands broadcast."""
    shapes = [v.shape for v in inputs if v is not None]
    return [(operand(inputs, 0).dtype, broadcast(*shapes))]


def same(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    """The first operand's dtype and shape."""
    x = operand(inputs, 0)
    return [(x.dtype, x.shape)]


def boolean(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    """bool, all operands broadcast."""
    return [("bool", broadcast(*[v.shape for v in inputs if v is not None]))]


def axis_of(axis: int, rank: int) -> int:
    """``axis`` counted from the front; :class:`GraphError` outside ``[-rank, rank)``."""
    if not -rank <= axis < rank:
        fail(f"axis {axis}", f"one of [{-rank}, {rank})")
    return axis % rank


def axes_of(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, without repeats; :class:`GraphError` otherwise."""
    found = tuple(axis_of(int(a), rank) for a in axes)
    if len(set(found)) != len(found):
        fail(f"axes {tuple(axes)} repeat one", "each axis once")
    return found


def known_ints(constants: Constants, index: int) -> tuple[int, ...] | None:
    """Input ``index`` as integers when it is a known constant."""
    array = constants.get(index)
    return None if array is None else tuple(int(v) for v in array.reshape(-1))


def length_of(value: Value) -> int | None:
    """The number of elements of a 1-d operand, when known."""
    if value.shape is None or len(value.shape) != 1 or not isinstance(value.shape[0], int):
        return None
    return value.shape[0]


def product(dims: Sequence[Extent]) -> Extent:
    """The product when it can be told: a number, or one symbol times ones."""
    number, symbols = factors(dims)
    if number == 0:
        return 0
    if symbols is None:
        return None
    if not symbols:
        return number
    return next(iter(symbols)) if number == 1 and symbols.total() == 1 else None


def factors(dims: Sequence[Extent]) -> tuple[int, Counter[str] | None]:
    """The numeric factor and the symbols with multiplicity (None when an extent is unknown)."""
    number, symbols = 1, Counter[str]()
    unknown = False
    for d in dims:
        if isinstance(d, int):
            number *= d
        elif d is None:
            unknown = True
        else:
            symbols[d] += 1
    return number, None if unknown else symbols


def quotient(total: Sequence[Extent], part: Sequence[Extent]) -> Extent:
    """The one extent that makes ``part`` hold as many elements as ``total``, when it can be told."""
    (n, a), (m, b) = factors(total), factors(part)
    if a is None or b is None or m == 0 or b - a:
        return None
    rest = a - b
    if not rest:
        if n % m:
            fail(f"{n} elements", f"a multiple of {m}")
        return n // m
    return next(iter(rest)) if n == m and rest.total() == 1 else None


def plus(a: Extent, b: Extent) -> Extent:
    """The sum when it can be told."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return b if a == 0 else a if b == 0 else None


def times(a: Extent, n: int) -> Extent:
    return a if n == 1 else a * n if isinstance(a, int) else None
