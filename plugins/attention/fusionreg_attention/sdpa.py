"""Scaled dot-product attention, without scores in memory: the operator ``Attention``, with and without a mask.

Heads of q may share heads of k and v (GQA, MQA). Which keys a query sees is a matter of positions (``is_causal`` and
the windows, counted from the top left corner: the last key that query i sees is i + right) and of the mask. A query
that sees no key gives 0, as the operator has it. Kernels leave out what they can of keys that a query does not see:
what is not finite in their k and v may show or not.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec, Tolerance

from .sdpa_kernels import kernels
from .sdpa_workloads import WORKLOADS

#: As the operator names them.
_ATTRIBUTES = {
    "scale": AttributeSpec(type="float", default=1.0, summary="of the scores, where scaling is given"),
    "is_causal": AttributeSpec(type="int", default=0, choices=(0, 1), summary="1: query i sees keys 0 to i"),
    "softcap": AttributeSpec(type="float", default=0.0, summary="c in c tanh(score / c), 0 for none"),
    "left_window_size": AttributeSpec(type="int", default=-1, summary="query i sees keys from i - left on, -1 for all"),
    "right_window_size": AttributeSpec(type="int", default=-1, summary="query i sees keys to i + right, -1 for all"),
}

_CONSTRAINTS = (
    "G > 0 and H > 0",
    "H % G == 0",
    "D > 0",
    "scale > 0",
    "softcap >= 0",
    "left_window_size >= -1",
    "right_window_size >= -1",
)

_CASES = (
    Case(name="causal_short", axes={"Q": 3, "K": 9}, attributes={"is_causal": 1}, summary="aligned to the top left"),
    Case(name="causal_long", axes={"Q": 70, "K": 9}, attributes={"is_causal": 1}, summary="most queries see all keys"),
    Case(name="aligned_right", axes={"Q": 37, "K": 72}, attributes={"right_window_size": 35},
         summary="the last query sees the last key"),
    Case(name="window", axes={"Q": 72, "K": 72}, attributes={"left_window_size": 9, "right_window_size": 2}),
    Case(name="window_causal", axes={"B": 1, "Q": 200, "K": 200}, attributes={"left_window_size": 40, "is_causal": 1},
         summary="whole tiles before and behind the window"),
    Case(name="nothing_to_see", axes={"Q": 90, "K": 20}, attributes={"left_window_size": 4},
         summary="queries without a key give 0"),
    Case(name="capped", attributes={"softcap": 3.0}),
    Case(name="steep", axes={"B": 1, "Q": 40, "K": 200}, attributes={"scaling": "given", "scale": 4.0},
         summary="the largest score changes from tile to tile, and most weights are next to nothing"),
    Case(name="one_key_head", axes={"H": 6, "G": 1}),
    Case(name="two_key_heads", axes={"H": 6, "G": 2}, attributes={"is_causal": 1}),
    Case(name="tiles", axes={"B": 1, "H": 2, "G": 1, "Q": 200, "K": 264}, attributes={"is_causal": 1},
         summary="several tiles of queries and of keys"),
    Case(name="no_key", axes={"K": 0}),
    *(
        Case(name=f"width_{d}", axes={"B": 1, "D": d, "E": d, "Q": 72, "K": 136}, attributes={"is_causal": 1})
        for d in (32, 96, 128, 256)
    ),
    Case(name="width_192_128", axes={"B": 1, "D": 192, "E": 128, "Q": 72, "K": 136}),
    Case(name="width_odd", axes={"D": 35, "E": 21}),
)  # fmt: skip

#: Of those, what a mask may meet.
_BESIDE_MASKS = ("window_causal", "steep", "two_key_heads", "no_key", "width_128")
_MASK_CASES = (
    *(case for case in _CASES if case.name in _BESIDE_MASKS),
    Case(name="nothing_allowed", values={"mask": "zeros"}, summary="a boolean mask without a key: rows of 0"),
    Case(name="far_below", axes={"K": 72}, values={"mask": "-1e4"}, summary="the same number for all keys"),
    Case(name="causal_masked", axes={"B": 1, "Q": 72, "K": 200}, attributes={"is_causal": 1}),
)

_SCORES = Tolerance(
    dtype="float32",
    ulp=2.0,
    inputs=2.0,
    reason="a weight has the absolute error of its score as its relative one, and scores round by their size",
)

#: A number or a bool for each key; broadcast along the other axes.
MASK = "P[Q K] | P[1 K] | P[H Q K] | P[H 1 K] | P[B 1 1 K] | P[B 1 Q K] | P[B H 1 K] | P[B H Q K]"


def _fusion(words: str, summary: str, masked: bool, kernels: tuple[KernelSpec, ...]) -> FusionSpec:
    attributes = ", ".join(f"{name}={name}" for name in _ATTRIBUTES if name != "scale")
    pattern = (
        'y = any_of("scaling", usual=Attention(), given=Attention(scale=scale))'
        f"(q, k, v{', mask' if masked else ''}, {attributes}"
    )
    return FusionSpec(
        api=1,
        name=f"attention.{words}",
        summary=summary,
        pattern=(f"{pattern})", f'{pattern}, softmax_precision="float32")'),  # it is float32 in any case
        inputs={"q": "T[B H Q D]", "k": "T[B G K D]", "v": "T[B G K E]", **({"mask": MASK} if masked else {})},
        outputs={"y": "T[B H Q E]"},
        layouts={"y": "q"},
        dtypes={
            "T": ("float16", "bfloat16", "float32"),
            **({"P": ("bool", "float16", "bfloat16", "float32")} if masked else {}),
        },
        axes={
            "B": "batch",
            "H": "heads of q",
            "G": "heads of k and v, each for H / G of q",
            "Q": "queries",
            "K": "keys",
            "D": "width of a head of q and k",
            "E": "width of a head of v",
        },
        extents={"B": 2, "H": 2, "G": 1, "Q": 24, "K": 40, "D": 64, "E": 64},
        attributes=_ATTRIBUTES,
        autocast="lower",
        constraints=(*_CONSTRAINTS, *(('P in ("bool", T)',) if masked else ())),
        cases=_MASK_CASES if masked else _CASES,
        tolerances=(_SCORES,),
        workloads=() if masked else WORKLOADS,
        kernels=kernels,
        tags=("S12", "attention"),
    )


FUSIONS: tuple[FusionSpec, ...] = (
    _fusion("sdpa", "softmax(q k^T scale) v for each head, causal or in a window", False, kernels(masked=False)),
    _fusion("sdpa_masked", "the same with a mask, additive or boolean", True, kernels(masked=True)),
)

#: Kernels beside those that the fusions bring, such as calls of libraries.
KERNELS: tuple[KernelSpec, ...] = ()
