"""The programmatic interface: look things up, match, plan, call, fuse; and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import onnx_ir
import plugin_kit
import pytest
import torch
from onnx_models import model, node, ort, same
from torch import nn

import fusionreg
from fusionreg.api import NothingFusedWarning
from fusionreg.core.errors import ArgumentError, ModelError, UnknownNameError
from fusionreg.core.ir import Graph
from fusionreg.model import FusedModel

RNG = np.random.default_rng(11)


def weights(*shape, dtype="f"):
    return RNG.normal(size=shape).astype(dtype)


def mlp(rows="N"):
    nodes = [
        node("MatMul", ["x", "w1"], ["a"], name="up"),
        node("Add", ["a", "b1"], ["b"], name="bias"),
        node("Relu", ["b"], ["c"], name="act"),
        node("MatMul", ["c", "w2"], ["d"], name="down"),
        node("Mul", ["d", "s"], ["y"], name="scale"),
    ]
    constants = {"w1": weights(16, 32), "b1": weights(32), "w2": weights(32, 8), "s": weights(8)}
    return model(nodes, {"x": [rows, 16]}, {"y": [rows, 8]}, constants)


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("gemm",))


def test_a_registry_is_a_mapping(registry):
    assert "gemm.scale_bias" in registry and "gemm.nothing" not in registry
    assert list(registry) == sorted(registry) and len(registry) == len(list(registry)) >= 4
    entry = registry["gemm.scale_bias"]
    assert entry.name == "gemm.scale_bias" and list(entry.inputs) == ["x", "w", "scale", "bias"]
    assert [p.name for p in registry.plugins] == ["gemm"] and registry.failures == ()
    assert repr(registry) == f"<Registry: {len(registry)} fusions of 1 plugins>"
    with pytest.raises(UnknownNameError, match=r"did you mean gemm\.scale_bias"):
        registry["gemm.scale_bais"]


def test_registries_are_independent(registry):
    assert fusionreg.load_registry(allow=("gemm",)).catalog is not registry.catalog
    denied = fusionreg.load_registry(deny=("gemm",))
    assert "gemm.bias" in registry and not any(name.startswith("gemm.") for name in denied)


ACTIVATIONS = {
    "none": lambda v: v,
    "Relu": lambda v: np.maximum(v, 0),
    "Sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "Tanh": np.tanh,
    "Swish": lambda v: v / (1 + np.exp(-v)),
}


@pytest.mark.parametrize("activation", ["none", "Relu", "Swish"])
@pytest.mark.parametrize("transposed", [0, 1])
def test_call_against_numpy_in_float64(registry, activation, transposed):
    x, w, scale, bias = weights(2, 5, 24), weights(24, 40), weights(40), weights(40)
    exact = ACTIVATIONS[activation](x.astype("f8") @ w.astype("f8") * scale + bias)
    given = np.ascontiguousarray(w.T) if transposed else w
    got = registry.call("gemm.scale_bias", x, given, scale, bias, activation=activation, transB=transposed)
    assert got.shape == (2, 5, 40) and got.dtype == np.float32
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_call_on_torch_tensors(registry):
    """bfloat16 tensors on the CPU run in the simulator, and the result is torch's."""
    x, w, bias = (torch.tensor(weights(*s)).bfloat16() for s in ((16, 32), (32, 16), (16,)))
    got = registry.call("gemm.bias", x, w, bias, activation="Relu")
    assert type(got) is torch.Tensor and got.dtype == torch.bfloat16
    exact = torch.relu(x.double() @ w.double() + bias.double())
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=1e-6)
    assert any(key.startswith("gemm.bias/") for key in registry.runtime.kernels_used)


@pytest.mark.parametrize(
    ("name", "arrays", "attributes", "error", "says"),
    [
        ("gemm.bais", [(2, 3), (3, 4), (4,)], {}, UnknownNameError, "gemm.bias"),
        ("gemm.bias", [(2, 3), (5, 4), (4,)], {}, ArgumentError, "K"),
        ("gemm.bias", [(2, 3), (3, 4)], {}, ArgumentError, "bias is missing"),
        ("gemm.bias", [(2, 3), (3, 4), (4,), (4,)], {}, ArgumentError, "at most 3"),
        ("gemm.bias", [(2, 3), (3, 4), (4,)], {"activation": "relu"}, ArgumentError, "Relu"),
        ("gemm.bias", [(2, 3), (3, 4), (4,)], {"transb": 1}, ArgumentError, "transB"),
    ],
)
def test_wrong_calls(registry, name, arrays, attributes, error, says):
    with pytest.raises(error, match=says):
        registry.call(name, *(weights(*s) for s in arrays), **attributes)


