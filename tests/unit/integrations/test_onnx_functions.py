"""The ONNX frontend: functions and sub-graphs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import check, count, function, info, loop_body, model, node, ours

from fusionreg.core.errors import ModelError
from fusionreg.integrations.onnx import load

I64 = np.int64
RNG = np.random.default_rng(0)


# --- functions ------------------------------------------------------------------------------------------------------


def test_functions_are_inlined_with_attributes_defaults_and_nesting():
    def ref(op, ins, outs, **refs):
        n = node(op, ins, outs)
        for attr, (param, kind) in refs.items():
            n.attribute.append(onnx.AttributeProto(name=attr, ref_attr_name=param, type=kind))
        return n

    float_kind = onnx.AttributeProto.FLOAT
    leaky = function(
        "Leaky", ["a"], ["b"], [ref("LeakyRelu", ["a"], ["b"], alpha=("slope", float_kind))], attributes=["slope"]
    )
    call = node("Leaky", ["p"], ["t"], domain="local")
    call.attribute.append(onnx.AttributeProto(name="slope", ref_attr_name="slope", type=float_kind))
    outer = function(
        "Block", ["p", "w"], ["r"], [call, node("Add", ["t", "w"], ["r"])],
        defaults=[helper.make_attribute("slope", 0.25)],
    )  # fmt: skip
    nodes = [
        node("Block", ["x", "x"], ["one"], domain="local"),
        node("Block", ["one", "x"], ["y"], domain="local", slope=0.5),
    ]
    proto = model(nodes, {"x": [3, 4]}, ["y"], functions=[leaky, outer], domains={"local": 1})
    graph = load(proto)
    assert count(graph) == {"LeakyRelu": 2, "Add": 2}
    assert [n.attrs["alpha"] for n in graph.nodes if n.op == "LeakyRelu"] == [0.25, 0.5]
    check(proto)


def test_function_written_for_another_opset():
    """The body's opset holds inside it: Squeeze of opset 11, axes as an attribute, in a model of opset 17."""
    body = function("Drop", ["a"], ["b"], [node("Squeeze", ["a"], ["b"], axes=[0])], opset=11)
    proto = model(
        [node("Drop", ["x"], ["y"], domain="local")], {"x": [1, 3]}, ["y"], functions=[body], domains={"local": 1}
    )
    graph = load(proto)
    x = RNG.normal(size=(1, 3)).astype("f")
    np.testing.assert_array_equal(ours(graph, {"x": x})["y"], x[0])


def test_recursive_function_is_refused():
    body = function("Loop", ["a"], ["b"], [node("Loop", ["a"], ["b"], domain="local")])
    proto = model(
        [node("Loop", ["x"], ["y"], domain="local")], {"x": [3]}, ["y"], functions=[body], domains={"local": 1}
    )
    with pytest.raises(ModelError):
        load(proto)


# --- sub-graphs -----------------------------------------------------------------------------------------------------


def branch(name, nodes, output, constants=()):
    return helper.make_graph(nodes, name, [], [info(output, None)], list(constants))


def test_if_captures_outer_values():
    """A captured intermediate has a reader that is in no node's input list."""
    then = branch("then", [node("Add", ["h", "h"], ["t"])], "t")
    other = branch("else", [node("Neg", ["h"], ["e"])], "e")
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["c"]),
        node("If", ["c"], ["i"], then_branch=then, else_branch=other),
        node("Relu", ["h"], ["r"]),
        node("Add", ["r", "i"], ["y"]),
    ]
    proto = model(nodes, {"x": [2, 3]}, ["y"], {"w": RNG.normal(size=(3, 3)).astype("f"), "zero": np.float32(0)})
    graph = load(proto)
    branching = next(n for n in graph.nodes if n.op == "If")
    assert branching.captures == {"h"} and branching in graph.consumers["h"]
    assert graph.values["i"].shape == (2, 3)
    x = RNG.normal(size=(2, 3)).astype("f")
    check(proto, {"x": np.abs(x)})
    check(proto, {"x": -np.abs(x)})


def test_if_branches_of_different_shapes():
    then = branch("then", [node("Identity", ["x"], ["t"])], "t")
    other = branch("else", [node("Concat", ["x", "x"], ["e"], axis=0)], "e")
    nodes = [node("If", ["c"], ["y"], then_branch=then, else_branch=other)]
    proto = model(nodes, {"x": [2, 3], "c": ([], "bool")}, ["y"])
    shape = load(proto).values["y"].shape
    assert isinstance(shape[0], str) and shape[1] == 3
    for c in (True, False):
        check(proto, {"x": RNG.normal(size=(2, 3)).astype("f"), "c": np.array(c)})


def test_loop_with_carried_growing_and_scanned_values():
    nodes = [node("Loop", ["n", "", "a", "b"], ["last", "grown", "scans"], body=loop_body())]
    shapes = {"x": [1, 3], "a": [1, 3], "b": [1, 3]}
    proto = model(nodes, shapes, ["last", "grown", "scans"], {"n": np.array(4, I64)})
    graph = load(proto)
    assert graph.values["last"].shape == (1, 3)
    assert graph.values["grown"].shape is None or isinstance(graph.values["grown"].shape[0], str)
    assert graph.values["scans"].shape[1:] == (1, 3) and graph.nodes[0].captures == {"x"}
    check(proto)


def test_scan():
    body = helper.make_graph(
        [node("Add", ["s", "e"], ["s2"]), node("Relu", ["s2"], ["o"])],
        "body", [info("s", [3]), info("e", [3])], [info("s2", [3]), info("o", [3])],
    )  # fmt: skip
    nodes = [node("Scan", ["z", "x"], ["last", "all"], body=body, num_scan_inputs=1)]
    proto = model(nodes, {"z": [3], "x": ["T", 3]}, ["last", "all"])
    assert load(proto).values["all"].shape == ("T", 3)
    check(proto, T=5)


def test_sub_graph_names_that_repeat_outer_ones_stay_apart():
    """Names of a branch may be used again after it: they are different values."""
    then = branch("then", [node("Neg", ["x"], ["t"])], "t")
    other = branch("else", [node("Abs", ["x"], ["t"])], "t")
    nodes = [
        node("If", ["c"], ["i"], then_branch=then, else_branch=other),
        node("Mul", ["i", "x"], ["t2"]),
        node("Add", ["t2", "i"], ["y"]),
    ]
    proto = model(nodes, {"x": [3], "c": ([], "bool")}, ["y"])
    graph = load(proto)
    inner = [o for g in graph.nodes[0].graphs.values() for n in g.nodes for o in n.outputs]
    assert len({*inner}) == 2 and not {*inner} & {o for n in graph.nodes for o in n.outputs}
    check(proto, {"x": RNG.normal(size=3).astype("f"), "c": np.array(False)})
