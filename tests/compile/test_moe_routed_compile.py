"""Kernels of whole layers of experts under NVRTC: what they take of a multiprocessor, on several architectures."""

from __future__ import annotations

import pytest
from catalogs import shipped

from fusionreg.core.bench import Subject
from fusionreg.core.compiler import compile_all
from fusionreg.core.problem import combinations
from fusionreg.core.render import render
from fusionreg.core.targets import REGISTERS_SM, STATIC_SHARED, target

pytest.importorskip("cupy_backends", reason="CuPy brings the binding of NVRTC")

CATALOG = shipped("moe")


@pytest.mark.parametrize(
    ("fusion", "kernel", "arch", "dtypes"),
    [
        ("moe.routed_ffn", "tiles", "sm_80", {}),
        ("moe.routed_ffn_w8a16", "tiles", "sm_120f", {"W": "int8"}),
        ("moe.routed_ffn_w4a16", "decode", "sm_90a", {"T": "float16"}),
    ],
)
def test_they_fit_and_do_not_spill(fusion, kernel, arch, dtypes):
    entry, device = CATALOG[fusion], target(arch)
    workload = next(w for w in entry.spec.workloads if w.name.endswith("-1"))
    workload = workload.model_copy(update={"dtypes": {**workload.dtypes, **dtypes}})
    subject = Subject.of(entry, workload, arch, CATALOG.ops)
    chosen = next(iter(combinations(entry.kernel(kernel), subject.problem)))
    (code,) = compile_all([render(entry, entry.kernel(kernel), subject.problem, chosen.params)])
    assert not isinstance(code, Exception), code
    assert code.registers * chosen.launch.threads <= REGISTERS_SM and code.spills <= 16
    assert code.shared <= STATIC_SHARED and code.shared + chosen.launch.shared_memory <= device.shared_memory