def test_bind_launches_again_on_the_same_arrays(registry):
    x, w, bias = weights(4, 8), weights(8, 8), weights(8)
    bound = registry.bind("gemm.bias", x, w, bias)
    first = bound.outputs[0].copy()
    x[...] *= 2
    bound()
    np.testing.assert_allclose(bound.outputs[0], x.astype("f8") @ w + bias, rtol=1e-5, atol=1e-5)
    assert not np.array_equal(first, bound.outputs[0]) and bound.kernel.startswith("gemm.bias/")


def test_match_and_plan(registry):
    graph = registry.graph(mlp())
    assert isinstance(graph, Graph) and registry.graph(graph) is graph
    found = registry.match(graph, explain=True)
    assert {m.fusion for m in found.matches} >= {"gemm.bias", "gemm.scale"}
    assert all(f.clause and f.node and f.fusion in registry for f in found.failures)
    plan = registry.plan(graph)
    assert [m.fusion for m in plan] == ["gemm.bias", "gemm.scale"]
    assert plan.saved.launches == 3 and plan.saved.seconds > 0
    assert [m.nodes for m in registry.plan(graph, matches=found)] == [m.nodes for m in plan]


def test_policies(registry):
    graph = registry.graph(mlp())
    assert not registry.plan(graph, policy="off").chosen
    per_op = {k.name for e in registry.values() for k in e.kernels if k.spec.rounding == "per_op"}
    assert bool(registry.plan(graph, policy="conservative").chosen) == bool(per_op)
    assert len(registry.plan(graph, policy="aggressive")) >= len(registry.plan(graph, policy="balanced")) == 2
    with pytest.raises(UnknownNameError, match="did you mean balanced"):
        registry.plan(graph, policy="balance")


@pytest.mark.parametrize("form", ["path", "text", "proto", "ir"])
def test_fuse_takes_every_form_of_an_onnx_model(registry, tmp_path, form):
    import onnx

    proto = mlp()
    onnx.save(proto, tmp_path / "m.onnx")
    given = {"path": tmp_path / "m.onnx", "text": str(tmp_path / "m.onnx"), "proto": proto}
    fused = registry.fuse(given[form] if form in given else onnx_ir.from_proto(proto))
    assert isinstance(fused, FusedModel) and [s.status for s in fused.sites] == ["planned", "planned"]
    x = weights(3, 16)
    same(fused(x=x), ort(proto, {"x": x}), rtol=1e-4, atol=1e-5)
    assert [(s.fusion, s.status) for s in fused.sites] == [("gemm.bias", "fused"), ("gemm.scale", "fused")]
    assert fused.sites[0].nodes == ("up", "bias", "act")


def test_the_module_function_fuses_with_a_registry_of_its_own():
    x = weights(2, 16)
    proto = mlp()
    same(fusionreg.fuse(proto)(x=x), ort(proto, {"x": x}), rtol=1e-4, atol=1e-5)
    unfused = fusionreg.fuse(proto, policy="off")
    assert unfused.sites == ()
    same(unfused(x=x), ort(proto, {"x": x}), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [object(), 3, {"x": 1}, [1]])
def test_what_is_no_model(registry, given):
    with pytest.raises(ModelError, match="cannot read model"):
        registry.fuse(given)


class Block(nn.Module):
    """Named arguments in, a dict and a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, pair, *, gain):
        a, b = pair
        hidden = torch.relu(self.up(a))
        return {"y": self.down(hidden) + b, "more": (hidden * gain, a)}


def torch_case():
    torch.manual_seed(3)
    block = Block().eval()
    args, kwargs = ((torch.randn(4, 16), torch.randn(8)),), {"gain": torch.tensor(2.0)}
    return block, args, kwargs


@pytest.mark.parametrize("form", ["module", "program", "pt2"])
def test_fuse_of_torch_keeps_the_call_and_the_results(registry, tmp_path, form):
    block, args, kwargs = torch_case()
    if form == "module":
        fused = registry.fuse(block, args, kwargs)
    else:
        program = torch.export.export(block, args, kwargs)
        torch.export.save(program, tmp_path / "m.pt2")
        fused = registry.fuse(program if form == "program" else tmp_path / "m.pt2")
    with torch.no_grad():
        want, got = block(*args, **kwargs), fused(*args, **kwargs)
    assert list(got) == ["y", "more"] and isinstance(got["more"], tuple)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [s.status for s in fused.sites] == ["fused"] * len(fused.sites) and len(fused.sites) >= 2
    with torch.no_grad(), pytest.raises(ArgumentError):
        fused(*args)
    with torch.no_grad(), pytest.raises(ArgumentError, match="wrong shape"):
        fused((torch.randn(4, 17), torch.randn(8)), **kwargs)


def test_a_module_with_axes_that_vary(registry):
    torch = pytest.importorskip("torch", reason="the extra torch is not installed")
    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU()).eval()
    fused = registry.fuse(module, torch.randn(8, 64), dynamic_shapes={"input": {0: torch.export.Dim.DYNAMIC}})
    for batch in (8, 3, 17):
        x = torch.randn(batch, 64)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), module(x), rtol=1e-5, atol=1e-6)
    assert [(s.kernel, s.status) for s in fused.model.sites] == [("gemm.bias/plain", "fused")]


def test_a_module_needs_example_inputs(registry):
    with pytest.raises(ModelError, match="no example inputs"):
        registry.fuse(nn.Linear(2, 2))


HEAVY = ("torch", "onnx", "onnx_ir", "onnxruntime", "cupy", "numpy", "scipy", "jinja2", "pydantic")


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_is_light():
    code = f"import sys, fusionreg; print([m for m in {HEAVY!r} if m in sys.modules]); print(dir(fusionreg))"
    imported, names = fresh(code).splitlines()
    assert imported == "[]" and "load_registry" in names
    assert (
        fresh(
            "import sys, fusionreg\nfusionreg.load_registry()\n"
            "print([m for m in ('torch', 'onnx', 'onnx_ir', 'onnxruntime', 'cupy') if m in sys.modules])"
        )
        == "[]\n"
    )
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        fusionreg.nonsense  # noqa: B018


def test_a_process_may_fork_after_import_and_after_use(tmp_path):
    """No context, thread or lock of ours is left that a child would miss."""
    code = """
