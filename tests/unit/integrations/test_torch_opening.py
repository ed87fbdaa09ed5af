"""PyTorch models behind the front door: inputs, reference, wrapped callables, import targets, the example."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fusionreg
from fusionreg.core.errors import ArgumentError, ModelError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations import open_model
from fusionreg.integrations.torch import export
from fusionreg.integrations.torch.arrays import from_numpy, to_numpy

OPS = default_vocabulary()
EXAMPLE = Path(__file__).parents[3] / "examples" / "transformer_encoder.py"


def example():
    spec = importlib.util.spec_from_file_location("transformer_encoder_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Stateful(nn.Module):
    """Reads a dict, writes a buffer, returns a size beside a tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x, extra):
        y = self.linear(x) + extra["k"]
        self.seen += y.sum(0)
        return y, x.shape[0], self.seen * 1


def stateful():
    torch.manual_seed(0)
    module, args = Stateful().eval(), (torch.randn(2, 4), {"k": torch.randn(2, 3)})
    return module, args, export(module, args, None, ({0: torch.export.Dim.AUTO}, {"k": {0: torch.export.Dim.AUTO}}))


@pytest.mark.parametrize("kind", ["module", "exported", "pt2"])
def test_opened_models_agree_with_their_reference(kind, tmp_path):
    """The reference is the original artefact; given the same inputs, results and written buffers agree."""
    module, args, ep = stateful()
    if kind == "pt2":
        torch.export.save(ep, tmp_path / "m.pt2")
    model = {"module": module, "exported": ep, "pt2": tmp_path / "m.pt2"}[kind]
    opened = open_model(model, args if kind == "module" else (), ops=OPS)
    inputs = dict(opened.example(3))
    assert set(inputs) == set(opened.graph.inputs) and all(isinstance(v, np.ndarray) for v in inputs.values())
    want = opened.reference(inputs)
    got = evaluate(opened.graph, inputs, ops=OPS)
    assert set(want) == set(opened.graph.outputs)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5)
    assert not module.seen.any()
    if kind != "pt2":
        np.testing.assert_array_equal(opened.example(0)["x"], args[0].numpy())


def test_the_reference_is_not_our_graph(tmp_path):
    """A fault of the conversion must show: the reference knows nothing of the graph."""
    _, _, ep = stateful()
    opened = open_model(ep, ops=OPS)
    wrong = opened.graph.with_(
        constants={**opened.graph.constants, "linear.bias": opened.graph.constants["linear.bias"] + 1}
    )
    inputs = dict(opened.example(0))
    want, got = opened.reference(inputs), evaluate(wrong, inputs, ops=OPS)
    assert not np.allclose(want[opened.graph.outputs[0]], got[opened.graph.outputs[0]], atol=0.5)


def test_wrapped_models_are_called_like_the_module():
    module, _, ep = stateful()
    registry = fusionreg.load_registry()
    call = registry.fuse(ep, policy="off")
    x = torch.randn(5, 4)
    y, n, seen = call(x, {"k": torch.zeros(5, 3)})
    torch.testing.assert_close(y, module.linear(x).detach())
    assert n == 5 and torch.allclose(seen, y.sum(0)) and call.sites == ()
    assert torch.equal(call.buffers["seen"], seen)


def test_arrays_share_memory():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        t = torch.zeros(3, 4, dtype=dtype).t()
        array = to_numpy(t)
        assert array.shape == (4, 3) and array.ctypes.data == t.data_ptr()
        back = from_numpy(array)
        assert back.dtype == dtype and back.data_ptr() == t.data_ptr() and back.stride() == t.stride()
    frozen = to_numpy(torch.zeros(2), writable=False)
    assert not frozen.flags.writeable and from_numpy(frozen).data_ptr() != frozen.ctypes.data
    assert from_numpy(np.arange(4)[::-1]).tolist() == [3, 2, 1, 0]


