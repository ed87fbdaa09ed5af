"""What layers of experts take of memory, and how fast experts in host memory are read, on one GPU.

``python benchmarks/experts.py [--output benchmarks/results/experts.json]``. Memory is the most that is allocated during
a call beyond what it is given, result included, in MB: of fused calls and of torch's operators for the same. Offloaded
experts: bytes of the matrices in host memory that rows name over the time of the calls, in GB/s, beside a copy of as
many bytes to the GPU; with the first of them on the GPU, too, which the rows of a second call name.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fusionreg
from fusionreg.torch import ops

CALLS = 9


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def peak(call: Callable[[], Any]) -> float:
    """MB beyond what is there before the call."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = call()
    torch.cuda.synchronize()
    del found
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def milliseconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(CALLS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def projection() -> dict[str, Any]:
    """Rows times gathered matrices: 64 rows, 8 experts of 4096 x 128, float32."""
    x, w = random(64, 4096, dtype=torch.float32), random(8, 4096, 128, dtype=torch.float32)
    ids = torch.randint(0, 8, (64,), device="cuda")
    found: dict[str, Any] = {"name": "64 rows times matrices of 8 experts, 4096 x 128, float32"}
    found |= {"fused": peak(lambda: ops.moe.expert_gemv(x, w, ids, trans=0, indices="none"))}
    return found | {"torch": peak(lambda: torch.bmm(x[:, None], w[ids]))}


def layer(name: str, tokens: int, width: int, hidden: int, experts: int, top_k: int) -> dict[str, Any]:
    x, logits = random(tokens, width), random(tokens, experts)
    gate_up, down = random(experts, 2 * hidden, width), random(experts, width, hidden)

    def fused() -> torch.Tensor:
        return ops.moe.routed_ffn(x, logits, gate_up, down, activation="Swish", top_k=top_k, renormalise=1)

    def grouped() -> torch.Tensor:
        """As transformers has it."""
        weights, ids = torch.softmax(logits.float(), -1).topk(top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        own, order = ids.reshape(-1).sort()
        ends = torch.histc(own.float(), bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)
        h = torch._grouped_mm(x[order // top_k], gate_up.mT, offs=ends)
        gate, up = h.chunk(2, -1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.mT, offs=ends)
        y = y * weights.to(y.dtype).reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        return y[back].view(tokens, top_k, width).sum(1)

    return {"name": f"{name}, {tokens} tokens, bfloat16", "fused": peak(fused), "torch": peak(grouped)}


def offloaded(rows: int, n: int, k: int, experts: int, hot: int = 0) -> dict[str, Any]:
    """``hot``: how many of the experts are on the GPU; each row names another one, or as many of them do."""
    x, registry = random(rows, k), fusionreg.load_registry(device="cuda")
    near, w = random(hot, n, k), torch.empty(experts - hot, n, k, dtype=torch.bfloat16, pin_memory=True)
    w.copy_(random(experts - hot, n, k))
    ids = torch.arange(rows, device="cuda") % experts
    read = max(0, min(rows, experts) - hot) * n * k * 2
    there = torch.empty(read // 2, dtype=torch.bfloat16, device="cuda")

    def call() -> Any:
        far = registry.call("moe.expert_gemv", x, w, ids - hot if hot else ids, trans=1)
        return far + registry.call("moe.expert_gemv", x, near, ids, trans=1) if hot else far

    y = call()
    pairs = zip(ids.tolist(), x, strict=True)
    exact = torch.stack([torch.mv(near[e] if e < hot else w[e - hot].cuda(), row) for e, row in pairs])
    assert (y - exact).abs().max() <= 0.02 * exact.abs().max(), "another result than torch's"
    copied = milliseconds(lambda: there.copy_(w.view(-1)[: there.numel()], non_blocking=True))
    called = milliseconds(call)
    return {
        "name": f"{rows} rows, {experts} experts of {n} x {k}, {experts - hot} of them in pinned memory, bfloat16",
        "GB/s": read / called / 1e6, "GB/s of a copy": read / copied / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="benchmarks/results/experts.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__)}
    for kind, made in (
        ("offloaded", lambda: offloaded(8, 4096, 4096, 8)),
        ("offloaded", lambda: offloaded(8, 4096, 4096, 8, hot=4)),
        ("offloaded", lambda: offloaded(8, 1536, 2048, 64)),
        ("MB beyond inputs", projection),
        ("MB beyond inputs", lambda: layer("mixtral-8x7b", 64, 4096, 14336, 8, 2)),
        ("MB beyond inputs", lambda: layer("qwen3-30b-a3b", 4096, 2048, 768, 128, 8)),
    ):
        with torch.no_grad():
            row = made()
        print(kind, json.dumps(row), flush=True)
        facts.setdefault(kind, []).append(row)
        Path(options.output).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
