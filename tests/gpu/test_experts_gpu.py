"""Routed experts on two GPUs: the values and gradients of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "expert_parallel.py"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_what_one_does(tmp_path: Path) -> None:
    """Uneven loads, ranks without tokens or experts, all tokens on one rank, in one part and in several."""
    output = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--gradients", "--seconds", "0", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(output.read_text())
    assert len({row["case"] for row in found["values"]}) == 5 and len(found["gradients"]) == 2
    for row in found["values"]:
        assert row["error"] <= 2**-7, row
    for row in found["gradients"]:
        assert 0 < max(row["error"].values()) <= 2**-6, row
