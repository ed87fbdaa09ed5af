"""Gated feed-forward networks as people write them: one fusion takes both products, and nothing that looks like it."""

from __future__ import annotations

import pytest

import fusionreg

torch = pytest.importorskip("torch", reason="modules are torch modules")
F = torch.nn.functional


class Gated(torch.nn.Module):
    def __init__(self, activation, bias=False, first=lambda a, u: a * u):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(16, 24, bias=bias) for _ in range(2))
        self.activation, self.product = activation, first

    def forward(self, x):
        return self.product(self.activation(self.gate(x)), self.up(x))


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(device="sim")


def fused(registry, module, x):
    model = registry.fuse(module.eval(), x)
    return model, [site.fusion for site in model.sites]


@pytest.mark.parametrize(
    ("activation", "choice"),
    [
        (F.silu, "Swish"),
        (F.gelu, "Gelu"),
        (lambda g: F.gelu(g, approximate="tanh"), "gelu_tanh"),
        (F.relu, "Relu"),
        (torch.sigmoid, "Sigmoid"),
    ],
)
def test_both_products_are_one_fusion(registry, activation, choice):
    module, x = Gated(activation), torch.randn(2, 5, 16)
    model, names = fused(registry, module, x)
    assert names == ["gemm.gated"]
    match = next(m for m in registry.match(module, x) if m.fusion == "gemm.gated")
    assert match.choices["activation"] == choice and match.attributes["transB"] == 1
    with torch.no_grad():
        wanted = module.double()(x.double())
        torch.testing.assert_close(model(x).double(), wanted, rtol=1e-5, atol=1e-6)
    assert dict(registry.runtime.kernels_used)["gemm.gated/plain"] >= 1


def test_the_other_order_of_the_product(registry):
    _, names = fused(registry, Gated(F.silu, first=lambda a, u: u * a), torch.randn(5, 16))
    assert names == ["gemm.gated"]


@pytest.mark.parametrize(
    "square", [lambda g: F.relu(g).square(), lambda g: F.relu(g) * F.relu(g), lambda g: (r := F.relu(g)) * r]
)
def test_gates_that_are_the_square_of_a_relu(registry, square):
    module, x = Gated(square), torch.randn(2, 5, 16)
    model, names = fused(registry, module, x)
    assert names == ["gemm.gated_relu2"]
    with torch.no_grad():
        torch.testing.assert_close(model(x).double(), module.double()(x.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        Gated(lambda g: F.relu(g) * F.relu(-g)),  # of another gate
        Gated(lambda g: F.relu(g).pow(3)),
        Gated(F.silu, first=lambda a, u: a + u),  # a sum
        Gated(F.silu, bias=True),  # biases between
        Gated(torch.cos),  # no activation of the family
    ],
)
def test_what_only_looks_like_it(registry, module):
    assert "gemm.gated" not in fused(registry, module, torch.randn(5, 16))[1]


def test_products_of_two_inputs(registry):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))

        def forward(self, x):
            return F.silu(self.gate(x)) * self.up(x.flip(0))

    assert "gemm.gated" not in fused(registry, Two(), torch.randn(5, 16))[1]
