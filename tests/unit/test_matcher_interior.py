"""What may become one node: interior values, several outputs, cycles, in-place writes, shared weights."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import (
    FLOATS,
    Net,
    chain,
    feeds,
    fused,
    fusion,
    gemm,
    matches_of,
    plan_of,
    quick_gelu,
    reasons,
    run,
    sites,
    softmax_bias,
)

from fusionreg.core.matcher import legality
from fusionreg.core.spec import AttributeSpec

# --- interior values that somebody else reads -----------------------------------------------------------------------


@pytest.mark.parametrize("exposed", ("matmul", "mul", "add", "relu"))
@pytest.mark.parametrize(("m", "k", "n"), [(4, 8, 16), (8, 8, 8)])
def test_an_exposed_intermediate_is_still_produced(exposed, m, k, n):
    graph = chain((exposed,), m, k, n)
    result = fused(graph, gemm())
    assert result.outputs == ("relu", exposed)
    size = {"matmul": 1, "mul": 2, "add": 3, "relu": 4}[exposed]
    found = plan_of(graph, gemm())
    assert [len(x.nodes) for x in found] == [size]
    if exposed != "relu":
        assert ("Relu_relu", legality.OUTPUT) in reasons(graph, gemm())


def test_one_consumer_and_graph_output():
    net = Net()
    x = net.input("x", "float32", (3, 4))
    t = net.op("Sigmoid", net.op("Mul", x, net.const(1.702)))
    y = net.op("Mul", x, t)
    assert sites(fused(net.build([y]), quick_gelu())) == {"act.quick_gelu": 1}
    graph = net.build([y, t])
    assert sites(fused(graph, quick_gelu())) == {"Mul": 2, "Sigmoid": 1}
    failed = reasons(graph, quick_gelu())["Mul_mul_2", legality.OUTPUT]
    assert failed.node == "Sigmoid_sigmoid"


def test_no_second_product():
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (3, 4)), net.weight((4, 4)))
    half = net.op("Mul", h, net.const(0.5))
    other = net.op("Add", net.op("Relu", h), h)
    result = fused(net.build([half, other]), gemm())
    assert sites(result).get("MatMul", 0) + sites(result).get("gemm.scale_bias", 0) == 1
    assert sites(result)["Mul"] == 1


def test_captured_by_a_subgraph_is_exposed():
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (3, 4)), net.weight((4, 4)))
    b = net.op("Add", h, net.weight((4,)))
    y = net.op("Relu", b)
    branch = Net("branch")
    branch.node("Neg", [b], [_value("neg", (3, 4))])
    body = branch.build(["neg"], outer=[b])
    net.node("If", [net.const(True, "bool")], [_value("z", (3, 4))], graphs=_graphs(then_branch=body, else_branch=body))
    graph = net.build([y, "z"])
    assert [len(m.nodes) for m in plan_of(graph, gemm())] == [2]
    assert ("Relu_relu", legality.CAPTURED) in reasons(graph, gemm())
    fused(graph, gemm())


def _value(name, shape, kind="float32"):
    from fusionreg.core.ir import Value

    return Value(name, kind, shape)


def _graphs(**graphs):
    from fusionreg.core.frozen import FrozenDict

    return FrozenDict(graphs)


# --- whole patterns, several outputs --------------------------------------------------------------------------------


def test_a_partial_chain_is_no_match():
    net = Net()
    x = net.input("x", "float32", (4, 4))
    a = net.op("Softmax", x)
    b = net.op("Add", x, net.weight((4,)))
    graph = net.build([a, b])
    assert not matches_of(graph, softmax_bias())


def test_one_node_cannot_stand_for_two_steps():
    two = fusion("act.two", "y = Add(Relu(x), Relu(x))", {"x": "T[N]"}, {"y": "T[N]"})
    net = Net()
    x = net.input("x", "float32", (4,))
    r = net.op("Relu", x)
    assert not matches_of(net.build([net.op("Add", r, r)]), two)
    net = Net()
    x = net.input("x", "float32", (4,))
    graph = net.build([net.op("Add", net.op("Relu", x), net.op("Relu", x))])
    assert sites(fused(graph, two)) == {"act.two": 1}


def test_repeated_names_are_one_value():
    square = fusion("act.square", "y = Mul(Relu(x), Sigmoid(x))", {"x": "T[N]"}, {"y": "T[N]"})
    for same in (True, False):
        net = Net()
        a, b = net.input("a", "float32", (4,)), net.input("b", "float32", (4,))
        graph = net.build([net.op("Mul", net.op("Relu", a), net.op("Sigmoid", a if same else b))])
        assert bool(matches_of(graph, square)) == same


@pytest.mark.parametrize("equal", [True, False])
def test_repeated_names_may_be_equal_constants(equal):
    shared = fusion("act.shared", "y = Mul(Add(x, c), c)", {"x": "T[N]", "c": "T[N]"}, {"y": "T[N]"})
    net = Net()
    values = np.arange(4.0)
    h = net.op("Add", net.input("x", "float32", (4,)), net.const(values))
    graph = net.build([net.op("Mul", h, net.const(values if equal else np.array([0, 1, 2, 3.001])))])
    assert bool(matches_of(graph, shared)) == equal
    fused(graph, shared)


def two_outputs():
    return fusion(
        "norm.center", "m = ReduceMean(x, (-1,))\nc = Sub(x, m)", {"x": "T[M N]"}, {"c": "T[M N]", "m": "T[M 1]"}
    )


@pytest.mark.parametrize(
    "outputs", [("sub", "reducemean"), ("reducemean", "sub"), ("sub",), ("relu",), ("relu", "tanh")]
)
def test_several_outputs_in_any_use(outputs):
    net = Net()
    x = net.input("x", "float32", (3, 3))
    m = net.op("ReduceMean", x, net.const([-1], "int64"))
    c = net.op("Sub", x, m)
    net.op("Tanh", m)
    net.op("Relu", c)
    graph = net.build(outputs)
    found = matches_of(graph, two_outputs())
    assert [dict(f.outputs) for f in found] == [{"c": "sub", "m": "reducemean"}]
    result = fused(graph, two_outputs())
    call = next(n for n in result.nodes if n.op == "fused::norm.center")
    assert call.outputs == ("sub", "reducemean")  # the spec's order
    assert sites(result) == {"norm.center": 1, "Tanh": 1, "Relu": 1}


def test_two_heads_over_one_body():
    heads = fusion(
        "act.heads",
        "h = Add(x, bias)\na = Relu(h)\nb = Tanh(h)",
        {"x": "T[M N]", "bias": "T[N]"},
        {"a": "T[M N]", "b": "T[M N]"},
    )
    net = Net()
    h = net.op("Add", net.input("x", "float32", (3, 4)), net.weight((4,)))
    graph = net.build([net.op("Tanh", h), net.op("Relu", h)])
    assert sites(fused(graph, heads)) == {"act.heads": 1}
    net = Net()
    h = net.op("Add", net.input("x", "float32", (3, 4)), net.weight((4,)))
    graph = net.build([net.op("Tanh", h), net.op("Relu", h), net.op("Neg", h)])
    assert not matches_of(graph, heads)
    assert any(c in (legality.EXPOSED, legality.OUTPUT) for _, c in reasons(graph, heads))


def test_outputs_that_nobody_reads_and_named_masks():
    drop = fusion(
        "drop.add",
        "d, mask = Dropout(x)\ny = Add(d, r)",
        {"x": "T[M N]", "r": "T[M N]"},
        {"y": "T[M N]", "mask": "B[M N]"},
        dtypes={"T": FLOATS, "B": ("bool",)},
    )
    for count, keep in ((2, True), (2, False), (1, False)):
        net = Net()
        x, r = net.input("x", "float32", (3, 4)), net.input("r", "float32", (3, 4))
        d = net.op("Dropout", x, outputs=count)
        y = net.op("Add", d[0] if count == 2 else d, r)
        graph = net.build([y, d[1]] if keep else [y])
        result = fused(graph, drop)
        assert sites(result) == {"drop.add": 1}
        call = next(n for n in result.nodes if n.op.startswith("fused"))
        assert call.outputs == (y, d[1] if count == 2 else "")


def test_a_contraction_that_makes_a_cycle_is_refused():
    both = fusion("act.pair", "a = Relu(x)\nb = Add(a, z)", {"x": "T[N]", "z": "T[N]"}, {"a": "T[N]", "b": "T[N]"})
    for through in (False, True):
        net = Net()
        x, z = net.input("x", "float32", (4,)), net.input("z", "float32", (4,))
        a = net.op("Relu", x)
        other = net.op("Tanh", a if through else z)
        graph = net.build([net.op("Add", a, other), a])
        assert bool(matches_of(graph, both)) == (not through)
        if through:
            assert any(c == legality.CYCLE for _, c in reasons(graph, both))
        fused(graph, both)


# --- in-place writes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["matmul", "x", "w", "view", "result", "other", "before"])
def test_no_match_across_a_write(target):
    net = Net()
    x = net.input("x", "float32", (4, 4))
    w = net.input("w", "float32", (4, 4))
    q = net.input("q", "float32", (4, 4))
    one = net.const(1.0)
    if target == "before":
        net.op("Add", x, one, name="written", mutates=(x,))
    if target == "view":
        flat = net.op("Reshape", x, net.const([16], "int64"))
    h = net.op("MatMul", x, w)
    if target == "view":
        net.op("Add", flat, one, name="written", mutates=(flat,))
    elif target in ("x", "w", "matmul", "other"):
        name = {"x": x, "w": w, "matmul": h, "other": q}[target]
        net.op("Add", name, one, name="written", mutates=(name,))
    b = net.op("Add", h, net.weight((4,)))
    y = net.op("Relu", b)
    if target == "result":
        net.op("Add", y, one, name="written", mutates=(y,))
    graph = net.build([y])
    whole = [m for m in matches_of(graph, gemm()) if len(m.nodes) == 3]
    assert bool(whole) == (target in ("other", "result", "before"))
    if target in ("x", "w", "view"):
        assert ("Relu_relu", legality.MUTATION) in reasons(graph, gemm())


# --- shared weights, twins ------------------------------------------------------------------------------------------


def test_a_shared_weight_keeps_its_value_and_its_other_reader():
    net = Net()
    w = net.weight((4, 4))
    a = net.op("Relu", net.op("MatMul", net.input("x", "float32", (3, 4)), w))
    b = net.op("MatMul", net.input("z", "float32", (3, 4)), w)
    graph = net.build([a, b])
    before = graph.constants[w].copy()
    result = fused(graph, gemm())
    assert result.constants[w] is graph.constants[w]
    np.testing.assert_array_equal(graph.constants[w], before)
    again = fused(graph, gemm())
    assert [n.op for n in again.nodes] == [n.op for n in result.nodes]


def test_twins_on_different_inputs_stay_apart():
    net = Net()
    w = net.weight((4, 4))
    outs = []
    for name, rows in (("x", 3), ("z", 5)):
        h = net.op("MatMul", net.input(name, "float32", (rows, 4)), w)
        outs.append(net.op("Relu", h))
    graph = net.build(outs)
    result = fused(graph, gemm())
    assert [n.inputs[0] for n in result.nodes] == ["x", "z"]
    assert [m.axes["M"] for m in plan_of(graph, gemm())] == [3, 5]


# --- operands that must survive, extents that change between calls ---------------------------------------------------


def attention(mask: bool):
    scores = "Add(MatMul(q, k, transB=1), mask)" if mask else "MatMul(q, k, transB=1)"
    return fusion(
        "attn.masked" if mask else "attn.plain",
        f"y = MatMul(Softmax({scores}, axis=-1), v)",
        {"q": "T[S D]", "k": "T[R D]", "v": "T[R E]"} | ({"mask": "T[R] | T[S R]"} if mask else {}),
        {"y": "T[S E]"},
    )


@pytest.mark.parametrize("shape", [(4,), (4, 4), None])
def test_a_mask_is_an_operand_of_the_call(shape):
    net = Net()
    q, k, v = (net.input(n, "float32", (4, 4)) for n in "qkv")
    s = net.op("MatMul", q, k, transB=1)
    if shape is not None:
        s = net.op("Add", s, net.input("mask", "float32", shape))
    graph = net.build([net.op("MatMul", net.op("Softmax", s), v)])
    result = fused(graph, attention(True), attention(False))
    (call,) = result.nodes
    assert call.op == ("fused::attn.plain" if shape is None else "fused::attn.masked")
    if shape is not None:
        assert "mask" in call.inputs
        given = feeds(graph)
        hidden = given | {"mask": np.where(np.arange(4) < 2, 0, -1e4).astype("f4") * np.ones(shape, "f4")}
        given["v"][2:] = hidden["v"][2:] = 1e3
        assert np.abs(run(result, hidden)[result.outputs[0]]).max() < 10 < np.abs(run(result, given)["matmul_2"]).max()


@pytest.mark.parametrize(("channels", "length", "fuses"), [(4, 4, True), (4, 2, False), (2, 2, True)])
def test_scale_per_channel_not_per_group(channels, length, fuses):
    grouped = fusion(
        "norm.group",
        "y = Relu(GroupNormalization(x, s, b, num_groups=num_groups))",
        {"x": "T[B C L]", "s": "T[C]", "b": "T[C]"},
        {"y": "T[B C L]"},
        attributes={"num_groups": AttributeSpec(type="int")},
    )
    net = Net()
    x, s, b = net.input("x", "float32", (2, channels, 6)), net.weight((length,)), net.weight((length,))
    net.node("GroupNormalization", [x, s, b], [_value("g", (2, channels, 6))], attrs={"num_groups": 2})
    graph = net.build([net.op("Relu", "g")])
    assert [m.attributes["num_groups"] for m in matches_of(graph, grouped)] == ([2] if fuses else [])


def test_one_fused_graph_serves_every_extent():
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", ("B", "S", 4)), net.weight((4, 6)))
    graph = net.build([net.op("Relu", net.op("Add", h, net.weight((6,))))])
    result = fused(graph, gemm())
    for extent in (7, 130, 1):
        given = feeds(graph, {"B": 2, "S": extent})
        np.testing.assert_array_equal(run(result, given)["relu"], run(graph, given)["relu"])
