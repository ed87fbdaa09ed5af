"""Cross entropy of rows of scores and its gradient, in the simulator: labels that do not count, and that are none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import softmax as kit
import torch

from fusionreg.core.cache import Cache
from fusionreg.core.conformance import run
from fusionreg.core.conformance.cases import derive
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.runtime import Runtime

CATALOG = kit.ready("cross_entropy")
LOSS, ROWS = "attention.cross_entropy", "attention.cross_entropy_rows"
F = torch.nn.functional


@pytest.mark.parametrize("fusion", [LOSS, f"{LOSS}_backward"])
def test_conforms(fusion, sim_cache):
    report = run(CATALOG, [fusion], device="sim", cases="quick", cache=sim_cache)
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] >= 50


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(300, 24), (3, 5128), (9, 77)])
def test_against_torch(reduction, shape, sim_cache):
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal(shape).astype("f"), rng.integers(0, shape[1], shape[0])
    labels[1::4] = -100
    twin = torch.from_numpy(x).double().requires_grad_()
    want = F.cross_entropy(twin, torch.from_numpy(labels), reduction=reduction)
    dy = torch.randn_like(want)
    name, more = (ROWS, {}) if reduction == "none" else (LOSS, {"reduction": reduction})
    runtime = Runtime(CATALOG, device="sim", cache=sim_cache)
    loss = runtime.call(name, x, labels, **more)
    dx = runtime.call(f"{name}_backward", dy.numpy().astype("f"), x, labels, **more)
    np.testing.assert_allclose(loss, want.detach().numpy(), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(dx, torch.autograd.grad(want, twin, dy)[0].numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("fusion", "text", "other"),
    [
        (LOSS, "fr::grid_sync();", "__syncthreads();"),
        (LOSS, "all / of", "all"),
        (LOSS, "label != ignore_index", "true"),
        (LOSS, "sum *= exp(before - base())", "sum *= 1.0f"),
        (LOSS, "label >= 0 && label < K", "label < K"),
        (ROWS, "    __syncthreads();\n", ""),
        (f"{LOSS}_backward", "labels[row] != ignore_index", "true"),
        (f"{LOSS}_backward", "j == hit - n", "j == 0"),
        (f"{ROWS}_backward", "entropy::write(dx + row * K + n, {})", "(void)to"),
    ],
)
def test_faults_are_noticed(fusion, text, other):
    entry, executor = CATALOG[fusion], SimExecutor(Cache(), target="sm_90a", multiprocessors=3)
    names = ("base", "ignored", "classes", "no_class", "odd", "long")
    for trial in derive(entry, entry.kernel("rows"), "sm_90a", "quick"):
        if trial.name.rpartition("-")[2] in names:
            found = prepare(entry, entry.kernel("rows"), trial, executor)
            if isinstance(found, Job):
                assert text in found.source.text or "reduction" in trial.attributes
                broken = replace(found, source=changed(found.source, found.source.text.replace(text, other)))
                if execute(broken, executor, CATALOG.ops, stress="sync" in text).status.failed:
                    return
    raise AssertionError("every case passed")
