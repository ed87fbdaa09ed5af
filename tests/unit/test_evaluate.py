"""Evaluating graphs: both modes, fused nodes, sub-graphs, lifetimes, errors; on NumPy and on torch."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from fusionreg.core.errors import ArgumentError, GraphError
from fusionreg.core.evaluate.evaluator import Evaluator, evaluate
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, GraphBuilder, Node, Value
from fusionreg.core.ops import Vocabulary, backend_of, default_vocabulary, operator

OPS = default_vocabulary()
BF16 = np.dtype(ml_dtypes.bfloat16)
TORCH = backend_of(torch.zeros(1))


def chain(*ops: str, dtype: str = "float32", shape=("N",)) -> Graph:
    """``x`` through operators one after the other, results t0, t1 …; an operand ``y`` where two are needed."""
    b = GraphBuilder("chain")
    b.input("x", dtype, shape)
    b.input("y", dtype, shape)
    last = "x"
    for i, op in enumerate(ops):
        operands = [last, "y"] if len(OPS[op].inputs) > 1 else [last]
        b.node(op, operands, [Value(f"t{i}", dtype, shape)], source=f"model.py:{i + 1}")
        last = f"t{i}"
    return b.build([last])


def test_step_rounds_after_every_operator_and_exact_never_does() -> None:
    graph = chain("Add", "Sub", dtype="float16")
    x, y = np.array([1.0], np.float16), np.array([2048.0], np.float16)
    assert evaluate(graph, {"x": x, "y": y}, ops=OPS)["t1"].tolist() == [0.0]  # 2049 is no float16
    exact = evaluate(graph, {"x": x, "y": y}, ops=OPS, mode="exact")["t1"]
    assert exact.tolist() == [1.0] and exact.dtype == np.float64


def test_step_computes_wide_inside_an_operator() -> None:
    b = GraphBuilder("g")
    b.input("x", "float16", (1, 4096))
    b.input("w", "float16", (4096, 1))
    b.node("MatMul", ["x", "w"], [Value("y", "float16", (1, 1))])
    ones = np.ones((1, 4096), np.float16)
    got = evaluate(b.build(["y"]), {"x": ones, "w": ones.T}, ops=OPS)["y"]
    assert got.dtype == np.float16 and got.item() == 4096  # half accumulation stops at 2048


def test_exact_casts_to_integers_and_ignores_casts_among_floats() -> None:
    b = GraphBuilder("g")
    b.input("x", "float32", (2,))
    b.node("Cast", ["x"], [Value("h", "float16", (2,))], attrs={"to": "float16"})
    b.node("Cast", ["h"], [Value("i", "int32", (2,))], attrs={"to": "int32"})
    b.node("Cast", ["x"], [Value("z", "bool", (2,))], attrs={"to": "bool"})
    graph, x = b.build(["h", "i", "z"]), np.array([2049.7, 0.0], np.float32)
    step, exact = (evaluate(graph, {"x": x}, ops=OPS, mode=m) for m in ("step", "exact"))
    assert step["h"].tolist() == [2050, 0] and step["i"].tolist() == [2050, 0]
    assert exact["h"].tolist() == [float(np.float32(2049.7)), 0] and exact["i"].tolist() == [2049, 0]
    assert exact["i"].dtype == np.int32 and exact["z"].tolist() == [True, False]


def test_a_saturating_cast_saturates_in_exact_mode_too() -> None:
    """That is what it means; rounding is what exact mode leaves out."""
    b = GraphBuilder("g")
    b.input("x", "float32", (4,))
    for saturate in (0, 1):
        attributes = {"to": "float8_e4m3fn", "saturate": saturate}
        b.node("Cast", ["x"], [Value(f"y{saturate}", "float8_e4m3fn", (4,))], attrs=attributes)
    x = np.array([500.0, -np.inf, 1.03, np.nan], np.float32)
    found = evaluate(b.build(["y0", "y1"]), {"x": x}, ops=OPS, mode="exact")
    np.testing.assert_array_equal(found["y1"], [448, -448, np.float32(1.03), np.nan])
    np.testing.assert_array_equal(found["y0"], x)


def test_constants_are_exact_in_exact_mode_and_shared_between_calls() -> None:
    b = GraphBuilder("g")
    b.input("x", "bfloat16", ("N",))
    b.constant("k", np.array([0.1], BF16), "bfloat16")
    b.node("Mul", ["x", "k"], [Value("y", "bfloat16", ("N",))])
    run = Evaluator(b.build(["y"]), ops=OPS, mode="exact")
    x = np.ones(3, BF16)
    assert run.run({"x": x})["y"].tolist() == [float(BF16.type(0.1))] * 3
    first = dict(run._constants)
    run.run({"x": x})
    assert all(run._constants[k] is v for k, v in first.items()) and len(first) == 1


def test_constants_go_to_devices_that_have_no_hash() -> None:
    """CuPy's have none."""

    class Device:
        __hash__ = None  # type: ignore[assignment]

    b = GraphBuilder("g")
    b.constant("c", np.ones(2, "float32"), "float32")
    b.input("x", "float32", (2,))
    b.node("Add", ["x", "c"], [Value("y", "float32", (2,))])
    graph = b.build(["y"])
    evaluator = Evaluator(graph, ops=default_vocabulary())
    there = replace(backend_of(np.ones(1)), device=Device())
    first = evaluator.constant(graph, "c", there, on_device=True)
    assert evaluator.constant(graph, "c", there, on_device=True) is first


