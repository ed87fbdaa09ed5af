"""The torch code that our kernels are compared with computes what the evaluator says the graph means."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import graphs as kit  # noqa: E402

from fusionreg.core.bench import subjects  # noqa: E402
from fusionreg.core.conformance import cases as derived  # noqa: E402
from fusionreg.core.conformance import coverage  # noqa: E402
from fusionreg.core.conformance.reference import graph_of  # noqa: E402
from fusionreg.core.errors import MisfitError  # noqa: E402
from fusionreg.core.evaluate.evaluator import evaluate  # noqa: E402
from fusionreg.core.registry.catalog import load  # noqa: E402
from fusionreg.integrations.torch.arrays import from_numpy, to_numpy  # noqa: E402
from fusionreg.integrations.torch.peer_operators import WRITERS  # noqa: E402
from fusionreg.integrations.torch.peers import restricted, torch_module, undropped  # noqa: E402

CATALOG = load()
OPS = CATALOG.ops


def agree(graph, tolerance: float = 2e-6, seed: int = 3) -> str:
    """Holds the module against the evaluator in float64 on random inputs; returns its code. Weights of 4 bits are large
    numbers: their scales are small ones, as in a model, so that float16 holds the results."""
    given = kit.feeds(graph, seed=seed)
    if any(n.op == "fusionreg::UnpackInt4" for n in graph.nodes):
        given |= {n: (a / 64).astype(a.dtype) for n, a in given.items() if n.endswith("_scale")}
    module = torch_module(graph, OPS)
    with torch.no_grad():
        got = module(*(from_numpy(given[name]) for name in graph.inputs))
    got = got if isinstance(got, tuple) else (got,)
    assert len(got) == len(graph.outputs)
    exact = evaluate(graph, given, ops=OPS, mode="exact")
    for name, array in zip(graph.outputs, got, strict=True):
        value = graph.values[name]
        found = to_numpy(array)
        assert found.dtype.name == value.dtype and found.shape == value.shape, (name, found.dtype, found.shape)
        want = np.asarray(exact[name]).astype(np.float64)
        scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0.0)))
        np.testing.assert_allclose(found.astype(np.float64), want, rtol=0, atol=tolerance * scale, err_msg=module.code)
    return module.code


def one(op: str, *shapes, kind: str = "float32", constants: dict | None = None, **attrs):
    """A graph of one operator; ``constants``: operand index → integer constant."""
    net, constants = kit.Net(), constants or {}
    names, given = [], iter(shapes)
    for i in range(len(shapes) + len(constants)):
        if i in constants:
            names.append(net.const(constants[i], "int64"))
        else:
            shape = next(given)
            names.append(None if shape is None else net.input(f"x{i}", kind, shape))
    found = net.op(op, *names, **attrs)
    return net.build(found if isinstance(found, tuple) else (found,))


A, B, IMAGE = (4, 6), (6, 5), (2, 4, 6, 5)
SINGLE = {
    **{
        f"{name}": one(name, A)
        for name in (
            "Abs", "Ceil", "Celu", "Cos", "Elu", "Erf", "Exp", "Floor", "HardSwish", "Identity", "LeakyRelu", "Mish",
            "Neg", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Swish", "Tanh", "Gelu",
            "fusionreg::QuickGelu", "Softmax", "LogSoftmax", "Flatten", "Transpose", "Asinh", "Atan", "Cosh",
            "HardSigmoid", "IsInf", "IsNaN", "Selu", "Shrink", "Sinh", "ThresholdedRelu", "fusionreg::Expm1",
        )
    },
    **{
        name: one(name, A, (6,))
        for name in (
            "Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "PRelu", "SwiGLU", "Mod", "Mean", "fusionreg::Atan2",
            "fusionreg::Hypot", "Equal", "Less", "GreaterOrEqual",
        )
    },
    **{f"int_{name}": one(name, A, (6,), kind="int32") for name in ("Add", "Mul", "Max", "BitwiseXor", "Greater")},
    "fmod": one("Mod", A, (6,), fmod=1),
    "hard_sigmoid_wide": one("HardSigmoid", A, alpha=0.3, beta=0.4),
    "selu_own": one("Selu", A, alpha=1.0, gamma=2.0),
    "is_inf_below": one("IsInf", A, detect_positive=0),
    "shrink_soft": one("Shrink", A, bias=0.3, lambd=0.3),
    "shrink_own": one("Shrink", A, bias=0.1, lambd=0.4),
    "shift_left": one("BitShift", A, constants={1: [1]}, kind="int64", direction="LEFT"),
    "shift_right": one("BitShift", A, constants={1: [1]}, kind="int64", direction="RIGHT"),
    "grad_leaky": one("fusionreg::LeakyReluGrad", A, A, alpha=0.3),
    "grad_swish_alpha": one("fusionreg::SwishGrad", A, A, alpha=1.5),
    "grad_log_softmax": one("fusionreg::LogSoftmaxGrad", A, A),
    **{
        f"{op.lower()}_{how}": one(op, A, constants={1: [5, 2, 0, 3]}, reduction=how, ignore_index=2)
        for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
        for how in ("none", "mean")
    },
    **{
        f"grad_cross_entropy_{how}": one(
            "fusionreg::SoftmaxCrossEntropyGrad", (4,) if how == "none" else (), A, constants={2: [5, 2, 0, 3]},
            reduction=how, ignore_index=2)
        for how in ("none", "sum", "mean")
    },
    "grad_batch_norm": one("fusionreg::BatchNormalizationGrad", IMAGE, IMAGE, (4,), (4,), (4,), outputs=3),
    "batch_apply": one("fusionreg::BatchNormalizationApply", IMAGE, (4,), (4,), (4,), (4,)),
    **{
        f"batch_norm_{unbiased}": one(
            "BatchNormalization", IMAGE, (4,), (4,), (4,), (4,), training_mode=1, unbiased=unbiased, outputs=5,
            momentum=0.8)
        for unbiased in (0, 1)
    },
    "gelu_tanh": one("Gelu", A, approximate="tanh"),
    "swish_alpha": one("Swish", A, alpha=1.5),
    "elu_alpha": one("Elu", A, alpha=0.3),
    "leaky_alpha": one("LeakyRelu", A, alpha=0.3),
    "matmul": one("MatMul", A, B),
    "matmul_tt": one("MatMul", (6, 4), (5, 6), transA=1, transB=1),
    "matmul_batched": one("MatMul", (3, 4, 6), (6, 5)),
    "gemm": one("Gemm", A, B, (5,), alpha=0.5, beta=2.0),
    "gemm_no_c": one("Gemm", A, (5, 6), transB=1),
    "softmax_axis": one("Softmax", A, axis=0),
    "softmax_grad": one("fusionreg::SoftmaxGrad", A, A),
    "causal_mask": one("fusionreg::CausalMask", (2, *A), value=-3.0, diagonal=1),
    "causal_softmax_grad": one("fusionreg::CausalSoftmaxGrad", A, A, diagonal=-1),
    **{f"grad_{name}": one(f"fusionreg::{name}Grad", A, A) for name in ("Gelu", "Swish", "Sigmoid", "Tanh", "Relu")},
    "grad_gelu_tanh": one("fusionreg::GeluGrad", A, A, approximate="tanh"),
    "grad_rms_norm": one("fusionreg::RMSNormalizationGrad", A, A, (6,), outputs=2),
    "grad_layer_norm": one("fusionreg::LayerNormalizationGrad", A, A, (6,), outputs=3),
    "grad_layer_norm_dx": one("fusionreg::LayerNormalizationGrad", A, A, (6,)),
    "grad_group_norm": one("fusionreg::GroupNormalizationGrad", IMAGE, IMAGE, (4,), num_groups=2, outputs=3),
    "grad_group_norm_dx": one("fusionreg::GroupNormalizationGrad", IMAGE, IMAGE, (4,), num_groups=2),
    "layer_norm": one("LayerNormalization", A, (6,), (6,)),
    "layer_norm_no_bias": one("LayerNormalization", A, (6,), epsilon=0.1),
    "layer_norm_two_axes": one("LayerNormalization", (3, 4, 6), (4, 6), (4, 6), axis=1),
    "rms_norm": one("RMSNormalization", A, (6,), epsilon=1e-3),
    "group_norm": one("GroupNormalization", IMAGE, (4,), (4,), num_groups=2),
    "instance_norm": one("InstanceNormalization", IMAGE, (4,), (4,)),
    "conv": one("Conv", IMAGE, (8, 2, 3, 3), (8,), pads=(1, 1, 1, 1), strides=(2, 1), group=2),
    "max_pool": one("MaxPool", IMAGE, kernel_shape=(3, 2), strides=(2, 2), pads=(1, 0, 1, 0)),
    "attention": one("Attention", (2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), is_causal=1),
    "attention_scale": one("Attention", (2, 4, 6, 8), (2, 4, 3, 8), (2, 4, 3, 8), (6, 3), scale=0.5),
    "reduce_sum": one("ReduceSum", (3, 4, 6), constants={1: [1, -1]}, keepdims=0),
    "reduce_mean_all": one("ReduceMean", (3, 4, 6)),
    "reduce_none": one("ReduceSumSquare", A, noop_with_empty_axes=1),
    "reduce_max": one("ReduceMax", A, constants={1: [0]}),
    "reshape": one("Reshape", (2, 3, 4), constants={1: [0, -1]}),
    "squeeze": one("Squeeze", (1, 3, 1, 4), constants={1: [0, 2]}),
    "squeeze_all": one("Squeeze", (1, 3, 1)),
    "unsqueeze": one("Unsqueeze", (3, 4), constants={1: [-1, 0]}),
    "expand": one("Expand", (3, 1), constants={1: [2, 1, 4]}),
    "perm": one("Transpose", (2, 3, 4), perm=(1, 2, 0)),
    "concat": one("Concat", (2, 3), (4, 3), axis=0),
    "cast": one("Cast", A, to="float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", SINGLE)
def test_one_operator(name: str) -> None:
    agree(SINGLE[name], 1e-3 if name == "cast" else 2e-6)


def test_domains_that_need_positive_numbers() -> None:
    for op in ("Log", "Sqrt", "Reciprocal", "fusionreg::Rsqrt", "fusionreg::Log1p", "fusionreg::Log2"):
        net = kit.Net()
        x = net.op("Add", net.op("Abs", net.input("x", "float32", A)), net.const(0.5))
        agree(net.build((net.op(op, x),)))


def test_literals_stay_numbers() -> None:
    net = kit.Net()
    x = net.input("x", "float16", A)
    y = net.op("Max", net.op("Mul", net.op("Clip", x, net.const(-0.5, "float16"), None), net.const(1.702, "float16")),
               net.const(0.25, "float16"))  # fmt: skip
    code = agree(net.build((y,)), 1e-3)
    assert "clamp" in code and "1.7021484375" in code  # the constant as float16 holds it


def test_several_outputs_and_weights() -> None:
    net = kit.Net()
    x = net.input("x", "float32", A)
    h = net.op("MatMul", x, net.weight(B))
    m = net.op("Where", net.op("Greater", h, net.const(0.0)), h, net.op("Neg", h))
    agree(net.build((m, h)))


def test_a_chain_of_twelve() -> None:
    net = kit.Net()
    v = x = net.input("x", "float32", A)
    for op in ("Sigmoid", "Tanh", "Gelu", "Swish", "Relu", "Exp"):
        v = net.op("Add", net.op(op, v), x)
    agree(net.build((v,)), 1e-5)


@pytest.mark.parametrize("name", sorted(n for n, e in CATALOG.fusions.items() if e.patterns))
def test_every_row_of_every_fusion(name: str) -> None:
    """Every choice, attribute, form and dtype of the shipped fusions, at small extents."""
    entry = CATALOG[name]
    plain, further, _ = coverage.rows(entry, entry.kernels[-1], derived.base_axes(entry), "sm_90a", None)
    for row in (*plain, *further):
        small = row.with_("r", axes=dict.fromkeys(row.axes, 8))
        graph = graph_of(entry, small if coverage.problem_of(entry, small, "sm_90a") else row, OPS)
        kinds = (*row.dtypes.values(), *(graph.values[n].dtype for n in graph.outputs))
        near = max({"float16": 4e-3, "bfloat16": 3e-2, "float8_e4m3fn": 7e-2}.get(d, 1e-5) for d in kinds)
        agree(undropped(graph) or graph, near)


def test_every_workload_has_a_torch_peer() -> None:
    for subject in subjects(CATALOG, "sm_90a"):
        assert "return" in torch_module(subject.graph, OPS).code


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (one("Tile", A, constants={1: [2, 2]}), "Tile"),
        (one("MaxPool", IMAGE, kernel_shape=(2, 2), pads=(0, 0, 1, 1)), "pads both sides"),
        (one("Conv", IMAGE, (8, 4, 3, 3), auto_pad="SAME_UPPER"), "SAME_UPPER"),
        (one("Attention", (2, 4, 6, 8), (2, 4, 3, 8), (2, 4, 3, 8), is_causal=1), "different lengths"),
    ],
)
def test_what_has_no_plain_form(graph, said: str) -> None:
    with pytest.raises(MisfitError, match=said):
        torch_module(graph, OPS)


def dropout(training: bool):
    net = kit.Net()
    x = net.input("x", "float32", A)
    return net.build((net.op("Dropout", x, net.const(0.5), net.const(training, "bool")),))


def test_dropout_in_training_has_none() -> None:
    with pytest.raises(MisfitError, match="another random stream"):
        torch_module(dropout(True), OPS)
    agree(dropout(False))


def test_seeded_dropout_is_torchs_own() -> None:
    net = kit.Net()
    x, rng = net.input("x", "float32", (64, 64)), net.input("rng", "int64", (2,))
    graph = net.build((net.op("fusionreg::Dropout", x, rng, p=0.25),))
    y = torch_module(graph, OPS)(torch.ones(64, 64), torch.zeros(2, dtype=torch.int64))
    assert 0.2 < (y == 0).float().mean() < 0.3 and y.max() == pytest.approx(4 / 3)
    agree(undropped(graph))
    assert undropped(SINGLE["Relu"]) is None


def test_operators_of_the_table_exist() -> None:
    assert set(WRITERS) <= set(OPS)


def test_every_pointwise_operator_has_a_torch_form() -> None:
    assert {name for name, op in OPS.items() if op.pointwise} <= set(WRITERS)


def test_integers_divide_as_onnx_does() -> None:
    net = kit.Net()
    x, y = net.input("x", "int32", A), net.const([3, -2, 5, 1, -7, 2], "int32")
    agree(net.build((net.op("Div", x, y), net.op("Pow", x, net.const(2, "int32")), net.op("Mod", x, y))))


def test_domains_of_inverse_functions() -> None:
    for op, low, high in (("Acos", -1, 1), ("Asin", -1, 1), ("Atanh", -0.9, 0.9), ("Acosh", 1, 9)):
        net = kit.Net()
        x = net.op("Clip", net.input("x", "float32", A), net.const(float(low)), net.const(float(high)))
        agree(net.build((net.op(op, x),)), 1e-5)


def layer(reader: bool = False, kind: str = "float32", rank: int = 1, transposed: int = 1):
    net = kit.Net()
    x, w = net.input("x", kind, (3, 4, 6)), net.input("w", kind, (5, 6) if transposed else (6, 5))
    h = net.op("MatMul", x, w, transB=transposed)
    y = net.op("Gelu", net.op("Add", net.input("b", kind, (1,) * (rank - 1) + (5,)), h))
    return net.build((y, h) if reader else (y,))


def test_a_bias_behind_a_layers_product_is_one_call() -> None:
    code = agree(layer())
    assert "linear(x, w, b)" in code and "matmul" not in code
    for other in (layer(reader=True), layer(rank=2), layer(transposed=0)):
        code = agree(other)
        assert "matmul" in code and "linear(" not in code


def test_what_nobody_asks_for_is_not_computed() -> None:
    net = kit.Net()
    x = net.input("x", "float32", A)
    split = net.op("Split", x, num_outputs=2, axis=0, outputs=2)
    graph = net.build((net.op("Relu", split[0]), net.op("Exp", split[1])))
    kept = restricted(graph, 1)
    assert restricted(graph, 0) is graph
    assert kept.outputs == graph.outputs[:1] and [n.op for n in kept.nodes] == ["Split", "Relu"]
    assert kept.nodes[0].outputs[1] == "", "half of it"


@pytest.mark.parametrize("causal", [0, 1])
def test_sequences_one_behind_the_other(causal: int) -> None:
    """Some empty, tokens before the first and behind the last, other numbers of keys than of queries."""
    net = kit.Net()
    q, k, v = (net.input(n, "float32", (m, h, 8)) for n, m, h in (("q", 9, 2), ("k", 12, 1), ("v", 12, 1)))
    cu = [net.input(n, "int32", (5,)) for n in ("cu_q", "cu_k")]
    graph = net.build(net.op("fusionreg::VarlenAttention", q, k, v, *cu, is_causal=causal, outputs=2))
    rng = np.random.default_rng(5)
    given = {n: rng.standard_normal(graph.values[n].shape).astype(np.float32) for n in ("q", "k", "v")}
    given |= {"cu_q": np.array([1, 4, 4, 6, 8], np.int32), "cu_k": np.array([2, 7, 8, 8, 11], np.int32)}
    want = evaluate(graph, given, ops=OPS)
    got = torch_module(graph, OPS)(*(torch.from_numpy(given[n]) for n in graph.inputs))
    for x, name in zip(got, graph.outputs, strict=True):  # and the log-sum-exp
        np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [0, 1])
def test_gradients_of_sequences_one_behind_the_other(causal: int) -> None:
    """Keys are of one sequence alone, also where ``cu_k`` falls."""
    net, rng = kit.Net(), np.random.default_rng(5)
    shapes = {"dy": (9, 2, 8), "q": (9, 2, 8), "k": (12, 1, 8), "v": (12, 1, 8), "y": (9, 2, 8), "lse": (2, 9)}
    names = [net.input(n, "float32", s) for n, s in shapes.items()]
    names += [net.input(n, "int32", (5,)) for n in ("cu_q", "cu_k")]
    graph = net.build(net.op("fusionreg::VarlenAttentionGrad", *names, is_causal=causal, outputs=3))
    given = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    given |= {"cu_q": np.array([1, 4, 4, 6, 8], np.int32), "cu_k": np.array([2, 7, 8, 5, 11], np.int32)}
    want = evaluate(graph, given, ops=OPS)
    got = torch_module(graph, OPS)(*(torch.from_numpy(given[n]) for n in graph.inputs))
    for x, name in zip(got, graph.outputs, strict=True):
        assert np.abs(want[name]).max() > 0.1
        np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-6)
