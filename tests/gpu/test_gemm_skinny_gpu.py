"""Products with few rows on a GPU: long sums, repeats bit by bit, weights in host memory, weights of 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from catalogs import shipped

from fusionreg.core.errors import ArgumentError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.runtime import Runtime

pytestmark = pytest.mark.gpu

CATALOG = shipped("gemm")


@pytest.fixture
def torch():
    found = pytest.importorskip("torch")
    found.manual_seed(5)
    return found


def only(fusion: str, name: str = "skinny", **params: int) -> Runtime:
    """A runtime whose fusion has that kernel for few rows alone, pending or not, with these parameters."""
    entry = CATALOG[fusion]
    kernel = entry.kernel(name)
    fixed = {name: (params.get(name, values[0]),) if params else values for name, values in kernel.spec.params.items()}
    spec = kernel.spec.model_copy(update={"pending": "", "params": FrozenDict(fixed)})
    entry = replace(entry, kernels=(replace(kernel, spec=spec),), members=())
    return Runtime(replace(CATALOG, fusions=FrozenDict({fusion: entry})), device="cuda")


@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_sum_of_64k_terms(torch, rows, split):
    k, n = 65536, 256
    x = torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn)
    w = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    ones = torch.ones(rows, 1, device="cuda"), torch.ones(n, device="cuda")
    runtime = only("gemm.scaled_float32", BM=max(8, rows), SPLIT=split)
    y = runtime.call("gemm.scaled_float32", x, w, *ones, transB=1, activation="none")
    exact, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    assert ((y - exact).abs() / size).max() < 2.0**-18
    for _ in range(8):
        assert torch.equal(runtime.call("gemm.scaled_float32", x, w, *ones, transB=1, activation="none"), y)


@pytest.mark.parametrize(("kernel", "transB"), [("skinny", 0), ("skinny", 1), ("stream", 1)])
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64, 100])
def test_against_cublas_at_the_size_of_a_layer(torch, rows, kernel, transB):
    n, k = 4096 + 24, 1024 + 40
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(*((n, k) if transB else (k, n)), device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    y = only("gemm.bias", kernel).call("gemm.bias", x, w, bias, activation="Relu", transB=transB)
    exact = torch.relu(x.double() @ (w.T if transB else w).double() + bias.double())
    assert ((y.double() - exact).abs() <= 1e-3 + 2.0**-7 * exact.abs()).all()


@pytest.mark.parametrize("kernel", ["skinny", "stream"])
def test_the_weight_is_read_for_many_rows(torch, kernel):
    """Stages are filled again some million times: what is given back too early shows in a few sums of thousands."""
    x, w = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    runtime, exact = only("gemm.activation", kernel), torch.relu(x.float() @ w.float().T)
    for _ in range(4):
        y = runtime.call("gemm.activation", x, w, activation="Relu", transB=1)
        assert ((y.float() - exact).abs() <= 0.5 + 2.0**-7 * exact.abs()).all()


def test_a_weight_in_pinned_host_memory_is_read_there(torch):
    x = torch.randn(16, 2048, device="cuda", dtype=torch.float16)
    w = torch.randn(4096, 2048, dtype=torch.float16)
    scale = torch.ones((), device="cuda", dtype=torch.float16)
    runtime, pinned, here = only("gemm.scale"), w.pin_memory(), w.cuda()
    torch.cuda.synchronize()
    before = torch.cuda.max_memory_allocated()
    y = runtime.call("gemm.scale", x, pinned, scale, transB=1, activation="none")
    assert torch.cuda.max_memory_allocated() - before < w.nbytes
    assert torch.equal(y, runtime.call("gemm.scale", x, here, scale, transB=1, activation="none"))
    with pytest.raises(ArgumentError, match="w is on cpu"):
        runtime.call("gemm.scale", x, w, scale, transB=1, activation="none")


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_every_byte_of_a_weight(torch, kind):
    """A row of x picks one weight of each channel; a NaN would spoil the whole channel and has one of its own."""
    codes = torch.arange(256, device="cuda", dtype=torch.uint8).repeat(16, 1)  # [N K]
    if kind != "int8":
        codes[1:] = codes[1:].where((codes[1:] & 0x7F) != 0x7F, 0)
    w = codes.view(getattr(torch, kind))
    x = torch.eye(256, device="cuda", dtype=torch.bfloat16)
    for rows in x.split(64):
        y = only("gemm.cast_scale").call("gemm.cast_scale", rows, w, x.new_ones(()), transB=1, activation="none")
        expected = rows.double() @ w.double().T
        assert torch.equal(y.double().nan_to_num(7777.0), expected.nan_to_num(7777.0))
