"""The graph every frontend emits and every later stage reads. Floor 1.

A :class:`Graph` is a frozen value: nodes in topological order, every value named once (SSA), constants beside it.
Operators are ONNX's by name; one of another domain is written ``domain::Name``. A fused call is a node whose
operator is ``fused::<fusion name>`` and whose ``graphs["body"]`` is the sub-graph that it replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .errors import GraphError
from .frozen import EMPTY, FrozenDict

if TYPE_CHECKING:
    import numpy

#: One extent of a shape: a number, or the name of a symbolic axis.
Dim = int | str
Shape = tuple[Dim, ...]
Attribute = int | float | str | bool | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]

FUSED = "fused::"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in the graph: its dtype by name, and its shape, None where even the rank is unknown."""

    name: str
    dtype: str
    shape: Shape | None = None

    def __str__(self) -> str:
        extent = "?" if self.shape is None else " ".join(map(str, self.shape))
        return f"{self.name}: {self.dtype}[{extent}]"


@dataclass(frozen=True)
class Node:
    """One operator application.

    Attributes:
        name: unique in its graph.
        op: ``"MatMul"``, or ``"domain::Name"`` outside ONNX's default domain.
        inputs: value names; ``""`` stands for an omitted optional input.
        outputs: value names; ``""`` stands for an output that nobody reads.
        attrs: attribute values; tensors among them are given as constants of the graph instead.
        source: where it stands in the model: ``file:line``, a module path or the ONNX node name.
        graphs: sub-graphs by attribute name (If, Loop, Scan, and ``body`` of a fused call).
        mutates: inputs that this node writes in place; no match may cross such a write.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: FrozenDict[str, Any] = EMPTY
    source: str = ""
    graphs: FrozenDict[str, Graph] = EMPTY
    mutates: tuple[str, ...] = ()

    @cached_property
    def captures(self) -> frozenset[str]:
        """Names of this graph that the node's sub-graphs read without being handed them."""
        if self.op.startswith(FUSED):
            return frozenset()
        return frozenset().union(*(g.free_names for g in self.graphs.values()))

    @property
    def reads(self) -> frozenset[str]:
        """All values of this graph that the node reads, captured ones included."""
        return frozenset(n for n in self.inputs if n) | self.captures

    def __repr__(self) -> str:
        attrs = "".join(f", {k}={v!r}" for k, v in self.attrs.items())
        return f"{', '.join(self.outputs)} = {self.op}({', '.join(self.inputs)}{attrs})"


