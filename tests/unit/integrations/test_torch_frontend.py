"""What the PyTorch frontend keeps and spells out: sources, sharing, dtypes, symbolic extents, nesting, refusals."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_blocks
import torch_zoo
from exported import agree, fused
from torch import nn

from fusionreg.core.errors import ModelError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.torch import export, from_exported, from_module, import_exported, import_pt2
from fusionreg.integrations.torch.aten import TABLE
from fusionreg.integrations.torch.module import ExportedCallable

OPS = default_vocabulary()
AUTO = torch.export.Dim.AUTO


def module_of(fn, **params):
    return torch_zoo.Fn(fn, **params).eval()


def op_names(graph):
    return [n.op for n in graph.nodes]


# -- forms ---------------------------------------------------------------------------------------------------


def test_the_table_covers_the_promise():
    assert len({name.split(".")[1] for name in TABLE}) >= 110


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x, w, b: F.linear(x, w, b),
        lambda x, w, b: x @ w.t() + b,
        lambda x, w, b: torch.addmm(b, x, w.t()),
        lambda x, w, b: torch.mm(x, w.T) + b,
        lambda x, w, b: torch.matmul(x, w.transpose(0, 1)) + b,
        lambda x, w, b: torch.matmul(x.contiguous(), w.permute(1, 0).clone()) + b,
        lambda x, w, b: torch.einsum("mk,nk->mn", x, w) + b,
    ],
)
def test_linear_has_one_form(spelling):
    """pt#119911: addmm, mm + add, linear, matmul, with clones or without: MatMul with transB, then Add."""
    graph = from_module(module_of(spelling, w=torch.randn(6, 4), b=torch.randn(6)), (torch.randn(3, 4),))
    assert op_names(graph) == ["MatMul", "Add"]
    assert graph.nodes[0].attrs == {"transB": 1}
    assert graph.nodes[0].inputs[1] == "w" and graph.constants["w"].shape == (6, 4)


@pytest.mark.parametrize("turn", [lambda w: w.permute(0, 1), lambda w: w.transpose(0, 0), lambda w: w.t().t()])
def test_identity_transpose_sets_no_flag(turn):
    """ort#32228: a transpose that moves nothing must not become transB."""
    graph = from_module(module_of(lambda x, w: x @ turn(w), w=torch.randn(4, 4)), (torch.randn(4, 4),))
    matmul = next(n for n in graph.nodes if n.op == "MatMul")
    x, w = torch.randn(4, 4), graph.constants["w"]
    got = evaluate(graph, {graph.inputs[0]: x.numpy()}, ops=OPS)[graph.outputs[0]]
    np.testing.assert_allclose(got, x.numpy() @ w, rtol=1e-5, atol=1e-5)
    assert matmul.attrs.get("transB", 0) == (0 if matmul.inputs[1] == "w" else 1)


def test_canonical_operators_stay_whole():
    module = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.Softmax(-1), nn.RMSNorm(8))
    assert op_names(from_module(module.eval(), (torch.randn(2, 8),))) == [
        "LayerNormalization", "Gelu", "Swish", "HardSwish", "Softmax", "RMSNormalization",
    ]  # fmt: skip


def test_sources_name_file_line_and_module():
    graph = from_module(torch_blocks.T5FeedForward().eval(), (torch.randn(2, 6, 16),))
    line = next(n for n in graph.nodes if n.op == "Gelu").source
    assert "torch_blocks.py:" in line
    product = next(n for n in graph.nodes if n.op == "MatMul").source
    assert product.endswith("(wi_0)")


def test_values_keep_the_names_of_export():
    graph = from_module(module_of(lambda x: torch.relu(x) + 1), (torch.randn(3),))
    assert [n.outputs for n in graph.nodes] == [("relu",), ("add",)] and graph.outputs == ("add",)


# -- dtypes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_outside_of_training_is_the_identity(p):
    """Also at p = 1, where 1 / (1 - p) is no number."""
    module, x = nn.Sequential(nn.Dropout(p), nn.ReLU(), nn.Dropout(p)).eval(), torch.randn(3, 5)
    call = fused(module, (x,))
    assert torch.equal(call(x), torch.relu(x))
    assert op_names(import_exported(export(module, (x,), None, None)).graph) == ["Relu"]


def test_python_numbers_do_not_promote_and_tensors_do():
    def f(x, wide, n):
        return x + 1.5, x * 2, x + wide, x + n, n + 1.5, x * wide[0, 0], n / 2

    x, wide, n = torch.randn(2, 3).bfloat16(), torch.randn(2, 3), torch.arange(6).view(2, 3)
    graph = from_module(module_of(f), (x, wide, n))
    expected = [str(t.dtype).removeprefix("torch.") for t in f(x, wide, n)]
    assert [graph.values[o].dtype for o in graph.outputs] == expected
    assert graph.values[graph.outputs[2]].dtype == "float32" and "Cast" in op_names(graph)


