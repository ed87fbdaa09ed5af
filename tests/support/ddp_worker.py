"""One rank of a data-parallel training step on the CPU: ``python ddp_worker.py RANK STORE``; prints what it found."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusionreg
from fusionreg.torch import backend

RANKS, ROWS = 2, 4


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def step(way: str, rank: int, registry: Any, x: torch.Tensor, reference: nn.Module) -> dict[str, Any]:
    """Two steps on this rank's part of the batch: the error of the gradients, and what was fused in which graphs."""
    reports: list[Any] = []
    options = {"registry": registry, "device": "sim", "report": reports.append, "policy": "aggressive", "strict": True}
    model = copy.deepcopy(reference)

    def compiled(module: nn.Module) -> Any:
        return torch.compile(module, backend=backend, options={**options, "inner": "eager"}, dynamic=False)

    def parallel(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, bucket_cap_mb=0.004)

    if way == "sharded":
        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (RANKS,)))
    run = {"compiled": lambda: compiled(parallel(model)), "inside": lambda: parallel(compiled(model))}.get(
        way, lambda: compiled(model)
    )()
    for _ in range(2):
        model.zero_grad()
        run(x[rank * ROWS : (rank + 1) * ROWS]).square().mean().backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    error = max(float((_whole(p.grad) - q.grad).abs().max() / q.grad.abs().max()) for p, q in pairs)
    fused = [[r.stage, [s.fusion for s in r.fused]] for r in reports]
    return {"error": error, "fused": fused, "plans": [r.plans for r in reports]}


def _whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096  # so that a model this small has several
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    reference, x = nn.Sequential(Block(), Block()), torch.randn(RANKS * ROWS, 16)
    reference(x).square().mean().backward()  # the whole batch in one process
    registry = fusionreg.load_registry(device="sim")
    found = {way: step(way, rank, registry, x, reference) for way in ("compiled", "inside", "sharded")}
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
