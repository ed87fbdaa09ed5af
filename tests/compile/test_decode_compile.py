"""Attention for decoding under NVRTC: registers suffice at every width, without spills."""

from __future__ import annotations

import pytest
from catalogs import shipped

from fusionreg.core.bench import Subject
from fusionreg.core.compiler import compile_all
from fusionreg.core.problem import combinations
from fusionreg.core.render import render
from fusionreg.core.targets import REGISTERS_SM

pytest.importorskip("cupy_backends", reason="CuPy brings the binding of NVRTC")

CATALOG = shipped("attention")
ENTRY = CATALOG["attention.sdpa"]


def test_accumulators_stay_in_registers() -> None:
    kernel, sources, launches = ENTRY.kernel("decode"), [], []
    for width in (128, 256):
        axes = {"B": 16, "H": 32, "G": 8, "Q": 1, "K": 8192, "D": width, "E": width}
        problem = Subject.of(
            ENTRY, ENTRY.spec.workloads[0].model_copy(update={"axes": axes}), "sm_90a", CATALOG.ops
        ).problem
        chosen = next(iter(combinations(kernel, problem)))
        sources.append(render(ENTRY, kernel, problem, chosen.params))
        launches.append(chosen.launch)
    for launch, code in zip(launches, compile_all(sources), strict=True):
        assert not isinstance(code, Exception), code
        assert code.spills == 0 and code.registers * launch.threads <= REGISTERS_SM, (code.registers, code.spills)
