"""Maps with channels last: what of a graph lies so, were its inputs moved first. Floor 4.

Kernels of convolutions read the channels of a pixel in one go, and give maps in the order in which they get them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..dtypes import DTYPES
from ..frozen import EMPTY
from ..ir import Graph, Node, Value
from ..matcher.match import Match
from ..ops import Vocabulary
from .plan import Plan

#: The axes of a map in that order.
LAST = (0, 2, 3, 1)
#: What gives a map in the order of its first operand, in every library; as point-wise operators do.
KEEPING = frozenset(
    {"AveragePool", "BatchNormalization", "Concat", "Conv", "GlobalAveragePool", "MaxPool", "Pad", "Slice", "Split"}
)


@dataclass(frozen=True)
class Moved:
    """A graph whose maps have channels last.

    Attributes:
        graph: which.
        inputs: those of its inputs and filters that are moved for it.
        outputs: those of its outputs that lie so then.
        strides: value → its strides in elements, of all values that lie so.
    """

    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    strides: Mapping[str, tuple[int, ...]]

    def of(self, match: Match) -> Mapping[str, tuple[int, ...]]:
        """Those of a match's operands."""
        return {tensor: self.strides[name] for tensor, name in match.inputs.items() if name in self.strides}

    def better(self, made: Plan, last: Plan, moving: Callable[[Value], float]) -> Plan:
        """The one that saves more of ``made``, for maps as they are, and ``last``, for these; ``moving``: seconds that
        it takes to move a value, first ones and, back, results."""
        moved = (*(n for n in self.inputs if not self.graph.is_constant(n)), *self.outputs)
        price = sum(moving(self.graph.values[n]) for n in moved)
        return replace(last, moved=self.inputs) if last.saved.seconds - price > made.saved.seconds else made


def channels_last(graph: Graph, ops: Vocabulary, known: Mapping[str, tuple[int, ...]] = EMPTY) -> Moved | None:
    """What lies so where all maps that enter do; None where nothing convolves them, where that is in groups of several
    channels, which libraries are slow at then, and where their channels or places are symbolic. ``known``: how values
    lie; where that tells of any map, those that enter lie so already, and filters alone are moved, or None."""
    convolutions = [n for n in graph.nodes if n.op == "Conv"]
    if not convolutions or any(_grouped(graph, n) for n in convolutions):
        return None
    filters = [n.inputs[1] for n in convolutions if graph.is_constant(n.inputs[1])]
    inputs = [name for name in graph.inputs if _strides(graph.values[name])]
    found = {name: s for name in (*inputs, *filters) if (s := _strides(graph.values[name]))}
    for node in graph.nodes:
        if (node.op in KEEPING or (node.op in ops and ops[node.op].pointwise)) and _kept(graph, node, found):
            found |= {o: s for o in node.outputs if o and (s := _strides(graph.values[o]))}
    if not inputs or not all(n.inputs[0] in found for n in convolutions):
        return None
    filters = [f for f in filters if f in found and known.get(f) != found[f]]
    if any(len(s) == len(LAST) for s in known.values()):
        so = filters and all(known.get(name) == found[name] for name in inputs)
        return Moved(graph, tuple(dict.fromkeys(filters)), (), found) if so else None
    return Moved(graph, tuple(dict.fromkeys((*inputs, *filters))), tuple(o for o in graph.outputs if o in found), found)


def _kept(graph: Graph, node: Node, found: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether all maps that a node reads lie so, and it reads one."""
    read = node.inputs[:1] if node.op == "Conv" else node.inputs
    maps = [i for i in read if i and not graph.is_constant(i) and _strides(graph.values[i])]
    return bool(maps) and all(i in found for i in maps)


def _grouped(graph: Graph, node: Node) -> bool:
    x, w = (graph.values[i].shape or () for i in node.inputs[:2])
    return len(x) == 4 and len(w) == 4 and x[1] != w[1] != 1


def _strides(value: Value) -> tuple[int, ...]:
    """Those of a map with channels last; () of what is no map, or has symbolic channels or places."""
    shape, row = value.shape or (), DTYPES.get(value.dtype)
    if len(shape) != 4 or row is None or row.kind != "f":
        return ()
    c, h, w = shape[1:]
    return (h * w * c, 1, w * c, c) if isinstance(c, int) and isinstance(h, int) and isinstance(w, int) else ()
