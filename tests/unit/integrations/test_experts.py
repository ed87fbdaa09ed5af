"""Routed experts over several ranks: what each token gets, and its gradient, whoever has its experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from fusionreg.core.errors import ArgumentError
from fusionreg.integrations.torch.experts import expert_parallel_ffn


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_three_ranks_of_which_one_has_no_expert_and_one_no_token(tmp_path: Path) -> None:
    found = run_ranks("experts_worker.py", 3, tmp_path, "moe")
    for rank, tokens in enumerate((5, 4, 0)):
        for chunks in (1, 3):
            assert found[rank][f"rows {chunks}"] == [tokens, 16]
            assert found[rank][f"error {chunks}"] < 1e-5
            assert len(found[rank][f"gradients {chunks}"]) == 4 and max(found[rank][f"gradients {chunks}"]) < 1e-5
        assert found[rank]["error one rank"] < 1e-5, "all tokens on experts of one rank"
        assert "5 on all ranks, logits of 4" in found[rank]["refused"]
    assert found[0]["error 1"] > 0, "it was computed"


def test_what_it_refuses() -> None:
    x, weights = torch.zeros(2, 4), torch.zeros(1, 8, 4)
    with pytest.raises(ArgumentError, match="unusable chunks"):
        expert_parallel_ffn(x, x[:, :1], weights, weights, ffn=print, activation="Swish", top_k=1, chunks=0)
