"""First layers and their pools on Hopper: products whose rows are a window's places, kernels of any width in quads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from catalogs import shipped

from fusionreg.core.conformance import derive, run_one
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime import Runtime

CATALOG = shipped("conv")
FUSION, ALONE = "conv.conv_bn_relu_pool", "conv.conv_bn_relu"
F = torch.nn.functional

#: C, K, R, S, N H W, stride, padding, window of the pool (0: none) and its padding: tasks end inside of images and
#: beyond, rows of the kernel leave nothing, one, two or three pairs beside quads, elements begin at words or within.
LAYERS = [
    (3, 64, 3, 3, (1, 16, 32), 1, 1, 2, 0),
    (3, 72, 7, 7, (2, 21, 40), 2, 3, 3, 1),
    (3, 16, 5, 5, (2, 21, 24), 1, 2, 2, 1),
    (4, 16, 3, 3, (1, 13, 22), 1, 1, 2, 0),
    (2, 8, 3, 3, (1, 23, 24), 2, 0, 3, 0),
    (3, 8, 6, 6, (1, 13, 24), 2, 2, 2, 0),
    (3, 8, 2, 3, (1, 13, 24), 1, 0, 3, 1),
    (3, 8, 7, 7, (1, 33, 32), 4, 3, 2, 0),
    (3, 32, 3, 3, (1, 17, 40), 2, 1, 0, 0),
    (3, 72, 6, 6, (2, 21, 40), 2, 2, 0, 0),
    (3, 40, 3, 3, (2, 13, 24), 1, 1, 0, 0),
]


def runtime(window: int, kept) -> Runtime:
    """The kernel for pools of that extent and no other one."""
    entry = CATALOG[FUSION if window else ALONE]
    kernel = entry.kernel("stem_wide" if window == 3 else "stem")
    kernel = replace(kernel, spec=kernel.spec.model_copy(update={"pending": ""}))
    one = replace(entry, kernels=(kernel,), members=())
    return Runtime(replace(CATALOG, fusions=FrozenDict({entry.name: one})), device="sim", cache=kept)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_layers(layer, sim_cache):
    """NaN and infinities reach the windows that see them, and no others."""
    c, k, r, s, shape, stride, pad, window, around = layer
    kind, act, slope = (torch.float16, "Relu", 0.0) if r % 2 or not window else (torch.bfloat16, "leaky", 0.3)
    x, w = torch.randn(shape[0], c, *shape[1:]), torch.randn(k, c, r, s) * 0.2
    x[0, 0, 1, 2], x[-1, -1, -1, -1], x[0, -1, 0, 0] = float("nan"), float("inf"), float("-inf")
    x, w = (t.to(kind).contiguous(memory_format=torch.channels_last) for t in (x, w))
    gamma, beta, mean, var = torch.randn(4, k)
    norm = gamma, beta, mean, var.abs() + 0.5
    sides = ("top", "left", "bottom", "right")
    fields = {"stride_h": stride, "stride_w": stride, **{f"pad_{side}": pad for side in sides}}
    if window:
        fields |= {"pool_h": window, "pool_w": window, "pool_stride_h": 2, "pool_stride_w": 2, "pool": "MaxPool"}
        fields |= {"activation": act, "alpha": slope or 0.01, **{f"pool_{side}": around for side in sides}}
    runs = runtime(window, sim_cache)
    got = runs.call(FUSION if window else ALONE, x, w, None, *norm, **fields)
    assert [key.split("/")[1][:4] for key in runs.kernels_used] == ["stem"]
    gamma, beta, mean, var = (v.double().reshape(1, -1, 1, 1) for v in norm)
    y = (F.conv2d(x.double(), w.double(), None, stride, pad) - mean) / torch.sqrt(var + 1e-5) * gamma + beta
    y = F.leaky_relu(y, slope) if slope else torch.relu(y)
    want = F.max_pool2d(y, window, 2, around) if window else y
    close = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[kind]
    torch.testing.assert_close(got.double(), want, rtol=close, atol=close, equal_nan=True)
    assert 0 < int(want.isnan().sum()) < want.numel()


#: What a kernel must not lack, in which one, and the case that notices.
FAULTS = [
    ("fr::fence_proxy_async();", "", "stem", "base"),
    ("fr::mbarrier_wait(full + warp * BUFFERS + buffer, parity);", "", "stem", "base"),
    ("bar, begin(task) & ~7, line, task.image", "bar, begin(task) & ~7, line + 1, task.image", "stem", "base"),
    (" & mask, rests[y][i][1]", ", rests[y][i][1]", "stem", "special-x"),  # zeros times NaN
    ("__shfl_up_sync(0xffffffffu, words[1][n], 4)", "words[1][n]", "stem_wide", "base"),  # the column to the left
    ("kept[n] = below[n]", "kept[n] = most[n]", "stem_wide", "base"),  # a row of places that is no window's any more
    ("is ? words[i][n] : LOWEST", "words[i][n]", "stem_wide", "base"),  # a place that is the pool's padding
]


@cache
def trials(kernel):
    entry = CATALOG[FUSION]
    return derive(entry, entry.kernel(kernel), "sm_90a", "quick")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_what_a_kernel_must_not_lack(fault, sim_cache):
    text, other, kernel, case = fault
    executor = SimExecutor(cache=sim_cache, target="sm_90a")
    trial = next(t for t in trials(kernel) if t.name.endswith(f"-{case}"))

    def broken(source):
        assert text in source.text
        return changed(source, source.text.replace(text, other))

    assert run_one(CATALOG, FUSION, kernel, trial, executor).status is Status.PASSED
    assert run_one(CATALOG, FUSION, kernel, trial, executor, broken).status.failed
