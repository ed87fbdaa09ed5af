"""Products of extents by name: 4 · batch is called ``4*batch``, and divided by 4 it is ``batch`` again.

The spelling is that of torch's exporter, so a ``dim_param`` written so means the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ...core.ir import Dim

_FACTOR = re.compile(r"[A-Za-z_][\w.]*|\d+")


def factors(dim: Dim) -> tuple[int, Counter[str]]:
    """The number and the names whose product an extent is; a name that is no product is one factor."""
    if isinstance(dim, int):
        return dim, Counter()
    parts = [p.strip() for p in dim.split("*")]
    if not all(_FACTOR.fullmatch(p) for p in parts):
        return 1, Counter([dim])
    number, names = 1, Counter[str]()
    for p in parts:
        if p.isdigit():
            number *= int(p)
        else:
            names[p] += 1
    return number, names


def _called(number: int, names: Counter[str]) -> Dim:
    words = sorted(names.elements())
    if not words or number == 0:
        return number
    return "*".join(words if number == 1 else [str(number), *words])


def _total(dims: Sequence[Dim | None]) -> tuple[int, Counter[str]] | None:
    number, names = 1, Counter[str]()
    for d in dims:
        if d is None:
            return None
        n, more = factors(d)
        number, names = number * n, names + more
    return number, names


def product(dims: Sequence[Dim | None]) -> Dim | None:
    """The product by number or name; None where a factor is unknown."""
    total = _total(dims)
    return None if total is None else _called(*total)


def quotient(total: Sequence[Dim | None], part: Sequence[Dim | None]) -> Dim | None:
    """What ``part`` must be multiplied with to be ``total``; None where that cannot be told by name."""
    whole, share = _total(total), _total(part)
    if whole is None or share is None or share[0] == 0 or whole[0] % share[0] or share[1] - whole[1]:
        return None
    return _called(whole[0] // share[0], whole[1] - share[1])
