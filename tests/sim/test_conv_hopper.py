"""Convolutions on wgmma: boxes of pixels moved by a place of the kernel, consumers in turn, pools in registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.conformance.trial import Trial
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime import Runtime

CATALOG = shipped("conv")
PAD = {"pad_top": 1, "pad_left": 1, "pad_bottom": 1, "pad_right": 1}
HALVED = PAD | {"pool_stride_h": 2, "pool_stride_w": 2}
OWN = {"SHARE": 1, "MB": 2, "BK": 64, "EDGE": 8, "SPLIT": 1, "ONCE": 0, "HALO": 1}
BOTH = OWN | {"SHARE": 2}
PIXELS = {"EDGE": 64, "HALO": 0}


def job(
    sim_cache, words: str, extents: tuple[int, ...], params: dict[str, int], *, absent=("bias", "residual"),
    dtype="float16", multiprocessors=2, choices=None, **attributes: int,
) -> tuple[Job, SimExecutor]:  # fmt: skip
    """The kernel on (N, C, H, W, K, R, S) with these parameters and no others."""
    entry = CATALOG[f"conv.{words}"]
    absent = tuple(n for n in absent if n in entry.inputs)
    last = {n: "channels_last" for n in ("x", "w", "residual") if n in entry.inputs and n not in absent}
    n, c, h, w, k, r, s = extents
    trial = Trial(
        "case", FrozenDict({"T": dtype, "B": "float32"}),
        FrozenDict({"N": n, "C": c, "G": c, "H": h, "W": w, "K": k, "R": r, "S": s}),
        attributes=FrozenDict(attributes), choices=FrozenDict(choices or {}), absent=absent, layouts=FrozenDict(last),
        values=FrozenDict({"var": "uniform"}), params=FrozenDict(params), exactly=True,
    )  # fmt: skip
    executor = SimExecutor(sim_cache, target="sm_90a", multiprocessors=multiprocessors)
    found = prepare(entry, entry.kernel("wgmma"), trial, executor)
    assert isinstance(found, Job), found
    return found, executor


CASES: dict[str, tuple[str, tuple[int, ...], dict[str, int], dict[str, Any]]] = {
    "own_tiles": ("conv_bn_relu", (3, 72, 9, 10, 72, 3, 3), OWN, PAD),
    "few_stages": ("conv_bn", (1, 128, 17, 9, 64, 3, 3), OWN | {"MB": 1}, PAD | {"multiprocessors": 1}),
    "both_consumers": (
        "conv_bn_relu", (2, 24, 9, 10, 72, 3, 3), BOTH | {"EDGE": 4},
        PAD | {"absent": ("gamma", "beta", "mean", "var")},
    ),
    "strided": (
        "conv_bn_relu", (2, 8, 12, 10, 136, 3, 3), BOTH | {"BK": 128, "EDGE": 4, "HALO": 0},
        PAD | {"stride_h": 2, "stride_w": 2},
    ),
    "dilated": (
        "conv_bn", (2, 16, 12, 10, 64, 5, 3), OWN | {"HALO": 0}, {"pad_top": 4, "dilation_h": 2, "pad_left": 1},
    ),
    "divided": (  # a sum between two blocks, and then its channels
        "conv_bn_relu", (3, 1096, 5, 9, 264, 1, 1), BOTH | PIXELS | {"MB": 1, "BK": 128, "SPLIT": 2},
        {"absent": (), "dtype": "bfloat16", "multiprocessors": 64},
    ),
    "pixels": (
        "conv_bn_relu", (3, 72, 5, 9, 264, 1, 1), OWN | PIXELS | {"MB": 1, "BK": 256},
        {"absent": (), "dtype": "bfloat16"},
    ),
    "slot": ("conv_bn.gated", (3, 24, 5, 9, 72, 1, 1), OWN | PIXELS, {"absent": (), "dtype": "bfloat16"}),
    "pool_of_rows": (
        "conv_bn_relu_pool", (3, 24, 9, 10, 72, 3, 3), OWN,
        HALVED | {"choices": {"pool": "MaxPool", "activation": "Relu"}},
    ),
    "pool_of_warps": (
        "conv_bn_relu_pool", (9, 24, 5, 6, 72, 3, 3), OWN | {"EDGE": 4},
        HALVED | {"choices": {"pool": "AveragePool", "activation": "Swish"}},
    ),
    "pool_of_products": (
        "conv_bn_relu_pool", (17, 8, 5, 6, 72, 3, 3), OWN | {"EDGE": 2},
        HALVED | {"choices": {"pool": "AveragePool", "activation": "leaky"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tiles(name, sim_cache):
    """Tiles reach over the ends of images, channels and pixels; blocks take several of them."""
    words, extents, params, more = CASES[name]
    found, executor = job(sim_cache, words, extents, params, **more)
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("if (SHARE == 1) fr::barrier_sync(MINE + group, 256);", ""),  # a phase is taken for the one before the last
        ("fr::mbarrier_wait(empty + stage, parity ^ 1);", ""),
        ("if (RESIDENT && first) fr::mbarrier_wait(ready + step * TAPS + tap, 0);", ""),
        ("tap * LINE * 1024", "tap * 0"),  # all rows of the kernel read the first one's
        ("parity ^= steps / stages & 1;", ""),  # uses of stages by the other consumer are not counted
    ],
)
def test_what_a_pipeline_must_not_lack(text, other, sim_cache):
    found, executor = job(sim_cache, "conv_bn", (1, 128, 17, 9, 64, 3, 3), OWN | {"MB": 1}, multiprocessors=1, **PAD)
    assert found.source.text.count(text) >= 1
    broken = replace(found, source=changed(found.source, found.source.text.replace(text, other)))
    assert execute(broken, executor, CATALOG.ops).status.failed


def test_values_of_a_layer(sim_cache):
    """Against a convolution written out: NaN of one pixel reaches the windows that see it, and no others."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((1, 9, 10, 8)), rng.standard_normal((16, 3, 3, 8))
    x[0, 4, 5, 3] = np.nan
    x, w = x.astype(np.float16), w.astype(np.float16)
    gamma, beta, mean, var = (rng.uniform(0.5, 2.0, 16).astype(np.float32) for _ in range(4))
    wide = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), axis=(1, 2))  # [N P Q C R S]
    wanted = np.einsum("npqcrs,krsc->npqk", windows, w.astype(np.float64))
    wanted = np.maximum((wanted - mean) / np.sqrt(var.astype(np.float64) + 1e-5) * gamma + beta, 0)
    entry = CATALOG["conv.conv_bn_relu"]
    kernel = entry.kernel("wgmma")
    kernel = replace(kernel, spec=kernel.spec.model_copy(update={"pending": ""}))
    catalog = replace(CATALOG, fusions=FrozenDict({entry.name: replace(entry, kernels=(kernel,))}))
    runtime = Runtime(catalog, "sim", sim_cache)
    last = [a.transpose(0, 3, 1, 2) for a in (x, w)]
    y = runtime.call(entry.name, *last, None, gamma, beta, mean, var, None, **PAD)
    assert y.strides[1] == 2, "channels last, as x is"
    np.testing.assert_allclose(y.transpose(0, 2, 3, 1).astype(np.float64), wanted, rtol=2e-3, atol=2e-3)
    assert np.isnan(wanted).sum() == 9 * 16
