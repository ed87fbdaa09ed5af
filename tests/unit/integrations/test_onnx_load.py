"""The ONNX frontend: what comes in, constants, names, shapes and optional operands."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import OPS, check, count, info, model, node, ort, ours, same

from fusionreg.core.errors import ModelError
from fusionreg.core.lift import lift
from fusionreg.core.rewrite import fold_constants
from fusionreg.integrations.onnx import load, reference

I64 = np.int64
RNG = np.random.default_rng(0)


def relu_model(**changes):
    return model([node("Relu", ["x"], ["y"])], {"x": ["N", 3]}, ["y"], **changes)


# --- what comes in --------------------------------------------------------------------------------------------------


def test_every_kind_of_source_gives_the_same_graph(tmp_path):
    proto = relu_model()
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    for source in (path, str(path), proto.SerializeToString(), proto, onnx_ir.from_proto(proto)):
        graph = load(source)
        assert repr(graph) == repr(load(proto))
        assert graph.values["y"].shape == ("N", 3) and graph.values["y"].dtype == "float32"


def test_the_given_model_is_not_changed():
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([2.0], np.float32), "w"), numpy_helper.from_array(np.array([1], I64), "i"), [3]
    )
    proto = model([node("Add", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"], sparse_initializer=[sparse])
    before = proto.SerializeToString()
    load(proto)
    assert proto.SerializeToString() == before


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (b"\x00" * 64, "cannot read model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "cannot read model"),
        (b"PK\x03\x04" + bytes(60), "cannot read model"),
        (b"\x08\x08", "no graph"),
    ],
)
def test_foreign_files(tmp_path, data, words):
    path = tmp_path / "bad.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=words) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_refused(tmp_path):
    w = RNG.normal(size=(3, 4)).astype(np.float32)
    data = model([node("MatMul", ["x", "w"], ["y"])], {"x": ["N", 3]}, ["y"], {"w": w}).SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(0, len(data), 3):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError):
            load(path)


def test_missing_file():
    with pytest.raises(ModelError, match=r"nowhere\.onnx"):
        load("nowhere.onnx")


@pytest.mark.parametrize("opset", [1, 6, 99])
def test_opsets_out_of_range(opset):
    with pytest.raises(ModelError, match=f"opset {opset}"):
        load(relu_model(opset=opset))


def test_no_opset_import():
    proto = relu_model()
    del proto.opset_import[:]
    with pytest.raises(ModelError, match="imports no opset"):
        load(proto)


# --- graphs that contradict themselves ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("Relu", ["nobody"], ["y"])], "nobody"),
        ([node("Relu", ["a"], ["b"]), node("Relu", ["b"], ["a"]), node("Add", ["a", "x"], ["y"])], "cycle"),
        ([node("Relu", ["x"], ["z"])], "'y'"),
        ([node("Relu", ["x"], ["y"]), node("Neg", ["x"], ["y"])], "'y' is redeclared"),
        ([node("MatMul", ["x", "x"], ["y"], name="bad")], "bad"),
        ([node("Relu", ["x"], ["y"], name="odd", slope=2.0)], "slope"),
        ([node("Transpose", ["x"], ["y"], name="odd", perm=[0, 7])], "odd"),
        ([node("Constant", [], ["y"], name="empty")], "empty"),
    ],
)
def test_contradictions_are_model_errors(nodes, words):
    with pytest.raises(ModelError, match=words):
        load(model(nodes, {"x": [2, 3]}, ["y"]))


def test_output_of_another_type_than_declared():
    with pytest.raises(ModelError, match="declared int64"):
        load(model([node("Relu", ["x"], ["y"])], {"x": [2]}, {"y": ([2], "int64")}))


def test_nodes_out_of_order_are_sorted():
    check(
        model([node("Neg", ["h"], ["y"]), node("Relu", ["x"], ["h"])], {"x": [2, 3]}, ["y"]),
        {"x": RNG.normal(size=(2, 3)).astype("f")},
    )


# --- constants ------------------------------------------------------------------------------------------------------


def test_overridable_initialiser_is_never_folded():
    """An initialiser that is a graph input is a default: the caller may replace it."""
    proto = model(
        [node("Neg", ["w"], ["n"]), node("Add", ["x", "n"], ["y"])], {"x": [3], "w": [3]}, ["y"], {"w": np.ones(3, "f")}
    )
    graph = load(proto)
    assert graph.overridable == {"w"} and graph.inputs == ("x", "w")
    lifted = lift(graph, OPS)
    assert count(fold_constants(graph, OPS)) == count(lifted) == {"Neg": 1, "Add": 1}
    x = {"x": np.zeros(3, "f")}
    for inputs in (x, {**x, "w": np.full(3, 5, "f")}):
        same(ours(lifted, inputs), ort(proto, inputs))


def test_overridable_shape_is_no_hint():
    """The default of a replaceable shape says nothing about the shape of the result."""
    proto = model(
        [node("Reshape", ["x", "s"], ["y"])], {"x": [2, 6], "s": ([2], "int64")}, ["y"], {"s": np.array([3, 4], I64)}
    )
    graph = load(proto)
    assert all(isinstance(d, str) for d in graph.values["y"].shape)
    inputs = {"x": np.arange(12, dtype="f").reshape(2, 6), "s": np.array([4, 3], I64)}
    same(ours(lift(graph, OPS), inputs), ort(proto, inputs))


def test_initialisers_listed_as_inputs_before_ir_4_are_constants():
    """The IR of that time demanded it; onnxruntime does not let a caller replace them either."""
    nodes = [node("Reshape", ["x", "s"], ["r"]), node("Add", ["r", "w"], ["y"])]
    constants = {"s": np.array([4, 3], I64), "w": np.ones(3, "f")}
    proto = model(nodes, {"x": [2, 6], "s": ([2], "int64"), "w": [3]}, ["y"], constants, 9)
    proto.ir_version = 3
    graph = load(proto)
    assert graph.inputs == ("x",) and not graph.overridable and graph.values["y"].shape == (4, 3)
    check(proto)


def test_constant_nodes_of_every_kind():
    nodes = [
        node("Constant", [], ["a"], value=numpy_helper.from_array(np.array([1, 2], "f"))),
        node("Constant", [], ["b"], value_float=0.5),
        node("Constant", [], ["c"], value_floats=[1.0, -1.0]),
        node("Constant", [], ["i"], value_ints=[0]),
        node("Constant", [], ["k"], value_int=1),
        node("Add", ["x", "a"], ["p"]),
        node("Mul", ["p", "b"], ["q"]),
        node("Sub", ["q", "c"], ["r"]),
        node("ReduceSum", ["r", "i"], ["s"]),
        node("Gather", ["s", "k"], ["y"], axis=1),
    ]
    graph = load(model(nodes, {"x": [3, 2]}, ["y"]))
    assert "Constant" not in count(graph)
    assert graph.constants["k"].dtype == I64 and graph.constants["b"].dtype == np.float32
    check(model(nodes, {"x": [3, 2]}, ["y"]))


@pytest.mark.parametrize("coordinates", [False, True])
def test_sparse_initialiser_and_constant(coordinates):
    dense = np.zeros((2, 3), "f")
    dense[0, 1], dense[1, 2] = 2.0, -3.0
    places = np.argwhere(dense) if coordinates else np.flatnonzero(dense)

    def sparse(name):
        values = numpy_helper.from_array(dense[dense != 0], name)
        return helper.make_sparse_tensor(values, numpy_helper.from_array(places.astype(I64), name + "_i"), [2, 3])

    nodes = [
        node("Constant", [], ["k"], sparse_value=sparse("k")),
        node("Add", ["x", "w"], ["h"]),
        node("Mul", ["h", "k"], ["y"]),
    ]
    check(model(nodes, {"x": [2, 3]}, ["y"], sparse_initializer=[sparse("w")]))


def test_sparse_index_out_of_its_shape():
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([2.0], "f"), "w"), numpy_helper.from_array(np.array([7], I64), "i"), [3]
    )
    with pytest.raises(ModelError, match="sparse tensor 'w'"):
        load(model([node("Add", ["x", "w"], ["y"])], {"x": [3]}, ["y"], sparse_initializer=[sparse]))


def test_equal_initialisers_under_two_names():
    w = RNG.normal(size=(3, 3)).astype("f")
    nodes = [node("MatMul", ["x", "a"], ["h"]), node("MatMul", ["h", "b"], ["y"])]
    check(model(nodes, {"x": [2, 3]}, ["y"], {"a": w, "b": w.copy()}))


def test_tensor_data_that_do_not_fill_their_shape():
    proto = model([node("Add", ["x", "w"], ["y"])], {"x": [3]}, ["y"], {"w": np.ones(3, "f")})
    proto.graph.initializer[0].dims[0] = 300
    with pytest.raises(ModelError, match="'w'"):
        load(proto)


def test_bfloat16_and_float16_weights_keep_their_bits():
    import ml_dtypes

    w = np.array([1.0078125, -3.0], ml_dtypes.bfloat16)
    tensor = TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=[2], raw_data=w.tobytes())
    proto = model([node("Cast", ["w"], ["y"], to=1)], {}, ["y"])
    proto.graph.initializer.append(tensor)
    graph = load(proto)
    assert graph.values["w"].dtype == "bfloat16" and graph.constants["w"].tobytes() == w.tobytes()


# --- names, shapes, optional operands -------------------------------------------------------------------------------


def test_symbolic_unknown_and_zero_extents():
    """dim_param keeps its name, an unset extent gets one, and a written 0 or −1 means unknown (pytorch#194444)."""
    proto = model([node("Relu", ["x"], ["y"])], {"x": ["batch", None, 0, 4]}, ["y"])
    x, y = load(proto).values["x"].shape, load(proto).values["y"].shape
    assert x[0] == "batch" and x[3] == 4 and all(isinstance(d, str) for d in x) is False
    assert isinstance(x[1], str) and isinstance(x[2], str) and len({*x}) == 4 and y == x
    check(proto, {"x": RNG.normal(size=(2, 3, 5, 4)).astype("f")})


@pytest.mark.parametrize("name", ["?", "None", "-1"])
def test_names_that_are_none(name):
    """An exporter that writes "?" on every open axis does not say that they are equal: this Expand does something."""
    nodes = [node("Shape", ["z"], ["s"]), node("Expand", ["x", "s"], ["e"]), node("Neg", ["e"], ["y"])]
    proto = model(nodes, {"x": [name, 3], "z": [name, 3]}, ["y"])
    graph = load(proto)
    assert graph.values["x"].shape[0] != graph.values["z"].shape[0]
    check(proto, {"x": RNG.normal(size=(1, 3)).astype("f"), "z": np.zeros((4, 3), "f")})


def test_stale_shapes_in_the_file_are_not_believed():
    """A model exported at batch 1 whose input was made dynamic by hand afterwards."""
    proto = model([node("Relu", ["x"], ["h"]), node("Neg", ["h"], ["y"])], {"x": ["N", 4]}, {"y": [1, 4]})
    proto.graph.value_info.append(info("h", [1, 4]))
    graph = load(proto)
    assert graph.values["h"].shape == graph.values["y"].shape == ("N", 4)


def test_sequence_length_is_not_frozen():
    """pytorch#194444: scale = sqrt(size of the last axis), computed at run time; two lengths through one graph."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "last"], ["n"]),
        node("Cast", ["n"], ["f"], to=1),
        node("Sqrt", ["f"], ["r"]),
        node("Div", ["x", "r"], ["d"]),
        node("Softmax", ["d"], ["y"], axis=1),
    ]
    proto = model(nodes, {"x": [2, "S"]}, ["y"], {"last": np.array(-1, I64)})
    lifted = lift(load(proto), OPS)
    for length in (7, 130):
        x = {"x": RNG.normal(size=(2, length)).astype("f")}
        same(ours(lifted, x), ort(proto, x))


def test_empty_optional_inputs_and_outputs():
    nodes = [
        node("Clip", ["x", "", "hi"], ["c"]),
        node("TopK", ["c", "k"], ["", "i"]),
        node("Cast", ["i"], ["y"], to=1),
    ]
    proto = model(nodes, {"x": [2, 5]}, ["y"], {"hi": np.float32(0.1), "k": np.array([2], I64)})
    graph = load(proto)
    topk = next(n for n in graph.nodes if n.op == "TopK")
    assert topk.outputs == ("", "i") and graph.nodes[0].inputs == ("x", "", "hi")
    x = np.array([[0, 3, 1, 4, 2], [-1, -2, -3, -4, -5]], "f")
    np.testing.assert_array_equal(ours(graph, {"x": x})["y"], [[1, 2], [0, 1]])


def test_outputs_that_are_inputs_constants_or_repeated():
    proto = model(
        [node("Relu", ["x"], ["h"])], {"x": [2, 3]}, {"h": None, "x": [2, 3], "w": [3]}, {"w": np.ones(3, "f")}
    )
    graph = load(proto)
    assert graph.outputs == ("h", "x", "w")
    x = RNG.normal(size=(2, 3)).astype("f")
    found = ours(graph, {"x": x})
    np.testing.assert_array_equal(found["x"], x)
    np.testing.assert_array_equal(found["w"], np.ones(3))


def test_source_is_the_node_name_or_the_exporter_s_python_line():
    named = node("Relu", ["x"], ["h"], name="layer/relu")
    traced = node("Neg", ["h"], ["y"], name="n")
    text = 'File "/a/outer.py", line 3, in <module>\n    f()\n  File "/a/net.py", line 41, in forward\n    y = -h'
    traced.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=text)
    graph = load(model([named, traced], {"x": [2]}, ["y"]))
    assert [n.source for n in graph.nodes] == ["layer/relu", "/a/net.py:41"]


def test_unknown_operators_stay_opaque():
    mystery = node("Mystery", ["h"], ["m"], domain="com.acme", power=3)
    nodes = [node("Relu", ["x"], ["h"]), mystery, node("Neg", ["m"], ["y"])]
    proto = model(nodes, {"x": [2, "N"]}, {"y": [2, "N"]}, domains={"com.acme": 1})
    graph = load(proto)
    assert [n.op for n in graph.nodes] == ["Relu", "com.acme::Mystery", "Neg"]
    assert graph.values["m"].dtype == "unknown" and dict(graph.nodes[1].attrs) == {"power": 3}
    proto.graph.value_info.append(info("m", [2, 5]))
    assert str(load(proto).values["m"]) == "m: float32[2 5]"
    assert not reference.run(proto, {"x": np.zeros((2, 3), "f")})  # nor has onnxruntime a kernel: no reference
