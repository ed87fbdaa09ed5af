"""One rank of routed experts on the CPU: ``python experts_worker.py RANK STORE``; prints what it found."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from fusionreg.core.errors import ArgumentError
from fusionreg.torch import expert_parallel_ffn

#: Experts and tokens of each rank: one rank without experts, one without tokens.
EXPERTS, TOKENS = (2, 0, 3), (5, 4, 0)
RANKS, WIDTH, HIDDEN, TOP = 3, 16, 8, 2


def expected(x, logits, gate_up, down):
    """Expert by expert, in float64."""
    weights, ids = logits.double().softmax(-1).topk(TOP)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros(x.shape, dtype=torch.float64)
    for e in range(sum(EXPERTS)):
        gate, up = (x.double() @ gate_up[e].double().T).chunk(2, -1)
        made = (torch.nn.functional.silu(gate) * up) @ down[e].double().T
        y += made * (weights * (ids == e)).sum(-1, keepdim=True)
    return y


def part(tensor, sizes, rank):
    return tensor.split(sizes)[rank]


def eager(rows, ids, weights, gate_up, down, **_):
    """What given experts give, by operators that autograd knows."""
    y = torch.zeros_like(rows)
    for e in range(gate_up.shape[0]):
        gate, up = (rows @ gate_up[e].T).chunk(2, -1)
        y = y + (torch.nn.functional.silu(gate) * up) @ down[e].T * (weights * (ids == e)).sum(-1, keepdim=True)
    return y


def deviation(found, exact):
    return float((found - exact).abs().max() / exact.abs().max()) if found.numel() else 0.0


def gradients(rank, tensors, sizes, chunks):
    """Errors of the gradients of this rank's tokens, logits and experts. One rank's tokens want none."""
    exact = [t.double().requires_grad_() for t in tensors]
    slope = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1))
    expected(*exact).backward(slope.double())
    own = [part(t, n, rank).detach().requires_grad_() for t, n in zip(tensors, sizes, strict=True)]
    own[0].requires_grad_(rank != 1)
    y = expert_parallel_ffn(*own, activation="Swish", top_k=TOP, renormalise=1, chunks=chunks, ffn=eager)
    y.backward(part(slope, TOKENS, rank))
    wanted = [part(t.grad, n, rank) for t, n in zip(exact, sizes, strict=True)]
    return [
        deviation(t.grad, w) if t.grad is not None else float(w.abs().max() if t.requires_grad and w.numel() else 0.0)
        for t, w in zip(own, wanted, strict=True)
    ]


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    experts, tokens = sum(EXPERTS), sum(TOKENS)
    x, logits = torch.randn(tokens, WIDTH), torch.randn(tokens, experts)
    gate_up, down = torch.randn(experts, 2 * HIDDEN, WIDTH), torch.randn(experts, WIDTH, HIDDEN)
    tensors, sizes = (x, logits, gate_up, down), (TOKENS, TOKENS, EXPERTS, EXPERTS)
    own = [part(t, n, rank) for t, n in zip(tensors, sizes, strict=True)]
    exact = part(expected(x, logits, gate_up, down), TOKENS, rank)
    found = {}
    for chunks in (1, 3):
        y = expert_parallel_ffn(*own, activation="Swish", top_k=TOP, renormalise=1, chunks=chunks)
        found[f"error {chunks}"] = deviation(y, exact)
        found[f"rows {chunks}"] = list(y.shape)
        found[f"gradients {chunks}"] = gradients(rank, tensors, sizes, chunks)
    logits = torch.zeros(tokens, experts)
    logits[:, 4] = 9.0  # all tokens on experts of the last rank
    logits[:, 3] = 8.0
    exact = part(expected(x, logits, gate_up, down), TOKENS, rank)
    own[1] = part(logits, TOKENS, rank)
    y = expert_parallel_ffn(*own, activation="Swish", top_k=TOP, renormalise=1)
    found["error one rank"] = deviation(y, exact)
    try:
        expert_parallel_ffn(own[0], own[1][:, :4], *own[2:], activation="Swish", top_k=TOP)
    except ArgumentError as error:
        found["refused"] = str(error)
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