def test_a_number_beyond_a_half_is_applied_wide():
    """fp16 has no 1e6: torch applies it in float32, so the graph must not turn it into inf."""
    module, x = module_of(lambda x: (x * 1e6, x / 1e6, x + 1e-9)), torch.tensor([1e-3, 2e-2], dtype=torch.float16)
    agree(fused(module, (x,))(x), module(x))


def test_casts_in_attention_stay():
    """pt#171190: softmax in float32 and back is two Casts; without the way back the product is float32."""

    def back(q, k, v):
        return (q @ k.transpose(-1, -2)).float().softmax(-1).to(q.dtype) @ v

    def wide(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2), -1, dtype=torch.float32) @ v.float()

    def whole(q, k, v):
        return (q @ k.transpose(-1, -2)).to(torch.int32).float().softmax(-1).half() @ v

    args = tuple(torch.randn(2, 5, 8).half() for _ in range(3))
    for fn, casts in (
        (back, ["float32", "float16"]),
        (wide, ["float32", "float32"]),
        (whole, ["int32", "float32", "float16"]),
    ):
        graph = from_module(module_of(fn), args)
        assert [n.attrs["to"] for n in graph.nodes if n.op == "Cast"] == casts
        agree(fused(module_of(fn), args)(*args), fn(*args), 2e-3)


@pytest.mark.parametrize("form", ["ambient", "region"])
def test_autocast_is_spelled_out(form):
    """pt#137033: exported under autocast, dtypes are those of the eager module under autocast."""
    linear, norm = nn.Linear(8, 8), nn.LayerNorm(8)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = linear, norm

        def forward(self, x):
            if form == "ambient":
                y = self.linear(x)
            else:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    y = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                return y, self.norm(y.float())

    module, x = Net().eval(), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=form == "ambient"):
        call, want = fused(module, (x,)), module(x)
    got = call(x)
    assert [t.dtype for t in got] == [t.dtype for t in want] == [torch.bfloat16, torch.float32]
    agree(got, want, 2e-2)


# -- sharing -------------------------------------------------------------------------------------------------


def test_tied_weights_are_one_constant_and_nothing_is_copied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.low = nn.Linear(4, 4, bias=False).bfloat16()

        def forward(self, i):
            h = self.embed(i)
            return self.head(h), self.low(h.bfloat16())

    module = Tied().eval()
    graph = from_module(module, (torch.arange(3),))
    weights = [c for c in graph.constants.values() if c.size == 40]
    assert len(weights) == 1
    assert weights[0].ctypes.data == module.embed.weight.data_ptr()
    half = next(c for c in graph.constants.values() if c.size == 16)
    assert half.dtype.name == "bfloat16" and half.ctypes.data == module.low.weight.data_ptr()
    with pytest.raises(ValueError, match="read-only"):
        weights[0][0, 0] = 1.0


def test_shared_modules_stay_unmodified():
    """pt#197539: one Conv2d read by a BatchNorm on one path and raw on another; the module stays as it was."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
            self.bn.running_var.fill_(4.0)

        def forward(self, x, y):
            return self.bn(self.conv(x)), self.conv(y)

    module, args = Shared().eval(), (torch.randn(1, 2, 5, 5), torch.randn(1, 2, 5, 5))
    before = copy.deepcopy(module.state_dict())
    for _again in range(2):
        call = fused(module, args)
        agree(call(*args), module(*args))
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())


# -- symbolic extents ----------------------------------------------------------------------------------------

DYNAMIC = {
    "linear_no_bias_3d": ({0: AUTO, 1: AUTO},),
    "bert_layer": ({0: AUTO, 1: AUTO}, {0: AUTO, 1: AUTO}),
    "gpt2_block": ({0: AUTO, 1: AUTO},),
    "llama_block": ({0: AUTO, 1: AUTO},),
    "vit_block": ({0: AUTO},),
    "t5_ffn": ({0: AUTO, 1: AUTO},),
    "torch_encoder_layer": ({0: AUTO, 1: AUTO},),
    "conv_bn_relu": ({0: AUTO, 2: AUTO, 3: AUTO},),
    "unet_resblock": ({0: AUTO, 2: AUTO, 3: AUTO}, {0: AUTO}),
    "sdpa_masks": (
        ({0: AUTO, 2: AUTO}, {0: AUTO, 2: AUTO}, {0: AUTO, 2: AUTO}, {0: AUTO, 2: AUTO, 3: AUTO}, {0: AUTO, 1: AUTO}),
    ),
    "reductions": (({0: AUTO}, {0: AUTO}),),
    "linear_einsum": (({0: AUTO, 1: AUTO},),),
    "creation": (({0: AUTO},),),
    "pools_and_pads": (({0: AUTO},),),
}


def grown(args, dynamic_shapes):
    """Arguments longer by one along every dynamic axis."""
    axes = dynamic_shapes[0] if isinstance(dynamic_shapes[0], tuple) else dynamic_shapes
    out = []
    for t, dims in zip(args, axes, strict=True):
        for axis in dims:
            t = torch.cat([t, t.narrow(axis, 0, 1)], axis)
        out.append(t)
    return tuple(out)


@pytest.mark.parametrize("name", DYNAMIC)
def test_one_graph_serves_other_extents(name, tmp_path):
    """pt#194444: batch, sequence and image extents stay symbolic, also those that scales and shapes are made of."""
    module, args = torch_zoo.build(name)
    ep = export(module, args, None, DYNAMIC[name])
    torch.export.save(ep, tmp_path / "m.pt2")
    for imported in (import_exported(ep), import_pt2(tmp_path / "m.pt2")):
        assert any(isinstance(d, str) for i in imported.graph.inputs for d in imported.graph.values[i].shape)
        call = ExportedCallable(imported, lambda given, g=imported.graph: evaluate(g, given, ops=OPS))
        for given in (args, grown(args, DYNAMIC[name])):
            with torch.no_grad():
                agree(call(*given), module(*given), 5e-5)  # sums of products of products, in whatever order a CPU has


