"""Products with weights of 8 bits as models write them: matched, run in the simulator, and equal to the original."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from onnx_models import model, node
from torch import nn
from torch.nn import functional as F

import fusionreg
from fusionreg.api import NothingFusedWarning
from fusionreg.core.pattern.instantiate import instantiate
from fusionreg.integrations.torch.library_peers import library_peers

RNG = np.random.default_rng(11)
M, K, N = 5, 32, 48
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(device="sim")


def weight(kind: str, *shape: int) -> np.ndarray:
    values = RNG.integers(-127, 128, shape)
    return values.astype(np.int8) if kind == "int8" else (values / 64).astype(E4M3)


class PerChannel(nn.Module):
    """One way to write x @ (w · scale)."""

    def __init__(self, way: str, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        stored = torch.from_numpy(weight("int8", N, K))
        self.register_buffer("w", stored if kind == "int8" else (stored / 64).to(torch.float8_e4m3fn))
        self.register_buffer("scale", (torch.rand(N) / 64 + 0.001).to(dtype))
        self.bias = nn.Parameter(torch.randn(N).to(dtype))
        self.way = way

    def forward(self, x):
        w, s = self.w.to(x.dtype), self.scale
        if self.way == "behind":
            return F.gelu(F.linear(x, w) * s + self.bias)
        if self.way == "before":
            return torch.relu(F.linear(x, w * s[:, None], self.bias))
        if self.way == "transposed":
            return x @ (w * s.unsqueeze(1)).t()
        if self.way == "packed" and x.dtype != torch.float64:
            return torch.ops.aten._weight_int8pack_mm(x.flatten(0, 1), self.w, s).unflatten(0, x.shape[:2])
        return F.linear(x, w) * s  # bare


@pytest.mark.parametrize(
    ("way", "kind", "dtype", "fusion"),
    [
        ("behind", "int8", torch.float16, "gemm.cast_scale"),
        ("before", "int8", torch.bfloat16, "gemm.dequantize"),
        ("transposed", "float8", torch.float16, "gemm.dequantize"),
        ("bare", "float8", torch.bfloat16, "gemm.cast_scale"),
        ("packed", "int8", torch.bfloat16, "gemm.cast_scale"),
    ],
)
def test_weights_of_torch_modules(registry, way, kind, dtype, fusion):
    torch.manual_seed(0)
    module, x = PerChannel(way, kind, dtype), torch.randn(2, M, K, dtype=dtype)
    fused = registry.fuse(torch.export.export(module, (x,)))
    assert [s.fusion for s in fused.sites] == [fusion]
    y = fused(x).double()
    exact = PerChannel.forward(module.double(), x.double())
    assert (y - exact).abs().max() <= 2.0 ** (-9 if dtype == torch.float16 else -6) * exact.abs().max()


class WideScales(PerChannel):
    """Scales are float32, x and the result are not."""

    def forward(self, x):
        w, s, dtype, way = self.w, self.scale, x.dtype, self.way
        if way == "behind":
            return (F.linear(x, w.to(dtype)) * s).to(dtype)
        if way == "wide_result":
            return F.linear(x, w.to(dtype)) * s
        if way == "biased":
            return F.gelu((F.linear(x, w.to(dtype)) * s).to(dtype) + self.bias)
        if way == "before":
            return torch.relu(F.linear(x, (w.to(s.dtype) * s[:, None]).to(dtype), self.bias))
        if way == "transposed":
            return x @ (w * s.unsqueeze(-1)).t().to(dtype)
        if way == "divided":
            return F.linear(x, (w * s[:, None] / 127).to(dtype))
        return F.linear(x, (w.to(s.dtype) * s[:K]).to(dtype))  # along k


@pytest.mark.parametrize(
    ("way", "kind", "fusion"),
    [
        ("behind", "float8", "gemm.cast_scale_wide"),
        ("wide_result", "int8", "gemm.cast_scale_wide"),
        ("biased", "int8", "gemm.cast_scale_wide"),
        ("before", "float8", "gemm.dequantize_wide"),
        ("transposed", "int8", "gemm.dequantize_wide"),
        ("divided", "int8", "gemm.dequantize_wide"),
        ("along_k", "int8", ""),
    ],
)
def test_scales_in_float32(registry, way, kind, fusion):
    """They have bits that bfloat16 lacks."""
    torch.manual_seed(0)
    module, x = WideScales(way, kind, torch.float32), torch.randn(M, K, dtype=torch.bfloat16)
    module.bias = nn.Parameter(module.bias.bfloat16())
    fused = registry.fuse(torch.export.export(module, (x,)))
    found = [s.fusion for s in fused.sites if s.fusion.startswith("gemm")]
    assert found == ([fusion] if fusion else [])
    y = fused(x)
    assert y.dtype == module(x).dtype
    exact = module.double()(x.double())
    assert (y.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


class Scaled(nn.Module):
    def __init__(self, per_row: bool, bias: bool) -> None:
        super().__init__()
        self.register_buffer("w", torch.randn(N, K).to(torch.float8_e4m3fn))
        self.register_buffer("scale", torch.rand(1, N) if per_row else torch.rand(()))
        self.bias = nn.Parameter(torch.randn(N).bfloat16()) if bias else None

    def forward(self, x, scale):
        return F.silu(torch._scaled_mm(x, self.w.t(), scale, self.scale, bias=self.bias, out_dtype=torch.bfloat16))


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_scaled_mm(registry, per_row, bias):
    torch.manual_seed(1)
    module, x = Scaled(per_row, bias), torch.randn(16, K).to(torch.float8_e4m3fn)
    scale = torch.rand(16, 1) if per_row else torch.rand(())
    fused = registry.fuse(torch.export.export(module, (x, scale)))
    assert [s.fusion for s in fused.sites] == ["gemm.scaled_bias" if bias else "gemm.scaled"]
    y, exact = fused(x, scale).float(), module(x, scale).float()
    assert (y - exact).abs().max() <= 2.0**-7 * exact.abs().max()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_scales_that_are_multiplied_first(registry, per_row, swapped):
    class First(Scaled):
        def forward(self, x, scale):
            scales = self.scale * scale if swapped else scale * self.scale
            return F.silu((x.float() @ self.w.t().float() * scales).bfloat16())

    torch.manual_seed(3)
    module, x = First(per_row, False), torch.randn(16, K).to(torch.float8_e4m3fn)
    scale = torch.rand(16, 1) if per_row else torch.rand(())
    fused = registry.fuse(torch.export.export(module, (x, scale)))
    assert [s.fusion for s in fused.sites] == ["gemm.scaled"]
    y, exact = fused(x, scale).float(), module(x, scale).float()
    assert (y - exact).abs().max() <= 2.0**-7 * exact.abs().max()


def test_a_scale_of_each_element_is_none_of_a_row(registry):
    class Each(nn.Module):
        def forward(self, x, w, scale, each):
            return (x.float() @ w.t().float() * (scale * each)).bfloat16()

    args = [torch.randn(n, K).to(torch.float8_e4m3fn) for n in (16, N)]
    args += [torch.rand(()), torch.rand(16, N)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingFusedWarning)
        fused = registry.fuse(torch.export.export(Each(), tuple(args)))
    assert not any(s.fusion.startswith("gemm.scaled") for s in fused.sites)


class Requantized(Scaled):
    """Its result is an operand of the next such product."""

    def forward(self, x, scale):
        return (super().forward(x, scale) * self.gain).to(torch.float8_e4m3fn)


def test_a_scaled_product_cast_to_8_bits_again(registry):
    torch.manual_seed(2)
    module, x, scale = Requantized(True, False), torch.randn(16, K).to(torch.float8_e4m3fn), torch.rand(16, 1)
    module.register_buffer("gain", torch.tensor(0.5, dtype=torch.bfloat16))
    fused = registry.fuse(torch.export.export(module, (x, scale)), policy="aggressive")  # nothing was measured
    (site,) = fused.sites
    assert site.fusion.startswith("gemm.scaled.r")
    y, exact = fused(x, scale).float(), module(x, scale).float()
    assert (y - exact).abs().max() <= 2.0**-3 * exact.abs().max()


def quantized(kind: str, axis: int, zero: int | None, fold: bool = False):
    """ONNX: y = Relu(x @ DequantizeLinear(w)), w [K N], or [N K] behind a Transpose."""
    shape = (K, N) if axis == 1 else (N, K)
    constants = {"w": weight(kind, *shape), "s": RNG.random(N).astype(np.float16) / 64}
    names = ["w", "s"]
    if zero is not None:
        constants["z"] = np.full(N, zero, np.int8 if kind == "int8" else E4M3)
        names.append("z")
    nodes = [node("DequantizeLinear", names, ["d"], axis=axis)]
    right = "d"
    if axis == 0:
        nodes.append(node("Transpose", ["d"], ["t"], perm=[1, 0]))
        right = "t"
    nodes += [node("MatMul", ["x", right], ["h"]), node("Relu", ["h"], ["y"])]
    return model(nodes, {"x": ([M, K], "float16")}, {"y": (None, "float16")}, constants), constants


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("kind", "zero"), [("int8", None), ("int8", 0), ("float8", None)])
def test_dequantised_weights_of_onnx_models(registry, axis, kind, zero):
    proto, constants = quantized(kind, axis, zero)
    fused = registry.fuse(proto)
    assert [s.fusion for s in fused.sites] == ["gemm.dequantize"]
    x = RNG.standard_normal((M, K)).astype(np.float16)
    w = constants["w"].astype(float) * constants["s"].astype(float).reshape((N, 1) if axis == 0 else (1, N))
    w = w if axis == 1 else w.T
    y = fused(x=x)["y"].astype(float)
    np.testing.assert_allclose(y, np.maximum(x.astype(float) @ w, 0), rtol=2e-3, atol=2e-3)


def test_an_offset_is_not_dropped(registry):
    fused = registry.fuse(quantized("int8", 1, 3)[0])
    assert "gemm.dequantize" not in [s.fusion for s in fused.sites]


def test_a_scale_along_k_is_none_of_a_channel(registry):
    """Square, so that shapes alone would let it pass."""
    constants = {"w": weight("int8", K, K), "s": RNG.random(K).astype(np.float16)}
    nodes = [node("DequantizeLinear", ["w", "s"], ["d"], axis=0), node("MatMul", ["x", "d"], ["y"])]
    proto = model(nodes, {"x": ([M, K], "float16")}, {"y": (None, "float16")}, constants)
    with pytest.warns(NothingFusedWarning):
        registry.fuse(proto)

    class AlongK(nn.Module):
        def forward(self, x, w, s):
            return F.linear(x, w.to(x.dtype) * s)

    given = torch.randn(M, K).half(), torch.zeros(K, K, dtype=torch.int8), torch.ones(K).half()
    with pytest.warns(NothingFusedWarning):
        registry.fuse(torch.export.export(AlongK(), given))


def test_scaled_products_of_onnx_models(registry):
    """Both operands dequantised, in float32."""
    constants = {"w": weight("float8", K, N), "sw": RNG.random(N).astype(np.float32), "sx": np.float32(0.5)}
    nodes = [
        node("DequantizeLinear", ["x", "sx"], ["a"]), node("DequantizeLinear", ["w", "sw"], ["b"]),
        node("MatMul", ["a", "b"], ["h"]), node("Sigmoid", ["h"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, {"x": ([M, K], "float8_e4m3fn")}, {"y": (None, "float32")}, constants)
    fused = registry.fuse(proto)
    assert [s.fusion for s in fused.sites] == ["gemm.scaled_float32"]
    x = RNG.standard_normal((M, K)).astype(E4M3)
    exact = 0.5 * x.astype(float) @ (constants["w"].astype(float) * constants["sw"])
    np.testing.assert_allclose(fused(x=x)["y"], 1 / (1 + np.exp(-exact)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("activation", ["none", "Relu"])
def test_the_library_that_scaled_products_are_measured_against(registry, per_row, activation):
    entry, ops = registry.catalog["gemm.scaled"], registry.catalog.ops
    shapes = {"x": (16, K), "w": (N, K), "scale_x": (16, 1) if per_row else (), "scale_w": (N,) if per_row else ()}
    graph = instantiate(
        entry.patterns[0], entry.spec, dtypes={"T": "bfloat16"}, shapes=shapes, ops=ops,
        choices={"activation": activation}, attributes={"transB": 1},
    )  # fmt: skip
    (peer,) = library_peers(graph, ops)
    assert peer.name == "product" and peer.inputs == ("x", "w", "scale_x", "scale_w")
    assert peer.computes == ("" if activation == "none" else "(x @ w) times its scales")
    torch.manual_seed(2)
    x, w = (torch.randn(shapes[n]).to(torch.float8_e4m3fn) for n in ("x", "w"))
    scales = [torch.rand(shapes[n]) + 0.5 for n in ("scale_x", "scale_w")]
    exact = (x.double() @ w.double().t()) * scales[0].double() * scales[1].double()
    assert torch.allclose(peer.exact(x, w, *scales)[0].double(), exact)
    assert ((peer.call(x, w, *scales).double() - exact).abs() <= 2.0**-7 * exact.abs().max()).all()
