"""Convolutions with what follows them: every kernel conforms, windows that straddle tiles are whole, memory orders that
are ambiguous give the right values, and a site that is not fused has a reason.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_models
import pytest
import torch
from catalogs import shipped

from fusionreg.api import Registry
from fusionreg.core.conformance import derive, run, run_one
from fusionreg.core.conformance.mutants import changed, edit
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.errors import MisfitError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime import Runtime

CATALOG = shipped("conv")
F = torch.nn.functional
#: Every template, and the slot once; epilogues are those of the same kernels elsewhere.
KERNELS = [
    ("conv.conv_bn_relu_pool", "plain"),
    ("conv.conv_bn_relu", "tensor_core"),
    ("conv.conv_bn_relu", "depthwise"),
    ("conv.conv_bn_relu", "image"),
    ("conv.conv_bn.gated", "tensor_core"),
]


@pytest.mark.parametrize(("fusion", "kernel"), KERNELS)
def test_conforms(fusion, kernel, sim_cache):
    base = fusion.removesuffix(".gated")
    key = f"{fusion}/{kernel}"
    report = run(CATALOG, [base], kernels=[key], device="sim", cases="quick", cache=sim_cache)
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] >= 25


#: A fault, and the case of the plain kernel that notices it.
FAULTS = (
    (edit("windows_lose_nan", "window[k].add(v[k])", "window[k].value = fmaxf(window[k].value, v[k])"), "special-x"),
    (edit("padding_as_zero", "if (!inside) continue;", "if (!inside) { window[0].add(0.0f); continue; }"), "depthwise"),
    (edit("rows_dilated_as_columns", "r * dilation_h", "r * dilation_w"), "strided"),
)


@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=[fault.name for fault, _ in FAULTS])
def test_faults_are_noticed(fault, case, sim_cache):
    fusion = "conv.conv_bn_relu_pool"
    entry, executor = CATALOG[fusion], SimExecutor(cache=sim_cache)
    trial = next(t for t in derive(entry, entry.kernel("plain"), "sm_90a", "quick") if t.name.endswith(f"-{case}"))
    assert run_one(CATALOG, fusion, "plain", trial, executor).status is Status.PASSED
    wrong = run_one(CATALOG, fusion, "plain", trial, executor, lambda s: changed(s, fault.source(s.text)))
    assert wrong.status is Status.INCORRECT_NUMERICAL, wrong


def call(kernel, cache, fusion, *arrays, **keywords):
    """The fusion by one kernel alone."""
    entry = CATALOG[fusion]
    one = replace(entry, kernels=(entry.kernel(kernel),), members=())
    runtime = Runtime(replace(CATALOG, fusions=FrozenDict({fusion: one})), device="sim", cache=cache)
    y = runtime.call(fusion, *arrays, **keywords)
    assert list(runtime.kernels_used) == [f"{fusion}/{kernel}"]
    return y


def given(c, k, r, s, shape, kind=torch.float16, order=torch.channels_last, seed=0):
    """x, with a NaN and infinities where it is not small, w, and what normalises."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(shape[0], c, *shape[1:], generator=made)
    if min(shape[1:]) > 3:
        x[0, 0, 1, 2], x[-1, -1, -1, -1], x[0, -1, 0, 0] = float("nan"), float("inf"), float("-inf")
    w = torch.randn(k, c, r, s, generator=made) * 0.2
    gamma, beta, mean, var = torch.randn(4, k, generator=made)
    maps = [t.to(kind).contiguous(memory_format=order) for t in (x, w)]
    return maps, [gamma, beta, mean, var.abs() + 0.5]


def reference(x, w, norm, stride, pad, pool=None, slope=0.0):
    y = F.conv2d(x.double(), w.double(), None, stride, pad)
    gamma, beta, mean, var = (v.double().reshape(1, -1, 1, 1) for v in norm)
    y = (y - mean) / torch.sqrt(var + 1e-5) * gamma + beta
    y = F.leaky_relu(y, slope) if slope else torch.relu(y)
    return y if pool is None else F.max_pool2d(y, *pool)


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=4e-3, equal_nan=True)
    assert not bool(got.isnan().all())


