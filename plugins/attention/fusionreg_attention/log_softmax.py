"""Fusions of the logarithm of softmax over scores in memory, the last axis, and its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.spec import Backward, Case, FusionSpec, Tolerance, Workload

from .softmax_kernels import kernels

_ROWS = "T[... Q K]"

_CASES = (
    Case(name="rows_of_blocks", axes={"Q": 3, "K": 4616}, attributes={"scaling": "Mul"},
         summary="several warps to a row"),
    Case(name="rows_of_clusters", axes={"Q": 2, "K": 40968}, attributes={"scaling": "Div"},
         summary="several blocks to a row"),
)  # fmt: skip

_ROUNDING = Tolerance(
    dtype="float32", ulp=6.0, reason="expf and logf are within 2 ulp, and a row's parts are brought to one base by expf"
)

_CANCELLED = Tolerance(
    dtype="float32", ulp=2.0, inputs=6.0, reason="the sum of dy cancels, and what is left of it is in all of a row"
)


def _fusion(
    words: str, summary: str, pattern: str, inputs: Mapping[str, str], output: str, **fields: Any
) -> FusionSpec:
    return FusionSpec(
        api=1,
        name=f"attention.{words}",
        summary=summary,
        pattern=pattern,
        inputs={**inputs, "scale": "T[]"},
        outputs={output: _ROWS},
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes={"Q": "rows", "K": "what is normalised over"},
        extents={"Q": 16, "K": 40},
        cases=_CASES,
        workloads=tuple(
            Workload(
                name=f"{m}x{n}-bf16", row="S16 more", axes={"Q": m, "K": n}, dtypes={"T": "bfloat16"},
                absent=("scale",), summary="logits of a language model" if n > 10000 else "classes",
            )
            for m, n in ((32768, 1024), (8192, 32000), (4096, 128256))
        ),
        **fields,
    )  # fmt: skip


FUSIONS = (
    _fusion(
        "log_softmax", "logarithm of a softmax of scaled scores",
        's = optional(any_of(Mul, Div), "scaling")(x, scale)\ny = LogSoftmax(s, axis=-1)', {"x": _ROWS}, "y",
        backward=Backward(fusion="attention.log_softmax_backward"),
        autocast="float32",
        tolerances=(_ROUNDING,),
        kernels=kernels("forward", 2, ("x", "y"), stem="log_softmax"),
        tags=("S16", "attention"),
    ),
    _fusion(
        "log_softmax_backward", "its gradient: (dy - exp(y) sum of dy) * scale",
        'r = fusionreg.LogSoftmaxGrad(dy, y, axis=-1)\ndx = optional(any_of(Mul, Div), "scaling")(r, scale)',
        {"dy": _ROWS, "y": _ROWS}, "dx",
        tolerances=(_CANCELLED,),
        kernels=kernels("backward", 2, ("dy", "y", "dx"), stem="log_softmax"),
        tags=("S16", "attention", "training", "backward"),
    ),
)  # fmt: skip
