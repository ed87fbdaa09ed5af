"""The gemm kernels under NVRTC: every shipped architecture, no spills by default, within each chip's limits."""

from __future__ import annotations

import pytest
from catalogs import shipped

from fusionreg.core.compiler import compile_all
from fusionreg.core.conformance import coverage
from fusionreg.core.conformance.cases import base_axes
from fusionreg.core.problem import combinations
from fusionreg.core.render import render
from fusionreg.core.targets import REGISTERS_SM, SHIPPED, STATIC_SHARED, accepts, target

pytest.importorskip("cupy_backends", reason="CuPy brings the binding of NVRTC")

CATALOG = shipped("gemm")
#: Those of routed adapters have a module of their own.
KERNELS = [
    (f, k.name) for f, e in CATALOG.fusions.items() for k in e.kernels if k.library is None and f != "gemm.lora_routed"
]


#: Bytes a thread may spill: nothing to speak of where kernels are tuned; more where releases of ptxas differ.
SPILLS = {"sm_80": 32, "sm_90a": 32, "sm_100f": 96, "sm_120f": 96}


def problem_of(fusion: str, kernel: str, arch: str, dtype: str = "bfloat16", activation: str = "Gelu", **attributes):
    entry = CATALOG[fusion]
    plain, further, _ = coverage.rows(entry, entry.kernel(kernel), base_axes(entry), arch, None)
    rows = [*plain, *further]
    row = next((r for r in rows if r.dtypes["T"] == dtype), rows[0])  # some have float32 alone
    attributes = {name: spec.default for name, spec in entry.spec.attributes.items()} | attributes
    if "transB == 1" in entry.kernel(kernel).spec.requires:
        attributes["transB"] = 1
    weights = [name for name in ("w", "gate", "up") if name in entry.inputs]
    choices = {"activation": activation} if "activation" in entry.choices else {}
    forms = {name: attributes["transB"] for name in weights if len(entry.inputs[name].forms) > 1}
    row = row.with_("x", choices=choices, attributes=attributes, forms=forms)
    problem = coverage.problem_of(entry, row, arch)
    assert problem is not None
    return entry, entry.kernel(kernel), problem


@pytest.mark.parametrize(("fusion", "kernel"), KERNELS)
def test_default_parameters_on_every_shipped_architecture(fusion, kernel):
    sources, launches = [], []
    arches = [a for a in SHIPPED if any(accepts(d, target(a)) for d in CATALOG[fusion].kernel(kernel).spec.targets)]
    for arch in arches:
        entry, entry_kernel, problem = problem_of(fusion, kernel, arch)
        chosen = next(iter(combinations(entry_kernel, problem)))
        sources.append(render(entry, entry_kernel, problem, chosen.params))
        launches.append(chosen.launch)
    for arch, code, launch in zip(arches, compile_all(sources), launches, strict=True):
        assert not isinstance(code, Exception), code
        assert code.registers * launch.threads <= REGISTERS_SM
        assert code.spills <= SPILLS[arch], f"{arch}: {code.spills} bytes of spills by NVRTC {code.nvrtc}"
        assert code.shared <= STATIC_SHARED and code.shared + launch.shared_memory <= target(arch).shared_memory


@pytest.mark.parametrize("kernel", ["plain", "tensor_core"])
def test_every_combination_of_parameters(kernel):
    entry, entry_kernel, problem = problem_of("gemm.scale_bias", kernel, "sm_90a", activation="none")
    found = list(combinations(entry_kernel, problem))
    assert len(found) == {"plain": 1, "tensor_core": 5}[kernel]
    for candidate, code in zip(
        found, compile_all([render(entry, entry_kernel, problem, c.params) for c in found]), strict=True
    ):
        assert not isinstance(code, Exception), f"{candidate.params}: {code}"
        assert code.registers * candidate.launch.threads <= REGISTERS_SM, candidate.params


def test_tensor_cores_are_used_and_copies_are_asynchronous():
    entry, kernel, problem = problem_of("gemm.bias", "tensor_core", "sm_80")
    text = render(entry, kernel, problem, next(iter(combinations(kernel, problem))).params).text
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in text and "cp.async.cg.shared.global" in text


def test_asynchronous_copies_have_no_cache_policy():
    """For sm_90 ptxas forgets to write the register of the policy: an illegal instruction when it runs."""
    entry, kernel, problem = problem_of("gemm.cast_scale", "skinny", "sm_90a")
    text = render(entry, kernel, problem, next(iter(combinations(kernel, problem))).params).text
    copies = [line for line in text.splitlines() if "cp.async." in line and "bulk" not in line and "_group" not in line]
    assert copies and not any("cache_hint" in line for line in copies)


def test_a_kernel_includes_only_the_headers_its_dtypes_need():
    entry, kernel, problem = problem_of("gemm.bias", "plain", "sm_80", dtype="float32")
    text = render(entry, kernel, problem, next(iter(combinations(kernel, problem))).params).text
    assert "#include" not in text
