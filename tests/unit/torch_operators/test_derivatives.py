"""Derivatives of operators against differences of their meaning in float64, which knows nothing of torch."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from graphs import Net, vocabulary

from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import numpy_backend
from fusionreg.integrations.torch.derivatives import RULES
from fusionreg.integrations.torch.derivatives.chain import Chain
from fusionreg.integrations.torch.derivatives.passing import Pass

WIDE, UNIT, ABOVE = (-2.5, 2.5), (-0.9, 0.9), (0.3, 3.0)

#: Operator → shapes of its inputs, attributes, range of values. Kinks lie where no difference step reaches.
CASES = {
    "Add": ([(2, 3), (3,)], {}, WIDE), "Sub": ([(3,), (2, 3)], {}, WIDE), "Mul": ([(2, 1), (2, 3)], {}, WIDE),
    "Div": ([(2, 3), (1, 3)], {}, ABOVE), "Pow": ([(2, 3), (2, 3)], {}, ABOVE),
    "Mod": ([(5,), (5,)], {"fmod": 1}, ABOVE),
    "Max": ([(2, 3), (3,), (2, 1)], {}, WIDE), "Min": ([(2, 3), (3,), (2, 1)], {}, WIDE),
    "Sum": ([(2, 3), (3,), ()], {}, WIDE), "Mean": ([(2, 3), (3,), (1, 1)], {}, WIDE),
    "Clip": ([(4, 5), (), ()], {}, WIDE), "fusionreg::Atan2": ([(6,), (6,)], {}, WIDE),
    "fusionreg::Hypot": ([(6,), (6,)], {}, WIDE), "PRelu": ([(3, 4), (4,)], {}, WIDE),
    "SwiGLU": ([(3, 4), (3, 4)], {"alpha": 1.2}, WIDE),
    "LeakyRelu": ([(9,)], {"alpha": 0.2}, WIDE), "ThresholdedRelu": ([(9,)], {"alpha": 0.7}, WIDE),
    "Elu": ([(9,)], {"alpha": 1.3}, WIDE), "Selu": ([(9,)], {}, WIDE), "Celu": ([(9,)], {"alpha": 1.7}, WIDE),
    "HardSigmoid": ([(9,)], {"alpha": 0.3}, WIDE), "HardSwish": ([(9,)], {}, WIDE),
    "Gelu": ([(9,)], {"approximate": "tanh"}, WIDE), "Swish": ([(9,)], {"alpha": 1.4}, WIDE),
    "fusionreg::QuickGelu": ([(9,)], {}, WIDE), "Shrink": ([(9,)], {"bias": 0.1, "lambd": 0.4}, WIDE),
    "fusionreg::MaskedFill": ([(3, 4)], {"value": -1.5, "keep": 1}, WIDE),
    "fusionreg::CausalMask": ([(2, 3, 4)], {"value": -1.5, "diagonal": 1}, WIDE),
    "Softmax": ([(3, 4)], {"axis": 0}, WIDE), "LogSoftmax": ([(3, 4)], {}, WIDE),
    "Acosh": ([(6,)], {}, (1.3, 3.0)), "Reciprocal": ([(6,)], {}, ABOVE),
    "MatMul": ([(2, 3, 4), (4, 5)], {}, WIDE),
    "Gemm": ([(4, 3), (5, 4), (5,)], {"transA": 1, "transB": 1, "alpha": 0.5}, WIDE),
    "Transpose": ([(2, 3, 4)], {"perm": (2, 0, 1)}, WIDE), "Flatten": ([(2, 3, 4)], {}, WIDE),
    "LayerNormalization": ([(4, 6), (6,), (6,)], {"epsilon": 0.1}, WIDE),
    "RMSNormalization": ([(4, 2, 3), (2, 3)], {"axis": 1, "epsilon": 0.1}, WIDE),
    "GroupNormalization": ([(2, 4, 3), (4,), (4,)], {"num_groups": 2, "epsilon": 0.1}, WIDE),
    "BatchNormalization": ([(3, 2, 4), (2,), (2,), (2,), (2,)], {"epsilon": 0.1, "training_mode": 1}, ABOVE),
}  # fmt: skip
UNITS = {"Asin", "Acos", "Atanh"}
POSITIVE = {"Sqrt", "Log", "fusionreg::Log1p", "fusionreg::Log2", "fusionreg::Rsqrt"}
#: More of the same operators: other attributes, an operand that a rule reads in another way.
MORE = [
    ("Gelu", [(9,)], {}, WIDE), ("Swish", [(9,)], {}, WIDE), ("HardSigmoid", [(9,)], {"alpha": 1 / 6}, WIDE),
    ("MatMul", [(2, 4, 3), (2, 5, 4)], {"transA": 1, "transB": 1}, WIDE), ("MatMul", [(3, 4), (2, 4, 5)], {}, WIDE),
    ("MatMul", [(4, 3), (2, 5, 4)], {"transA": 1, "transB": 1}, WIDE), ("Mod", [(5,), (5,)], {}, ABOVE),
    ("BatchNormalization", [(3, 2, 4), (2,), (2,), (2,), (2,)], {"epsilon": 0.1}, ABOVE),
]  # fmt: skip
#: Operators whose second operand is whole numbers: those, and the shape of the first.
INDEXED = {
    "Reshape": ([6, 2], (3, 4)), "Expand": ([2, 3, 4], (3, 1)), "ReduceSum": ([0, 2], (2, 3, 4)),
    "ReduceMean": ([1], (2, 3, 4)), "Squeeze": ([1], (3, 1, 2)), "Unsqueeze": ([0], (3, 2)),
}  # fmt: skip
COMPARISONS = {"Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"}
#: Of bools, or with nothing to differentiate.
LOGIC = {"And", "Or", "Xor", "Not", "IsNaN", "IsInf"}


def built(op, shapes, attributes):
    net = Net()
    inputs = [net.input(f"i{k}", "float64", s) for k, s in enumerate(shapes)]
    if op in INDEXED:
        inputs.append(net.const(INDEXED[op][0], "int64"))
    if op == "Where":
        inputs.insert(0, net.op("Greater", inputs[0], net.const(0.1, "float64")))
    if op == "fusionreg::MaskedFill":
        inputs.append(net.op("Greater", inputs[0], net.const(0.1, "float64")))
    if op == "Cast":
        return net.build([net.op(op, inputs[0], to="float64")])
    outputs = 5 if op == "BatchNormalization" and attributes.get("training_mode") else 1
    found = net.op(op, *inputs, outputs=outputs, **attributes)
    y = found[0] if outputs > 1 else found
    return net.build([net.op("Cast", y, to="float64") if net._values[y].dtype == "bool" else y])


def all_cases():
    yield from ((op, *case) for op, case in CASES.items())
    yield from MORE
    yield from ((op, [shape], {}, WIDE) for op, (_, shape) in INDEXED.items())
    for op in RULES:
        if op not in CASES and op not in INDEXED and op not in LOGIC:
            shapes = [(3, 4), (4,)] if op == "Where" else [(7,)] * (2 if op in COMPARISONS else 1)
            yield op, shapes, {}, UNIT if op in UNITS else ABOVE if op in POSITIVE else WIDE


def differences(graph, values, name, way, step=1e-6):
    """The gradient of Σ way · y by central differences."""
    found = np.zeros_like(values[name])
    for at in product(*map(range, values[name].shape)):
        sides = []
        for sign in (1, -1):
            moved = {**values, name: values[name].copy()}
            moved[name][at] += sign * step
            y = evaluate(graph, moved, ops=vocabulary(), backend=numpy_backend(), mode="exact")[graph.outputs[0]]
            sides.append((np.asarray(y) * way).sum())
        found[at] = (sides[0] - sides[1]) / (2 * step)
    return found


class Watched(Pass):
    """Notes what a pass computes again."""

    def value(self, name):
        if name not in self.values and name in self.graph.producers:
            self.ran.add(self.graph.producers[name].name)
        return super().value(name)


#: Operators with a second formula for gradients that are differentiated again.
TWICE = {"Swish", "Mish", "GroupNormalization"}
BOTH = [(c, False) for c in all_cases()] + [(c, True) for c in all_cases() if c[0] in TWICE]


@pytest.mark.parametrize(
    ("case", "create_graph"), BOTH, ids=[f"{c[0].split(':')[-1]}-{len(c[1])}{'-again' * g}" for c, g in BOTH]
)
def test_a_gradient_is_the_limit_of_differences(case, create_graph):
    op, shapes, attributes, (low, high) = case
    graph, random = built(op, shapes, attributes), np.random.default_rng(3)
    values = {n: random.uniform(low, high, s) for n, s in zip(graph.inputs, shapes, strict=True)}
    if op == "Clip":
        values |= {"i1": np.asarray(-0.5), "i2": np.asarray(0.6)}
    wanted = graph.inputs[:3] if op == "BatchNormalization" else graph.inputs
    chain = Chain(graph, wanted, vocabulary())
    assert not chain.refusal
    (y,) = graph.outputs
    exact = evaluate(graph, values, ops=vocabulary(), backend=numpy_backend(), mode="exact")
    way = random.uniform(-1, 1, np.shape(exact[y]))
    known = {n: torch.tensor(v) for n, v in {**values, **exact}.items()}
    one = Watched(chain, {n: known[n] for n in chain.saved}, {})
    one.ran = set()
    with torch.set_grad_enabled(create_graph):  # formulas that can be differentiated again
        found = one.run({y: torch.tensor(way)}) if chain.outputs else {}
    assert one.ran == set(chain.again), "what a pass computes again is known beforehand"
    for name in wanted:
        right = differences(graph, values, name, way)
        got = found[name].numpy() if name in found else np.zeros_like(right)
        assert got.shape == right.shape
        np.testing.assert_allclose(got, right, rtol=2e-5, atol=2e-5, err_msg=f"{op}, {name}")


def test_every_value_is_what_the_operator_means():
    """What a backward pass computes again."""
    random = np.random.default_rng(5)
    for op, shapes, attributes, (low, high) in all_cases():
        graph = built(op, shapes, attributes)
        values = {n: random.uniform(low, high, s) for n, s in zip(graph.inputs, shapes, strict=True)}
        right = evaluate(graph, values, ops=vocabulary(), backend=numpy_backend(), mode="exact")
        one = Pass(Chain(graph, (), vocabulary()), {n: torch.tensor(v) for n, v in values.items()}, {})
        for name in graph.outputs:
            got = one.value(name)
            np.testing.assert_allclose(got.double().numpy(), right[name], rtol=1e-7, atol=1e-7, err_msg=op)


@pytest.mark.parametrize(
    ("op", "at", "expected"),
    [
        ("Relu", [0.0, -0.0, float("nan"), float("inf"), float("-inf")], [0, 0, 1, 1, 0]),
        ("Abs", [0.0, float("inf")], [0, 1]),
        ("Gelu", [float("inf"), float("nan"), 40.0, -40.0], [float("nan"), float("nan"), 1, 0]),
        ("Sigmoid", [0.0, 200.0, float("nan")], [0.25, 0, float("nan")]),
        ("Sqrt", [0.0, 4.0], [float("inf"), 0.25]),
    ],
)
def test_kinks_and_special_values_are_as_torch_has_them(op, at, expected):
    net = Net()
    graph = net.build([net.op(op, net.input("x", "float64", (len(at),)))])
    chain = Chain(graph, ("x",), vocabulary())
    x = torch.tensor(at, dtype=torch.float64)
    y = Pass(chain, {"x": x}, {}).value(graph.outputs[0])
    known = {"x": x, graph.outputs[0]: y}
    found = chain.run({n: known[n] for n in chain.saved}, {graph.outputs[0]: torch.ones_like(x)}, {})["x"]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), equal_nan=True)


def test_two_equal_largest_values_share_the_gradient():
    net = Net()
    a, b = (net.input(n, "float32", (3,)) for n in "ab")
    graph = net.build([net.op("Max", a, b)])
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 5.0, 0.0])
    found = Chain(graph, "ab", vocabulary()).run({"a": x, "b": y}, {graph.outputs[0]: torch.ones(3)}, {})
    assert found["a"].tolist() == [0.5, 0.0, 1.0] and found["b"].tolist() == [0.5, 1.0, 0.0]


# --- what is read -------------------------------------------------------------------------------------------------


def layered(activation, **attributes):
    net = Net()
    x, w, b = net.input("x", "float32", (4, 8)), net.input("w", "float32", (8, 6)), net.input("b", "float32", (6,))
    return net.build([net.op(activation, net.op("Add", net.op("MatMul", x, w), b), **attributes)])


@pytest.mark.parametrize(
    ("activation", "wanted", "saved", "again"),
    [
        ("Relu", "xwb", ["x", "w", "relu"], []),
        ("Tanh", "xwb", ["x", "w", "tanh"], []),
        ("Sigmoid", "b", ["sigmoid"], []),
        ("Gelu", "xwb", ["x", "w", "b"], ["MatMul", "Add"]),
        ("Gelu", "b", ["x", "w", "b"], ["MatMul", "Add"]),
    ],
)
def test_only_what_the_formulas_read_is_saved(activation, wanted, saved, again):
    graph = layered(activation)
    chain = Chain(graph, wanted, vocabulary())
    assert list(chain.saved) == saved
    assert [graph.node_by_name[n].op for n in chain.again] == again
    assert list(chain.backward.products) == [op for op in again if op == "MatMul"]


def test_a_rule_takes_the_formula_that_needs_least():
    """Of a Relu in between, the operand is at hand and the result is not."""
    net = Net()
    x = net.input("x", "float32", (4,))
    graph = net.build([net.op("Exp", net.op("Relu", x))])
    chain = Chain(graph, "x", vocabulary())
    assert chain.again == () and set(chain.saved) == {"x", *graph.outputs}


def test_what_has_no_derivative_is_refused_by_name():
    net = Net()
    x = net.input("x", "float32", (4, 4))
    graph = net.build([net.op("Neg", net.op("Trilu", x))])
    assert Chain(graph, "x", vocabulary()).refusal == "no derivative of Trilu is known"
    assert Chain(graph, "", vocabulary()).refusal == ""
