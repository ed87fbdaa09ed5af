"""The open fusion ``pointwise.region`` proven on its own programs, and what conformance must not let pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import plugin_kit
import pytest
import region_kit
from catalogs import shipped

from fusionreg.core.conformance import run, run_mutants
from fusionreg.core.conformance.mutants import edit
from fusionreg.core.runtime import Runtime
from fusionreg.core.spec import FusionSpec, KernelSpec

CATALOG = shipped("pointwise")
KERNELS = {"vector", "turns", "transposed", "ragged", "strided"}
MEMBERS = [e.name for e in CATALOG.entries(["pointwise.region"])]

CASTS = 'v0 = Mul(x, x)\nv1 = Cast(v0, to="float16")\nv2 = Cast(v1, to="float32")\ny = Sub(v2, 1.0)'

LIVE = "if (position + VEC > fr_elements) continue;"
FAULTS = {
    "vector": [
        edit("beyond_the_end", LIVE, "if (position > fr_elements) continue;"),
        edit("no_last_elements", "fr_elements - fr_elements % VEC +", "fr_elements +"),
        edit("never_in_the_next_row", "k < room ?", "true ?"),
        edit("row_of_another", "const int i0 = iq1;", "const int i0 = 0;"),
    ],
    "strided": [
        edit("beyond_the_end", LIVE, ""),
        edit("column_of_another", "position - iq1 * fr_extent_1", "position - iq1"),
    ],
    "transposed": [
        edit("no_barrier", "__syncthreads();", ";"),
        edit("another_place", "(line / VEC ^ run) * VEC", "line / VEC * VEC"),
        edit("tiles_apart", "blockIdx.x) * EDGE", "blockIdx.x) * (EDGE + VEC)"),
    ],
    "ragged": [
        edit("no_barrier", "__syncthreads();", ";"),
        edit("the_next_row_too", "k >= -before && k < after", "true"),
        edit("never_shifted", "w[i] = __funnelshift_r(w[i], w[i + 1], shift * 8)", "w[i] = w[i]"),
        edit("another_row", "turn % WORD", "0"),
        edit("tiles_apart", "blockIdx.x) * STEP", "blockIdx.x) * (STEP + VEC)"),
    ],
}


@pytest.mark.parametrize("name", MEMBERS)
def test_conforms(name, sim_cache):
    report = run(CATALOG, [name], device="sim", cases="quick", cache=sim_cache)
    assert report.ok, "\n".join(map(str, report.failures))
    assert {e.kernel for e in report.evaluations if e.status == "PASSED"} == KERNELS


@pytest.mark.parametrize("kernel", FAULTS)
def test_every_mutant_dies(kernel, sim_cache):
    name = "residual" if kernel in ("ragged", "transposed") else "bias_relu"  # columns beside rows
    verdicts = run_mutants(
        CATALOG, [f"pointwise.region.{name}"], kernels=[kernel], device="sim", extra=FAULTS[kernel], cache=sim_cache
    )
    assert not [str(v) for v in verdicts if v.survived]
    assert {m.name for m in FAULTS[kernel]} <= {v.mutant for v in verdicts if v.applies}


def test_the_kernel_that_the_documentation_shows(tmp_path, sim_cache):
    page = (Path(__file__).parents[2] / "docs" / "writing-a-plugin.md").read_text()
    block = page.partition("### Point-wise kernels")[2].partition("```cuda\n")[2].partition("```")[0]
    kernel = KernelSpec(
        name="plain", template="k.cu.j2", regions="*", strides="*", grid="ceildiv(elements, 256)", block="256"
    )
    spec = FusionSpec(
        api=1, name="acme.sum", pattern="v0 = Add(x, bias)\ny = Relu(v0)", dtypes={}, kernels=[kernel],
        inputs={"x": "float32[M N]", "bias": "float32[N]"}, outputs={"y": "float32[M N]"},
    )  # fmt: skip
    runtime = Runtime(plugin_kit.catalog(tmp_path, {"k.cu.j2": block}, spec), device="sim", cache=sim_cache)
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal((30, 40)).astype("f4")[:, ::-2], rng.standard_normal(20).astype("f4")
    np.testing.assert_array_equal(runtime.call("acme.sum", x, bias), np.maximum(x + bias, 0))
    assert dict(runtime.kernels_used) == {"acme.sum/plain": 1}


def test_kernels_that_round_at_an_overflowed_cast_pass_and_wrong_ones_fail(sim_cache):
    text = (CASTS, {"x": "float32[A0 A1]"}, {"y": "float32[A0 A1]"})
    catalog = region_kit.catalog(squares=text)
    kernel = {"kernels": ["strided"], "device": "sim", "cache": sim_cache}
    report = run(catalog, ["pointwise.squares"], cases="quick", **kernel)
    assert report.ok, "\n".join(map(str, report.failures))
    wrong = [
        edit("largest_instead", "out0 = v3;", "out0 = v3 > 3e38f ? 65503.0f : v3;"),
        edit("nan_instead", "out0 = v3;", "out0 = v3 > 3e38f ? v3 - v3 : v3;"),
        edit("infinite_everywhere", "out0 = v3;", "out0 = v0 > 4.0f ? INFINITY : v3;"),
    ]
    verdicts = run_mutants(catalog, ["pointwise.squares"], extra=wrong, only=[m.name for m in wrong], **kernel)
    assert {m.name for m in wrong} <= {v.mutant for v in verdicts if v.applies}
    assert not [str(v) for v in verdicts if v.survived]
