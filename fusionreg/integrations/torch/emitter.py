"""What the emitter table writes with: values under construction, operators with inferred types, shapes as operands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusionreg.core.dtypes import DTYPES
from fusionreg.core.dtypes import dtype as dtype_row
from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Dim, Graph, GraphBuilder, Shape, Value
from fusionreg.core.ops import Vocabulary, infer, normalise

from .program import Call, Meta, TensorMeta

#: Largest table (a causal mask, a range, an identity matrix) that is made at load time, in elements.
MAX_STORED = 1 << 28


class V:
    """A value under construction; compared by identity.

    Attributes:
        dtype: by name.
        shape: extents, symbolic ones as text.
        name: its name in the graph, "" until it has one.
        array: its data, for a constant.
        node: the node that writes it.
        number: of a symbolic number, the text of its expression.
    """

    __slots__ = ("array", "dtype", "name", "node", "number", "shape")

    def __init__(self, dtype: str, shape: Shape, name: str = "", array: Any = None, number: str = "") -> None:
        self.dtype, self.shape, self.name, self.array, self.number = dtype, shape, name, array, number
        self.node: N | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def floating(self) -> bool:
        return DTYPES[self.dtype].floating

    def axis(self, dim: int) -> int:
        """``dim`` counted from the front; a 0-d tensor counts as 1-d, as in torch."""
        return dim % max(self.rank, 1)

    def __repr__(self) -> str:
        return f"{self.name or '?'}: {self.dtype}{list(self.shape)}"


@dataclass(eq=False)
class N:
    """A node under construction."""

    op: str
    inputs: list[V | None]
    outputs: list[V]
    attrs: FrozenDict[str, Any]
    source: str
    label: str


@dataclass(frozen=True)
class Statistics:
    """What a value is known to be: the mean, or the inverse deviation, that a normalisation gives beside its result.

    Attributes:
        kind: ``layer``, ``rms`` or ``group``.
        x: what was normalised.
        extent: how many of the last axes, or how many groups of channels.
        epsilon: what was added to the variance.
    """

    kind: str
    x: V
    extent: int
    epsilon: float


#: A tensor, or a number, as an operand of aten's operators.
Operand = V | int | float | bool


@dataclass
class Emitter:
    """One conversion. ``call`` is the aten call being emitted, ``env`` what each of its values became."""

    name: str
    ops: Vocabulary
    env: dict[str, Any] = field(default_factory=dict)
    nodes: list[N] = field(default_factory=list)
    inputs: list[V] = field(default_factory=list)
    call: Call | None = None
    metas: tuple[Meta | None, ...] = ()
    statistics: dict[V, Statistics] = field(default_factory=dict)
    _constants: dict[Any, V] = field(default_factory=dict)
    _unknown: int = 0

    # -- the call being emitted ------------------------------------------------------------------------------

    @property
    def out(self) -> TensorMeta:
        """What export recorded of the call's first result."""
        meta = self.metas[0] if self.metas else None
        if not isinstance(meta, TensorMeta):
            raise self.refuse("no recorded result", "a tensor")
        return meta

    def refuse(self, found: str, expected: str, next_step: str = "") -> ModelError:
        """The error of a call that cannot be expressed: names the operator and its line in the model."""
        target = self.call.target if self.call else ""
        where = self.call.source if self.call else ""
        whom = f"{target} at {where}" if where else target
        return ModelError(
            "cannot convert", f"{self.name}: {whom}", found, expected, next_step, operator=target, source=where
        )

    # -- operators -------------------------------------------------------------------------------------------

    def op(
        self, op: str, *inputs: V | None, outputs: int = 1, dtype: str = "", shape: Shape | None = None, **attrs: Any
    ) -> Any:
        """Adds a node; returns its value, or a tuple of ``outputs`` values.

        ``dtype`` and ``shape`` state what is known of the (only) result beyond what inference tells.
        """
        spec = self.ops[op]
        operands = list(inputs)
        while operands and operands[-1] is None:
            operands.pop()
        attributes = normalise(spec, attrs)
        known = {i: v.array for i, v in enumerate(operands) if v is not None and v.array is not None}
        values = [None if v is None else Value(v.name, v.dtype, v.shape) for v in operands]
        label = next((o for o in self.call.outputs if o), "") if self.call else ""
        types = infer(spec, values, attributes, known, outputs, whom=f"{label} ({op})")
        results = [V(dtype or d, shape if shape is not None else self._named(s)) for d, s in types]
        node = N(op, operands, results, attributes, self.call.source if self.call else "", label)
        for r in results:
            r.node = node
        self.nodes.append(node)
        return results[0] if outputs == 1 else tuple(results)

    def _named(self, shape: Any) -> Shape:
        if shape is None:
            raise self.refuse("a value of unknown rank", "ranks known at export")
        dims: list[Dim] = []
        for d in shape:
            if d is None:
                self._unknown += 1
                d = f"dim{self._unknown}"
            dims.append(d)
        return tuple(dims)

    def cast(self, x: V, dtype: str) -> V:
        """``x`` in ``dtype``; ``x`` itself when it is."""
        if x.dtype == dtype:
            return x
        if x.array is not None and x.array.size <= 1:
            return self.const(x.array.astype(dtype_row(dtype).numpy), dtype)
        return self.op("Cast", x, to=dtype, shape=x.shape)

    def stored(self, *extents: int) -> None:
        """Refuses a constant of more elements than a model's own tables have."""
        if math.prod(extents) > MAX_STORED:
            raise self.refuse(f"a table of {' × '.join(map(str, extents))} elements", f"at most {MAX_STORED}")

    # -- constants -------------------------------------------------------------------------------------------

    def const(self, value: Any, dtype: str, shape: Sequence[int] | None = None) -> V:
        """A constant; equal small ones are one value. ``shape`` repeats a number."""
        array = np.asarray(value)
        array = array.astype(dtype_row(dtype).numpy) if array.dtype != dtype_row(dtype).numpy else array
        if shape is not None:
            array = np.full(tuple(shape), array, dtype=array.dtype)
        key = (dtype, array.shape, array.tobytes()) if array.size <= 64 else id(array)
        if key not in self._constants:
            self._constants[key] = V(dtype, tuple(array.shape), array=array)
        return self._constants[key]

    def weight(self, name: str, array: Any, dtype: str, key: Any) -> V:
        """The constant of a parameter or buffer; those with one ``key`` (one memory) are one value."""
        if key not in self._constants:
            self._constants[key] = V(dtype, tuple(array.shape), name=name, array=array)
        return self._constants[key]

    def number(self, value: float | int | bool, dtype: str) -> V:
        """A 0-d constant of ``dtype``."""
        return self.const(value, dtype)

    def fits(self, value: float | int | bool, dtype: str) -> bool:
        """Whether a number keeps its magnitude in ``dtype``: neither overflows nor vanishes."""
        if not DTYPES[dtype].floating or not math.isfinite(value) or value == 0:
            return True
        with np.errstate(over="ignore", under="ignore"):
            there = float(np.asarray(value, np.float64).astype(dtype_row(dtype).numpy))
        return math.isfinite(there) and abs(there - value) <= 2.0 ** -DTYPES[dtype].mantissa * abs(value)

    def operand(self, x: Operand, dtype: str) -> V:
        """A tensor or a number as a value of ``dtype``."""
        return self.cast(x, dtype) if isinstance(x, V) else self.number(x, dtype)

    # -- shapes as operands ----------------------------------------------------------------------------------

    def ints(self, values: Iterable[int | V]) -> V:
        """A 1-d int64 operand of numbers and symbolic numbers."""
        items = list(values)
        if all(isinstance(i, int) for i in items):
            return self.const(np.asarray(items, np.int64).reshape(-1), "int64")
        parts = [
            self.const([i], "int64")
            if isinstance(i, int)
            else self.op("Unsqueeze", self.cast(i, "int64"), self.const([0], "int64"))
            for i in items
        ]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def size(self, x: V, axis: int) -> int | V:
        """An extent: a number, or a 0-d int64 value read from ``x``."""
        extent = x.shape[axis]
        if isinstance(extent, int):
            return extent
        sizes = self.op("Shape", x)
        found = self.op("Gather", sizes, self.const(axis, "int64"), axis=0)
        found.number = extent
        return found

    def dims(self, values: Iterable[int | V]) -> Shape:
        """The extents that a list of numbers and symbolic numbers stands for."""
        out: list[Dim] = []
        for v in values:
            if isinstance(v, int):
                out.append(v)
            elif v.number:
                out.append(v.number)
            else:
                self._unknown += 1
                out.append(f"dim{self._unknown}")
        return tuple(out)

    def reshape(self, x: V, target: Sequence[int | V], shape: Shape | None = None) -> V:
        """``x`` reshaped. The operand is constant where extents can be copied (0) or inferred (-1), so that patterns
        see one form whatever is dynamic; ``shape`` are the resulting extents."""
        items = list(target)
        shape = shape if shape is not None else self.dims(items)
        if x.shape == shape:
            return x
        wanted: list[int | V] = []
        for i, (item, extent) in enumerate(zip(items, shape, strict=True)):
            same = i < x.rank and x.shape[i] == extent and not isinstance(extent, int)
            wanted.append(extent if isinstance(extent, int) else 0 if same else item)
        holes = [i for i, d in enumerate(wanted) if not isinstance(d, int) or d == -1]
        empty = any(d == 0 for d in shape)
        if empty and all(isinstance(d, int) for d in shape):
            return self.op("Reshape", x, self.ints([d for d in shape if isinstance(d, int)]), allowzero=1, shape=shape)
        if empty:
            return self.op("Reshape", x, self.ints(items), allowzero=1, shape=shape)
        if len(holes) <= 1:
            fixed = [-1 if i in holes or not isinstance(d, int) else d for i, d in enumerate(wanted)]
            return self.op("Reshape", x, self.ints(fixed), shape=shape)
        mixed = [i if isinstance(i, V) else d for i, d in zip(items, wanted, strict=True)]
        return self.op("Reshape", x, self.ints(mixed), shape=shape)

    def transpose(self, x: V, perm: Sequence[int]) -> V:
        """``x`` with its axes permuted; ``x`` itself for the identity."""
        perm = tuple(int(p) for p in perm)
        return x if perm == tuple(range(x.rank)) else self.op("Transpose", x, perm=perm)

    def unsqueeze(self, x: V, *axes: int) -> V:
        return self.op("Unsqueeze", x, self.ints(axes)) if axes else x

    def squeeze(self, x: V, *axes: int) -> V:
        return self.op("Squeeze", x, self.ints(axes)) if axes else x

    # -- the graph -------------------------------------------------------------------------------------------

    def build(self, outputs: Sequence[V]) -> Graph:
        """The graph of everything that ``outputs`` need; names are given here."""
        live: set[int] = {id(v) for v in outputs}
        kept: list[N] = []
        for node in reversed(self.nodes):
            if any(id(o) in live for o in node.outputs):
                kept.append(node)
                live.update(id(i) for i in node.inputs if i is not None)
        kept.reverse()
        builder = GraphBuilder(self.name, taken=[v.name for v in self.inputs])
        for v in self.inputs:
            builder.input(v.name, v.dtype, v.shape)
        self._name_values(builder, kept, outputs)
        for node in kept:
            results = [Value(o.name if id(o) in live else "", o.dtype, o.shape) for o in node.outputs]
            while results and not results[-1].name and len(results) > 1 and node.op != "Split":
                results.pop()
            ins = ["" if i is None else i.name for i in node.inputs]
            label = f"{node.label}.{node.op}" if node.label else node.op
            builder.node(node.op, ins, results, name=label, attrs=node.attrs, source=node.source)
        return builder.build([v.name for v in outputs])

    def _name_values(self, builder: GraphBuilder, nodes: list[N], outputs: Sequence[V]) -> None:
        done = {id(v) for v in self.inputs}
        named = [v for n in nodes for v in n.outputs if v.name] + [v for n in nodes for v in n.outputs if not v.name]
        for v in named:  # aten's own names first, so that they stay as export wrote them
            label = v.node.label if v.node else ""
            v.name = builder.fresh(v.name or (f"{label}.{v.node.op.lower()}" if v.node else "v"))
            done.add(id(v))
        for v in [i for n in nodes for i in n.inputs if i is not None] + list(outputs):
            if id(v) not in done and v.array is not None:
                done.add(id(v))
                v.name = builder.fresh(v.name or "const")
                builder.constant(v.name, v.array, v.dtype)
