"""The runtime on the real simulator: the same call that a GPU would serve, on NumPy arrays and CPU tensors."""

from __future__ import annotations

import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import plugin_kit
import pytest

from fusionreg.core.cache import Cache, CacheWarning
from fusionreg.core.errors import SimulatorError
from fusionreg.core.runtime import Runtime
from fusionreg.core.simulator import Checks

FUSION = "acme.add_relu"


@pytest.fixture
def cache(sim_cache):
    return sim_cache


def runtime_of(tmp_path, cache, template=plugin_kit.ADD_RELU, checks=None, **changes):
    made = plugin_kit.catalog(tmp_path, {"k.cu.j2": template}, plugin_kit.add_relu(**changes))
    return Runtime(made, "sim", cache, checks)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_call_gives_the_rounded_value(tmp_path, cache, dtype):
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal((3, 5, 70)).astype(dtype), rng.standard_normal(70).astype(dtype)
    x[0, 0, :3] = [np.nan, np.inf, -np.inf]
    y = runtime_of(tmp_path, cache).call(FUSION, x, bias)
    exact = x.astype(np.float64) + bias.astype(np.float64)
    right = np.where(exact < 0, 0, exact).astype(dtype)
    assert y.dtype == x.dtype and np.array_equal(y.astype(np.float64), right.astype(np.float64), equal_nan=True)


def test_tensors_of_torch_share_their_memory(tmp_path, cache):
    torch = pytest.importorskip("torch")
    runtime = runtime_of(tmp_path, cache)
    x, bias = torch.randn(6, 40).bfloat16(), torch.randn(40).bfloat16()
    bound = runtime.bind(FUSION, x, bias)
    x.fill_(2.0)
    assert torch.equal(bound(), torch.relu(x.float() + bias.float()).bfloat16())
    assert runtime.kernels_used == {f"{FUSION}/plain": 2}


def test_strided_views_reach_a_kernel_that_takes_strides(tmp_path, cache):
    template = plugin_kit.ADD_RELU.replace("x[i]", "x[i / N * x_stride_0 + i % N * x_stride_1]")
    runtime = runtime_of(tmp_path, cache, template, kernel_strides="x")
    base = np.arange(160, dtype=np.float32).reshape(8, 20) - 80
    for x in (base.T, base[:, 3:9], base[::-1], base[::2, ::3]):
        bias = np.zeros(x.shape[1], np.float32)
        assert np.array_equal(runtime.call(FUSION, x, bias), np.maximum(x, 0))


def test_workspace_and_checks(tmp_path, cache):
    template = """\
{{ signature }} {
  float* sums = reinterpret_cast<float*>(workspace);  // one per row
  const long long row = blockIdx.x;
  if (threadIdx.x == 0) sums[row] = fr::to_float(x[row * N]);
  __syncthreads();
  for (long long j = threadIdx.x; j < N; j += 32) y[row * N + j] = fr::from_float<T>(sums[row] + fr::to_float(bias[j]));
}
"""
    geometry = {"kernel_workspace": "M * 4", "kernel_grid": "M", "kernel_block": "32"}
    x, bias = np.ones((4, 40), np.float32), np.arange(40, dtype=np.float32)
    runtime = runtime_of(tmp_path / "right", cache, template, Checks.full(), **geometry)
    assert np.array_equal(runtime.call(FUSION, x, bias), np.broadcast_to(bias + 1, (4, 40)))
    beyond = template.replace("j < N;", "j <= N;")
    with pytest.raises(SimulatorError):
        runtime_of(tmp_path / "wrong", cache, beyond, Checks.full(), **geometry).call(FUSION, x, bias)


def test_a_second_process_compiles_nothing(tmp_path, cache):
    """Compiled simulator kernels are cached like cubins, and a damaged one is made anew."""
    code = (
        "import sys, pathlib; sys.path[:0] = {path!r}\nimport numpy as np, plugin_kit\n"
        "from fusionreg.core.cache import Cache\nfrom fusionreg.core.runtime import Runtime\n"
        "c = plugin_kit.catalog(pathlib.Path({folder!r}), {{'k.cu.j2': plugin_kit.ADD_RELU}}, plugin_kit.add_relu())\n"
        "y = Runtime(c, 'sim', Cache({cache!r})).call('acme.add_relu', np.ones((2, 3), 'f4'), np.ones(3, 'f4'))\n"
        "print(y.sum())"
    )

    def run(folder):
        text = code.format(path=sys.path, folder=str(tmp_path / folder), cache=str(tmp_path / "cache"))
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip() == "12.0", done.stderr
        found = Cache(tmp_path / "cache")
        return {p: p.stat().st_mtime_ns for p in found.path.rglob("*") if p.is_file()}, done.stderr

    first, _ = run("a")
    again, said = run("b")
    assert first == again and not said
    for path in first:
        path.write_bytes(path.read_bytes()[:100])
    healed, said = run("c")
    assert "damaged" in said and set(healed) == set(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        assert all(Cache(tmp_path / "cache").entry(p.parts[-3], p.name) for p in healed)
