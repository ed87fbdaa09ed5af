"""Backward row kernels on parts of other sizes: a grid that fits, and the same gradients from it."""

from __future__ import annotations

import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.conformance.coverage import problem_of
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.conformance.trial import Trial
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.problem import select

CATALOG = shipped("norm")
BACKWARD = [
    (name, kernel.spec.name)
    for name, entry in CATALOG.fusions.items()
    for kernel in entry.kernels
    if kernel.spec.template.startswith("row_backward") and kernel.spec.name != "spread"  # which is for few rows
]
SPREAD = [
    name
    for name, entry in CATALOG.fusions.items()
    if any(k.spec.template == "row_backward_spread.cu.j2" for k in entry.kernels)
]
ROWS = FrozenDict(M=37, N=40)


def trial(entry, kernel="stream"):
    values = {name: attribute.default for name, attribute in entry.spec.attributes.items()}
    kind = "bfloat16" if kernel in ("columns", "packed") else "float32"
    return Trial("part", FrozenDict(T=kind), ROWS, attributes=FrozenDict(values))


@pytest.mark.parametrize(("fusion", "kernel"), BACKWARD)
@pytest.mark.parametrize("multiprocessors", [1, 16, 132, 188])
def test_the_grid_is_resident_at_once(fusion, kernel, multiprocessors):
    entry = CATALOG[fusion]
    problem = problem_of(entry, trial(entry, kernel), "sm_90a", multiprocessors)
    chosen = next(c for c in select(entry, problem, pending=True).accepted if c.kernel.name == kernel)
    assert chosen.launch.cooperative
    assert 1 <= chosen.launch.blocks <= multiprocessors
    assert chosen.launch.threads <= 1024  # the bounds of the launch keep registers to what one block may have


@pytest.mark.parametrize("fusion", SPREAD)
@pytest.mark.parametrize(("multiprocessors", "rows"), [(2, 1), (16, 3), (132, 5), (188, 94)])
def test_the_grid_of_few_rows_is_resident_at_once(fusion, multiprocessors, rows):
    entry = CATALOG[fusion]
    few = trial(entry).with_("few", axes=FrozenDict(M=rows, N=30000))
    problem = problem_of(entry, few, "sm_90a", multiprocessors)
    chosen = next(c for c in select(entry, problem, pending=True).accepted if c.kernel.name == "spread")
    assert chosen.launch.cooperative and rows <= chosen.launch.blocks <= multiprocessors
    assert chosen.launch.threads <= 1024


@pytest.mark.parametrize(("fusion", "kernel"), BACKWARD)
def test_gradients_from_a_small_part(fusion, kernel, sim_cache):
    """Three multiprocessors: every block takes many rows, and the sums over rows have few parts."""
    entry, executor = CATALOG[fusion], SimExecutor(sim_cache, ahead=False)
    executor.multiprocessors = 3
    job = prepare(entry, entry.kernel(kernel), trial(entry, kernel), executor)
    assert isinstance(job, Job), job.reason
    assert job.candidate.launch.blocks <= 3 and np.prod(job.arrays["dy"].shape) == 37 * 40
    found = execute(job, executor, CATALOG.ops)
    assert found.status.name == "PASSED", found.reason


@pytest.mark.parametrize(
    ("fusion", "kernel", "rows", "n"),
    [
        ("gelu_dropout_layernorm", "stream", 19, 4096),
        ("gelu_dropout_layernorm_backward", "stream", 8, 4096),
        ("layernorm", "stream", 5, 12288),
        ("residual_rmsnorm", "stream", 70, 776),
        ("dropout_residual_layernorm_backward", "stream", 3, 11000),
        ("gelu_dropout_layernorm_backward", "packed", 9, 4096),
        ("gelu_dropout_layernorm_backward", "packed", 250, 40),
        ("gelu_dropout_layernorm_backward", "packed", 3, 8456),
        ("layernorm_backward", "columns", 5, 12288),
        ("residual_rmsnorm_backward", "columns", 70, 776),
        ("dropout_residual_layernorm_backward", "columns", 4, 11000),
        ("rmsnorm_backward", "columns", 200, 40),
    ],
)
def test_row_after_row(fusion, kernel, rows, n, sim_cache):
    """One multiprocessor: blocks go on until every stage of what is on its way was used again."""
    entry, executor = CATALOG[f"norm.{fusion}"], SimExecutor(sim_cache, ahead=False)
    executor.multiprocessors = 1
    made = trial(entry).with_("rows", dtypes=FrozenDict(T="bfloat16"), axes=FrozenDict(M=rows, N=n))
    job = prepare(entry, entry.kernel(kernel), made, executor)
    assert isinstance(job, Job), job.reason
    found = execute(job, executor, CATALOG.ops, stress=n <= 256)  # accesses too, where that is quick
    assert found.status.name == "PASSED", found.reason
