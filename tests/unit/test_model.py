"""A fused model: its inputs, its dynamic extents, what it does where a guard fails, and what it saves."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import plugin_kit
import pytest
from onnx_models import model, node, ort, same

import fusionreg
from fusionreg.core.errors import ArgumentError, ModelError
from fusionreg.core.runtime import FallbackWarning

RNG = np.random.default_rng(23)


def weights(*shape):
    return RNG.normal(size=shape).astype("f")


def linear(rows="N", **constants):
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "b"], ["s"]), node("Relu", ["s"], ["y"])]
    return model(nodes, {"x": [rows, 16]}, {"y": [rows, 8]}, {"w": weights(16, 8), "b": weights(8)} | constants)


def two_inputs():
    nodes = [node("MatMul", ["left", "right"], ["h"]), node("Add", ["h", "b"], ["y"])]
    return model(nodes, {"left": ["N", 16], "right": [16, 8]}, {"y": ["N", 8]}, {"b": weights(8)})


def replaceable():
    """An input with an initialiser: a default that the caller may override."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "b"], ["y"])]
    return model(nodes, {"x": ["N", 16], "b": [8]}, {"y": ["N", 8]}, {"w": weights(16, 8), "b": weights(8)})


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("gemm",))


# --- inputs --------------------------------------------------------------------------------------------------------


def test_inputs_by_name_and_by_place(registry):
    proto = two_inputs()
    fused = registry.fuse(proto)
    given = {"left": weights(3, 16), "right": weights(16, 8)}
    want = ort(proto, given)
    same(fused(**given), want, rtol=1e-4, atol=1e-5)
    same(fused(given["left"], given["right"]), want, rtol=1e-4, atol=1e-5)
    same(fused(given["left"], right=given["right"]), want, rtol=1e-4, atol=1e-5)
    assert fused.sites[0].fusion == "gemm.bias"


@pytest.mark.parametrize(
    ("args", "named", "says"),
    [
        (0, ["left"], r"no value for \['right'\]"),
        (0, ["left", "right", "lift"], "unknown input 'lift'"),
        (1, ["left", "right"], "'left' given twice"),
        (3, [], "3 inputs"),
        (0, [], "no value for"),
    ],
)
def test_wrong_inputs(registry, args, named, says):
    arrays = {"left": weights(3, 16), "right": weights(16, 8), "lift": weights(1)}
    with pytest.raises(ArgumentError, match=says) as caught:
        registry.fuse(two_inputs())(*list(arrays.values())[:args], **{k: arrays[k] for k in named})
    assert "left" in caught.value.expected


@pytest.mark.parametrize(
    ("array", "says"), [(np.zeros((3, 17), "f"), "wrong shape"), (np.zeros((3, 16)), "wrong dtype")]
)
def test_arrays_that_do_not_fit(registry, array, says):
    with pytest.raises(ArgumentError, match=says):
        registry.fuse(linear())(x=array)


def test_defaults_may_be_overridden(registry):
    proto, x, b = replaceable(), weights(2, 16), weights(8)
    fused = registry.fuse(proto)
    same(fused(x=x), ort(proto, {"x": x}), rtol=1e-4, atol=1e-5)
    same(fused(x=x, b=b), ort(proto, {"x": x, "b": b}), rtol=1e-4, atol=1e-5)
    same(fused(x=x), ort(proto, {"x": x}), rtol=1e-4, atol=1e-5)  # the default again, not the last one given


# --- extents -------------------------------------------------------------------------------------------------------


def test_one_fused_model_takes_every_batch_size(registry):
    proto = linear()
    fused = registry.fuse(proto)
    for rows in (1, 7, 64, 0, 7, 129, 1):
        x = weights(rows, 16)
        same(fused(x=x), ort(proto, {"x": x}), rtol=1e-4, atol=1e-5)
        assert [(s.status, s.reason) for s in fused.sites] == [("fused", "")]


@pytest.fixture
def guarded(tmp_path):
    """``acme.add_relu``, whose contract takes even numbers of rows alone."""
    spec = plugin_kit.add_relu(
        constraints=("M % 2 == 0",), inputs={"x": "T[M N]", "bias": "T[N]"}, outputs={"y": "T[M N]"}
    )
    catalog = plugin_kit.catalog(tmp_path / "plugin", {"k.cu.j2": plugin_kit.ADD_RELU}, spec)
    return fusionreg.Registry(catalog)


def add_relu(rows="N", tail=True):
    nodes = [node("Add", ["x", "b"], ["s"], name="add"), node("Relu", ["s"], ["r"], name="relu")]
    nodes += [node("Neg", ["r"], ["y"])] if tail else []
    return model(nodes, {"x": [rows, 8]}, {"y" if tail else "r": [rows, 8]}, {"b": weights(8)})


