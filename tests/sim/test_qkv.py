"""Self-attention from its input on, in one launch, in the simulator: conforming, and as torch has it."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from catalogs import shipped

from fusionreg.core.cache import Cache
from fusionreg.core.conformance import run
from fusionreg.core.conformance.cases import derive
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.runtime import Runtime

CATALOG = shipped("attention")
F = torch.nn.functional


@pytest.mark.parametrize(
    ("fusion", "kernel"),
    [
        ("attention.qkv_sdpa", "wgmma"),
        ("attention.qkv_packed_sdpa", "fused"),
        ("attention.qkv_rope_sdpa", "wgmma"),
        ("attention.qkv_rope_sdpa", "fused"),
    ],
)
def test_conforms(fusion, kernel):
    """Kernels of a template that differ in what is written in front of attention."""
    report = run(CATALOG, [fusion], device="sim", kernels=[kernel], cases="quick", cache=Cache())
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] >= 20


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("fused", "float16-special-bv"),  # what fp16 rounds to 0, times an infinite v: infinity, not NaN
        ("wgmma", "float16,bool-special-bv"),
        ("wgmma_masked", "float16,bool-beside_mask_nothing"),  # rows of 0
        ("wgmma_masked", "float16,bool-beside_mask_causal"),
        ("wgmma", "bfloat16,bool-large-all"),  # scores whose product with a factor rounds by powers of two
    ],
)
def test_extremes(kernel, name):
    entry, executor = CATALOG["attention.qkv_sdpa"], SimExecutor(Cache(), target="sm_90a")
    (trial,) = (t for t in derive(entry, entry.kernel(kernel), "sm_90a", "all") if t.name == name)
    found = prepare(entry, entry.kernel(kernel), trial, executor)
    assert isinstance(found, Job) and not execute(found, executor, CATALOG.ops).status.failed


def runtime(fusion: str, kernel: str = "fused") -> Runtime:
    entry = CATALOG[fusion]
    kernels = (replace(k, spec=k.spec.model_copy(update={"pending": ""})) for k in entry.kernels if k.name == kernel)
    kernels = tuple(kernels)
    return Runtime(replace(CATALOG, fusions=FrozenDict({fusion: replace(entry, kernels=kernels)})), device="sim")


@pytest.mark.parametrize(
    ("kernel", "packed", "groups", "causal", "trans", "width"),
    [
        ("fused", False, 3, 0, 1, 32),
        ("fused", False, 1, 1, 1, 32),
        ("fused", True, 3, 1, 0, 32),
        ("fused", True, 3, 0, 1, 32),
        ("wgmma", False, 1, 0, 1, 64),
        ("wgmma", True, 3, 1, 0, 128),
        ("wgmma_masked", False, 1, 1, 1, 128),
        ("wgmma_masked", True, 3, 0, 1, 64),
    ],
)
def test_against_torch(kernel, packed, groups, causal, trans, width):
    torch.manual_seed(1)
    b, s, c, heads = 2, 70, 48, 3
    columns = (3 * heads * width,) if packed else (heads * width, groups * width, groups * width)
    x = torch.randn(b, s, c).bfloat16()
    weights = [torch.randn(n, c).bfloat16() / 7 for n in columns]
    biases = [torch.randn(n).bfloat16() for n in columns]
    mask = torch.randn(s, s).bfloat16() * (kernel != "wgmma")  # which has none
    rows = torch.cat([F.linear(x.double(), w.double(), v.double()) for w, v in zip(weights, biases, strict=True)], -1)
    parts = rows.split([n * width for n in (heads, groups, groups)], -1)
    q, k, v = (t.view(b, s, -1, width).transpose(1, 2) for t in parts)
    far = torch.zeros(s, s).double().masked_fill(~torch.ones(s, s).tril().bool(), -torch.inf) if causal else 0
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.double() + far, enable_gqa=True)
    want = y.transpose(1, 2).reshape(b, s, -1).numpy()

    def array(t):
        return t.contiguous().float().numpy().astype(ml_dtypes.bfloat16)

    name = f"attention.qkv_{'packed_' if packed else ''}sdpa"
    given = [array(x), *(array(w if trans else w.T) for w in weights), *map(array, biases)]
    given.append(array(mask) if kernel != "wgmma" else None)
    more = {} if packed else {"G": groups}
    found = runtime(name, kernel).call(name, *given, H=heads, transB=trans, is_causal=causal, scaling="usual", **more)
    error = np.abs(found.astype(np.float64) - want)
    assert error.max() < 0.05 and np.sqrt((error**2).mean() / (want**2).mean()) < 0.01


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@pytest.mark.parametrize(
    ("kernel", "words", "groups", "normed", "trans", "width"),
    [
        ("wgmma", "norm", 3, True, 1, 128),
        ("fused", "norm", 1, True, 0, 32),
        ("wgmma", "rope_norm", 1, True, 1, 128),
        ("fused", "rope_norm", 3, True, 1, 32),
        ("wgmma", "packed_groups", 1, False, 0, 64),
        ("wgmma_masked", "packed_groups", 1, True, 1, 128),
        ("fused", "packed_groups", 1, True, 1, 32),
        ("wgmma", "packed_rope", 1, True, 0, 128),
        ("wgmma_masked", "packed_rope", 3, False, 1, 64),
        ("fused", "packed_rope", 1, False, 1, 32),
    ],
)
def test_steps_between(kernel, words, groups, normed, trans, width):
    """Norms of heads and rotations between projections and attention, against torch in float64."""
    torch.manual_seed(2)
    b, s, c, heads = 2, 70, 48, 3
    columns = [n * width for n in (heads, groups, groups)]
    x, angles = torch.randn(b, s, c).bfloat16(), torch.rand(1, 1, s, width) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    weights, biases = ([torch.randn(n, *m).bfloat16() / 5 for n in columns] for m in ((c,), ()))
    scales = [torch.rand(width).to(torch.float32 if "rope_norm" in words else torch.bfloat16) + 0.5 for _ in "qk"]
    mask = torch.randn(s, s).bfloat16() if kernel != "wgmma" else None  # which has none
    parts = [
        F.linear(x.double(), w.double(), v.double()).view(b, s, -1, width).transpose(1, 2)
        for w, v in zip(weights, biases, strict=True)
    ]
    for i, scale in enumerate(scales if normed else ()):
        parts[i] = F.rms_norm(parts[i], (width,), scale.double(), 1e-6)
    if "rope" in words:
        parts[:2] = (rotated(t, cos.double(), sin.double()) for t in parts[:2])
    y = F.scaled_dot_product_attention(*parts, attn_mask=None if mask is None else mask.double(), enable_gqa=True)
    want = y.transpose(1, 2).reshape(b, s, -1).numpy()

    def array(t):
        return (
            None
            if t is None
            else t.numpy()
            if t.dtype == torch.float32
            else t.contiguous().float().numpy().astype(ml_dtypes.bfloat16)
        )

    packed, name = "packed" in words, f"attention.qkv_{words}_sdpa"
    if packed:
        weights, biases = [torch.cat(weights)], [torch.cat(biases)]
    given = [array(x), *(array(w if trans else w.T) for w in weights), *map(array, biases)]
    given += map(array, scales) if normed else (None, None)
    given += [array(cos), array(sin)] if "rope" in words else []
    more = {"columns_q": columns[0], "columns_k": columns[1]} if packed else {}
    found = runtime(name, kernel).call(
        name, *given, array(mask), H=heads, G=groups, transB=trans, scaling="usual", **more
    )
    error = np.abs(found.astype(np.float64) - want)
    assert error.max() < 0.05 and np.sqrt((error**2).mean() / (want**2).mean()) < 0.015


@pytest.mark.parametrize(
    ("kernel", "text", "other"),
    [
        ("fused", "  fr::grid_sync();\n", ""),
        ("fused", "fr::cp_async_wait<STAGES - 2>();", ""),
        ("fused", "tile.shared * D, columns, fr::i64{n}", "0, columns, fr::i64{n}"),
        ("fused", "low += fr::to_float(bv[column])", "low += 0.0f"),
        ("fused", "fmaf(total[r], shrink, part)", "total[r] + part"),
        ("fused", "(key < seen.low || key > seen.high)", "false"),
        ("wgmma", "fr::grid_sync();", "__syncthreads();"),
        ("wgmma", "fmaf(total[r], shrink[r], part)", "total[r] + part"),
        ("wgmma", "(8 * j + e > high)", "(false)"),
    ],
)
def test_faults_are_noticed(kernel, text, other):
    entry, executor = CATALOG["attention.qkv_sdpa"], SimExecutor(Cache(), target="sm_90a", multiprocessors=3)
    names = ("base", "tails", "tiles", "causal", "wide_causal", "wider_causal")
    for trial in derive(entry, entry.kernel(kernel), "sm_90a", "quick"):
        if trial.name.rpartition("-")[2] in names:
            found = prepare(entry, entry.kernel(kernel), trial, executor)
            if isinstance(found, Job) and text in found.source.text:
                broken = replace(found, source=changed(found.source, found.source.text.replace(text, other)))
                if execute(broken, executor, CATALOG.ops, stress="sync" in text).status.failed:
                    return
    raise AssertionError("every case passed")


def test_heads_are_merged_without_a_copy():
    """Heads split by views: attention reads them where they lie, and gives y in their order: merging is a view."""
    q = np.random.default_rng(0).standard_normal((2, 9, 4, 16)).astype(np.float32)
    y = Runtime(CATALOG, device="sim").call("attention.sdpa", *[q.transpose(0, 2, 1, 3)] * 3, scaling="usual")
    assert y.shape == (2, 4, 9, 16) and np.shares_memory(y.transpose(0, 2, 1, 3).reshape(2, 9, 64), y)