import multiprocessing, sys
import numpy as np
import fusionreg

def child(queue):
    registry = fusionreg.load_registry(allow=("gemm",))
    queue.put(float(registry.call("gemm.bias", np.ones((2, 8), "f"), np.ones((8, 8), "f"), np.ones(8, "f")).sum()))

context = multiprocessing.get_context("fork")
answers = []
for turn in ("before", "after"):
    if turn == "after":
        registry = fusionreg.load_registry(allow=("gemm",))
        registry.call("gemm.bias", np.ones((2, 8), "f"), np.ones((8, 8), "f"), np.ones(8, "f"))
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    answers.append(queue.get(timeout=60))
    process.join(60)
    assert process.exitcode == 0
print(answers)
"""
    assert fresh(code) == "[144.0, 144.0]\n"


def test_frozen_uses_shipped_parameters_alone() -> None:
    from fusionreg.core.bench.tuned import ShippedParameters, TunedParameters

    assert isinstance(fusionreg.load_registry().runtime.tuned, TunedParameters)
    assert isinstance(fusionreg.load_registry(frozen=True).runtime.tuned, ShippedParameters)


@pytest.mark.parametrize("device", ["gpu", "CUDA", "", None])
def test_a_device_that_is_none_is_told_at_once(device):
    with pytest.raises(ArgumentError, match="one of auto, sim, cuda"):
        fusionreg.load_registry(device=device)


def test_multiprocessors_are_spared() -> None:
    assert fusionreg.load_registry(spare=16).runtime.spare == 16
    with pytest.raises(ArgumentError, match="cannot spare multiprocessors: -1"):
        fusionreg.load_registry(spare=-1)


def test_nothing_fused_is_told_once_with_what_to_do(tmp_path) -> None:
    """Once for a line of the caller's, which is the one it names; not where the policy is to fuse nothing."""
    registry = fusionreg.Registry(plugin_kit.catalog(tmp_path, {"k.cu.j2": plugin_kit.ADD_RELU}, plugin_kit.add_relu()))
    plain = model([node("Neg", ["x"], ["y"])], {"x": [2, 8]}, {"y": [2, 8]})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(2):
            registry.fuse(plain)
        fusionreg.fuse(plain, registry=registry)
        registry.fuse(plain, policy="off")
    assert [w.category for w in told] == [NothingFusedWarning] * 2 and {w.filename for w in told} == {__file__}
    assert str(told[0].message) == "nothing in g is fused; `fusionreg match MODEL --explain` says why"
    fused = model(
        [node("Add", ["x", "b"], ["s"]), node("Relu", ["s"], ["y"])], {"x": [2, 8]}, {"y": [2, 8]},
        {"b": np.ones(8, "f")},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(registry.fuse(fused).sites) == 1


def test_a_plan_knows_how_operands_lie() -> None:
    """The kernel that is planned for is the one that a call takes."""
    registry = fusionreg.load_registry(device="sim")
    module = torch.nn.Sequential(torch.nn.GroupNorm(2, 8), torch.nn.SiLU())
    kernels = []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(1, 8, 4, 4).to(memory_format=layout)
        (site,) = registry.plan(module, x, policy="aggressive").chosen
        assert site.strides == ({} if layout is torch.contiguous_format else {"x": x.stride()})
        fused = registry.fuse(module, x, policy="aggressive")
        torch.testing.assert_close(fused(x), module(x), rtol=1e-4, atol=1e-5)
        kernels.append(registry.runtime.kernel(site))
        assert fused.sites[0].kernel == f"{site.fusion}/{kernels[-1]}"
    assert kernels[0] != kernels[1]
