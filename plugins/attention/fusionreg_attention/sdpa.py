"""Scaled dot-product attention, without scores in memory: the operator ``Attention``, with and without a mask, and as
training wants it: with the log-sum-exp of each query's scores, from which ``sdpa_backward`` has the weights again.

Heads of q may share heads of k and v (GQA, MQA). Which keys a query sees is a matter of positions (``is_causal`` and
the windows, counted from the top left corner: the last key that query i sees is i + right) and of the mask. A query
that sees no key gives 0, as the operator has it. Kernels leave out what they can of keys that a query does not see:
what is not finite in their k and v may show or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.frozen import EMPTY, FrozenDict
from fusionreg.core.spec import AttributeSpec, Backward, Case, FusionSpec, Tolerance

from .sdpa_backward_kernels import gradient_kernels
from .sdpa_kernels import kernels
from .sdpa_workloads import BIAS_WORKLOADS, GRADIENT_WORKLOADS, LENGTHS_WORKLOADS, MASKED_WORKLOADS, WORKLOADS

#: As the operator names them.
ATTRIBUTES = {
    "scale": AttributeSpec(type="float", default=1.0, summary="of the scores, where scaling is given"),
    "is_causal": AttributeSpec(type="int", default=0, choices=(0, 1), summary="1: query i sees keys 0 to i"),
    "softcap": AttributeSpec(type="float", default=0.0, summary="c in c tanh(score / c), 0 for none"),
    "left_window_size": AttributeSpec(type="int", default=-1, summary="query i sees keys from i - left on, -1 for all"),
    "right_window_size": AttributeSpec(type="int", default=-1, summary="query i sees keys to i + right, -1 for all"),
}

#: Scores of random numbers are about 1: in fp16 small weights are 0, and an infinity times them NaN.
MILD = {"scale": ATTRIBUTES["scale"].model_copy(update={"default": 0.125})}

CONSTRAINTS = (
    "G > 0 and H > 0",
    "H % G == 0",
    "D > 0",
    "scale > 0",
    "softcap >= 0",
    "left_window_size >= -1",
    "right_window_size >= -1",
)

#: What kernels for wide heads alone have their edges around.
_WIDE = Case(name="wide", axes={"B": 1, "H": 1, "D": 256, "E": 256}, attributes={"scaling": "usual"})

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
    _WIDE,
    _WIDE.model_copy(update={"name": "capped_wide", "attributes": _WIDE.attributes | {"softcap": 3.0}}),
    Case(name="window_wide", axes={"B": 1, "Q": 72, "K": 136, "D": 256, "E": 256},
         attributes={"scaling": "given", "scale": 0.5, "left_window_size": 9, "right_window_size": 2}),
    *(
        Case(name=f"width_{d}", axes={"B": 1, "D": d, "E": d, "Q": 72, "K": 136}, attributes={"is_causal": 1})
        for d in (32, 96, 128, 256)
    ),
    Case(name="width_192_128", axes={"B": 1, "D": 192, "E": 128, "Q": 72, "K": 136}),
    Case(name="width_odd", axes={"D": 35, "E": 21}),
)  # fmt: skip

#: Of those, what a mask may meet.
_BESIDE_MASKS = ("window_causal", "steep", "two_key_heads", "no_key", "wide", "capped_wide", "width_128", "width_256")
_MASK_CASES = (
    *(case for case in _CASES if case.name in _BESIDE_MASKS),
    Case(name="nothing_allowed", values={"mask": "zeros"}, summary="a boolean mask without a key: rows of 0"),
    _WIDE.model_copy(update={"name": "nothing_allowed_wide", "values": FrozenDict({"mask": "zeros"})}),
    Case(name="far_below", axes={"K": 72}, values={"mask": "-1e4"}, summary="the same number for all keys"),
    Case(name="causal_masked", axes={"B": 1, "Q": 72, "K": 200}, attributes={"is_causal": 1}),
)

#: Sequences that end anywhere, at each tile's edges, and those that have nothing or all.
_LENGTHS_CASES = (
    Case(name="anywhere", axes={"B": 6, "K": 136}, values={"lengths": "bytes"}, summary="negative numbers are 0"),
    Case(name="causal", axes={"B": 5, "Q": 20, "K": 136}, values={"lengths": "bytes"}, attributes={"is_causal": 1},
         summary="the last query sees the last key; where there are more queries than keys, the first see none"),
    Case(name="window", axes={"Q": 72, "K": 136}, values={"lengths": "100"}, attributes={"left_window_size": 40}),
    Case(name="all", axes={"Q": 72, "K": 136}, values={"lengths": "1000"}, summary="more than there are: all"),
    Case(name="none", values={"lengths": "0"}),
    Case(name="tiles", axes={"B": 1, "Q": 200, "K": 264}, values={"lengths": "200"}, attributes={"is_causal": 1}),
    *(
        Case(name=f"width_{d}_{n}", axes={"B": 1, "D": d, "E": d, "Q": 72, "K": 136}, values={"lengths": f"{n}"})
        for d, n in ((64, 128), (128, 65), (128, 129), (256, 100))
    ),
    Case(name="unseen_nan", axes={"B": 2, "Q": 72, "K": 136}, values={"lengths": "0", "k": "nan", "v": "nan"},
         summary="what lies behind the last key is not read"),
    Case(name="decoding", axes={"B": 4, "H": 8, "Q": 1, "K": 520}, values={"lengths": "bytes"}),
    Case(name="width_odd", axes={"D": 35, "E": 21}, values={"lengths": "17"}),
)  # fmt: skip

_BESIDE_STATISTICS = (
    "nothing_to_see", "steep", "two_key_heads", "no_key", "wide", "capped_wide", "width_128", "width_256",
    "window_causal",
)  # fmt: skip
_TRAINING_CASES = tuple(case for case in _CASES if case.name in _BESIDE_STATISTICS)

#: Of any dy, y and lse: gradients are defined for those that no forward pass has given, too.
_GRADIENT_CASES = (
    *(
        case
        for case in _CASES
        if case.name
        in ("causal_short", "aligned_right", "nothing_to_see", "capped", "one_key_head", "two_key_heads", "no_key")
    ),
    Case(name="window_causal", axes={"H": 1, "Q": 136, "K": 136}, attributes={"left_window_size": 40, "is_causal": 1}),
    Case(name="tiles", axes={"Q": 72, "K": 200}, attributes={"right_window_size": 128},
         summary="several tiles of queries and of keys"),
    *(
        Case(name=f"width_{d}", axes={"H": h, "D": d, "E": d, "Q": q, "K": k}, attributes={"is_causal": 1})
        for d, h, q, k in ((96, 1, 24, 40), (256, 2, 72, 136), (128, 1, 72, 136))
    ),
    Case(name="width_192_128", axes={"H": 1, "D": 192, "E": 128, "Q": 24, "K": 40}),
    _WIDE,
    _WIDE.model_copy(update={"name": "capped_wide", "attributes": _WIDE.attributes | {"softcap": 3.0}}),
    Case(name="tiles_wide", axes={"H": 4, "G": 2, "Q": 200, "K": 136, "D": 256, "E": 256},
         attributes={"scaling": "given", "scale": 0.125, "left_window_size": 80}),
    Case(name="width_odd", axes={"D": 35, "E": 21}),
    Case(name="cancelled", values={"dy": "ones", "v": "ones", "y": "ones"}, summary="scores have no gradient"),
    Case(name="huge", axes={"H": 1, "Q": 136, "K": 136}, values={"dy": "large", "v": "large"},
         summary="gradients of scores pass what fp16 holds"),
)  # fmt: skip

#: Beside masks, what is not the same without one: where masks leave no key, and where they are large.
_MASK_TRAINING_CASES = tuple(case for case in _MASK_CASES if case.name in ("nothing_allowed", "far_below", "no_key"))
_MASK_GRADIENT_CASES = (
    *(case for case in _GRADIENT_CASES if case.name in ("aligned_right", "capped", "two_key_heads", "no_key", "tiles")),
    Case(name="nothing_allowed", values={"mask": "zeros", "lse": "special"}, summary="lse is -infinity there"),
    Case(name="far_below", values={"mask": "-1e4", "lse": "-1e4"}, summary="the same number for all keys"),
    Case(name="width_128", axes={"H": 1, "D": 128, "E": 128, "Q": 72, "K": 136}, attributes={"is_causal": 1}),
)

#: Along which axes a bias has one number.
_SHARED = tuple(
    Case(name=f"bias_for_all_{words}", axes={"B": 2, "MB": 2, "H": 4, "MH": 4, "G": 2} | dict.fromkeys(axes, 1))
    for words, axes in {
        "batches": ("MB",), "heads": ("MH",), "queries": ("MQ",), "but_keys": ("MB", "MH", "MQ"),
    }.items()
)  # fmt: skip
_BIAS_TRAINING_CASES = _SHARED[:1]
_BIAS_GRADIENT_CASES = (
    *_SHARED,
    Case(name="capped", attributes={"softcap": 3.0}, summary="the bias is added behind the cap"),
    Case(name="tiles", axes={"B": 2, "MB": 1, "Q": 136, "MQ": 136, "K": 200}, attributes={"right_window_size": 40},
         summary="several tiles of queries and of keys, some of which nothing sees"),
    Case(name="few_queries", axes={"Q": 136, "MQ": 1, "K": 40}, attributes={"left_window_size": 40}),
    Case(name="width_256", axes={"H": 1, "MH": 1, "D": 256, "E": 256, "Q": 24, "MQ": 24, "K": 40}),
)  # fmt: skip

_SCORES = Tolerance(
    dtype="float32",
    ulp=2.0,
    inputs=2.0,
    reason="a weight has the absolute error of its score as its relative one, and scores round by their size",
)

_SMALL = Tolerance(
    dtype="bfloat16", ulp=0.0, absolute=2.0**-126, reason="cuDNN's results are 0 where bfloat16 has subnormal numbers"
)

LENGTHS_TOLERANCES = (_SCORES, _SMALL)


def _gradients(mask: str) -> tuple[Tolerance, ...]:
    reason = "dy v^T less the sum of dy y may cancel; weights have the absolute error of scores as relative one"
    if mask:
        reason += ", which round once more where a mask is added"
    wide = 4.0 if mask else 2.0
    return tuple(Tolerance(dtype=t, ulp=2.0, inputs=wide if t == "float32" else 2.0, reason=reason) for t in FLOATS)


#: A mask that has a gradient: what is added to scores, along each axis one number or as many as there are.
BIAS = "T[MB MH MQ K]"
#: A number or a bool for each key; broadcast along the other axes.
MASK = "P[Q K] | P[1 K] | P[H Q K] | P[H 1 K] | P[B 1 1 K] | P[B 1 Q K] | P[B H 1 K] | P[B H Q K]"


_Q, _K, _V, _Y = "T[B H Q D]", "T[B G K D]", "T[B G K E]", "T[B H Q E]"
_LSE = {"lse": "float32[B H Q]"}
_MASKS: Mapping[str, Mapping[str, str]] = FrozenDict(
    {"": {}, "mask": {"mask": MASK}, "bias": {"mask": BIAS}, "lengths": {"lengths": "I[B]"}}
)
_OPERANDS: Mapping[str, str] = FrozenDict(
    {"": "q, k, v", "mask": "q, k, v, mask", "bias": "q, k, v, mask", "lengths": "q, k, v, None, None, None, lengths"}
)
FLOATS = ("float16", "bfloat16", "float32")

GRADIENT_TOLERANCES = _gradients("")

#: Those of masks and lengths.
_DTYPES: Mapping[str, Mapping[str, tuple[str, ...]]] = FrozenDict(
    {"mask": {"P": ("bool", *FLOATS)}, "lengths": {"I": ("int64", "int32")}}
)
_BIAS_AXES = (("MB", "B", "batches"), ("MH", "H", "heads"), ("MQ", "Q", "queries"))
_MASK_CONSTRAINTS: Mapping[str, tuple[str, ...]] = FrozenDict(
    {"mask": ('P in ("bool", T)',), "bias": tuple(f"{own} in (1, {of})" for own, of, _ in _BIAS_AXES)}
)


def _pattern(results: str, operator: str, operands: str) -> str:
    attributes = ", ".join(f"{name}={name}" for name in ATTRIBUTES if name != "scale")
    return f'{results} = any_of("scaling", usual={operator}(), given={operator}(scale=scale))({operands}, {attributes})'


def _fusion(
    words: str, summary: str, pattern: tuple[str, ...], *, mask: str = "", extents: Mapping[str, int],
    attributes: Mapping[str, AttributeSpec] = EMPTY, **fields: Any,
) -> FusionSpec:  # fmt: skip
    """``mask``: a key of :data:`.sdpa_kernels.MASK_FORMS`."""
    own = {axis: f"{extent} or 1: {of} of the mask" for axis, extent, of in _BIAS_AXES} if mask == "bias" else {}
    return FusionSpec(
        api=1,
        name=f"attention.{words}",
        summary=summary,
        pattern=pattern,
        dtypes={"T": FLOATS, **_DTYPES.get(mask, {})},
        axes={
            "B": "batch",
            "H": "heads of q",
            "G": "heads of k and v, each for H / G of q",
            "Q": "queries",
            "K": "keys",
            "D": "width of a head of q and k",
            "E": "width of a head of v",
            **own,
        },
        extents={**extents, **{axis: extents[other] for axis, other, _ in _BIAS_AXES if own}},
        attributes={**ATTRIBUTES, **attributes},
        constraints=(*CONSTRAINTS, *_MASK_CONSTRAINTS.get(mask, ())),
        tags=("S12", "attention", *(("training",) if "lse" in pattern[0] else ())),
        **fields,
    )


def _forward(words: str, summary: str, *, mask: str = "", statistics: bool = False, **fields: Any) -> FusionSpec:
    """``statistics``: whether it gives the log-sum-exp of scores as well."""
    pattern = _pattern("y, _, _, _, lse" if statistics else "y", "Attention", _OPERANDS[mask])
    return _fusion(
        words,
        summary,
        (pattern, f'{pattern[:-1]}, softmax_precision="float32")'),  # it is float32 in any case
        mask=mask,
        inputs={"q": _Q, "k": _K, "v": _V, **_MASKS[mask]},
        outputs={"y": _Y, **(_LSE if statistics else {})},
        layouts={"y": "q"},
        extents={"B": 2, "H": 2, "G": 1, "Q": 24, "K": 32 if mask == "bias" else 40, "D": 64, "E": 64},
        autocast="lower",
        tolerances=(_SCORES, _SMALL),
        kernels=kernels(mask, statistics),
        **fields,
    )


def _backward(words: str, summary: str, *, mask: str = "", queries: int = 16, **fields: Any) -> FusionSpec:
    """``queries``: of derived cases."""
    results = "dq, dk, dv, dmask" if mask == "bias" else "dq, dk, dv"
    operands = "dy, q, k, v, y, lse, mask" if mask else "dy, q, k, v, y, lse"
    return _fusion(
        words,
        summary,
        (_pattern(results, "fusionreg.AttentionGrad", operands),),
        mask=mask,
        inputs={"dy": _Y, "q": _Q, "k": _K, "v": _V, "y": _Y, **_LSE, **_MASKS[mask]},
        outputs={"dq": _Q, "dk": _K, "dv": _V, **({"dmask": BIAS} if mask == "bias" else {})},
        layouts={"dq": "q", "dk": "k", "dv": "v"},
        extents={"B": 1, "H": 2, "G": 1, "Q": queries, "K": 24, "D": 64, "E": 64},
        tolerances=_gradients(mask),
        kernels=gradient_kernels(mask),
        **fields,
    )


FUSIONS: tuple[FusionSpec, ...] = (
    _forward(
        "sdpa", "softmax(q k^T scale) v for each head, causal or in a window", cases=_CASES, workloads=WORKLOADS
    ),
    _forward("sdpa_masked", "the same with a mask, additive or boolean", mask="mask", cases=_MASK_CASES),
    _forward(
        "sdpa_lengths", "the same of sequences that have keys of their own number; a causal query counts from the last",
        mask="lengths", cases=_LENGTHS_CASES, workloads=LENGTHS_WORKLOADS,
    ),
    _forward(
        "sdpa_training", "attention that is differentiable: also gives the log-sum-exp of each query's scores",
        statistics=True, cases=_TRAINING_CASES, workloads=WORKLOADS, attributes=MILD,
        backward=Backward(fusion="attention.sdpa_backward"),
    ),
    _backward(
        "sdpa_backward", "gradients of attention from its y and lse; weights are computed again and stored nowhere",
        cases=_GRADIENT_CASES, workloads=GRADIENT_WORKLOADS,
    ),
    _forward(
        "sdpa_masked_training", "attention with a mask that is differentiable; the mask itself is a constant",
        mask="mask", statistics=True, cases=_MASK_TRAINING_CASES, attributes=MILD, workloads=MASKED_WORKLOADS,
        backward=Backward(fusion="attention.sdpa_masked_backward"),
    ),
    _backward(
        "sdpa_masked_backward", "gradients of attention with a mask", mask="mask", queries=8,
        cases=_MASK_GRADIENT_CASES, attributes=MILD, workloads=MASKED_WORKLOADS,
    ),
    _forward(
        "sdpa_position_bias_training", "attention with a mask that is added and differentiable, too: a position bias",
        mask="bias", statistics=True, cases=_BIAS_TRAINING_CASES, attributes=MILD, workloads=BIAS_WORKLOADS,
        backward=Backward(fusion="attention.sdpa_position_bias_backward"),
    ),
    _backward(
        "sdpa_position_bias_backward", "gradients of attention with a position bias, that of the bias among them",
        mask="bias", queries=12, cases=_BIAS_GRADIENT_CASES, attributes=MILD, workloads=BIAS_WORKLOADS,
    ),
)  # fmt: skip
