"""Where routed experts occur: Mixtral-8x7B and Qwen3-30B-A3B, from decoding one token to prefill."""

from __future__ import annotations

from fusionreg.core.spec import Workload

_MIXTRAL = {"D": 4096, "E": 8, "J": 28672, "I": 14336}
_QWEN3 = {"D": 2048, "E": 128, "J": 1536, "I": 768}


def _workload(model: str, axes: dict[str, int], top_k: int, tokens: int, goal: str, mode: str = "b") -> Workload:
    return Workload(
        name=f"{model}-{tokens}",
        row="S18",
        mode="g" if mode == "g" else "b",
        axes={"M": tokens, **axes},
        dtypes={"T": "bfloat16", "L": "bfloat16"},
        attributes={"top_k": top_k, "renormalise": 1, "activation": "Swish"},
        absent=("bias",),
        goal=goal,
        summary="decoding" if tokens <= 64 else "prefill",
    )


WORKLOADS = (
    *(
        _workload("mixtral-8x7b", _MIXTRAL, 2, tokens, goal)
        for tokens, goal in ((1, "0.189"), (16, "0.748"), (64, "0.756"), (256, "0.775"), (4096, "4.6"))
    ),
    _workload("qwen3-30b-a3b", _QWEN3, 8, 1, "0.026", "g"),
    *(
        _workload("qwen3-30b-a3b", _QWEN3, 8, tokens, goal)
        for tokens, goal in ((16, "0.208"), (64, "0.319"), (256, "0.336"), (4096, "0.65"), (16384, "2.4"))
    ),
)
