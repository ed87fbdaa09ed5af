"""Data-parallel training over two processes, parameters whole or sharded: gradients of the whole batch, one plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    first, second = run_ranks("ddp_worker.py", 2, tmp_path, "gemm, norm")
    for way in ("compiled", "inside", "sharded"):
        for found in (first[way], second[way]):
            assert found["error"] < 2e-5, way
        assert first[way]["plans"] == second[way]["plans"] and any(first[way]["plans"]), "the same on every rank"
    captured = [[names for s, names in first[w]["fused"] if s == "captured"] for w in ("compiled", "inside", "sharded")]
    assert all(len(graphs) > 1 for graphs in captured), "split at the buckets of DDP, and at blocks that are gathered"
    for graphs in captured:
        names = [n for names in graphs for n in names]
        assert names.count("norm.layernorm") == 2 and sum(n.startswith("gemm.") for n in names) >= 2