@dataclass(frozen=True, eq=False)
class Graph:
    """A straight-line program.

    Attributes:
        name: for people.
        inputs: names of the values a caller passes, in order.
        outputs: names of the values it gives back, in order; an input or a repeated name is allowed.
        nodes: topologically ordered.
        values: every named value that is an input, a constant or a node's output.
        constants: arrays (NumPy, ml_dtypes for bfloat16 and float8) of values that no node writes.
        overridable: constants that are inputs too (ONNX initialisers a caller may replace): never folded.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    values: FrozenDict[str, Value]
    constants: FrozenDict[str, numpy.ndarray] = field(default=EMPTY, repr=False)
    overridable: frozenset[str] = frozenset()

    @cached_property
    def node_by_name(self) -> Mapping[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Node name → index in ``nodes``."""
        return {n.name: i for i, n in enumerate(self.nodes)}

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """Value name → the node that writes it."""
        return {out: n for n in self.nodes for out in n.outputs if out}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """Value name → nodes that read it, captured reads included, each node once, in order."""
        found: dict[str, list[Node]] = {}
        for n in self.nodes:
            for name in n.reads:
                found.setdefault(name, []).append(n)
        return {k: tuple(v) for k, v in found.items()}

    @cached_property
    def output_names(self) -> frozenset[str]:
        return frozenset(self.outputs)

    @cached_property
    def free_names(self) -> frozenset[str]:
        """Names read but defined nowhere here: captured from the enclosing graph."""
        defined = set(self.inputs) | set(self.constants) | set(self.producers)
        read = {r for n in self.nodes for r in n.reads} | set(self.outputs)
        return frozenset(read - defined - {""})

    def is_constant(self, name: str) -> bool:
        """Whether the value is known and no caller can replace it."""
        return name in self.constants and name not in self.overridable

    def with_(self, **changes: Any) -> Graph:
        """A copy with the given fields replaced."""
        return replace(self, **changes)

    def check(self, outer: Iterable[str] = ()) -> Graph:
        """Itself, when every invariant holds; :class:`GraphError` naming the node otherwise.

        ``outer``: names that a sub-graph may capture from the graph around it.
        """
        defined = set(self.inputs) | set(self.constants) | set(outer)
        names: set[str] = set()
        for n in self.nodes:
            if n.name in names:
                raise GraphError("bad graph", self.name, f"two nodes are named {n.name!r}", "unique names", node=n.name)
            names.add(n.name)
            for read in n.reads:
                if read not in defined:
                    raise GraphError(
                        "bad graph",
                        self.name,
                        f"node {n.name!r} reads {read!r}",
                        "a value defined before it",
                        node=n.name,
                    )
            for out in filter(None, n.outputs):
                if out in defined:
                    raise GraphError("bad graph", self.name, f"{out!r} is written twice", "one writer", node=n.name)
                defined.add(out)
        missing = [o for o in self.outputs if o not in defined]
        if missing:
            raise GraphError("bad graph", self.name, f"outputs {missing} are never written", "every output written")
        untyped = defined - set(self.values) - set(outer)
        if untyped:
            raise GraphError("bad graph", self.name, f"no type for {sorted(untyped)[:5]}", "a Value for every name")
        return self

    def __repr__(self) -> str:
        head = ", ".join(str(self.values[i]) for i in self.inputs)
        lines = "\n".join(f"  {n!r}" for n in self.nodes[:40])
        more = f"\n  … {len(self.nodes) - 40} more" if len(self.nodes) > 40 else ""
        return f"graph {self.name}({head}):\n{lines}{more}\n  return {', '.join(self.outputs)}"


class Names:
    """Names of values and nodes that are ``taken``, and fresh ones."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = set(taken)
        self._counts: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """A name nobody has: ``stem`` itself when free, else ``stem_2``, ``stem_3`` …"""
        stem = stem or "v"
        name, i = stem, self._counts.get(stem, 1)
        while name in self.taken:
            i += 1
            name = f"{stem}_{i}"
        self._counts[stem] = i  # where the next search starts: many names of one stem stay linear
        self.taken.add(name)
        return name


class GraphBuilder(Names):
    """Collects nodes and values with fresh names; :meth:`build` checks and freezes."""

    def __init__(self, name: str, taken: Iterable[str] = ()) -> None:
        super().__init__(taken)
        self.name = name
        self._inputs: list[str] = []
        self._nodes: list[Node] = []
        self._values: dict[str, Value] = {}
        self._constants: dict[str, Any] = {}
        self._overridable: set[str] = set()

    def input(self, name: str, dtype: str, shape: Shape | None) -> str:
        self.taken.add(name)
        self._inputs.append(name)
        self._values[name] = Value(name, dtype, shape)
        return name

    def constant(self, name: str, array: Any, dtype: str, overridable: bool = False) -> str:
        self.taken.add(name)
        self._constants[name] = array
        self._values[name] = Value(name, dtype, tuple(int(d) for d in array.shape))
        if overridable:
            self._overridable.add(name)
        return name

    def value(self, value: Value) -> None:
        self._values[value.name] = value

    def node(self, op: str, inputs: Iterable[str], outputs: Iterable[Value], name: str = "", **fields: Any) -> Node:
        """Adds a node; ``outputs`` are the values it writes. ``fields``: attrs, source, graphs, mutates."""
        outs = tuple(outputs)
        if "attrs" in fields:
            fields["attrs"] = FrozenDict(fields["attrs"])
        node = Node(
            self.fresh(name or op.rsplit("::", 1)[-1]), op, tuple(inputs), tuple(o.name for o in outs), **fields
        )
        self._nodes.append(node)
        for o in outs:
            self.taken.add(o.name)
            self._values[o.name] = o
        return node

    def build(self, outputs: Iterable[str], outer: Iterable[str] = ()) -> Graph:
        return Graph(
            self.name,
            tuple(self._inputs),
            tuple(outputs),
            tuple(self._nodes),
            FrozenDict(self._values),
            FrozenDict(self._constants),
            frozenset(self._overridable),
        ).check(outer)
