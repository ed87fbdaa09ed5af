"""The gemm family on a GPU: conformance, and problems too large for anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from catalogs import shipped

from fusionreg.core.cache import Cache
from fusionreg.core.conformance import run
from fusionreg.core.frozen import FrozenDict

pytestmark = pytest.mark.gpu

CATALOG = shipped("gemm")


@pytest.mark.parametrize("kernel", [k.name for k in CATALOG["gemm.bias"].kernels])
def test_conforms(kernel):
    """One fusion, in this process; that all cases of all kernels pass is what evidence says."""
    report = run(CATALOG, ["gemm.bias"], kernels=[kernel], device="cuda", cases="quick", cache=Cache())
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] > 10


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def runtime():
    from fusionreg.core.runtime import Runtime

    return Runtime(CATALOG, device="cuda")


def only(fusion, kernel):
    """A runtime whose fusion has that kernel alone, pending or not."""
    from fusionreg.core.runtime import Runtime

    entry = CATALOG[fusion]
    ready = entry.kernel(kernel)
    ready = replace(ready, spec=ready.spec.model_copy(update={"pending": ""}))
    entry = replace(entry, kernels=(ready,), members=())
    return Runtime(replace(CATALOG, fusions=FrozenDict({fusion: entry})), device="cuda")


def ones(torch, *shape):
    return torch.ones(shape, device="cuda", dtype=torch.float16)


@pytest.mark.parametrize("k", [8, 7], ids=["tensor_core", "plain"])
def test_outputs_of_more_than_2_to_the_31_elements(torch, runtime, k):
    rows, columns = 2**16 + 3, 2**15 + 8
    x = ones(torch, rows, k)
    x[-1] = 2
    y = runtime.call("gemm.scale", x, ones(torch, k, columns), ones(torch), activation="none", transB=0)
    for row, value in ((0, k), (2**16, k), (-2, k), (-1, 2 * k)):
        assert (y[row] == value).all()


@pytest.mark.parametrize("k", [8, 7], ids=["tensor_core", "plain"])
def test_operands_of_more_than_2_to_the_31_elements(torch, runtime, k):
    """Rows 2^22 elements apart: offsets pass 2^31 after 512 of them."""
    base = torch.full((520, 2**22), float("nan"), device="cuda", dtype=torch.float16)
    x = base[:, :k]
    x[...] = 1
    y = runtime.call("gemm.activation", x, ones(torch, k, 16), activation="Relu", transB=0)
    assert (y == k).all()


@pytest.mark.parametrize("leading", [(65536, 1), (70000,)], ids=str)
def test_more_rows_than_a_grid_axis_holds(torch, runtime, leading):
    x = torch.zeros((*leading, 8), device="cuda", dtype=torch.bfloat16)
    x[-1] = 1
    w = torch.ones((8, 8), device="cuda", dtype=torch.bfloat16)
    y = runtime.call("gemm.activation", x, w, activation="Relu", transB=0)
    assert (y[-1] == 8).all() and y.float().sum() == 64


@pytest.mark.parametrize("transB", [0, 1])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_against_cublas_at_the_size_of_a_layer(torch, runtime, dtype, transB):
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    x = torch.randn(512, 1024, device="cuda", dtype=kind)
    w = torch.randn(*((4096, 1024) if transB else (1024, 4096)), device="cuda", dtype=kind) / 32
    bias = torch.randn(4096, device="cuda", dtype=kind)
    y = runtime.call("gemm.bias", x, w, bias, activation="Gelu", transB=transB)
    exact = torch.nn.functional.gelu(x.double() @ (w.T if transB else w).double() + bias.double())
    ulp = 2.0 ** (-10 if dtype == "float16" else -7)
    assert ((y.double() - exact).abs() <= 1e-5 + ulp * exact.abs()).all()


@pytest.mark.parametrize(
    ("fusion", "kernel", "kind", "bound"),
    [
        ("gemm.activation", "plain", "float32", 2.0**-20),
        ("gemm.activation", "tensor_core", "float16", 2.0**-18),
        ("gemm.activation", "tensor_core", "bfloat16", 2.0**-18),
        ("gemm.activation", "wgmma", "bfloat16", 2.0**-18),
        ("gemm.scaled", "wgmma", "float8_e4m3fn", 2.0**-13),  # products of 128 of k are summed in 14 bits
    ],
)
def test_a_sum_of_64k_terms(torch, fusion, kernel, kind, bound):
    """Against float64: the error is of the size of the terms' sum, beside the cast of the result."""
    torch.manual_seed(1)
    m, n, k = 128, 264, 65536
    x, w = (torch.randn(rows, k, device="cuda").to(getattr(torch, kind)) for rows in (m, n))
    given = [x, w] if fusion == "gemm.activation" else [x, w, x.new_ones((m, 1)).float(), x.new_ones(n).float()]
    words = {"activation": "Relu"} if fusion == "gemm.activation" else {"activation": "none", "T": "bfloat16"}
    y = only(fusion, kernel).call(fusion, *given, transB=1, **words)
    exact, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    exact = torch.relu(exact) if fusion == "gemm.activation" else exact
    cast = torch.finfo(y.dtype).eps / 2 * exact.abs()
    assert ((y.double() - exact).abs() <= bound * size + cast).all()


def test_sixteen_repeats_are_bit_identical(torch, runtime):
    x, w = torch.randn(333, 520, device="cuda").half(), torch.randn(520, 264, device="cuda").half()
    first = runtime.call("gemm.activation", x, w, activation="Swish", transB=0)
    for _ in range(16):
        assert torch.equal(runtime.call("gemm.activation", x, w, activation="Swish", transB=0), first)
