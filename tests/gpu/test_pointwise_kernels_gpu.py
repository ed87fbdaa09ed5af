"""Point-wise regions on a GPU: conformance, and sizes that only a GPU has room for."""

from __future__ import annotations

import pytest
import region_kit
from catalogs import shipped

from fusionreg.core.cache import Cache
from fusionreg.core.conformance import run
from fusionreg.core.runtime import Runtime

pytestmark = pytest.mark.gpu

FAMILY = shipped("pointwise")
KERNELS = {"vector", "turns", "transposed", "ragged", "strided"}
BITS = "v0 = BitwiseXor(x, a)\ny = BitwiseNot(v0)"
SUM = "v0 = Add(x, a)\ny = Relu(v0)"


def text(pattern, dtype, axes, other=""):
    return pattern, {"x": f"{dtype}[{axes}]", "a": f"{dtype}[{other or axes}]"}, {"y": f"{dtype}[{axes}]"}


CATALOG = region_kit.catalog(
    bits=text(BITS, "uint8", "A0 A1"),
    bits_row=text(BITS, "uint8", "A0 A1", "A1"),
    half=text(SUM, "float16", "A0 A1"),
    half3=text(SUM, "float16", "A0 A1 A2"),
)


def test_conforms():
    """One program, in this process; that all cases of all of them pass is what evidence says."""
    report = run(FAMILY, ["pointwise.region.chain"], device="cuda", cases="quick", cache=Cache())
    assert report.ok, "\n".join(map(str, report.failures))
    assert {e.kernel for e in report.evaluations if e.status == "PASSED"} == KERNELS


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def on(kernel, name, *arrays):
    """The output of exactly that kernel."""
    key = f"pointwise.{name}/{kernel}"
    runtime = Runtime(CATALOG, device="cuda", measured={key: 1e-9})
    found = runtime.call(f"pointwise.{name}", *arrays)
    assert dict(runtime.kernels_used) == {key: 1}
    return found


def same(torch, got, want):
    """``want``: slice of rows → what they hold. A few thousand rows at a time: these are large."""
    assert all(torch.equal(got[i : i + 4096], want(slice(i, i + 4096))) for i in range(0, got.shape[0], 4096))


def half_sum(torch, x, a):
    return lambda rows: torch.relu(x[rows].float() + a[rows].float()).half()


@pytest.mark.parametrize("columns", [65536, 65531])
@pytest.mark.parametrize("kernel", ["vector", "strided", "transposed"])
def test_more_than_2_31_elements(torch, kernel, columns):
    rows = 40016

    def bytes_(*shape):
        return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)

    x, a = bytes_(rows, columns), bytes_(columns, rows).T if kernel == "transposed" else bytes_(rows, columns)
    assert x.numel() > 2**31
    same(torch, on(kernel, "bits", x, a), lambda s: ~(x[s] ^ a[s]))
    if kernel != "transposed":
        row = bytes_(columns)
        same(torch, on(kernel, "bits_row", x, row), lambda s: ~(x[s] ^ row))


def test_offsets_beyond_2_31(torch):
    memory = torch.randn(2**31 + 4096, device="cuda", dtype=torch.float16)
    x = memory.as_strided((2, 1000), (2**31 + 8, 1))
    a = torch.randn(2, 1000, device="cuda", dtype=torch.float16)
    same(torch, on("vector", "half", x, a), half_sum(torch, x, a))


def test_more_tiles_than_a_grid_has_blocks_along_y_and_z(torch):
    x = torch.randn(70001, 40, 24, device="cuda", dtype=torch.float16)
    a = torch.randn(70001, 24, 40, device="cuda", dtype=torch.float16).transpose(1, 2)
    same(torch, on("transposed", "half3", x, a), half_sum(torch, x, a))
    x = torch.randn(4_200_000, 16, device="cuda", dtype=torch.float16)
    a = torch.randn(16, 4_200_000, device="cuda", dtype=torch.float16).T
    same(torch, on("transposed", "half", x, a), half_sum(torch, x, a))


@pytest.mark.parametrize("kernel", ["vector", "strided"])
@pytest.mark.parametrize("way", [(slice(None, None, -1),), (slice(None), slice(None, None, -1))])
def test_negative_strides(kernel, way):
    cupy = pytest.importorskip("cupy")
    a = cupy.random.standard_normal((999, 1024), dtype=cupy.float32).astype(cupy.float16)
    x = a[way]
    want = cupy.maximum(x.astype(cupy.float32) + a.astype(cupy.float32), 0).astype(cupy.float16)
    assert bool((on(kernel, "half", x, a) == want).all())


def test_a_graph_replays_on_new_values(torch):
    x, a = (torch.randn(300, 500, device="cuda", dtype=torch.float16) for _ in range(2))
    bound = Runtime(CATALOG, device="cuda").bind("pointwise.half", x, a.T.contiguous().T)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bound()
    x.normal_()
    graph.replay()
    assert torch.equal(y, torch.relu(x.float() + a.float()).half())