def test_dynamic_reshapes_are_constant_operands():
    """Extents are copied or inferred, so that patterns see one form: no shape arithmetic in a BERT layer."""
    module, args = torch_zoo.build("bert_layer")
    graph = from_exported(export(module, args, None, DYNAMIC["bert_layer"]))
    assert not {"Shape", "Concat"} & set(op_names(graph))
    assert all(graph.is_constant(n.inputs[1]) for n in graph.nodes if n.op == "Reshape")


def test_scale_from_a_symbolic_width():
    """pt#194444: a scale of q.size(-1) ** 0.5 with a symbolic width is computed from the tensor of each call."""

    def f(q, k):
        return (q @ k.transpose(-1, -2)) / (q.size(-1) ** 0.5) * q.shape[1], q.size(1) * 2, q.shape[1] // 2 - 1

    q = torch.randn(2, 7, 8)
    call = fused(module_of(f), (q, q), (({1: AUTO, 2: AUTO}, {1: AUTO, 2: AUTO}),))
    for s, d in ((7, 8), (130, 24)):
        q = torch.randn(2, s, d)
        agree(call(q, q), f(q, q), 1e-4)


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "operator", "words"),
    [
        (lambda x: F.dropout(x, 0.5), "aten.dropout.default", "module.eval()"),
        (lambda x: x + torch.rand_like(x), "aten.rand_like.default", "random"),
        (lambda x: x[:, x[0] > 0], "aten.index.Tensor", "mask"),
        (lambda x: torch.view_as_complex(x).abs(), "aten.view_as_complex.default", "form"),
        (lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), "cond", "higher-order"),
    ],
)
def test_refusals_name_operator_and_line(fn, operator, words):
    with pytest.raises(ModelError) as caught:
        from_module(module_of(fn), (torch.randn(4, 2),))
    assert operator in str(caught.value) and words in str(caught.value)
    assert ".py:" in str(caught.value)


def test_operators_without_a_row_are_decomposed():
    """Operators without a row: torch's decomposition of each is converted instead."""

    def f(x, y):
        return F.huber_loss(x, y), torch.logaddexp(x, y), torch.heaviside(x, y)

    args = (torch.randn(4, 5), torch.randn(4, 5))
    assert not any(f"aten.{n}.default" in TABLE for n in ("huber_loss", "logaddexp", "heaviside"))
    agree(fused(module_of(f), args)(*args), f(*args))


def test_a_module_that_cannot_be_exported():
    class Branch(nn.Module):
        def forward(self, x):
            return x + 1 if bool(x.sum() > 0) else x

    with pytest.raises(ModelError, match="cannot export Branch"):
        from_module(Branch(), (torch.randn(3),))


# -- nesting and arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_epsilon_that_nobody_gave(dtype):
    """It is that of the float32 that torch computes in: small numbers are not divided by the root of 2^-7."""
    x = (torch.randn(3, 16) * 0.02).to(dtype)
    model = module_of(lambda x, w: F.rms_norm(x, (16,), w), w=torch.ones(16, dtype=dtype))
    imported = import_exported(export(model, (x,)))
    got = ExportedCallable(imported, lambda given: evaluate(imported.graph, given, ops=OPS, mode="step"))(x)
    torch.testing.assert_close(got, model(x))
    assert got.abs().max() > 1