@pytest.mark.parametrize(("kernel", "c"), [("tensor_core", 8), ("image", 3)])
@pytest.mark.parametrize("window", [2, 3])
def test_windows_across_tiles(sim_cache, kernel, c, window):
    """Windows of 3 by steps of 2 share rows and columns with those of the next tiles; NaN stays where it was."""
    (x, w), norm = given(c, 16, 3, 3, (2, 21, 19))
    if kernel == "image" and window == 3:
        kernel = "image_wide"
    size = {"pool_h": window, "pool_w": window, "pool_stride_h": 2, "pool_stride_w": 2}
    pads = dict.fromkeys(("pad_top", "pad_left", "pad_bottom", "pad_right"), 1)
    pads |= dict.fromkeys(("pool_top", "pool_left", "pool_bottom", "pool_right"), 1)
    got = call(
        kernel, sim_cache, "conv.conv_bn_relu_pool", x, w, None, *norm, activation="leaky", alpha=0.25, pool="MaxPool",
        **size, **pads,
    )  # fmt: skip
    close(got, reference(x, w, norm, 1, 1, (window, 2, 1), 0.25))
    assert bool(got.isnan().any())
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("c", "r", "shape"), [(1, 3, (2, 5, 6)), (8, 1, (1, 4, 5)), (8, 1, (2, 3, 3)), (4, 3, (1, 3, 3))], ids=str
)
def test_memory_orders_that_are_ambiguous(sim_cache, c, r, shape):
    """pytorch#82060: one channel, one image, or kernels of one element have several orders at once; any is right."""
    (x, w), norm = given(c, 8, r, r, shape)
    for first in (x, x.contiguous()):
        for second in (w, w.contiguous()):
            got = call("tensor_core", sim_cache, "conv.conv_bn_relu", first, second, None, *norm)
            close(got, reference(x, w, norm, 1, 0))


@pytest.mark.parametrize(
    ("attributes", "shapes", "reason"),
    [
        ({}, ((1, 4, 9, 9), (4, 4, 8, 3)), "R <= 7"),
        ({"groups": 3}, ((1, 6, 5, 5), (4, 2, 3, 3)), "K % groups == 0"),
        ({"groups": 2}, ((1, 6, 5, 5), (4, 2, 3, 3)), "C == G * groups"),
        ({}, ((1, 4, 2, 5), (4, 4, 3, 3)), "P >= 1"),
    ],
)
def test_calls_that_are_none(attributes, shapes, reason):
    x, w = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(MisfitError, match=reason.replace("*", r"\*")):
        Registry(CATALOG, device="sim").call("conv.conv_bn_relu", x, w, **attributes)


@pytest.mark.parametrize(
    ("pool", "norm", "found"),
    [
        ({"dilations": [2, 2], "ceil_mode": 1}, {}, "of MaxPool"),
        ({"dilations": [2, 2]}, {}, "dilations = (2, 2) of MaxPool"),
        ({}, {"training_mode": 1}, "training_mode = 1 of BatchNormalization"),
    ],
)
def test_a_site_that_is_not_fused_has_a_reason(pool, norm, found):
    """A pool of its own kind, and batch normalisation in training, stay outside; the rest is fused without them."""
    constants = {"w": torch.zeros(4, 3, 3, 3).numpy(), **{n: torch.ones(4).numpy() for n in "sbmv"}}
    nodes = [
        onnx_models.node("Conv", ["x", "w"], ["c"]),
        onnx_models.node("BatchNormalization", ["c", *"sbmv"], ["n"], **norm),
        onnx_models.node("Relu", ["n"], ["r"]),
        onnx_models.node("MaxPool", ["r"], ["y"], kernel_shape=[2, 2], strides=[2, 2], **pool),
    ]
    model = onnx_models.model(nodes, {"x": [1, 3, 9, 9]}, ["y"], constants)
    matches = Registry(CATALOG, device="sim").match(model, explain=True)
    assert any(found in str(failure) for failure in matches.failures), [str(f) for f in matches.failures]
    assert {m.fusion.split(".")[1] for m in matches.matches} == ({"conv_bn"} if norm else {"conv_bn", "conv_bn_relu"})
