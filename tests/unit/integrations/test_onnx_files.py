"""The ONNX frontend: data in other files, and hostile files."""

from __future__ import annotations

import os

import numpy as np
import pytest
from onnx import TensorProto
from onnx_models import check, function, loop_body, model, node

from fusionreg.core.errors import ModelError
from fusionreg.integrations.onnx import load

I64 = np.int64
RNG = np.random.default_rng(0)


# --- data in other files --------------------------------------------------------------------------------------------


def external_model(folder, location, array, offset=0, length=None):
    proto = model([node("MatMul", ["x", "w"], ["y"])], {"x": [2, array.shape[0]]}, ["y"])
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=array.shape, data_location=TensorProto.EXTERNAL)
    entries = {"location": location, "offset": offset, "length": array.nbytes if length is None else length}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    proto.graph.initializer.append(tensor)
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.fixture
def weight():
    return RNG.normal(size=(4, 5)).astype("f")


def test_external_data(tmp_path, weight, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"\0" * 64 + weight.tobytes())
    path = external_model(tmp_path, "sub/w.bin", weight, offset=64)
    np.testing.assert_array_equal(load(path).constants["w"], weight)
    check(str(path), {"x": RNG.normal(size=(2, 4)).astype("f")})
    monkeypatch.chdir(tmp_path)  # a bare file name has an empty folder: it must not switch the checks off
    np.testing.assert_array_equal(load("m.onnx").constants["w"], weight)
    np.testing.assert_array_equal(load(path.read_bytes(), folder=tmp_path).constants["w"], weight)


@pytest.mark.parametrize(
    "where", ["../secret.bin", "sub/../../secret.bin", "ABSOLUTE", "link.bin", "linkdir/secret.bin"]
)
def test_external_data_never_leave_the_folder(tmp_path, weight, where, monkeypatch):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(weight.tobytes())
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    os.symlink(secret, folder / "link.bin")
    os.symlink(tmp_path, folder / "linkdir")
    path = external_model(folder, str(secret) if where == "ABSOLUTE" else where, weight)
    monkeypatch.chdir(folder)
    for source in (path, "m.onnx"):
        with pytest.raises(ModelError, match="'w'"):
            load(source)


def test_symlink_inside_the_folder_is_fine(tmp_path, weight):
    (tmp_path / "real.bin").write_bytes(weight.tobytes())
    os.symlink("real.bin", tmp_path / "w.bin")
    np.testing.assert_array_equal(load(external_model(tmp_path, "w.bin", weight)).constants["w"], weight)


@pytest.mark.parametrize(
    ("size", "offset", "length", "words"),
    [
        (None, 0, None, "missing"),
        (79, 0, None, "79 bytes"),
        (80, 8, None, "80 bytes"),
        (800, 0, 40, "length 40"),
        (80, -4, None, "w"),
    ],
)
def test_external_data_that_do_not_fit(tmp_path, weight, size, offset, length, words):
    if size is not None:
        (tmp_path / "w.bin").write_bytes(bytes(size))
    with pytest.raises(ModelError, match=words):
        load(external_model(tmp_path, "w.bin", weight, offset, length))


def test_external_data_need_a_folder(tmp_path, weight):
    (tmp_path / "w.bin").write_bytes(weight.tobytes())
    with pytest.raises(ModelError, match="folder"):
        load(external_model(tmp_path, "w.bin", weight).read_bytes())


# --- hostile files --------------------------------------------------------------------------------------------------


def test_functions_that_multiply_without_end():
    """Forty functions that each call the next one twice: a few kilobytes, and 2⁴⁰ nodes."""
    functions = []
    for i in range(40):
        op, domain = (f"F{i + 1}", "local") if i < 39 else ("Neg", "")
        calls = [node(op, ["a"], ["t"], domain=domain), node(op, ["t"], ["b"], domain=domain)]
        functions.append(function(f"F{i}", ["a"], ["b"], calls))
    nodes = [node("F0", ["x"], ["y"], domain="local")]
    with pytest.raises(ModelError, match="inlining"):
        load(model(nodes, {"x": [3]}, ["y"], functions=functions, domains={"local": 1}))


def test_damaged_files_raise_nothing_but_model_errors():
    """Bytes flipped, removed and inserted anywhere: a graph that happens to be well formed, or a ModelError."""
    import random

    body = loop_body()
    loop = [node("Loop", ["n", "", "a", "b"], ["last", "grown", "scans"], body=body)]
    loops = model(loop, {"x": [1, 3], "a": [1, 3], "b": [1, 3]}, ["last", "grown", "scans"], {"n": np.array(4, I64)})
    w = {"w": RNG.normal(size=(3, 3)).astype("f"), "s": np.array([0, -1], I64)}
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Softmax", ["h"], ["p"], axis=0),
        node("Reshape", ["p", "s"], ["y"]),
    ]
    sources = [p.SerializeToString() for p in (loops, model(nodes, {"x": ["N", 3]}, ["y"], w, 11))]
    rng, refused = random.Random(0), 0
    for _ in range(800):
        data = bytearray(rng.choice(sources))
        for _ in range(rng.choice((1, 2, 6))):
            at, kind = rng.randrange(len(data)), rng.random()
            if kind < 0.6:
                data[at] = rng.randrange(256)
            elif kind < 0.8:
                del data[at : at + rng.randrange(1, 9)]
            else:
                data[at:at] = rng.randbytes(3)
        try:
            load(bytes(data))
        except ModelError:
            refused += 1
    assert 400 < refused < 800
