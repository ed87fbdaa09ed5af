"""Row kernels on a GPU: rows as long as models have them, and a grid that fits the device at hand."""

from __future__ import annotations

import pytest
from catalogs import shipped

from fusionreg.core.conformance import devices
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.trial import Trial
from fusionreg.core.frozen import FrozenDict

pytestmark = pytest.mark.gpu

CATALOG = shipped("norm")
TEMPLATES = ("row_stream.cu.j2", "row_backward_stream.cu.j2")
STREAMS = [f for f, e in CATALOG.fusions.items() for k in e.kernels if k.spec.template in TEMPLATES]
#: Whole lanes and not, one warp to a row and many, shared memory filled to the end.
LENGTHS = (768, 1600, 4096, 7176, 12288)


@pytest.fixture(scope="module")
def executor():
    return devices.executor_for("cuda")


@pytest.fixture(scope="module")
def small():
    """As if there were three multiprocessors: each block takes row after row."""
    found = devices.executor_for("cuda")
    found.multiprocessors = 3
    return found


@pytest.mark.parametrize("fusion", STREAMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", LENGTHS)
def test_long_rows(fusion, dtype, n, small):
    entry = CATALOG[fusion]
    values = {name: attribute.default for name, attribute in entry.spec.attributes.items()}
    axes = FrozenDict(M=29 if n > 2000 else 221, N=n)
    trial = Trial("long", FrozenDict(T=dtype), axes, attributes=FrozenDict(values))
    job = prepare(entry, entry.kernel("stream"), trial, small)
    if not isinstance(job, Job):
        pytest.skip(job.reason)  # longer than the kernel holds
    found = execute(job, small, CATALOG.ops, stress=True)
    assert found.status.name == "PASSED", found.reason


def test_the_device_tells_its_multiprocessors(executor):
    torch = pytest.importorskip("torch")
    assert executor.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
