"""Gradients of attention in the simulator: kernels conform, faults are noticed, sums have one order."""

from __future__ import annotations

from dataclasses import replace

import attention as kit
import numpy as np
import pytest
from catalogs import shipped

from fusionreg.api import Registry
from fusionreg.core.cache import Cache
from fusionreg.core.conformance import run
from fusionreg.core.conformance.cases import derive
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor

CATALOG = shipped("attention")
FUSION = "attention.sdpa_backward"
KERNELS = [k.name for k in CATALOG[FUSION].kernels if k.library is None and k.name != "wgmma_wide"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_conforms(kernel):
    report = run(CATALOG, [FUSION], kernels=[kernel], device="sim", cases="quick", cache=Cache())
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] >= 40


def test_wide_heads():
    """The declared cases of heads for which two warpgroups share a tile of keys."""
    entry, target, ran = CATALOG[FUSION], "sm_90a", []
    kernel, executor = entry.kernel("wgmma_wide"), SimExecutor(Cache(), target=target, multiprocessors=2)
    for trial in derive(entry, kernel, target, "all"):
        name = trial.name.rpartition("-")[2]
        if name in ("wide", "capped_wide", "tiles_wide", "width_256"):
            found = prepare(entry, kernel, trial, executor)
            if isinstance(found, Job):
                result = execute(found, executor, CATALOG.ops)
                assert not result.status.failed, result
                ran.append(name)
    assert len({*ran}) == 4, ran


@pytest.mark.parametrize(
    ("words", "kernel"),
    [("masked", "wgmma"), ("masked", "tensor_core"), ("position_bias", "wgmma"), ("position_bias", "tensor_core"),
     ("position_bias", "plain")],
)  # fmt: skip
def test_masks_and_biases(words, kernel):
    """Where they leave no key, are large, or have one number for many scores; the cases that tell most."""
    names = ("tiles", "capped", "nothing_allowed", "far_below", "few_queries")
    entry, target = CATALOG[f"attention.sdpa_{words}_backward"], "sm_90a"
    executor, ran = SimExecutor(Cache(), target=target, multiprocessors=2), []
    for trial in derive(entry, entry.kernel(kernel), target, "quick"):
        name = trial.name.rpartition("-")[2]
        if trial.dtypes["T"] == "float16" and (name in names or name.startswith("bias_for_all")):
            found = prepare(entry, entry.kernel(kernel), trial, executor)
            if isinstance(found, Job):
                result = execute(found, executor, CATALOG.ops)
                assert not result.status.failed, result
                ran.append(name)
    assert {"capped", "tiles"} <= {*ran} and len(ran) >= 4, ran


@pytest.mark.parametrize("kernel", ["wgmma", "tensor_core", "plain"])
def test_the_log_sum_exp_of_a_query_without_a_key(kernel):
    """-inf, as its y is 0: a NaN among keys that the mask forbids is not seen, by the operator and by kernels."""
    entry, executor = CATALOG["attention.sdpa_masked_training"], SimExecutor(Cache(), target="sm_90a")
    rows = derive(entry, entry.kernel(kernel), "sm_90a", "all")
    (trial,) = (t for t in rows if t.name == "bfloat16,bool-nan-all")
    found = prepare(entry, entry.kernel(kernel), trial, executor)
    assert isinstance(found, Job)
    result = execute(found, executor, CATALOG.ops)
    assert not result.status.failed, result


