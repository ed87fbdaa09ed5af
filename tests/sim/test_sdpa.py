"""Attention in the simulator: kernels conform, blocks take tile after tile, and a pipeline that lacks a part fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from catalogs import shipped
from softmax import ready

from fusionreg.api import Registry
from fusionreg.core.cache import Cache
from fusionreg.core.conformance import run
from fusionreg.core.conformance.cases import derive
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.pattern.instantiate import instantiate
from fusionreg.core.proof.report import Status

CATALOG = shipped("attention")
FUSIONS = ("attention.sdpa", "attention.sdpa_masked")
KERNELS = [(f, k.name) for f in FUSIONS for k in CATALOG[f].kernels if k.library is None]
KERNELS.remove(("attention.sdpa_masked", "wgmma_wide"))  # has nothing that wgmma and the other wide one have not
#: Of sequences: what these kernels have for it, others have anyway.
KERNELS += [("attention.sdpa_lengths", k) for k in ("wgmma", "decode")]
KERNELS += [("attention.sdpa_varlen", k) for k in ("wgmma", "tensor_core")] + [("attention.sdpa_paged", "decode")]


@pytest.mark.parametrize(("fusion", "kernel"), KERNELS)
def test_conforms(fusion, kernel):
    report = run(CATALOG, [fusion], kernels=[kernel], device="sim", cases="quick", cache=Cache())
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] >= (25 if kernel in ("decode_whole", "wgmma_wide") else 40)  # two dtypes, few shapes


@pytest.mark.parametrize("kernel", ["wgmma", "tensor_core", "decode", "plain"])
def test_behind_the_last_key_nothing_is_read(kernel):
    """A cache that nobody has filled: NaN that lies there does not show. The last query is at the last key."""
    rng = np.random.default_rng(0)
    lengths, queries = np.array([70, 3, 0, 200], np.int64), 2 if kernel == "decode" else 70
    q, k, v = (rng.standard_normal((4, h, n, 64)).astype(np.float16) for h, n in ((4, queries), (2, 200), (2, 200)))
    fallen = {n: x.copy() for n, x in (("k", k), ("v", v))}
    for b, n in enumerate(lengths):
        fallen["k"][b, :, n:], fallen["v"][b, :, n:] = np.nan, np.inf
    catalog = ready("sdpa_lengths", kernel)
    y = Registry(catalog, device="sim").call(
        "attention.sdpa_lengths", q, fallen["k"], fallen["v"], lengths, is_causal=1, scaling="usual"
    )
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype(float), np.repeat(k, 2, 1).astype(float)) / 8
    at = lengths[:, None] - queries + np.arange(queries)  # where each query is
    seen = np.arange(200) <= at[:, None, :, None]
    e = np.where(seen, np.exp(scores), 0)
    p = e / np.maximum(e.sum(-1, keepdims=True), 1e-30)
    want = np.einsum("bhqk,bhkd->bhqd", p, np.repeat(v, 2, 1).astype(float))
    np.testing.assert_allclose(y, want, atol=4e-3)


@pytest.mark.parametrize("kernel", ["wgmma", "tensor_core"])
def test_sequences_do_not_meet(kernel):
    """One behind the other: what is not finite in one does not show in those beside it, in whose tiles it lies."""
    rng, ends = np.random.default_rng(0), np.array([0, 70, 73, 300, 340], np.int32)
    q, k, v = (rng.standard_normal((340, h, 64)).astype(np.float16) for h in (2, 1, 1))
    q[70:73], k[70:73], v[70:73], k[300:], v[300:] = np.nan, np.nan, np.inf, np.inf, np.nan
    y = Registry(ready("sdpa_varlen", kernel), device="sim").call(
        "attention.sdpa_varlen", q, k, v, ends, ends, is_causal=1, scaling="usual"
    )
    for first, end in ((0, 70), (73, 300)):
        scores = np.einsum("qhd,kd->hqk", q[first:end].astype(float), k[first:end, 0].astype(float)) / 8
        e = np.where(np.tri(end - first, dtype=bool), np.exp(scores), 0)
        want = np.einsum("hqk,kd->qhd", e / e.sum(-1, keepdims=True), v[first:end, 0].astype(float))
        np.testing.assert_allclose(y[first:end], want, atol=4e-3)


def job(
    kernel: str, axes: dict[str, int], multiprocessors: int = 132, fusion: str = "attention.sdpa",
    attributes: dict[str, float] | None = None, target: str = "sm_90a", **params: int,
) -> tuple[Job, SimExecutor]:  # fmt: skip
    entry = CATALOG[fusion]
    executor = SimExecutor(Cache(), target=target, multiprocessors=multiprocessors)
    rows = derive(entry, entry.kernel(kernel), target, "quick")
    base = next(t for t in rows if t.dtypes["T"] == "float16" and not t.layouts)
    trial = replace(
        base, axes=FrozenDict({**base.axes, **axes}), attributes=base.attributes | (attributes or {}),
        params=FrozenDict(params), exactly=bool(params), values=FrozenDict(),
    )  # fmt: skip
    found = prepare(entry, entry.kernel(kernel), trial, executor)
    assert isinstance(found, Job), found
    return found, executor


WIDE = {"CONSUMERS": 2, "BK": 128, "SLACK": 8, "FRACTION": 0, "CAPPED": 0}


@pytest.mark.parametrize(
    ("params", "width", "multiprocessors", "tiles"),
    [
        (WIDE, 128, 3, 2 * 3),
        (WIDE | {"SLACK": 0}, 128, 1, 2 * 3),
        (WIDE | {"CONSUMERS": 3, "FRACTION": 2}, 64, 2, 2 * 2),
        (WIDE | {"CONSUMERS": 3, "BK": 64}, 128, 3, 2 * 2),
    ],
)
def test_blocks_take_several_tiles(params, width, multiprocessors, tiles):
    """Stages, turns and the order of tiles go on from one tile to the next, whatever number of keys they have."""
    axes = {"B": 1, "H": 2, "G": 1, "Q": 300, "K": 300, "D": width, "E": width}
    found, executor = job("wgmma", axes, multiprocessors, **params)
    assert found.candidate.launch.grid[0] == min(multiprocessors, tiles)
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


def test_groups_of_heads_are_taken_in_turn():
    """As many as there are, where hardly a key fits the cache: every tile is taken once, whichever way round."""
    axes = {"B": 2, "H": 3, "G": 3, "Q": 300, "K": 300}
    found, executor = job("wgmma", axes, 5, attributes={"is_causal": 1}, **WIDE)
    small = found.source.text.replace("CACHE = 24 << 20", "CACHE = 1")
    assert small != found.source.text
    result = execute(replace(found, source=changed(found.source, small)), executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("fr::mbarrier_wait(k_full + keys.stage, keys.parity);", ""),
        ("fr::mbarrier_wait(v_full + values.stage, values.parity);", ""),
        ("fr::mbarrier_wait(k_empty + keys.stage, keys.parity ^ 1);", ""),
        ("fr::mbarrier_wait(q_full, q_parity);", ""),
        ("fr::mbarrier_wait(q_empty, q_parity ^ 1);", ""),
        ("release(v_empty + values.stage);", ""),
        ("fr::wgmma_wait<1>();", ""),
        ("fr::wgmma_wait<0>();", ""),
        ("fr::wgmma_fence();", ""),
        ("fr::fence_proxy_async();", ""),
        ("fr::store_wait_read<0>()", "(void)0"),
        ("if (group == CONSUMERS - 1) fr::barrier_arrive", "if (false) fr::barrier_arrive"),
        ("          rescale();", ""),
        ("scores[4 * j + 2 * r + e] += -fr::infinity()", "(void)0"),
        ("tile.head / group", "0"),
    ],
)  # fmt: skip
def test_what_a_pipeline_must_not_lack(text, other):
    axes = {"B": 1, "H": 4, "G": 2, "Q": 260, "K": 520}
    found, executor = job("wgmma", axes, 2, attributes={"is_causal": 1}, **WIDE | {"CONSUMERS": 3, "SLACK": 0})
    assert found.source.text.count(text) >= 1
    broken = replace(found, source=changed(found.source, found.source.text.replace(text, other)))
    stores = "fence_proxy" in text  # ordinary ones are looked at under stress alone
    assert execute(broken, executor, CATALOG.ops, stress=stores).status.failed


@pytest.mark.parametrize(
    ("kernel", "fusion", "text", "other"),
    [
        ("tensor_core", "attention.sdpa", "fr::cp_async_wait<1>();", ""),
        ("tensor_core", "attention.sdpa", "total[r] = fmaf(total[r], shrink, part);", "total[r] += part;"),
        ("tensor_core", "attention.sdpa", "fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2))", "most"),
        ("tensor_core", "attention.sdpa_masked", "some = loosest[r] != -fr::infinity();", ""),
        ("tensor_core", "attention.sdpa_masked", "bound += sdpa::added", "bound = sdpa::added"),
        ("plain", "attention.sdpa_masked", "open ? total[c] / sum : total[c]", "total[c] / sum"),
        ("plain", "attention.sdpa", "h / (H / G)", "h % G"),
    ],
)  # fmt: skip
def test_faults_are_noticed(kernel, fusion, text, other):
    """In one of the cases that a spec names or that are derived of it."""
    entry, executor = CATALOG[fusion], SimExecutor(Cache(), target="sm_80")
    names = ("tiles", "steep", "window_causal", "nothing_allowed", "causal_masked", "two_key_heads", "tails")
    for trial in derive(entry, entry.kernel(kernel), "sm_80", "quick"):
        if trial.dtypes["T"] != "float32" and trial.name.rpartition("-")[2] in names:
            found = prepare(entry, entry.kernel(kernel), trial, executor)
            if isinstance(found, Job) and text in found.source.text:
                broken = replace(found, source=changed(found.source, found.source.text.replace(text, other)))
                if execute(broken, executor, CATALOG.ops).status.failed:
                    return
    raise AssertionError("every case passed")


@pytest.mark.parametrize(
    ("queries", "keys", "attributes", "expected"),
    [
        (2, 4, {"is_causal": 1}, [1, 1.5]),  # NVIDIA/cutlass#2336: aligned to the top left
        (2, 4, {"right_window_size": 2}, [2, 2.5]),  # to the bottom right
        (4, 2, {"is_causal": 1}, [1, 1.5, 1.5, 1.5]),
        (3, 3, {"left_window_size": 0, "right_window_size": 0}, [1, 2, 3]),
        (3, 2, {"left_window_size": 0}, [1.5, 2, 0]),  # the last query sees nothing
    ],
)
def test_corners(queries, keys, attributes, expected):
    """What the reference itself means by positions, in numbers: scores are equal, v counts from 1."""
    entry = CATALOG["attention.sdpa"]
    shapes = {"q": (1, 1, queries, 4), "k": (1, 1, keys, 4), "v": (1, 1, keys, 1)}
    given = {n: a.default for n, a in entry.spec.attributes.items()} | attributes
    graph = instantiate(
        entry.patterns[0], entry.spec, dtypes={"T": "float32"}, shapes=shapes, ops=CATALOG.ops,
        choices={"scaling": "usual"}, attributes=given, absent=(),
    )  # fmt: skip
    arrays = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
    arrays["v"][..., 0] = np.arange(1, keys + 1)
    (found,) = evaluate(graph, arrays, ops=CATALOG.ops, mode="step").values()
    np.testing.assert_allclose(np.asarray(found).reshape(-1), expected, rtol=1e-6)