def test_a_constant_may_be_overridden_only_where_the_graph_says_so() -> None:
    b = GraphBuilder("g")
    b.input("x", "float32", (1,))
    b.constant("k", np.ones(1, np.float32), "float32", overridable=True)
    b.node("Add", ["x", "k"], [Value("y", "float32", (1,))])
    graph, x = b.build(["y"]), np.ones(1, np.float32)
    assert evaluate(graph, {"x": x}, ops=OPS)["y"] == 2
    assert evaluate(graph, {"x": x, "k": 5 * x}, ops=OPS)["y"] == 6
    with pytest.raises(ArgumentError, match="unknown inputs"):
        evaluate(graph.with_(overridable=frozenset()), {"x": x, "k": x}, ops=OPS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_gives_what_numpy_gives(dtype: str) -> None:
    graph = chain("Add", "Gelu", "Softmax", "Mul", dtype=dtype, shape=("M", "N"))
    rng = np.random.default_rng(0)
    kind = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    feed = {n: rng.standard_normal((5, 33)).astype(kind) for n in ("x", "y")}
    got = evaluate(graph, {k: TORCH.asarray(v) for k, v in feed.items()}, ops=OPS)["t3"]
    assert isinstance(got, torch.Tensor) and TORCH.name_of(got) == dtype
    want = evaluate(graph, feed, ops=OPS)["t3"].astype(float)
    np.testing.assert_allclose(TORCH.to_numpy(got).astype(float), want, rtol=1e-2 if kind.itemsize == 2 else 2e-6)


def test_torch_inputs_that_need_gradients_record_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    got = evaluate(chain("Add"), {"x": x, "y": x}, ops=OPS)["t0"]
    assert not got.requires_grad


def test_a_backend_moves_the_inputs() -> None:
    got = evaluate(chain("Add"), {"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}, ops=OPS, backend=TORCH)
    assert isinstance(got["t0"], torch.Tensor) and got["t0"].tolist() == [2, 2]


def test_shape_arithmetic_stays_on_the_host() -> None:
    """Shape → Gather → Concat → Reshape on torch never touches the device between."""
    b = GraphBuilder("g")
    b.input("x", "float32", ("B", 6))
    b.constant("zero", np.array([0]), "int64")
    b.constant("tail", np.array([2, 3]), "int64")
    b.node("Shape", ["x"], [Value("s", "int64", (2,))])
    b.node("Gather", ["s", "zero"], [Value("n", "int64", (1,))])
    b.node("Concat", ["n", "tail"], [Value("to", "int64", (3,))], attrs={"axis": 0})
    b.node("Reshape", ["x", "to"], [Value("y", "float32", ("B", 2, 3))])
    trace: dict = {}
    x = torch.arange(12.0).reshape(2, 6)
    got = evaluate(b.build(["y", "to"]), {"x": x}, ops=OPS, trace=trace)
    assert all(isinstance(trace[n], np.ndarray) for n in ("s", "n", "to"))
    assert got["y"].shape == (2, 2, 3) and isinstance(got["to"], torch.Tensor) and got["to"].tolist() == [2, 2, 3]


def fused_graph() -> Graph:
    inner = GraphBuilder("body")
    inner.input("p", "float16", ("N",))
    inner.input("q", "float16", ("N",))
    inner.node("Sub", ["p", "q"], [Value("r", "float16", ("N",))])
    inner.node("Relu", ["r"], [Value("out", "float16", ("N",))])
    b = GraphBuilder("g")
    b.input("x", "float16", ("N",))
    b.input("y", "float16", ("N",))
    b.node(
        "fused::acme.sub_relu",
        ["y", "", "x"],
        [Value("z", "float16", ("N",))],
        graphs=FrozenDict(body=inner.build(["out"])),
    )
    b.node("Neg", ["z"], [Value("w", "float16", ("N",))])
    return b.build(["w"])


def test_a_fused_node_without_an_executor_is_its_body() -> None:
    x, y = np.array([1, 5], np.float16), np.array([3, 3], np.float16)
    trace: dict = {}
    got = evaluate(fused_graph(), {"x": x, "y": y}, ops=OPS, trace=trace)
    assert got["w"].tolist() == [-2, 0] and trace["r"].tolist() == [2, -2]  # y - x: operands by position


def test_a_fused_node_goes_to_the_executor_in_step_mode_only() -> None:
    calls = []

    def fused(node: Node, args):
        calls.append((node.op, [None if a is None else a.dtype.name for a in args]))
        return (args[0],)

    feed = {"x": np.ones(2, np.float16), "y": np.full(2, 7, np.float16)}
    assert evaluate(fused_graph(), feed, ops=OPS, fused=fused)["w"].tolist() == [-7, -7]
    assert calls == [("fused::acme.sub_relu", ["float16", None, "float16"])]
    assert evaluate(fused_graph(), feed, ops=OPS, fused=fused, mode="exact")["w"].tolist() == [-6, -6]
    assert len(calls) == 1


def test_dead_values_are_freed() -> None:
    alive: list[weakref.ref] = []
    peak = []

    def meaning(xp, x):
        gc.collect()
        peak.append(sum(r() is not None for r in alive))
        y = x + 1
        alive.append(weakref.ref(y))
        return y

    ops = OPS.with_ops([operator("acme::Next", "x")(meaning)])
    b = GraphBuilder("g")
    b.input("v0", "float32", (4,))
    for i in range(8):
        b.node("acme::Next", [f"v{i}"], [Value(f"v{i + 1}", "float32", (4,))])
    got = evaluate(b.build(["v8", "v2"]), {"v0": np.zeros(4, np.float32)}, ops=ops)
    assert got["v8"].tolist() == [8] * 4 and got["v2"].tolist() == [2] * 4
    assert max(peak) == 2  # the operand and the early output


def test_errors_name_operator_node_and_source() -> None:
    graph = chain("Add", "Relu")
    graph = graph.with_(values=graph.values | {"y": Value("y", "float32", ("M",))})
    unknown = graph.with_(nodes=(graph.nodes[0], Node("odd", "Zork", ("t0",), ("t1",), source="model.py:2")))
    feed = {"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}
    with pytest.raises(GraphError, match=r"node 'odd' \(Zork\) at model.py:2") as caught:
        evaluate(unknown, feed, ops=OPS)
    assert caught.value.facts == {"node": "odd", "op": "Zork", "source": "model.py:2"}
    with pytest.raises(GraphError, match=r"node 'Add' \(Add\) at model.py:1.*x float32\[2\], y float32\[3\]") as caught:
        evaluate(graph, {**feed, "y": np.ones(3, np.float32)}, ops=OPS)
    assert caught.value.facts["node"] == "Add"
    wrong = graph.with_(values=graph.values | {"t1": Value("t1", "int32", ("N",))})
    with pytest.raises(GraphError, match="computed as float32 — declared as int32"):
        evaluate(wrong, feed, ops=OPS)
    attrs = graph.with_(nodes=(graph.nodes[0], Node("r", "Relu", ("t0",), ("t1",), FrozenDict(slope=1))))
    with pytest.raises(GraphError, match="'slope' of Relu"):
        evaluate(attrs, feed, ops=OPS)
    many = graph.with_(nodes=(*graph.nodes, Node("two", "Relu", ("t1",), ("a", "b"))))
    many = many.with_(values=many.values | {n: Value(n, "float32") for n in "ab"})
    with pytest.raises(GraphError, match="too many outputs"):
        evaluate(many, feed, ops=OPS)


@pytest.mark.parametrize(
    ("feed", "words"),
    [
        ({"x": np.ones(2, np.float32)}, r"no array for \['y'\]"),
        ({"x": np.ones(2, np.float32), "y": np.ones(2, np.float32), "z": 1}, r"unknown inputs \['z'\]"),
        ({"x": np.ones(2), "y": np.ones(2, np.float32)}, "float64 — float32"),
        ({"x": np.ones((2, 2), np.float32), "y": np.ones(2, np.float32)}, r"\(2, 2\)"),
    ],
)
def test_wrong_inputs_are_refused(feed, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        evaluate(chain("Add"), feed, ops=OPS)


def test_exact_takes_any_float_for_a_float_but_no_integer() -> None:
    graph = chain("Add", dtype="bfloat16")
    assert evaluate(graph, {"x": np.ones(1), "y": np.ones(1, np.float32)}, ops=OPS, mode="exact")["t0"] == 2
    with pytest.raises(ArgumentError, match="int64"):
        evaluate(graph, {"x": np.ones(1, int), "y": np.ones(1)}, ops=OPS, mode="exact")


def test_a_fixed_extent_must_be_met() -> None:
    with pytest.raises(ArgumentError, match=r"\(3,\) — \(2,\)"):
        evaluate(chain("Relu", shape=(2,)), {n: np.ones(3, np.float32) for n in "xy"}, ops=OPS)


def _branch(name: str, op: str, captured: str) -> Graph:
    b = GraphBuilder(name, taken=[captured])
    b.node(op, [captured], [Value(f"{name}_y", "float32", (2,))])
    return b.build([f"{name}_y"], outer=[captured])


def if_graph() -> Graph:
    b = GraphBuilder("g")
    b.input("c", "bool", ())
    b.input("x", "float32", (2,))
    b.node("Exp", ["x"], [Value("e", "float32", (2,))])
    graphs = FrozenDict(then_branch=_branch("then", "Neg", "e"), else_branch=_branch("other", "Relu", "x"))
    b.node("If", ["c"], [Value("y", "float32", (2,))], graphs=graphs)
    return b.build(["y"])


@pytest.mark.parametrize("make", [np.asarray, TORCH.asarray], ids=["numpy", "torch"])
def test_if_runs_one_branch_with_captures(make) -> None:
    x = make(np.array([-1.0, 2.0], np.float32))
    taken = evaluate(if_graph(), {"c": make(np.array(True)), "x": x}, ops=OPS)["y"]
    other = evaluate(if_graph(), {"c": make(np.array(False)), "x": x}, ops=OPS)["y"]
    np.testing.assert_allclose(np.asarray(taken), -np.exp([-1.0, 2.0]), rtol=1e-6)
    assert other.tolist() == [0, 2]


def test_captured_values_live_as_long_as_the_sub_graph_needs_them() -> None:
    graph = if_graph()
    assert graph.nodes[-1].captures == {"e", "x"}
    inner = evaluate(graph, {"c": np.array(True), "x": np.zeros(2, np.float32)}, ops=OPS, mode="exact")["y"]
    assert inner.tolist() == [-1, -1] and inner.dtype == np.float64


def loop_graph() -> Graph:
    """v ← v · 2 + k while v < 20, k captured; every new v is collected."""
    body = GraphBuilder("body", taken=["k"])
    for name, dtype in (("i", "int64"), ("go", "bool"), ("v", "float32")):
        body.input(name, dtype, ())
    body.constant("two", np.float32(2).reshape(()), "float32")
    body.constant("limit", np.float32(20).reshape(()), "float32")
    body.node("Mul", ["v", "two"], [Value("d", "float32", ())])
    body.node("Add", ["d", "k"], [Value("n", "float32", ())])
    body.node("Less", ["n", "limit"], [Value("on", "bool", ())])
    body.node("Identity", ["n"], [Value("seen", "float32", ())])
    b = GraphBuilder("g")
    b.input("trips", "int64", ())
    b.input("k", "float32", ())
    b.input("start", "float32", ())
    outs = [Value("last", "float32", ()), Value("all", "float32", ("L",))]
    b.node("Loop", ["trips", "", "start"], outs, graphs=FrozenDict(body=body.build(["on", "n", "seen"], outer=["k"])))
    return b.build(["last", "all"])


@pytest.mark.parametrize("make", [np.asarray, TORCH.asarray], ids=["numpy", "torch"])
@pytest.mark.parametrize(("trips", "seen"), [(100, [3, 7, 15, 31]), (2, [3, 7]), (0, [])])
def test_loop(trips: int, seen: list[float], make) -> None:
    one = make(np.float32(1).reshape(()))
    got = evaluate(loop_graph(), {"trips": make(np.array(trips)), "k": one, "start": one}, ops=OPS)
    assert got["last"].tolist() == (seen or [1])[-1] and got["all"].tolist() == seen
    assert str(got["all"].dtype).endswith("float32")


@pytest.mark.parametrize("make", [np.asarray, TORCH.asarray], ids=["numpy", "torch"])
@pytest.mark.parametrize("backwards", [0, 1])
def test_scan_runs_along_its_axes(backwards: int, make) -> None:
    body = GraphBuilder("body")
    body.input("s", "float32", (2,))
    body.input("row", "float32", (2,))
    body.node("Add", ["s", "row"], [Value("n", "float32", (2,))])
    body.node("Identity", ["n"], [Value("seen", "float32", (2,))])
    b = GraphBuilder("g")
    b.input("start", "float32", (2,))
    b.input("x", "float32", (2, "T"))
    attrs = {
        "num_scan_inputs": 1,
        "scan_input_axes": (1,),
        "scan_input_directions": (backwards,),
        "scan_output_axes": (1,),
        "scan_output_directions": (backwards,),
    }
    outs = [Value("last", "float32", (2,)), Value("all", "float32", (2, "T"))]
    graphs = FrozenDict(body=body.build(["n", "seen"]))
    b.node("Scan", ["start", "x"], outs, attrs=attrs, graphs=graphs)
    x = np.array([[1, 2, 3], [10, 20, 30]], np.float32)
    got = evaluate(b.build(["last", "all"]), {"start": make(np.zeros(2, np.float32)), "x": make(x)}, ops=OPS)
    want = np.cumsum(x[:, ::-1], 1)[:, ::-1] if backwards else np.cumsum(x, 1)
    assert got["last"].tolist() == [6, 60]
    np.testing.assert_array_equal(np.asarray(got["all"]), want)


def test_an_error_inside_a_sub_graph_names_the_inner_node() -> None:
    graph = if_graph()
    broken = _branch("then", "Neg", "e")
    broken = broken.with_(nodes=(Node("inner", "Zork", ("e",), ("then_y",), source="sub.py:9"),))
    node = graph.nodes[-1]
    node = Node(node.name, node.op, node.inputs, node.outputs, graphs=node.graphs | {"then_branch": broken})
    with pytest.raises(GraphError, match=r"'inner' \(Zork\) at sub.py:9"):
        evaluate(
            graph.with_(nodes=(graph.nodes[0], node)), {"c": np.array(True), "x": np.zeros(2, np.float32)}, ops=OPS
        )


def test_inputs_and_repeated_names_may_be_outputs() -> None:
    graph = chain("Relu").with_(outputs=("t0", "x", "t0"))
    x = np.array([-1.0], np.float32)
    got = evaluate(graph, {"x": x, "y": x}, ops=OPS)
    assert list(got) == ["t0", "x"] and got["x"].tolist() == [-1] and got["t0"].tolist() == [0]


def test_an_operator_of_a_plugin_runs_on_any_backend() -> None:
    ops = Vocabulary([operator("acme::Twice", "x")(lambda xp, x: xp.ns.multiply(x, 2))])
    b = GraphBuilder("g")
    b.input("x", "float16", (1,))
    b.node("acme::Twice", ["x"], [Value("y", "float16", (1,))])
    for make in (np.asarray, TORCH.asarray):
        got = evaluate(b.build(["y"]), {"x": make(np.full(1, 3, np.float16))}, ops=ops)["y"]
        assert got.tolist() == [6] and str(got.dtype).endswith("float16")
