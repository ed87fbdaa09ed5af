"""Kernels that start before their predecessor ends: in order all the same, on a stream and in a graph."""

from __future__ import annotations

import dependent_kit
import pytest

import fusionreg
from fusionreg.core.cache import Cache
from fusionreg.core.runtime import Runtime

torch = pytest.importorskip("torch", reason="GPU tests use torch's streams and graphs")
pytestmark = pytest.mark.gpu

SIZES = [(16, 1024), (512, 1024), (4096, 2048)]


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9.0")


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory):
    """A runtime for each way, which takes the kernels of that way."""
    folder = tmp_path_factory.mktemp("chains")
    catalog, cache = dependent_kit.chains(folder), Cache(folder / "cache")
    return {
        way: Runtime(catalog, device="cuda", cache=cache, measured={f"acme.{f}/{way}": 1e-9 for f in ("shift", "rows")})
        for way in dependent_kit.WAYS
    }


def back_and_forth(runtimes, ways, x, bias, times=60):
    """``times`` times + 1 between two buffers: what one kernel reads the next one overwrites."""
    buffers = [x.clone(), torch.empty_like(x)]
    for i in range(times):
        runtimes[ways[i % len(ways)]].call("acme.shift", buffers[i % 2], bias, out=buffers[1 - i % 2])
    return buffers[times % 2]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("ways", [("waits",), ("early",), ("late",), ("early", "plain", "late", "waits")], ids=str)
def test_values(runtimes, ways, size):
    x, bias = torch.zeros(size, device="cuda", dtype=torch.bfloat16), torch.ones(size[1], device="cuda").bfloat16()
    assert (back_and_forth(runtimes, ways, x, bias) == 60).all()
    run = fusionreg.capture(lambda x: back_and_forth(runtimes, ways, x, bias), x)
    for start in (3, 100):
        assert (run(torch.full_like(x, start)) == start + 60).all()
    followers = sum(ways[i % len(ways)] != "plain" for i in range(1, 60))
    assert run.report.nodes.programmatic == followers, "the first one follows a copy of memory, and waits for its end"


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_among_kernels_of_others(runtimes, size):
    """Between two of them a kernel of torch's, which knows nothing of such launches."""
    x = torch.randn(size, device="cuda").bfloat16()
    right = x
    for _ in range(5):
        right = torch.softmax(right.float(), -1).bfloat16() * 3
    found = x
    for _ in range(5):
        found = runtimes["late"].call("acme.rows", found) * 3
    torch.testing.assert_close(found, right, rtol=0.02, atol=1e-3)