def test_a_guard_that_fails_runs_the_operators(guarded):
    proto = add_relu()
    fused = guarded.fuse(proto)
    assert fused.plan.chosen[0].guards, "the constraint over a symbolic axis is a guard"
    even, odd = weights(4, 8), weights(5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(fused(x=even), ort(proto, {"x": even}))
    assert [(s.status, s.kernel) for s in fused.sites] == [("fused", "acme.add_relu/plain")]
    with pytest.warns(FallbackWarning, match=r"acme.add_relu runs unfused.*M % 2 == 0.*M = 5") as warned:
        same(fused(x=odd), ort(proto, {"x": odd}))
    assert len(warned) == 1
    site = fused.sites[0]
    assert (site.status, site.kernel) == ("fallback", "") and "M % 2 == 0" in site.reason
    assert site.nodes == ("add", "relu")
    with warnings.catch_warnings():  # it is said once for a site
        warnings.simplefilter("error")
        for x in (odd, weights(7, 8), even):
            same(fused(x=x), ort(proto, {"x": x}))
    assert fused.sites[0].status == "fused"


def test_a_guard_that_fails_at_the_end_of_the_graph(guarded):
    """The results of the replaced nodes are outputs of the model; the trace sees inside the site."""
    proto, odd, seen = add_relu(tail=False), weights(3, 8), {}
    with pytest.warns(FallbackWarning):
        same(guarded.fuse(proto)(x=odd, trace=seen), ort(proto, {"x": odd}))
    assert {"s", "r"} <= set(seen)


def test_concrete_extents_leave_nothing_to_a_guard(guarded):
    """An odd extent that is known does not match; the model is whole without it."""
    proto = add_relu(rows=5)
    fused = guarded.fuse(proto)
    assert fused.sites == ()
    x = weights(5, 8)
    same(fused(x=x), ort(proto, {"x": x}))


def test_a_misfit_under_concrete_extents_is_an_error(guarded, monkeypatch):
    from fusionreg.core.errors import MisfitError

    def refuse(*args):
        raise MisfitError("cannot call", "acme.add_relu", "nothing fits")

    fused = guarded.fuse(add_relu(rows=4))
    monkeypatch.setattr(guarded.runtime, "execute", refuse)
    with pytest.raises(MisfitError):
        fused(x=weights(4, 8))


def test_wrong_devices_are_no_misfit(tmp_path, guarded):
    """Under a symbolic extent too, arrays in the wrong place are an error and not a reason to run unfused."""
    registry = fusionreg.Registry(guarded.catalog, device="cuda")
    fused = registry.build(registry.graph(add_relu()))
    with pytest.raises(ArgumentError, match="arrays on a GPU"):
        fused(x=weights(4, 8))


def test_a_kernel_that_refuses_leaves_the_site_to_the_operators(tmp_path):
    """No kernel accepts the call although the fusion does: the runtime's own fallback, seen at the site."""
    spec = plugin_kit.add_relu(kernel_requires="M % 2 == 0")
    catalog = plugin_kit.catalog(tmp_path / "plugin", {"k.cu.j2": plugin_kit.ADD_RELU}, spec)
    proto, odd = add_relu(), weights(5, 8)
    fused = fusionreg.Registry(catalog).fuse(proto)
    with pytest.warns(FallbackWarning, match="no kernel accepts"):
        same(fused(x=odd), ort(proto, {"x": odd}))
    assert fused.sites[0].status == "fallback" and "M % 2 == 0 (M = 5)" in fused.sites[0].reason
    same(fused(x=weights(6, 8) * 0), {"y": np.array(ort(proto, {"x": np.zeros((6, 8), "f")})["y"])})
    assert fused.sites[0].status == "fused"


# --- the rest ------------------------------------------------------------------------------------------------------


def test_unfused_is_the_chain_and_the_reference(registry):
    proto, x = linear(), weights(3, 16)
    fused = registry.fuse(proto)
    same(fused.unfused(x=x), ort(proto, {"x": x}), rtol=1e-4, atol=1e-5)
    exact = fused.unfused(x=x, mode="exact")["y"]
    w, b = (onnx.numpy_helper.to_array(t).astype("f8") for t in proto.graph.initializer)
    assert exact.dtype == np.float64
    np.testing.assert_allclose(exact, np.maximum(x.astype("f8") @ w + b, 0), rtol=1e-13)


def test_repeated_calls_keep_their_constants(registry):
    """A weight is converted once for a model, not once a call: the arrays that kernels get are the same ones."""
    fused, seen = registry.fuse(linear()), []
    execute = registry.runtime.execute

    def spy(fusion, arrays, attributes):
        seen.append(id(arrays[1]))
        return execute(fusion, arrays, attributes)

    fused.runtime = type("Spy", (), {"execute": staticmethod(spy)})()
    for rows in (1, 2):
        fused(x=weights(rows, 16))
    assert len(seen) == 2 and len(set(seen)) == 1


def test_save_for_stock_onnxruntime(registry, tmp_path):
    proto, path = linear(), tmp_path / "fused.onnx"
    fused = registry.fuse(proto)
    fused.save(path)
    mine = tmp_path / "mine"
    mine.touch()
    assert path.stat().st_mode == mine.stat().st_mode  # others may read it, as any file that one writes
    assert {p.name for p in tmp_path.iterdir()} == {"fused.onnx", "mine"}
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert [n.domain for n in written.graph.node] == ["fusionreg"] and len(written.functions) == 1
    assert [n.op_type for n in written.functions[0].node] == ["MatMul", "Add", "Relu"]
    for rows in (1, 6):
        x = weights(rows, 16)
        same(ort(str(path), {"x": x}), ort(proto, {"x": x}))
        same(fused(x=x), ort(str(path), {"x": x}), rtol=1e-4, atol=1e-5)


def test_what_was_not_read_from_onnx_is_not_saved(registry, tmp_path):
    import torch

    program = torch.export.export(torch.nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    with pytest.raises(ModelError, match="cannot save"):
        registry.fuse(program).model.save(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_torch_with_a_dynamic_batch(registry):
    import torch

    torch.manual_seed(5)
    block = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(block, (torch.randn(4, 16),), dynamic_shapes=({0: batch},))
    fused = registry.fuse(program)
    for rows in (1, 4, 33):
        x = torch.randn(rows, 16)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), block(x), rtol=1e-5, atol=1e-5)
        assert {s.status for s in fused.sites} == {"fused"} and len(fused.sites) == 2
