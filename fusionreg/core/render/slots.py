"""The slots of a kernel: how its template reads an input, and writes an output, that operators may stand at. Floor 4.

For each tensor in ``KernelSpec.regions`` there is one C++ type, whatever stands there::

    struct Slot_x {                                     // an input
      template <int V> Loaded<V> fetch(at, m, n) const; // loads what V consecutive elements need
      template <int V> void values(loaded, float (&v)[V]) const;  // the elements, as they enter the fusion
    };
    struct Slot_y {                                     // an output
      template <int V> void write(at, m, n, const float (&v)[V]) const;
    };

``at`` is the first element's place in the whole (contiguous) tensor, and the rest its coordinates along the tensor's
axes. With nothing at the slot that is a load, or a store; with operators there, their operands are loaded, the
generated function is applied element by element, and what it gives is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..dtypes import dtype
from ..errors import FusionregError, RenderError
from ..frozen import FrozenDict
from ..ir import Graph
from ..problem import Problem
from ..registry.entries import Slot
from ..rewrite import extract
from ..tensors import TensorType
from .ctypes import compute_type
from .pointwise import device_function, pattern_graph
from .values import Code, identifier

if TYPE_CHECKING:
    from ..registry.catalog import FusionEntry, KernelEntry

#: The device library that slots are written with.
LIBRARY = "slots.cuh"


@dataclass(frozen=True)
class Slots:
    """The variables ``slots`` and ``slot`` of a template.

    Attributes:
        code: definitions of all slots, for namespace scope.
        made: slot → the C++ expression that makes it from the kernel's parameters.
    """

    code: Code
    made: FrozenDict[str, Code]

    def make(self, name: str) -> Code:
        """``slot("x")`` in a template."""
        found = self.made.get(str(name))
        if found is None:
            raise RenderError("cannot render", f"slot {name!r}", "it is not in `regions`", ", ".join(self.made))
        return found


def slots(entry: FusionEntry, kernel: KernelEntry, problem: Problem) -> Slots:
    """What a kernel's template sees of its slots; :class:`RenderError` where operators at one have no CUDA form."""
    definitions: list[str] = []
    made: dict[str, Code] = {}
    graph: Graph | None = None
    for name in kernel.spec.regions:
        identifier(name, kernel.key)
        filled = entry.slots.get(name)
        function = ""
        if filled is not None:
            try:
                graph = graph or pattern_graph(entry, problem)
                function = _function(entry, graph, filled)
            except FusionregError as e:
                expected = "point-wise operators that have a CUDA form"
                raise RenderError("cannot render", kernel.key, str(e), expected) from None
        kind = entry.tensors[name] if filled is None else filled.type
        writer = _Writer(name, kind, entry, problem, filled)
        definitions += filter(None, (function, writer.output() if writer.writes else writer.input()))
        made[name] = Code(f"Slot_{name}{{{', '.join(writer.tensors)}}}")
    return Slots(Code("\n".join(definitions)), FrozenDict(made))


def _function(entry: FusionEntry, graph: Graph, slot: Slot) -> str:
    """The operators at a slot: of an input, of what stands in front of it; of an output, of it and what it meets."""
    reads = [i for i in slot.inputs if i in graph.inputs]
    if slot.before:
        nodes, inputs, outputs = _before(graph, slot.name), reads, [slot.name]
    else:
        nodes, inputs = _behind(graph, slot.name), [slot.name, *reads]
        outputs = [o for o in slot.outputs if o != slot.name]
    return device_function(f"fr_at_{slot.name}", extract(graph, nodes, slot.name, inputs, outputs), entry.ops)


def _before(graph: Graph, value: str) -> list[str]:
    """Nodes that a value is computed by."""
    found: dict[str, None] = {}
    ready = [value]
    while ready:
        producer = graph.producers.get(ready.pop())
        if producer is not None and producer.name not in found:
            found[producer.name] = None
            ready += [i for i in producer.inputs if i]
    return list(found)


def _behind(graph: Graph, value: str) -> list[str]:
    """Nodes that a value goes into, and those that compute what it meets there."""
    found: dict[str, None] = {}
    ready = [value]
    while ready:
        for reader in graph.consumers.get(ready.pop(), ()):
            found[reader.name] = None
            ready += [o for o in reader.outputs if o]
    before = set(_before(graph, value))
    sides = [n for name in found for i in graph.node_by_name[name].inputs if i for n in _before(graph, i)]
    return [*found, *(n for n in dict.fromkeys(sides) if n not in found and n not in before)]


