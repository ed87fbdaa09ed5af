"""The row kernels under NVRTC: the family's workloads on a Hopper part without spills to speak of."""

from __future__ import annotations

import pytest
from catalogs import shipped

from fusionreg.core.bench import Subject
from fusionreg.core.compiler import compile_source
from fusionreg.core.conformance.coverage import problem_of
from fusionreg.core.conformance.trial import Trial
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.problem import combinations
from fusionreg.core.render import render
from fusionreg.core.targets import REGISTERS_SM, target

CATALOG = shipped("norm")
ROWS = [
    (name, workload)
    for name, entry in CATALOG.fusions.items()
    if any(k.spec.template.startswith("row_") for k in entry.kernels)
    for workload in entry.spec.workloads
]

BACKWARD = [
    name
    for name, entry in CATALOG.fusions.items()
    if any(k.spec.template == "row_backward_stream.cu.j2" for k in entry.kernels)
]

#: Bytes a thread may spill: a few words, and more on paths that hardly any row takes; the gradient of rows of 12288
#: behind GELU and dropout is faster with the most of them.
SPILLS = 160


@pytest.mark.parametrize(("fusion", "workload"), ROWS, ids=[f"{n}-{w.name}" for n, w in ROWS])
def test_a_workload_fits_a_multiprocessor(fusion, workload):
    subject = Subject.of(CATALOG[fusion], workload, "sm_90a", CATALOG.ops)
    chosen = subject.chosen
    assert chosen is not None
    code = compile_source(render(subject.entry, chosen.kernel, subject.problem, chosen.params), None)
    assert code.registers * chosen.launch.threads <= REGISTERS_SM
    assert code.spills <= SPILLS
    assert chosen.launch.shared_memory + code.shared <= target("sm_90a").shared_memory


@pytest.mark.parametrize("n", [768, 3072, 8192])
@pytest.mark.parametrize("fusion", BACKWARD)
def test_a_full_multiprocessor_has_the_shared_memory(fusion, n):
    """Rows that leave hardly any of it: what is declared in the template counts as well."""
    entry = CATALOG[fusion]
    values = {name: attribute.default for name, attribute in entry.spec.attributes.items()}
    trial = Trial("full", FrozenDict(T="bfloat16"), FrozenDict(M=512, N=n), attributes=FrozenDict(values))
    problem = problem_of(entry, trial, "sm_90a")
    assert problem is not None
    chosen = next(combinations(entry.kernel("stream"), problem))
    code = compile_source(render(entry, chosen.kernel, problem, chosen.params), None)
    assert chosen.launch.shared_memory + code.shared <= target("sm_90a").shared_memory
