"""The slots of a kernel: how its template reads an input, and writes an output, that operators may stand at. Floor 4.

For each tensor in ``KernelSpec.regions`` there is one C++ type, whatever stands there::

    struct Slot_x {                                     // an input
      template <int V> Loaded<V> fetch(at, m, n) const; // loads what V consecutive elements need
      template <int V> void values(loaded, float (&v)[V]) const;  // the elements, as they enter the fusion
      template <int V> void keep(at, const float (&v)[V]) const;  // stores them, where kept("x"): others read them
    };
    struct Slot_y {                                     // an output
      template <int V> void write(at, m, n, const float (&v)[V]) const;
    };

``at`` is the first element's place in memory, in every operand that has all of the tensor's axes (they are contiguous,
or, where the kernel takes a strided tensor, lie alike), and the rest its coordinates along those axes; operands with
several axes, but not all, have strides of their own. The elements follow one another along the last axis, or along the
one that the template asks for: ``slots_along("C")``. With nothing at the slot ``fetch`` is a load, ``write`` a store;
with operators there, their operands are loaded, the generated function is applied element by element, and what it gives
is stored.
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
from .prelude import strided_axes
from .values import Code, identifier

if TYPE_CHECKING:
    from ..registry.catalog import FusionEntry, KernelEntry

#: The device library that slots are written with.
LIBRARY = "slots.cuh"


@dataclass(frozen=True)
class Slots:
    """The variables ``slots``, ``slots_along`` and ``slot`` of a template.

    Attributes:
        functions: the operators at slots as C++ functions, for namespace scope.
        writers: what writes the type of each slot.
        made: slot → the C++ expression that makes it from the kernel's parameters.
    """

    functions: FrozenDict[str, str]
    writers: FrozenDict[str, _Writer]
    made: FrozenDict[str, Code]

    def code(self, along: str = "") -> Code:
        """Definitions of all slots; ``along``: the axis that the elements of a vector follow one another along."""
        parts = [(self.functions[name], writer.text(str(along))) for name, writer in self.writers.items()]
        return Code("\n".join(text for part in parts for text in part if text))

    def make(self, name: str) -> Code:
        """``slot("x")`` in a template."""
        found = self.made.get(str(name))
        if found is None:
            raise RenderError("cannot render", f"slot {name!r}", "it is not in `regions`", ", ".join(self.made))
        return found


def slots(entry: FusionEntry, kernel: KernelEntry, problem: Problem) -> Slots:
    """What a kernel's template sees of its slots; :class:`RenderError` where operators at one have no CUDA form."""
    functions: dict[str, str] = {}
    writers: dict[str, _Writer] = {}
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
        functions[name], writers[name] = function, _Writer(name, kind, entry, problem, filled)
    made = {name: Code(f"Slot_{name}{{{', '.join(w.members)}}}") for name, w in writers.items()}
    return Slots(FrozenDict(functions), FrozenDict(writers), FrozenDict(made))


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
        self.along = self.axes[-1:]
        self.writes = name in entry.outputs if filled is None else not filled.before
        self.forms = {n: t.forms[problem.forms[n]] for n, t in entry.tensors.items() if n in problem.forms}
        if filled is None:
            self.reads, self.stores = ([], [name]) if self.writes else ([name], [])
        else:
            self.reads = [i for i in filled.inputs if problem.tensors[i] is not None]
            self.stores = list(filled.outputs)
        self.compute = compute_type(problem.dtypes.get(kind.dtype, kind.dtype))

    @property
    def members(self) -> list[str]:
        """What it is made from: tensors, and the strides of loose operands."""
        return [*self.reads, *self.stores, *(s for t in self.reads for s in self._strides(t).values())]

    def text(self, along: str) -> str:
        if along and along not in self.axes:
            expected = f"one of {', '.join(self.axes)}"
            raise RenderError("cannot render", f"slot {self.name!r}", f"it has no axis {along!r}", expected)
        self.along = (along,) if along else self.axes[-1:]
        return self.output() if self.writes else self.input()

    def _whole(self, tensor: str) -> bool:
        return len(self.forms[tensor].names) == len(self.axes)

    def _ctype(self, tensor: str) -> str:
        found = self.problem.tensors[tensor]
        assert found is not None, tensor
        return str(dtype(found.dtype).cuda)

    def _place(self, tensor: str) -> str:
        """Its offset as C++."""
        if self._whole(tensor):
            return "at"
        named, strides = self.forms[tensor].names, self._strides(tensor)
        return " + ".join(f"{axis} * {strides[axis]}" if strides else axis for axis in named) or "0"

    def _step(self, tensor: str) -> str:
        """How far apart the elements of a vector are there: 1, "0" where they are one, or a stride."""
        if self._whole(tensor):
            return "1"
        if not self.along or self.along[0] not in self.forms[tensor].names:
            return "0"
        return self._strides(tensor).get(self.along[0], "1")

    def _strides(self, tensor: str) -> dict[str, str]:
        """Axis → C++ name of a loose operand's stride along it; empty for others."""
        if tensor not in self.problem.loose:
            return {}
        form = self.forms[tensor]
        return {str(form.axes[i]): f"{tensor}_stride_{i}" for i in strided_axes(form)}

    def _head(self) -> list[str]:
        lines = [f"struct Slot_{self.name} {{"]
        lines += [f"  const {self._ctype(t)}* __restrict__ {t};" for t in self.reads]
        lines += [f"  {self._ctype(t)}* __restrict__ {t};" for t in self.stores]
        lines += [f"  fr::i64 {stride};" for t in self.reads for stride in self._strides(t).values()]
        return lines

    def _parameters(self) -> str:
        return ", ".join(f"fr::i64 {p}" for p in ("at", *self.axes))

    def _loaded(self) -> list[str]:
        """A structure of what is loaded for V elements, and the function that loads it."""
        fields, loads, apart = [], [], []
        for t in self.reads:
            place, step = self._place(t), self._step(t)
            fields.append(f"{self._ctype(t)} {t};" if step == "0" else f"fr::Pack<{self._ctype(t)}, V> {t};")
            at_once = f"{t}[{place}]" if step == "0" else f"fr::load_pack<V>({t} + {place})"
            loads.append(at_once if step in ("0", "1") else "{}")
            if step not in ("0", "1"):
                apart.append(f"    for (int j = 0; j < V; ++j) loaded.{t}[j] = {t}[{place} + j * {step}];")
        made = f"{{{', '.join(loads)}}}"
        unrolled = [line for loop in apart for line in ("#pragma unroll", loop)]
        whole = [f"    Loaded<V> loaded = {made};", *unrolled, "    return loaded;"]
        return [
            f"  template <int V> struct Loaded {{ {' '.join(fields)} }};",
            f"  template <int V> __device__ __forceinline__ Loaded<V> fetch({self._parameters()}) const {{",
            *(whole if apart else [f"    return {made};"]),
            "  }",
        ]

    def _value(self, tensor: str) -> str:
        held = f"loaded.{tensor}" if self._step(tensor) == "0" else f"loaded.{tensor}[j]"
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
        if self.stores:
            given = f"fr::i64 at, const {self.compute} (&v)[V]"
            lines += ["  }", f"  template <int V> __device__ __forceinline__ void keep({given}) const {{"]
            lines.append(f"    fr::store_pack({self.name} + at, {self._stored(self.name, 'v')});")
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
