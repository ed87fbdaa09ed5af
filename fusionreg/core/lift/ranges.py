"""Bounds on indices that TopK gives, which hold of themselves. Floor 3.

transformers guards layers of experts against indices that stand for experts of other ranks: it clamps them, or fills
rows whose index is past the last expert. An index that TopK gives of E values is in 0 … E - 1: neither does anything.
"""

from __future__ import annotations

from ..ir import Graph
from .engine import Rule
from .site import Condition, Site, shape_is

#: Operators that give elements of their first operand, and nothing else.
_MOVES = frozenset(("Expand", "Gather", "GatherElements", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))


def _indexed(graph: Graph, name: str) -> int | None:
    """How many values those have that ``name`` has indices of, all from TopK; None where it may be anything else."""
    while (node := graph.producers.get(name)) is not None:
        if node.op == "TopK" and node.outputs[1:2] == (name,):
            shape = graph.values[node.inputs[0]].shape
            extent = None if shape is None else shape[node.attrs.get("axis", -1)]
            return extent if isinstance(extent, int) else None
        whole = node.op == "Cast" and node.attrs["to"] in ("int32", "int64")
        if node.op not in _MOVES and not whole and not (node.op == "TopK" and node.outputs[0] == name):
            return None
        name = node.inputs[0]
    return None


def _inside(low: str = "", high: str = "", last: int = 0) -> Condition:
    """Whether constants are no tighter than the indices: ``low`` ≤ 0, and ``high`` at least the last index + 1 -
    ``last``."""

    def holds(site: Site) -> bool:
        many = _indexed(site.graph, site.name("i"))
        lows, highs = (site.ints(name) if name else (0,) for name in (low, high))
        if many is None or not lows or (high and not highs):
            return False
        return max(lows) <= 0 and (not high or min(highs or ()) >= many - last)

    return holds


RULES: tuple[Rule, ...] = (
    Rule("inside", "y = Clip(i, low, high)", "y = i", (_inside("low", "high", 1),)),
    Rule("inside", "y = Clip(i, low)", "y = i", (_inside("low"),)),
    Rule("inside", "y = Clip(i, None, high)", "y = i", (_inside("", "high", 1),)),
    *(
        Rule("never_past", f"y = Where({test}, filled, x)", "y = x", (_inside("", "high"), shape_is("x")), shared=True)
        for test in ("GreaterOrEqual(i, high)", "Unsqueeze(GreaterOrEqual(i, high), axes)")
    ),
)
