"""Rotary embedding with the append to a cache, in the simulator: conforming, and in place where the caller says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.cache import Cache
from fusionreg.core.conformance import run
from fusionreg.core.conformance.cases import derive
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.errors import ArgumentError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.runtime import Runtime

CATALOG = shipped("attention")
FUSIONS = [e.name for e in CATALOG.entries() if "rope_kv_append" in e.name]
B, S, H, G, D, L = 2, 3, 4, 2, 16, 24


@pytest.mark.parametrize("fusion", ["attention.rope_kv_append", "attention.rope_kv_append_paged_fp8"])
def test_conforms(fusion):
    report = run(CATALOG, [fusion], device="sim", cases="quick", cache=Cache())
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] >= 60


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    def ready(name):
        entry = CATALOG[name]
        kernels = (replace(k, spec=k.spec.model_copy(update={"pending": ""})) for k in entry.kernels)
        return replace(entry, kernels=tuple(kernels))

    return Runtime(replace(CATALOG, fusions=FrozenDict({name: ready(name) for name in FUSIONS})), device="sim")


def rotated(x, angles, interleaved):
    """By complex numbers: element pairs times e^(i angle). x: [B H S D], angles: [B S D/2]."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : D // 2], x[..., D // 2 :])
    z = (a + 1j * b) * np.exp(1j * angles)[:, None]
    return np.stack([z.real, z.imag], -1).reshape(x.shape) if interleaved else np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("paged", [False, True])
def test_in_place(runtime, paged, interleaved):
    """Only the rows of new keys change; slots that no place has are left out, of equal ones the last token counts."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((B, h, S, D)).astype(np.float32) for h in (H, G, G))
    angles = rng.uniform(0, 6, (L, D // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = np.array([[5, 6, 7], [0, 23, 2]], np.int64)
    slots = np.array([[4, 4, 9], [-1, 2, 12]], np.int64)
    table = np.array([[3, 1, 0], [9, -2, 2]], np.int64)  # of pages 9 and -2 there are none
    shape = (5, 4, G, D) if paged else (B, G, 12, D)
    caches = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
    want, new = [c.copy() for c in caches], (rotated(k, angles[positions], interleaved), v)
    for b, s in np.ndindex(B, S):
        page, place = divmod(slots[b, s], 4)
        if not 0 <= slots[b, s] < 12 or (paged and not 0 <= table[b, page] < 5):
            continue
        for cache, x in zip(want, new, strict=True):
            if paged:
                cache[table[b, page], place] = x[b, :, s]
            else:
                cache[b, :, slots[b, s]] = x[b, :, s]
    name = f"attention.rope_kv_append{'_paged' if paged else ''}"
    given = (q, k, v, cos, sin, positions, *caches, slots, *((table,) if paged else ()))
    fresh = runtime.call(name, *given, interleaved=interleaved)  # before any of it is written in place
    for found, expected in zip(fresh[1:], want, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    yq = np.empty_like(q)
    runtime.call(name, *given, interleaved=interleaved, out=(yq, *caches))
    np.testing.assert_allclose(yq, rotated(q, angles[positions], interleaved), atol=1e-5)
    for cache, expected in zip(caches, want, strict=True):
        np.testing.assert_allclose(cache, expected, atol=1e-5)


def test_what_may_not_share_memory(runtime):
    q, k = (np.zeros((B, h, S, D), np.float32) for h in (H, G))
    table, places = np.zeros((L, D // 2), np.float32), np.zeros((B, S), np.int64)
    cache, other = (np.zeros((B, G, 12, D), np.float32) for _ in range(2))
    given = (q, k, k, table, table, places, cache, other, places)
    for out in ((np.empty_like(q), cache, cache), (np.empty_like(q), other, cache), (q, cache, other)):
        with pytest.raises(ArgumentError, match="overlap"):
            runtime.call("attention.rope_kv_append", *given, out=out)
    longer = np.zeros((B, G, 13, D), np.float32)
    with pytest.raises(ArgumentError, match="overlap"):  # a part of it elsewhere is not the cache
        runtime.call("attention.rope_kv_append", q, k, k, table, table, places, longer[:, :, :12], other, places,
                     out=(np.empty_like(q), longer[:, :, 1:], other))  # fmt: skip


@pytest.mark.parametrize(
    ("fusion", "text", "other"),
    [
        ("attention.rope_kv_append", "fr::grid_sync();\n", "\n"),
        ("attention.rope_kv_append", "passed |= row_of(t / each, slots[t]) == row", "passed |= false"),
        ("attention.rope_kv_append", "atomicMax(last + at, static_cast<int>(token))", "last[at] = 0"),
        ("attention.rope_kv_append_paged", "winner == static_cast<int>(token)", "true"),
        ("attention.rope_kv_append", "slot < 0 || slot >= C ? -1 : slot", "slot"),
        ("attention.rope_kv_append", "position >= 0 && position < L", "position >= 0"),
        ("attention.rope_kv_append", "to.cosines.fill(nan);", ";"),
        ("attention.rope_kv_append_paged", "page < 0 || page >= N ? -1 : ", ""),
        ("attention.rope_kv_append_paged", "slot % W;", "0;"),
        ("attention.rope_kv_append_fp8", "fr::clip(x / scale, -448.0f, 448.0f)", "x / scale"),
        ("attention.rope_kv_append_fp8", "head < of_k ? scale_k : scale_v", "scale_k"),
    ],
)
def test_faults_are_noticed(fusion, text, other):
    entry, executor = CATALOG[fusion], SimExecutor(Cache(), target="sm_80")
    names = ("scattered", "beyond", "no_page", "base", "tails", "saturated", "more_tokens_than_threads")
    for trial in derive(entry, entry.kernel("rows"), "sm_80", "quick"):
        if trial.dtypes["T"] != "float32" and trial.name.partition("-")[2] in names:
            found = prepare(entry, entry.kernel("rows"), trial, executor)
            assert isinstance(found, Job) and text in found.source.text
            broken = replace(found, source=changed(found.source, found.source.text.replace(text, other)))
            if execute(broken, executor, CATALOG.ops, stress="sync" in text or other == "true").status.failed:
                return
    raise AssertionError("every case passed")
