"""What softmax is measured on: scores of transformers, forward and backward, and long rows."""

from __future__ import annotations

from fusionreg.core.spec import Workload

#: Of all bytes what moves where half of the keys are hidden, and not read.
_FORWARD, _BACKWARD = "0.75 * floor", "0.6667 * floor"


def workloads(words: str) -> tuple[Workload, ...]:
    """Those of ``attention.<words>``, all bfloat16."""

    def scores(b: int, h: int, n: int, goal: str, mask: str = "") -> Workload:
        axes = {"B": b, "H": h} if mask else {"H": b * h}
        return Workload(
            name=f"{b}x{h}x{n}x{n}-bf16{'-' + mask if mask else ''}",
            row="S16",
            axes={**axes, "Q": n, "K": n},
            dtypes={"T": "bfloat16"},
            forms={mask: f"{'bool' if mask == 'mask' else 'T'}[B 1 1 K]"} if mask else {},
            absent=("scale",),
            goal=goal,
        )

    def rows(m: int, n: int, goal: str, row: str = "S16") -> Workload:
        return Workload(
            name=f"{m}x{n}-bf16", row=row, axes={"Q": m, "K": n}, dtypes={"T": "bfloat16"}, absent=("scale",), goal=goal
        )

    if words in ("mask_causal_softmax", "bias_causal_softmax"):
        sizes = ((8, 16, 512, f"{_FORWARD} / 0.85"), (4, 32, 2048, f"{_FORWARD} / 0.92"))
        return tuple(scores(*size, words.partition("_")[0]) for size in sizes)
    if words == "causal_softmax_backward":
        sizes = ((8, 16, 512, f"{_BACKWARD} / 0.88"), (4, 32, 2048, f"{_BACKWARD} / 0.92"))
        return tuple(scores(*size) for size in sizes)
    if words == "softmax_backward":
        return rows(32768, 4096, "1.02 * best"), rows(32768, 16384, "1.02 * best"), rows(16384, 65536, "floor / 0.92")
    if words == "softmax":
        shapes = (8 * 12 * 512, 512), *((32768, n) for n in (1024, 4096, 16384, 65536))  # the first are BERT's
        return tuple(rows(m, n, "", "S16 more") for m, n in shapes)
    return ()
