"""Generated device functions on a real device: the cases of tests/sim/test_pointwise_code.py, judged alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from pointwise_judge import all_cases, judge
from pointwise_units import Case, unit

from fusionreg.core import headers
from fusionreg.core.compiler import nvrtc
from fusionreg.core.render import OPTIONS
from fusionreg.core.runtime.kernels import device_target

cupy = pytest.importorskip("cupy", reason="CuPy loads the unit")
pytestmark = pytest.mark.gpu

ALL = all_cases()
PARTS = 8  # units compiled side by side


@pytest.fixture(scope="module")
def results():
    from cupy.cuda.function import Module

    folders = [f"-I{d}" for d in headers.include_directories()]

    def compiled(part: int) -> bytes:
        text = unit([case.graph for case in ALL[part::PARTS]])
        return nvrtc.compile_unit(text, "k.cu", device_target(0), (*OPTIONS, *folders), "the point-wise unit")[0]

    with ThreadPoolExecutor(PARTS) as pool:
        cubins = list(pool.map(compiled, range(PARTS)))
    kernels = []
    for cubin in cubins:
        module = Module()
        module.load(cubin)
        kernels.append((module, module.get_function("k")))
    index = {case.name: i for i, case in enumerate(ALL)}

    def run(case: Case) -> list[np.ndarray]:
        i, found = index[case.name], case.outputs()
        raw = case.arguments(found, np.zeros(1, np.uint8))
        device = [cupy.asarray(np.ascontiguousarray(x).view(np.uint8).reshape(-1)) for x in raw]
        given = (np.int32(i // PARTS), np.int64(case.size), *device)
        kernels[i % PARTS][1]((-(-case.size // 128),), (128,), given)
        held = device[len(device) // 2 :]
        return [cupy.asnumpy(d).view(x.dtype) for d, x in zip(held, found, strict=False)]

    return run


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in ALL])
def test_it_computes_what_the_vocabulary_says(case: Case, results) -> None:
    judge(case, results(case))