class _Writer:
    """The C++ type of one slot."""

    def __init__(
        self, name: str, kind: TensorType, entry: FusionEntry, problem: Problem, filled: Slot | None
    ) -> None:
        self.name, self.axes, self.problem, self.filled = name, kind.forms[0].names, problem, filled
        self.writes = name in entry.outputs if filled is None else not filled.before
        self.forms = {n: t.forms[problem.forms[n]] for n, t in entry.tensors.items() if n in problem.forms}
        if filled is None:
            self.reads, self.stores = ([], [name]) if self.writes else ([name], [])
        else:
            self.reads = [i for i in filled.inputs if problem.tensors[i] is not None]
            self.stores = list(filled.outputs)
        self.compute = compute_type(problem.dtypes.get(kind.dtype, kind.dtype))

    @property
    def tensors(self) -> list[str]:
        return [*self.reads, *self.stores]

    def _ctype(self, tensor: str) -> str:
        found = self.problem.tensors[tensor]
        assert found is not None, tensor
        return str(dtype(found.dtype).cuda)

    def _place(self, tensor: str) -> tuple[str, bool]:
        """Its offset as C++, and whether the elements of a vector are consecutive there."""
        named = self.forms[tensor].names
        if len(named) == len(self.axes):
            return "at", True
        if not named:
            return "0", False
        (axis,) = named
        return axis, axis == self.axes[-1]

    def _head(self) -> list[str]:
        lines = [f"struct Slot_{self.name} {{"]
        lines += [f"  const {self._ctype(t)}* __restrict__ {t};" for t in self.reads]
        lines += [f"  {self._ctype(t)}* __restrict__ {t};" for t in self.stores]
        return lines

    def _parameters(self) -> str:
        return ", ".join(f"fr::i64 {p}" for p in ("at", *self.axes))

    def _loaded(self) -> list[str]:
        """A structure of what is loaded for V elements, and the function that loads it."""
        fields, loads = [], []
        for t in self.reads:
            place, run = self._place(t)
            fields.append(f"fr::Pack<{self._ctype(t)}, V> {t};" if run else f"{self._ctype(t)} {t};")
            loads.append(f"fr::load_pack<V>({t} + {place})" if run else f"{t}[{place}]")
        return [
            f"  template <int V> struct Loaded {{ {' '.join(fields)} }};",
            f"  template <int V> __device__ __forceinline__ Loaded<V> fetch({self._parameters()}) const {{",
            f"    return {{{', '.join(loads)}}};",
            "  }",
        ]

    def _value(self, tensor: str) -> str:
        held = f"loaded.{tensor}[j]" if self._place(tensor)[1] else f"loaded.{tensor}"
        return held if self._compute(tensor) == self._ctype(tensor) else f"fr::to_float({held})"

    def input(self) -> str:
        lines = [*self._head(), *self._loaded()]
        given = f"const Loaded<V>& loaded, {self.compute} (&v)[V]"
        lines += [f"  template <int V> __device__ __forceinline__ void values({given}) const {{", "#pragma unroll"]
        if self.filled is None:
            lines.append(f"    for (int j = 0; j < V; ++j) v[j] = {self._value(self.name)};")
        else:
            given = ", ".join([*map(self._value, self.reads), "v[j]"])
            lines.append(f"    for (int j = 0; j < V; ++j) fr_at_{self.name}({given});")
        return "\n".join([*lines, "  }", "};"])

    def output(self) -> str:
        lines = [*self._head(), *(self._loaded() if self.reads else [])]
        parameters = f"{self._parameters()}, const {self.compute} (&v)[V]"
        lines.append(f"  template <int V> __device__ __forceinline__ void write({parameters}) const {{")
        if self.reads:
            lines.append(f"    const Loaded<V> loaded = fetch<V>({', '.join(('at', *self.axes))});")
        results = [t for t in self.stores if t != self.name]
        if self.filled is not None:
            given = ["v[j]", *map(self._value, self.reads), *(f"to_{t}[j]" for t in results)]
            lines += [f"    {self._compute(t)} to_{t}[V];" for t in results]
            lines += ["#pragma unroll", f"    for (int j = 0; j < V; ++j) fr_at_{self.name}({', '.join(given)});"]
        for t in self.stores:
            held = "v" if t == self.name else f"to_{t}"
            lines.append(f"    fr::store_pack({t} + at, {self._stored(t, held)});")
        return "\n".join([*lines, "  }", "};"])

    def _compute(self, tensor: str) -> str:
        found = self.problem.tensors[tensor]
        assert found is not None, tensor
        return compute_type(found.dtype)

    def _stored(self, tensor: str, held: str) -> str:
        """V computed values as what is stored."""
        kind = self._ctype(tensor)
        return f"fr::round_pack<{kind}>({held})" if self._compute(tensor) == "float" else f"fr::pack<{kind}>({held})"
