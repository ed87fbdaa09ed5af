"""Programmatic launches in the simulator: whoever touches a tensor before it has waited is found, and nobody else."""

from __future__ import annotations

import dependent_kit
import numpy as np
import pytest

from fusionreg.core.errors import SimulatorError
from fusionreg.core.runtime import Runtime
from fusionreg.core.simulator import Checks

CHECKED = Checks(accesses=True, orders=("forward", "reverse"), timeout=60.0)


def kernel(body: str) -> str:
    return f"""\
extern "C" __global__ void k(const float* __restrict__ x, float* __restrict__ y, long long n) {{
  __shared__ float room[64];
  const long long i = blockIdx.x * 64LL + threadIdx.x;
{body}
}}
"""


RIGHT = {
    "waits first": "fr_sim::grid_dependency_wait(); y[i] = x[i];",
    "indices and shared memory in front": """\
  room[threadIdx.x] = float(i);
  __syncthreads();
  const float before = room[63 - threadIdx.x];
  fr_sim::grid_dependency_wait();
  y[i] = x[i] + 0 * before;""",
    "one thread waits for its block": """\
  if (threadIdx.x == 5) fr_sim::grid_dependency_wait();
  __syncthreads();
  y[i] = x[i];""",
    "launches its successor early": """\
  fr_sim::grid_dependency_wait();
  fr_sim::grid_dependency_launch();
  y[i] = x[i];""",
}

WRONG = {
    "never": ("y[i] = x[i];  // HERE", "load before grid_dependency_wait"),
    "a load in front": ("const float v = x[i];  // HERE\n  fr_sim::grid_dependency_wait(); y[i] = v;", "tensor x"),
    "a store in front": (
        "y[i] = 0;  // HERE\n  fr_sim::grid_dependency_wait(); y[i] = x[i];", "store before grid_dependency_wait",
    ),
    "one thread waits for itself": (
        "if (threadIdx.x == 0) fr_sim::grid_dependency_wait();\n  y[i] = x[i];  // HERE", "tensor x",
    ),
    "a block that does not": (
        "if (blockIdx.x == 0) fr_sim::grid_dependency_wait();\n  y[i] = x[i];  // HERE", "tensor x",
    ),
    "its successor alone": ("fr_sim::grid_dependency_launch();\n  y[i] = x[i];  // HERE", "tensor x"),
}  # fmt: skip


def run(build, geometry, body: str, programmatic: bool = True, checks: Checks = CHECKED) -> np.ndarray:
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    launch = geometry(grid=(2, 1, 1), block=(64, 1, 1), programmatic=programmatic)
    build(kernel(body)).launch([x, y, 128], launch, checks=checks, names=("x", "y", "n"))
    return y


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_kernels_that_wait_in_time(build, geometry, body):
    assert (run(build, geometry, body) == np.arange(128)).all()


@pytest.mark.parametrize(("body", "says"), WRONG.values(), ids=WRONG)
def test_kernels_that_do_not(build, geometry, body, says):
    with pytest.raises(SimulatorError, match="grid_dependency_wait") as caught:
        run(build, geometry, body)
    line = next(n for n, text in enumerate(kernel(body).splitlines(), 1) if "// HERE" in text)
    assert says in str(caught.value) and caught.value.facts["detector"] == "dependency"
    assert caught.value.facts["line"] == line
    assert (run(build, geometry, body, programmatic=False)[1:] != 0).all(), "an ordinary launch may"


def test_a_launch_that_never_waits_is_found_without_looking_at_accesses(build, geometry):
    with pytest.raises(SimulatorError, match="no thread called grid_dependency_wait"):
        run(build, geometry, "y[i] = x[i];", checks=Checks(guard=True))


@pytest.mark.parametrize("way", dependent_kit.WAYS)
def test_device_library(tmp_path, way, sim_cache):
    catalog = dependent_kit.chains(tmp_path, (way,))
    runtime = Runtime(catalog, device="sim", cache=sim_cache, checks=CHECKED)
    x = np.random.default_rng(0).standard_normal((5, 72)).astype(np.float32)
    assert np.array_equal(runtime.call("acme.shift", x, x[0]), x + x[0])
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(runtime.call("acme.rows", x), e / e.sum(axis=1, keepdims=True), rtol=1e-5)
