"""Products with the matrices of experts on a GPU: at sizes of layers, the same bits each time, matrices on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from catalogs import shipped

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.runtime import Runtime

pytestmark = pytest.mark.gpu

CATALOG = shipped("moe")
GEMV, SCATTER = "moe.expert_gemv", "moe.gemm_scatter_add"
ROUTED, BACKWARD = "moe.routed_ffn", "moe.routed_ffn_backward"


@pytest.fixture
def torch():
    found = pytest.importorskip("torch")
    found.manual_seed(5)
    return found


def runtime(fusion: str, *kernels: str) -> Runtime:
    """A runtime whose fusion has these kernels alone, pending or not."""
    entry = CATALOG[fusion]
    chosen = tuple(
        replace(k, spec=k.spec.model_copy(update={"pending": ""})) for k in entry.kernels if k.name in kernels
    )
    entry = replace(entry, kernels=chosen, members=())
    return Runtime(replace(CATALOG, fusions=FrozenDict({fusion: entry})), device="cuda")


@pytest.mark.parametrize("kernel", ["resident", "stream_cluster", "stream", "decode", "offloaded", "plain"])
@pytest.mark.parametrize(("rows", "experts"), [(64, 8), (6, 128), (200, 3)])
def test_rows_of_experts(torch, kernel, rows, experts):
    """At the size of a layer, again and again: a copy that is not waited for would differ."""
    x, w = torch.randn(rows, 4096, device="cuda"), torch.randn(experts, 136, 4096, device="cuda")
    ids = torch.randint(-1, experts + 1, (rows,), device="cuda")
    run = runtime(GEMV, kernel)
    y = run.call(GEMV, x, w, ids)
    inside = (ids >= 0) & (ids < experts)
    exact = torch.bmm(w[torch.where(inside, ids, 0)].double(), x.double()[:, :, None])[:, :, 0]
    torch.testing.assert_close(y.double(), torch.where(inside[:, None], exact, 0.0), rtol=1e-4, atol=1e-3)
    for _ in range(20):
        assert torch.equal(run.call(GEMV, x, w, ids), y)


def test_cold_experts_are_read_in_host_memory(torch):
    """Some matrices on the GPU, the others where they are: each call leaves out the rows of the other."""
    x = torch.randn(9, 2048, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(16, 1536, 2048, dtype=torch.bfloat16)
    hot, cold = w[:4].cuda(), w[4:].pin_memory()
    ids = torch.tensor([3, 15, 4, 0, 9, -1, 4, 2, 7], device="cuda")
    run = runtime(GEMV, "stream", "offloaded")
    torch.cuda.synchronize()
    before = torch.cuda.max_memory_allocated()
    y = run.call(GEMV, x, hot, ids) + run.call(GEMV, x, cold, ids - 4)
    assert torch.cuda.max_memory_allocated() - before < w[0].nbytes
    assert run.kernels_used[f"{GEMV}/offloaded"] == 1
    assert torch.equal(y, run.call(GEMV, x, w.cuda(), ids))


@pytest.mark.parametrize("kernel", ["wgmma", "tensor_core"])
def test_products_are_added_in_one_order(torch, kernel):
    rows, tokens, n, k, experts = 4096, 512, 768, 256, 16
    base = torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16)
    ends = torch.randint(0, rows, (experts,), device="cuda", dtype=torch.int32).sort().values
    weights = torch.rand(rows, 1, device="cuda").bfloat16()
    run = runtime(SCATTER, kernel)
    for index in (torch.randint(-1, tokens, (rows,), device="cuda"), torch.full((rows,), 3, device="cuda")):
        y = run.call(SCATTER, base, x, w, ends, weights, index)
        ids = torch.searchsorted(ends, torch.arange(rows, device="cuda", dtype=torch.int32), right=True)
        product = torch.bmm(w[ids.clamp(max=experts - 1)].double(), x.double()[:, :, None])[:, :, 0] * weights
        product = torch.where((ids < experts)[:, None] & (index >= 0)[:, None], product, 0.0)
        exact = base.double().index_add(0, index.clamp(min=0), product)
        torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=0.05)
        for _ in range(10):
            assert torch.equal(run.call(SCATTER, base, x, w, ends, weights, index), y)


@pytest.mark.parametrize("kernel", ["wgmma", "tiles", "plain"])
def test_more_rows_than_16_bits_number(torch, kernel):
    """llama.cpp#13384: 65,536 rows of experts and 8 more; the last of them counts."""
    tokens, width, experts, k = 32772, 64, 8, 2
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(tokens, experts, device="cuda")
    gate_up = (torch.randn(experts, 2 * width, width, device="cuda") * width**-0.5).bfloat16()
    down = (torch.randn(experts, width, width, device="cuda") * width**-0.5).bfloat16()
    run, given = runtime(ROUTED, kernel), {"top_k": k, "renormalise": 1, "activation": "Swish"}
    y = run.call(ROUTED, x, logits, gate_up, down, None, **given)
    for part in (slice(0, 64), slice(-64, None)):
        assert torch.equal(y[part], run.call(ROUTED, x[part], logits[part], gate_up, down, None, **given))
    weights, ids = logits[-64:].double().softmax(-1).topk(k)
    weights, exact = weights / weights.sum(-1, keepdim=True), 0.0
    for e in range(experts):
        gate, up = (x[-64:].double() @ gate_up[e].double().T).chunk(2, -1)
        made = (torch.nn.functional.silu(gate) * up) @ down[e].double().T
        exact = exact + made * (weights * (ids == e)).sum(-1, keepdim=True)
    torch.testing.assert_close(y[-64:].double(), exact, rtol=2**-6, atol=0.02)


@pytest.mark.parametrize("kernel", ["wgmma", "tensor_core"])
def test_gradients_of_routed_experts(torch, kernel):
    """At the size of a layer, one expert without tokens: no further from float64 than bfloat16 between the products,
    and the same bits each time."""
    tokens, width, hidden, experts, k = 900, 1024, 768, 7, 2
    dy, x = (torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    logits = torch.randn(tokens, experts, device="cuda")
    logits[:, 5] = -9.0
    gate_up = (torch.randn(experts, 2 * hidden, width, device="cuda") * width**-0.5).bfloat16()
    down = (torch.randn(experts, width, hidden, device="cuda") * hidden**-0.5).bfloat16()
    leaves = [t.double().requires_grad_() for t in (x, logits, gate_up, down)]
    weights, ids = leaves[1].softmax(-1).topk(k)
    weights, y = weights / weights.sum(-1, keepdim=True), 0.0
    for e in range(experts):
        gate, up = (leaves[0] @ leaves[2][e].T).chunk(2, -1)
        made = (torch.nn.functional.silu(gate) * up) @ leaves[3][e].T
        y = y + made * (weights * (ids == e)).sum(-1, keepdim=True)
    exact = torch.autograd.grad(y, leaves, dy.double())
    run = runtime(BACKWARD, kernel)
    given = {"top_k": k, "renormalise": 1, "activation": "Swish"}
    found = run.call(BACKWARD, dy, x, logits, gate_up, down, None, **given)
    for got, right in zip(found, exact, strict=True):
        assert (got.double() - right).norm() <= 0.01 * right.norm()
    assert not found[2][5].any() and not found[3][5].any()
    for _ in range(5):
        again = run.call(BACKWARD, dy, x, logits, gate_up, down, None, **given)
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
