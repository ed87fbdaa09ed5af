"""What conditions of a fusion may read, and all that they may find there; shared by the checks of fusions, cases and
kernels. Floor 3."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import isnan
from typing import Any

from ..intervals import EXTENT, Conditions
from ..registry.entries import FusionEntry
from ..spec import AttributeSpec
from .names import Scope

#: Predicates that make sense before any memory is laid out: a constraint is decided when a graph is matched.
GRAPH_PREDICATES = frozenset({"present", "rank", "shape", "form"})
_TYPES = {"int": int, "float": float, "bool": bool, "str": str}


def fusion_scope(entry: FusionEntry) -> Scope:
    """What a constraint may read."""
    spec = entry.spec
    words: dict[str, tuple[str, ...]] = {**spec.dtypes, **entry.choices}
    words |= {n: tuple(map(str, a.choices)) for n, a in spec.attributes.items() if a.type == "str" and a.choices}
    names = {*entry.axes, *spec.attributes, *spec.dtypes, *entry.choices}
    return Scope(frozenset(names), frozenset(entry.tensors), GRAPH_PREDICATES, words)


def environments(entry: FusionEntry, names: frozenset[str] | None = None) -> Iterator[dict[str, Any]]:
    """Every combination of the fusion's finite names (of ``names`` only), each axis an interval of extents."""
    spec = entry.spec
    finite: dict[str, tuple[Any, ...]] = {**spec.dtypes, **entry.choices}
    finite |= {n: a.choices for n, a in spec.attributes.items() if a.choices}
    finite |= {n: (False, True) for n, a in spec.attributes.items() if a.type == "bool" and not a.choices}
    chosen = {n: v for n, v in finite.items() if names is None or n in names}
    axes = {a: EXTENT for a in entry.axes if a not in finite}
    for values in product(*chosen.values()):
        yield {**axes, **dict(zip(chosen, values, strict=True))}


def never(conditions: tuple[str, ...], entry: FusionEntry) -> str | None:
    """A condition that keeps all of them from ever holding together, None when nothing proves that there is one."""
    parsed = Conditions(conditions)
    wrong = None
    for env in environments(entry, parsed.names):
        wrong = parsed.impossible(env)
        if wrong is None:
            return None
    return wrong


def of_type(value: Any, spec: AttributeSpec) -> bool:
    """Whether an attribute may have a value, as far as its type goes."""
    if spec.type == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and not isnan(value)
    if type(value) is not _TYPES[spec.type]:
        return False
    return not isinstance(value, int) or -(2**63) <= value < 2**63
