"""Point-wise regions of a module on the GPU: strided and broadcast operands without copies, slots, and the values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fusionreg import load_registry  # noqa: E402

pytestmark = pytest.mark.gpu


class Chain(torch.nn.Module):
    """Fourteen operators and a reduction between them."""

    def forward(self, x, r, bias):
        h = torch.nn.functional.silu(x * 1.5 + bias)
        h = torch.where(h > 0.0, h, h * 0.2) + r
        m = h.mean(-1, keepdim=True)
        return (h - m).abs().clamp(max=2.0).exp() * bias, h


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "offset"])
def test_a_module(layout):
    registry = load_registry(device="cuda")
    torch.manual_seed(0)
    x = torch.randn(64, 96, 257, device="cuda", dtype=torch.bfloat16)
    r = torch.randn(64, 96, 257, device="cuda", dtype=torch.bfloat16)
    if layout == "transposed":
        r = torch.randn(257, 96, 64, device="cuda", dtype=torch.bfloat16).permute(2, 1, 0)
    elif layout == "expanded":
        r = r[:1].expand(64, 96, 257)
    elif layout == "offset":
        x = torch.randn(64 * 96 * 257 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(64, 96, 257)
    bias = torch.randn(257, device="cuda", dtype=torch.bfloat16)
    call = registry.fuse(Chain(), x, r, bias)
    got, want = call(x, r, bias), Chain()(x.double(), r.double(), bias.double())
    torch.testing.assert_close(got[1].double(), want[1], rtol=2**-7, atol=2**-7)
    # the second half starts from h rounded to bfloat16, in the module as in the kernels
    h = got[1].double()
    second = (h - h.mean(-1, keepdim=True).bfloat16().double()).abs().clamp(max=2.0).exp() * bias.double()
    torch.testing.assert_close(got[0].double(), second, rtol=2**-6, atol=2**-6)
    used = registry.runtime.kernels_used
    assert sum(used.values()) == 2 and all(k.startswith("pointwise.region.r") for k in used)
    assert not registry.runtime.fallbacks


def test_slots_of_a_norm():
    registry = load_registry(device="cuda")

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.RMSNorm(4096, eps=1e-5)

        def forward(self, x, gate):
            return self.norm(x) * torch.nn.functional.silu(gate)

    module = Gated().cuda().bfloat16().eval()
    x, gate = (torch.randn(2, 100, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        call = registry.fuse(module, x, gate)
        got = call(x, gate)
        want = module.double()(x.double(), gate.double())
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2**-7)
    (key,) = registry.runtime.kernels_used
    assert key.startswith("norm.rmsnorm.r")