@pytest.mark.parametrize("kernel", ["wgmma", "tensor_core", "plain"])
def test_the_log_sum_exp_is_that_of_scores(kernel):
    """Of the values that scores have, whatever is the largest; a query without a key has -inf."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, h, n, 64)).astype(np.float16) for h, n in ((2, 90), (1, 20), (1, 20)))
    runtime = Registry(kit.awake(kernel), device="sim").runtime
    given = {"left_window_size": 4, "scale": 2.0, "scaling": "given"}
    _, lse = runtime.run("attention.sdpa_training", (q, k, v), given)
    scores = 2.0 * np.float64(q) @ np.float64(k).swapaxes(-1, -2)
    ahead = np.arange(20) - np.arange(90)[:, None]
    scores[:, :, ahead < -4] = -np.inf
    top = scores.max(-1, keepdims=True)
    e = np.exp(scores - np.where(np.isinf(top), 0.0, top))
    with np.errstate(divide="ignore"):
        want = np.log(e.sum(-1)) + top[..., 0]
    assert np.isneginf(want[..., 24:]).all()
    np.testing.assert_allclose(lse, want, rtol=3e-6)


@pytest.mark.parametrize(
    ("kernel", "text", "other"),
    [
        ("tensor_core", "fr::grid_sync();", ""),
        ("tensor_core", "fr::cp_async_wait<1>();", ""),
        ("tensor_core", "by = value / larger", "by = 1.0f"),
        ("tensor_core", "(s - of.mean)", "s"),
        ("tensor_core", "head * group + n", "head * group"),
        ("tensor_core", "bend = 4.0f * r * (1.0f - r);", ""),
        ("wgmma", "fr::grid_sync();", ""),
        ("wgmma", "fr::mbarrier_wait(full + ring.stage, ring.parity);", ""),
        ("wgmma", "fr::mbarrier_wait(empty + ring.stage, ring.parity ^ 1);", ""),
        ("wgmma", "fr::mbarrier_wait(own_empty, own_parity ^ 1);", ""),
        ("wgmma", "hide(weights);", ""),
        ("wgmma_wide", "ring_e.wait_empty();", ""),
        ("wgmma_wide", "weights[j] * bends[j]", "weights[j]"),
        ("plain", "if (j < range.first || j > range.last) return;", ""),
        ("plain", "h / group", "h % G"),
    ],
)  # fmt: skip
def test_faults_are_noticed(kernel, text, other):
    """In one of the cases that the spec names or that are derived of it."""
    names = ("base", "capped", "causal_short", "two_key_heads", "huge", "tiles", "nothing_to_see", "window_causal")
    names += ("capped_wide", "tiles_wide", "width_256")  # whose tiles come in fewer stages than there are of them
    assert noticed(FUSION, kernel, text, other, names)


def noticed(fusion: str, kernel: str, text: str, other: str, names: tuple[str, ...]) -> bool:
    """Whether a case of those names fails with ``other`` in the place of ``text``."""
    target = "sm_90a" if kernel.startswith("wgmma") else "sm_80"
    entry, executor = CATALOG[fusion], SimExecutor(Cache(), target=target, multiprocessors=2)
    for trial in derive(entry, entry.kernel(kernel), target, "quick"):
        if trial.dtypes["T"] != "float32" and trial.name.rpartition("-")[2] in names:
            found = prepare(entry, entry.kernel(kernel), trial, executor)
            if isinstance(found, Job) and text in found.source.text:
                broken = replace(found, source=changed(found.source, found.source.text.replace(text, other)))
                if execute(broken, executor, CATALOG.ops).status.failed:
                    return True
    return False


@pytest.mark.parametrize(
    ("words", "kernel", "text", "other", "case"),
    [
        ("masked", "tensor_core", "seen = seen && added != -fr::infinity();", "", "nothing_allowed"),
        ("masked", "tensor_core", "score + added - top", "score - top", "tiles"),
        ("masked", "wgmma", "number == -fr::infinity() ? -0.0f : weight", "weight", "nothing_allowed"),
        ("masked", "wgmma", "n = 0, ++query_head", "n = 0", "two_key_heads"),
        ("position_bias", "wgmma", "(MB > 1 ? 1 : static_cast<int>(B)) * groups", "groups", "bias_for_all_batches"),
        ("position_bias", "tensor_core", "MB > 1 ? 1 : static_cast<int>(B)", "1", "bias_for_all_batches"),
        ("position_bias", "tensor_core", "load(n + 1, stage ^ 1);", "load(n + 1, stage);", "bias_for_all_batches"),
        ("position_bias", "tensor_core", "    total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);", "", "few_queries"),
        ("position_bias", "plain", "MH > 1 ? mh + 1 : H", "mh + 1", "bias_for_all_heads"),
    ],
)  # fmt: skip
def test_faults_beside_masks_are_noticed(words, kernel, text, other, case):
    assert noticed(f"attention.sdpa_{words}_backward", kernel, text, other, (case,))


@pytest.mark.parametrize(
    ("name", "target", "width", "tiles"),
    [("tensor_core", "sm_80", 32, 2 * 2), ("wgmma", "sm_90a", 64, 2 * 2), ("wgmma_wide", "sm_90a", 256, 3 * 2)],
)
def test_blocks_take_tile_after_tile(name, target, width, tiles):
    """Two blocks for a dozen tiles, ``tiles`` of keys: all is written, the same bits with any number of blocks."""
    entry, found = CATALOG[FUSION], []
    kernel = entry.kernel(name)
    for multiprocessors in (2, 132):
        executor = SimExecutor(Cache(), target=target, multiprocessors=multiprocessors)
        rows = derive(entry, kernel, target, "quick")
        base = next(t for t in rows if t.dtypes["T"] == "bfloat16" and not t.layouts)
        axes = {"B": 1, "H": 4, "G": 2, "Q": 140, "K": 130, "D": width, "E": width}
        trial = base.with_("several", axes=axes, values={})
        job = prepare(entry, kernel, trial, executor)
        assert isinstance(job, Job) and job.candidate.launch.grid[0] == min(multiprocessors, tiles + 4 * 2)
        result = execute(job, executor, CATALOG.ops)
        assert not result.status.failed, result
        found.append((result.max_abs, result.max_rel))
    assert found[0] == found[1]


@pytest.mark.parametrize("kernel", ["wgmma", "tensor_core", "plain"])
def test_sequences_one_behind_the_other(kernel):
    """Tiles hold tokens of neighbours, whose NaN is theirs alone; each is as if it were the only one."""
    rng, ends = np.random.default_rng(0), np.array([0, 37, 40, 175, 180], np.int32)
    registry = Registry(kit.awake(kernel), device="sim")
    q, k, v, dy, y = (rng.standard_normal((180, h, 64)).astype(np.float16) for h in (2, 1, 1, 2, 2))
    lse = rng.standard_normal((2, 180)).astype(np.float32) + 4
    for x in (q, k, v, dy, y):
        x[37:40], x[175:] = np.nan, np.inf
    got = registry.call("attention.sdpa_varlen_backward", dy, q, k, v, y, lse, ends, ends, is_causal=1, scaling="usual")
    for a, b in ((0, 37), (40, 175)):
        dys, qs, ys = (x[a:b].astype(float) for x in (dy, q, y))
        ks, vs = (x[a:b, 0].astype(float) for x in (k, v))
        scores = np.einsum("qhd,kd->hqk", qs, ks) / 8 - lse[:, a:b, None]
        p = np.where(np.tri(b - a, dtype=bool), np.exp(np.minimum(scores, 0)), 0)
        r = p * (np.einsum("qhd,kd->hqk", dys, vs) - np.einsum("qhd,qhd->hq", dys, ys)[..., None])
        want = [
            np.einsum("hqk,kd->qhd", r, ks) / 8,
            np.einsum("hqk,qhd->kd", r, qs)[:, None] / 8,
            np.einsum("hqk,qhd->kd", p, dys)[:, None],
        ]
        for mine, exact in zip(got, want, strict=True):
            np.testing.assert_allclose(mine[a:b], exact, atol=4e-3 * np.abs(exact).max())
