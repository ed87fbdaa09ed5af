"""Spelled-out graphs for tests of lifting, and the two assertions each needs: the values, and whether it was lifted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from graphs import Net

from fusionreg.core.dtypes import dtype
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ir import Graph
from fusionreg.core.lift import lift
from fusionreg.core.ops import default_vocabulary

OPS = default_vocabulary()

#: How far a canonical operator in float64 may stand from the spelled-out chain in float64.
ERF, TANH = 2e-6, 1e-6


class Spell(Net):
    """A graph of one dtype; numbers become constants of it."""

    def __init__(self, kind: str = "float32") -> None:
        super().__init__("spelled")
        self.kind = kind
        self.scales: dict[str, float] = {}

    def x(self, *shape: int | str, scale: float = 1.0, kind: str = "") -> str:
        name = self.input(self.fresh("x"), kind or self.kind, shape)
        self.scales[name] = scale
        return name

    def const(self, value: Any, kind: str = "", overridable: bool = False) -> str:
        return super().const(value, kind or self.kind, overridable)

    def weight(self, shape: Any, kind: str = "", name: str = "w", overridable: bool = False) -> str:
        return super().weight(shape, kind or self.kind, name, overridable)

    def _operand(self, value: Any) -> str:
        return value if isinstance(value, str) else self.const(value)

    def _binary(self, op: str, a: Any, b: Any) -> str:
        return self.op(op, self._operand(a), self._operand(b))

    def mul(self, a: Any, b: Any) -> str:
        return self._binary("Mul", a, b)

    def add(self, a: Any, b: Any) -> str:
        return self._binary("Add", a, b)

    def sub(self, a: Any, b: Any) -> str:
        return self._binary("Sub", a, b)

    def div(self, a: Any, b: Any) -> str:
        return self._binary("Div", a, b)

    def pow(self, a: Any, b: Any) -> str:
        return self._binary("Pow", a, b)

    def ints(self, *values: int) -> str:
        return self.const(np.array(values, np.int64), "int64")

    def done(self, *outputs: str) -> Graph:
        return self.build(outputs)


def kinds(graph: Graph) -> dict[str, int]:
    """Operators of the lifted graph, by count."""
    found: dict[str, int] = {}
    for n in lifted(graph).nodes:
        found[n.op] = found.get(n.op, 0) + 1
    return found


def lifted(graph: Graph) -> Graph:
    result = lift(graph, OPS)
    assert result.inputs == graph.inputs and result.outputs == graph.outputs
    for name in graph.outputs:
        assert result.values[name].dtype == graph.values[name].dtype
    return result.check()


def inputs_of(graph: Graph, seed: int = 0, skip: tuple[str, ...] = (), **sizes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for name in graph.inputs:
        value = graph.values[name]
        shape = tuple(d if isinstance(d, int) else sizes.get(d, 3) for d in value.shape or ())
        if name not in skip:
            found[name] = (rng.standard_normal(shape) * 2).astype(dtype(value.dtype).numpy)
    return found


def run(graph: Graph, inputs: Mapping[str, Any], mode: Any = "step") -> dict[str, np.ndarray]:
    return evaluate(graph, inputs, ops=OPS, mode=mode)


def lifted_of(graph: Graph, inputs: Mapping[str, Any] | None = None) -> Any:
    """The lifted graph, or its first output for ``inputs``."""
    result = lifted(graph)
    return result if inputs is None else next(iter(run(result, inputs).values()))


def unlifted_of(graph: Graph, inputs: Mapping[str, Any]) -> np.ndarray:
    return next(iter(run(graph, inputs).values()))


def agree(graph: Graph, other: Graph, tolerance: float, inputs: Mapping[str, Any]) -> None:
    """Equal functions: in float64 to ``tolerance``; in the graph's own dtypes to what rounding explains."""
    coarsest = min((dtype(v.dtype).mantissa for v in graph.values.values() if dtype(v.dtype).floating), default=52)
    exact, expected = run(other, inputs, "exact"), run(graph, inputs, "exact")
    for name, want in expected.items():
        assert exact[name].shape == want.shape
        np.testing.assert_allclose(exact[name], want, rtol=tolerance, atol=tolerance, err_msg=name)
    for name, got in run(other, inputs).items():
        row = dtype(graph.values[name].dtype)
        assert got.dtype == row.numpy
        want = expected[name]
        bound = 16 * 2.0**-coarsest * np.maximum(np.abs(want).max(initial=0.0), 1.0) if row.floating else 0
        assert np.abs(got.astype("f8") - want).max(initial=0.0) <= bound, name


def assert_lifted(graph: Graph, ops: Mapping[str, int], tolerance: float = 1e-6, **sizes: int) -> Graph:
    """The lifted graph has exactly these operators, and computes what the spelled-out one does."""
    result = lifted(graph)
    assert kinds(graph) == dict(ops), result
    wide = {
        "float16": 1e-3,
        "bfloat16": 1e-2,
    }  # constants of the chain are rounded to the dtype, the operator's are not
    tolerance = max(tolerance, *(wide.get(v.dtype, 0.0) for v in graph.values.values()))
    agree(graph, result, tolerance, inputs_of(graph, **sizes))
    return result


def assert_not_lifted(graph: Graph, *ops: str, skip: tuple[str, ...] = (), **sizes: int) -> Graph:
    """The lifted graph has none of these operators, and still computes the same."""
    result = lifted(graph)
    assert not set(ops) & set(kinds(graph)), result
    agree(graph, result, 1e-6, inputs_of(graph, skip=skip, **sizes))
    return result
