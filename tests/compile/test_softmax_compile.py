"""Softmax kernels under NVRTC: the family's workloads on a Hopper part, in registers and without spills to speak of."""

from __future__ import annotations

import pytest
import softmax as kit

from fusionreg.core.bench import Subject
from fusionreg.core.compiler import compile_source
from fusionreg.core.render import render
from fusionreg.core.targets import REGISTERS_SM

CATALOG = kit.awake()
ROWS = [(name, workload) for name, entry in CATALOG.fusions.items() for workload in entry.spec.workloads]


@pytest.mark.parametrize(("fusion", "workload"), ROWS, ids=[f"{n}-{w.name}" for n, w in ROWS])
def test_a_workload_stays_in_registers(fusion, workload):
    subject = Subject.of(CATALOG[fusion], workload, "sm_90a", CATALOG.ops)
    chosen = subject.chosen
    vocabulary = fusion.startswith("attention.log_softmax")  # such rows fill a multiprocessor, or are read twice
    assert chosen is not None and chosen.params["VEC"] == 8
    assert vocabulary or chosen.kernel.spec.name != "long"
    code = compile_source(render(subject.entry, chosen.kernel, subject.problem, chosen.params), None)
    blocks = 1 if vocabulary else 2
    assert blocks * code.registers * chosen.launch.threads <= REGISTERS_SM, "of two blocks one loads, one computes"
    assert code.spills <= 32
