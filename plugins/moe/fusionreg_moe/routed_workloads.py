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


def quantized(words: str) -> tuple[Workload, ...]:
    """The same layers with weights of fewer bits, of the fusion ``moe.<words>``."""
    return tuple(
        Workload(
            name=f"{model}-{tokens}",
            row="S18 more",
            mode=mode,
            axes={"M": tokens, **(_packed(axes) if "w4" in words else axes)},
            dtypes={"T": "bfloat16", "L": "float32", **({} if "w4" in words else {"W": "float8_e4m3fn"})},
            attributes={"top_k": top_k, "renormalise": 1, "activation": "Swish"},
            absent=("bias",),
            summary="decoding" if tokens <= 64 else "prefill",
        )
        for model, axes, top_k, tokens, mode in (
            ("mixtral-8x7b", _MIXTRAL, 2, 1, "b"),
            ("mixtral-8x7b", _MIXTRAL, 2, 64, "b"),
            ("qwen3-30b-a3b", _QWEN3, 8, 1, "g"),
            ("qwen3-30b-a3b", _QWEN3, 8, 64, "b"),
        )
    )


def _packed(axes: dict[str, int]) -> dict[str, int]:
    """Those of weights of 4 bits, with blocks of 128."""
    d, i = axes["D"], axes["I"]
    return {"D": d, "E": axes["E"], "J": axes["J"], "C": d // 2, "G": d // 128, "B": i // 2, "H": i // 128}


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

GRADIENT_WORKLOADS = tuple(
    _workload(*layer, 4096, "").model_copy(update={"row": "S18 more", "summary": "training"})
    for layer in (("mixtral-8x7b", _MIXTRAL, 2), ("qwen3-30b-a3b", _QWEN3, 8))
)
