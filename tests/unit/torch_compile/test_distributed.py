"""Data-parallel training over two processes, parameters whole or sharded: gradients of the whole batch, one plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).parents[2] / "support" / "ddp_worker.py"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    command = [sys.executable, str(WORKER)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=300) for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0, 0], said[0][1][-2000:]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    for way in ("compiled", "inside", "sharded"):
        for found in (first[way], second[way]):
            assert found["error"] < 2e-5, way
        assert first[way]["plans"] == second[way]["plans"] and any(first[way]["plans"]), "the same on every rank"
    captured = [[names for s, names in first[w]["fused"] if s == "captured"] for w in ("compiled", "inside", "sharded")]
    assert all(len(graphs) > 1 for graphs in captured), "split at the buckets of DDP, and at blocks that are gathered"
    for graphs in captured:
        names = [n for names in graphs for n in names]
        assert names.count("norm.layernorm") == 2 and sum(n.startswith("gemm.") for n in names) >= 2
