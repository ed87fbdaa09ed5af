"""Generated device functions, executed: every point-wise operator at its dtypes on special values, and random graphs.

All graphs stand in one unit; ``pointwise_judge`` tells what is right.
"""

from __future__ import annotations

import numpy as np
import pytest
from pointwise_cases import INTEGERS
from pointwise_judge import all_cases, judge
from pointwise_units import Case, unit

from fusionreg.core.simulator import Checks

ALL = all_cases()
KEPT = [case for case in ALL if case.kind == "kept"]


def runner(kernel, geometry, cases: list[Case]):
    index = {case.name: i for i, case in enumerate(cases)}

    def run(case: Case) -> list[np.ndarray]:
        found = case.outputs()
        raw = [x.view(np.uint8) for x in case.arguments(found, np.zeros(1, np.uint8))]
        blocks = geometry((-(-case.size // 128), 1, 1), (128, 1, 1))
        kernel.launch([index[case.name], case.size, *raw], blocks, checks=Checks(guard=False))
        return found

    return run


@pytest.fixture(scope="module")
def results(build, geometry):
    return runner(build(unit([case.graph for case in ALL])), geometry, ALL)


@pytest.fixture(scope="module")
def without_headers(build, geometry):
    return runner(build(unit([case.graph for case in KEPT], headers="")), geometry, KEPT)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in ALL])
def test_it_computes_what_the_vocabulary_says(case: Case, results) -> None:
    judge(case, results(case))


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in KEPT])
def test_casts_inside_need_no_header(case: Case, without_headers) -> None:
    judge(case, without_headers(case))


def test_every_operator_and_integer_is_tried() -> None:
    tried = {(c.graph.nodes[0].op, c.graph.values[c.graph.inputs[-1]].dtype) for c in ALL if c.kind != "random"}
    assert {("Add", n) for n in INTEGERS} | {("Where", "bool"), ("Not", "bool"), ("Gelu", "float64")} <= tried