def test_random_inputs_fit_the_model(tmp_path):
    """A .pt2 brings none (its own are never opened): indices stay below the table's rows, extents in their ranges."""

    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 4)

        def forward(self, i, x, y):
            return self.table(i.view(-1)).sum() + x.sum() + y

    batch = torch.export.Dim("batch", min=6, max=12)
    args = (torch.ones(8, 2, dtype=torch.int64), torch.randn(8, 4), torch.randn(16))
    ep = export(Embedded(), args, None, ({0: batch}, {0: batch}, {0: 2 * batch}))
    torch.export.save(ep, tmp_path / "e.pt2")
    opened = open_model(tmp_path / "e.pt2", ops=OPS)
    inputs = opened.example(0)
    assert [v.shape for v in inputs.values()] == [(6, 2), (6, 4), (12,)] and 0 <= inputs["i"].min() <= inputs[
        "i"
    ].max() < 3
    (want,), (got,) = opened.reference(inputs).values(), evaluate(opened.graph, inputs, ops=OPS).values()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    call = opened.wrap(
        lambda *given: evaluate(opened.graph, dict(zip(opened.graph.inputs, given, strict=True)), ops=OPS)
    )
    for sizes, words in (((6, 7, 12), "s[0-9]+ = 6"), ((6, 6, 13), "= 12"), ((13, 13, 26), "in 6 … 12")):
        with pytest.raises(ArgumentError, match=words):
            call(torch.zeros(sizes[0], 2, dtype=torch.int64), torch.zeros(sizes[1], 4), torch.zeros(sizes[2]))


# -- package.module:callable ---------------------------------------------------------------------------------

TARGETS = """
import torch

def linear():
    return torch.nn.Linear(4, 3).eval(), (torch.randn(2, 4),)

def one_tensor():
    return torch.nn.Linear(4, 3).eval(), torch.randn(2, 4)

def keywords():
    return torch.nn.Linear(4, 3).eval(), (), {"input": torch.randn(2, 4)}

def exported():
    return torch.export.export(torch.nn.Linear(4, 3).eval(), (torch.randn(2, 4),))

def nothing():
    return None

def fails():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def target_module(tmp_path, monkeypatch):
    (tmp_path / "zoo_of_targets.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)  # the current folder is importable meanwhile
    yield "zoo_of_targets"
    sys.modules.pop("zoo_of_targets", None)


@pytest.mark.parametrize("name", ["linear", "one_tensor", "keywords", "exported"])
def test_targets(name, target_module):
    path = list(sys.path)
    opened = open_model(f"{target_module}:{name}", ops=OPS)
    inputs = dict(opened.example(0))
    (want,) = opened.reference(inputs).values()
    (got,) = evaluate(opened.graph, inputs, ops=OPS).values()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert sys.path == path


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("zoo_of_targets:nothing", "it returned a NoneType"),
        ("zoo_of_targets:fails", "no weights here"),
        ("zoo_of_targets:missing", "AttributeError"),
        ("no_such_module_anywhere:f", "ModuleNotFoundError"),
        ("zoo_of_targets:a b", "package.module:factory"),
        ("zoo_of_targets:", "package.module:factory"),
    ],
)
def test_wrong_targets(target, words, target_module):
    with pytest.raises(ModelError) as caught:
        open_model(target, ops=OPS)
    assert words in str(caught.value)


def test_a_module_without_inputs():
    with pytest.raises(ModelError, match="no example inputs"):
        open_model(nn.Linear(2, 2), ops=OPS)


# -- the example ---------------------------------------------------------------------------------------------


def test_the_encoder_example(tmp_path):
    """Deterministic, bf16, and every GEMM site fits a tensor-core kernel: M = 128, N and K multiples of 16."""
    module = example()
    (encoder, args), (twin, _) = module.build(), module.build()
    assert all(
        torch.equal(a, b) for a, b in zip(encoder.state_dict().values(), twin.state_dict().values(), strict=True)
    )
    assert all(p.dtype == torch.bfloat16 for p in encoder.parameters()) and not encoder.training
    module.main(str(tmp_path / "encoder.pt2"))
    opened = open_model(tmp_path / "encoder.pt2", ops=OPS)
    graph = opened.graph
    weights = [n for n in graph.nodes if n.op == "MatMul" and n.inputs[1] in graph.constants]
    assert len(weights) == 4 * module.LAYERS
    for node in weights:
        b, s, k = graph.values[node.inputs[0]].shape
        n = graph.values[node.outputs[0]].shape[-1]
        assert b * s == 128 and k % 16 == 0 and n % 16 == 0
    inputs = {graph.inputs[0]: to_numpy(args[0])}
    got = evaluate(graph, inputs, ops=OPS)[graph.outputs[0]].astype(np.float32)
    with torch.no_grad():
        want = encoder(*args).float().numpy()
    assert np.abs(got - want).max() < 0.1 and np.abs(want).max() > 1
    (reference,) = opened.reference(inputs).values()
    np.testing.assert_array_equal(reference.astype(np.float32), want)


def test_the_encoder_example_has_fusable_sites(tmp_path):
    """The gemm family finds the projections and both halves of the MLP."""
    module, args = example().build()
    found = fusionreg.load_registry().match(module, *args)
    sites = {m.root for m in found.matches if m.fusion.startswith("gemm.")}
    assert len(sites) >= 8
