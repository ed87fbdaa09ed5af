"""Graphs and fusions for tests: a builder that infers types, small fusion specs, and comparing fused with unfused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from fusionreg.core import rewrite
from fusionreg.core.dtypes import dtype
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, GraphBuilder, Shape
from fusionreg.core.matcher.find import FailedMatch, Match, find
from fusionreg.core.ops import default_vocabulary, infer, named
from fusionreg.core.pattern.instantiate import parse_pattern
from fusionreg.core.planner.costs import CostModel
from fusionreg.core.planner.plan import Plan, plan
from fusionreg.core.registry.entries import FusionEntry
from fusionreg.core.spec import AttributeSpec, FusionSpec
from fusionreg.core.tensors import TensorType

FLOATS = ("float16", "bfloat16", "float32")


def vocabulary():
    return default_vocabulary()


class Net(GraphBuilder):
    """A builder that infers every type: ``y = net.op("MatMul", x, w, transB=1)``."""

    def __init__(self, name: str = "net") -> None:
        super().__init__(name)
        self.rng = np.random.default_rng(7)

    def weight(self, shape: Sequence[int], kind: str = "float32", name: str = "w", overridable: bool = False) -> str:
        array = np.asarray(self.rng.normal(size=tuple(shape))).astype(dtype(kind).numpy)
        return self.constant(self.fresh(name), array, kind, overridable)

    def const(self, value: Any, kind: str = "float32", overridable: bool = False) -> str:
        return self.constant(self.fresh("c"), np.asarray(value).astype(dtype(kind).numpy), kind, overridable)

    def op(self, op: str, *inputs: str | None, name: str = "", outputs: int = 1, **attrs: Any) -> Any:
        fields = {k: attrs.pop(k) for k in ("mutates", "source", "graphs") if k in attrs}
        spec = vocabulary()[op]
        values = [self._values[i] if i else None for i in inputs]
        constants = {k: self._constants[i] for k, i in enumerate(inputs) if i in self._constants}
        types = infer(spec, values, attrs, constants, count=outputs)
        stem = name or op.lower().rsplit(":", 1)[-1]
        outs = named([self.fresh(stem if k == 0 else f"{stem}_{k}") for k in range(outputs)], types)
        self.node(op, [i or "" for i in inputs], outs, name=f"{op}_{outs[0].name}", attrs=attrs, **fields)
        return outs[0].name if outputs == 1 else tuple(o.name for o in outs)


def entry(spec: FusionSpec, plugin: str = "tests") -> FusionEntry:
    """The fusion as the registry would hold it, without kernels."""
    return FusionEntry(
        spec,
        plugin,
        plugin,
        "1",
        tuple(parse_pattern(t, vocabulary(), spec.name, tuple(spec.outputs)) for t in spec.pattern),
        FrozenDict({k: TensorType.parse(v, spec.name) for k, v in spec.inputs.items()}),
        FrozenDict({k: TensorType.parse(v, spec.name) for k, v in spec.outputs.items()}),
    )


def fusion(name: str, pattern: str | tuple[str, ...], inputs: Mapping, outputs: Mapping, **fields: Any) -> FusionEntry:
    """A fusion over dtype variable ``T`` in the usual floats, unless ``dtypes`` says otherwise."""
    fields.setdefault("dtypes", {"T": FLOATS})
    return entry(FusionSpec(api=1, name=name, pattern=pattern, inputs=inputs, outputs=outputs, **fields))


@cache
def gemm() -> FusionEntry:
    """Matrix product with optional scale, bias and activation."""
    return fusion(
        "gemm.scale_bias",
        "h = MatMul(x, w, transB=transB)\ns = optional(Mul)(h, scale)\nb = optional(Add)(s, bias)\n"
        'y = optional(any_of(Relu, Gelu, Sigmoid, Tanh, gelu_tanh=Gelu(approximate="tanh")), "activation")(b)',
        {"x": "T[... M K]", "w": "T[K N] | T[N K]", "scale": "T[] | T[N]", "bias": "T[N]"},
        {"y": "T[... M N]"},
        attributes={"transB": AttributeSpec(type="bool", default=False)},
    )


@cache
def softmax_bias() -> FusionEntry:
    """Addition and softmax over the last axis."""
    return fusion(
        "softmax.bias", "y = Softmax(Add(x, bias), axis=-1)", {"x": "T[... M N]", "bias": "T[N]"}, {"y": "T[... M N]"}
    )


@cache
def layernorm() -> FusionEntry:
    """Layer normalization written out, over the last axis."""
    return fusion(
        "norm.layer",
        "c = Sub(x, ReduceMean(x, (-1,)))\nv = ReduceMean(Mul(c, c), (-1,))\n"
        "n = Div(c, Sqrt(Add(v, 1e-5)))\ny = Add(Mul(n, gamma), beta)",
        {"x": "T[... M N] | T[N]", "gamma": "T[N]", "beta": "T[N]"},
        {"y": "T[... M N] | T[N]"},
    )


@cache
def quick_gelu() -> FusionEntry:
    """x · sigmoid(1.702 x)."""
    return fusion("act.quick_gelu", "y = Mul(x, Sigmoid(Mul(x, 1.702)))", {"x": "T[... N]"}, {"y": "T[... N]"})


def feeds(graph: Graph, extents: Mapping[str, int] | None = None, seed: int = 3) -> dict[str, np.ndarray]:
    """Random inputs of moderate size; symbolic extents are 3 unless ``extents`` says otherwise."""
    rng = np.random.default_rng(seed)
    found = {}
    for name in graph.inputs:
        value = graph.values[name]
        shape: Shape = value.shape or ()
        size = tuple(d if isinstance(d, int) else (extents or {}).get(d, 3) for d in shape)
        row = dtype(value.dtype)
        if row.kind == "f":
            found[name] = np.asarray(rng.normal(size=size)).astype(row.numpy)
        elif row.kind == "b":
            found[name] = np.asarray(rng.integers(0, 2, size=size)).astype(bool)
        else:
            found[name] = np.asarray(rng.integers(0, 5, size=size)).astype(row.numpy)
    return found


def run(graph: Graph, inputs: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    return evaluate(graph, feeds(graph) if inputs is None else inputs, ops=vocabulary())


def matches_of(graph: Graph, *fusions: FusionEntry) -> tuple[Match, ...]:
    return find(graph, fusions, vocabulary()).matches


def plan_of(graph: Graph, *fusions: FusionEntry, policy: str = "aggressive") -> Plan:
    found = find(graph, fusions, vocabulary())
    return plan(graph, found, cost=CostModel(vocabulary()), policy=policy)


def fused(graph: Graph, *fusions: FusionEntry, policy: str = "aggressive") -> Graph:
    """The graph with the plan applied, after checking that every output is bit-equal to the unfused run."""
    chosen = plan_of(graph, *fusions, policy=policy)
    result = rewrite.apply(graph, chosen, {f.name: f for f in fusions}).check()
    given = feeds(graph)
    before, after = run(graph, given), run(result, given)
    assert list(before) == list(after)
    for name, expected in before.items():
        assert after[name].dtype == expected.dtype, name
        np.testing.assert_array_equal(after[name], expected, err_msg=name)
    return result


def sites(graph: Graph) -> dict[str, int]:
    """How often each operator stands in a graph, fused calls by their fusion's name."""
    found: dict[str, int] = {}
    for n in graph.nodes:
        op = n.op.removeprefix("fused::")
        found[op] = found.get(op, 0) + 1
    return found


def chain(expose: tuple[str, ...] = (), m: int = 4, k: int = 8, n: int = 16, kind: str = "float32") -> Graph:
    """relu((x @ w) * scale + bias), with the named values as further graph outputs."""
    net = Net()
    x = net.input("x", kind, (m, k))
    h = net.op("MatMul", x, net.weight((k, n), kind))
    s = net.op("Mul", h, net.const(0.5, kind))
    b = net.op("Add", s, net.weight((n,), kind, "bias"))
    y = net.op("Relu", b)
    return net.build((y, *expose))


def largest(graph: Graph, *fusions: FusionEntry) -> Any:
    """The match with most nodes, None where there is none."""
    return max(matches_of(graph, *fusions), key=lambda m: len(m.nodes), default=None)


def reasons(graph: Graph, *fusions: FusionEntry) -> dict[tuple[str, str], FailedMatch]:
    """(root, clause) → the near miss."""
    return {(f.root, f.clause): f for f in find(graph, fusions, vocabulary(), explain=True).failures}
