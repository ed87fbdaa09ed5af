"""What the family is measured on: rows of transformers, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.spec import Workload

#: Fusion → (row, rows, elements of a row, goal).
_ROWS: Mapping[str, tuple[tuple[str, int, int, str], ...]] = {
    "gelu_dropout_layernorm": (
        ("S6", 8192, 4096, "floor / 0.88"),
        ("S6", 4096, 12288, "floor / 0.88"),
        ("S6", 16384, 1024, "floor / 0.86"),
    ),
    "gelu_dropout_layernorm_backward": (
        ("S6", 8192, 4096, "floor / 0.85"),
        ("S6", 4096, 12288, "floor / 0.85"),
        ("S6", 16384, 1024, "floor / 0.82"),
    ),
    "residual_rmsnorm": (("norm", 8192, 4096, "best"),),
    "rmsnorm_backward": (("norm", 8192, 4096, "floor / 0.87"),),
    "rmsnorm": (("norm more", 8192, 4096, ""), ("norm more", 8192, 8192, "")),
    "layernorm": tuple(("norm more", 16384, n, "") for n in (768, 1600, 5120)),
    "layernorm_backward": (("norm more", 8192, 4096, ""),),
    "dropout_residual_layernorm": (("norm more", 8192, 4096, ""),),
}


def workloads(words: str) -> tuple[Workload, ...]:
    """Those of ``norm.<words>``, all bfloat16; where elements are dropped, one in ten is."""
    return tuple(
        Workload(
            name=f"{m}x{n}-bf16",
            row=row,
            axes={"M": m, "N": n},
            dtypes={"T": "bfloat16"},
            attributes={"p": 0.1} if "dropout" in words else {},
            goal=goal,
        )
        for row, m, n, goal in _ROWS.get(words, ())
    )
