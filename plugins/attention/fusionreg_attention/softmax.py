"""Fusions of softmax over scores in memory, the last axis: what stands in front of it, and its gradients.

Masks are broadcast over scores [B H Q K], each in a form that says along which axes. A bool mask replaces scores by a
number, and so does the causal mask, whatever was there; an additive one, ``bias``, is added as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.spec import AttributeSpec, Backward, Case, FusionSpec, Tolerance

from .softmax_kernels import kernels
from .softmax_workloads import workloads

_AXES = {"B": "batch", "H": "heads", "Q": "queries", "K": "keys: what is normalised over"}
_EXTENTS = {"B": 2, "H": 3, "Q": 16, "K": 40}

#: Scores by rank. With two axes all leading ones count as queries, with three those in front of the heads as heads.
_SCORES = {2: "T[... Q K]", 3: "T[... H Q K]", 4: "T[B H Q K]"}


def _broadcast(dtype: str) -> str:
    """Every way to be broadcast over [B H Q K]; the form's number is 15 - (8 B + 4 H + 2 Q + K)."""
    forms = []
    for has in product((True, False), repeat=4):
        axes = [axis if there else "1" for axis, there in zip("BHQK", has, strict=True)]
        while axes and axes[0] == "1":
            axes.pop(0)
        forms.append(f"{dtype}[{' '.join(axes)}]")
    return " | ".join(forms)


_MASKS: Mapping[str, Mapping[str, str]] = {
    "": {}, "mask": {"mask": _broadcast("bool")}, "bias": {"bias": _broadcast("T")}
}  # fmt: skip
_SCALED = 'optional(any_of(Mul, Div), "scaling")'
_KEEP = {
    "keep": AttributeSpec(type="int", default=0, choices=(0, 1), summary="1: a true mask keeps the score; 0: hides it"),
}
_FILL = {"fill": AttributeSpec(type="float", default=float("-inf"), summary="the score where the mask hides it")}
_DIAGONAL = {
    "diagonal": AttributeSpec(
        type="int", default=0, summary="query q sees keys up to q + diagonal: 0 from the first on, K - Q to the last"
    )
}
_CAUSAL_FILL = {"causal_fill": AttributeSpec(type="float", default=float("-inf"), summary="the score of a later key")}
_DROPOUT = {
    "p": AttributeSpec(
        type="float", default=0.5, summary="probability of dropping an element; rounded to a multiple of 1/65536"
    )
}

_SMALL = Tolerance(
    dtype="bfloat16",
    ulp=0.0,
    absolute=2.0**-126,
    reason="exponentials below 2^-126 are 0, where bfloat16 has subnormal numbers",
)
_ROUNDING = Tolerance(
    dtype="float32", ulp=6.0, reason="expf is within 2 ulp, and a row's parts are brought to one base by a second one"
)

_CANCELLED = Tolerance(
    dtype="float32", ulp=2.0, inputs=2.0, reason="dy - sum of dy y cancels where all of dy is about the same"
)

_FORWARD_CASES = (
    Case(name="rows_of_blocks", axes={"B": 1, "H": 1, "Q": 3, "K": 4616}, summary="several warps to a row"),
    Case(name="rows_of_clusters", axes={"B": 1, "H": 1, "Q": 2, "K": 40968}, summary="several blocks to a row"),
)
_FORBIDDEN = Case(name="all_hidden", axes={"B": 1, "H": 2, "Q": 8, "K": 40}, values={"mask": "ones"},
                  summary="NaN in all of them")  # fmt: skip
_EVEN = Case(name="all_hidden_finite", axes={"B": 1, "H": 2, "Q": 8, "K": 40}, values={"mask": "ones"},
             attributes={"fill": -10000.0}, summary="all of them uniform")  # fmt: skip
_DECODING = Case(name="last_aligned", axes={"B": 1, "H": 2, "Q": 5, "K": 40}, attributes={"diagonal": 35},
                 summary="the last query sees all keys")  # fmt: skip
_WITHOUT = Case(name="nothing_visible", axes={"B": 1, "H": 2, "Q": 40, "K": 8}, attributes={"diagonal": -32},
                summary="queries in front of all keys see none")  # fmt: skip
_FINITE = Case(name="finite_fill", axes={"B": 1, "H": 2, "Q": 40, "K": 24}, summary="masked rows are uniform",
               attributes={"diagonal": -16, "fill": -10000.0, "causal_fill": -10000.0})  # fmt: skip
_COMPETING = Case(name="competing_fill", axes={"B": 1, "H": 2, "Q": 24, "K": 24}, summary="hidden keys count",
                  attributes={"fill": 0.5, "causal_fill": 0.5})  # fmt: skip


def _cases(causal: bool, masked: bool) -> tuple[Case, ...]:
    fills = (_FINITE, _COMPETING) if causal or masked else ()
    hidden = (_FORBIDDEN, _EVEN) if masked else ()
    return (*_FORWARD_CASES, *((_DECODING, _WITHOUT) if causal else ()), *fills, *hidden)


def _fitting(cases: tuple[Case, ...], rank: int, attributes: Mapping[str, AttributeSpec]) -> tuple[Case, ...]:
    """With the axes and attributes that the fusion has; scaled each."""

    def fitted(case: Case, scaling: str) -> Case:
        own = {k: v for k, v in case.attributes.items() if k in attributes}
        axes = {a: n for a, n in case.axes.items() if a in "BHQK"[4 - rank :]}
        return case.model_copy(update={"axes": FrozenDict(axes), "attributes": FrozenDict({**own, "scaling": scaling})})

    return tuple(fitted(case, "Div" if i % 3 == 2 else "Mul") for i, case in enumerate(cases))


def _forward(words: str, summary: str, *, mask: str = "", causal: bool = False) -> FusionSpec:
    """``mask``: ``mask`` for a bool one, ``bias`` for one that is added, "" for none."""
    rank = 4 if mask else 3 if causal else 2
    lines, scores = [f"s = {_SCALED}(x, scale)"], "s"
    attributes: dict[str, AttributeSpec] = {}
    if mask == "bias":
        lines.append("m = Add(s, bias)")
        scores = "m"
    elif mask:
        lines.append("m = fusionreg.MaskedFill(s, mask, value=fill, keep=keep)")
        scores = "m"
        attributes |= _FILL | _KEEP
    if causal:
        lines.append(f"c = fusionreg.CausalMask({scores}, value=causal_fill, diagonal=diagonal)")
        scores = "c"
        attributes |= _CAUSAL_FILL | _DIAGONAL
    lines.append(f"y = Softmax({scores}, axis=-1)")
    return FusionSpec(
        api=1,
        name=f"attention.{words}",
        summary=summary,
        pattern="\n".join(lines),
        inputs={"x": _SCORES[rank], "scale": "T[]", **_MASKS[mask]},
        outputs={"y": _SCORES[rank]},
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes={a: _AXES[a] for a in "BHQK"[4 - rank :]},
        extents={a: _EXTENTS[a] for a in "BHQK"[4 - rank :]},
        attributes=attributes,
        # an additive mask may want a gradient itself, which those of the operators give
        backward=None if mask == "bias" else Backward(fusion=f"attention.{words}_backward"),
        autocast="float32",
        cases=_fitting(_cases(causal, mask == "mask"), rank, attributes),
        tolerances=(_SMALL, _ROUNDING),
        workloads=workloads(words),
        kernels=kernels("forward", rank, ("x", "y"), mask, causal=causal),
        tags=("S16", "attention"),
    )


def _backward(words: str, summary: str, *, mask: str = "", causal: bool = False, dropout: bool = False) -> FusionSpec:
    rank = 4 if mask else 3 if causal else 2
    lines, g = (["g = fusionreg.Dropout(dy, rng, p=p)"], "g") if dropout else ([], "dy")
    attributes: dict[str, AttributeSpec] = {**_DROPOUT} if dropout else {}
    if causal:
        lines.append(f"r = fusionreg.CausalSoftmaxGrad({g}, y, diagonal=diagonal)")
        attributes |= _DIAGONAL
    else:
        lines.append(f"r = fusionreg.SoftmaxGrad({g}, y, axis=-1)")
    if mask:
        lines.append("m = fusionreg.MaskedFill(r, mask, value=0.0, keep=keep)")
        attributes |= _KEEP
    lines.append(f"dx = {_SCALED}({'m' if mask else 'r'}, scale)")
    rng = {"rng": "int64[2]"} if dropout else {}
    cases = (*_FORWARD_CASES, *((_DECODING, _WITHOUT) if causal else ()), *(_DROPOUT_CASES if dropout else ()))
    return FusionSpec(
        api=1,
        name=f"attention.{words}_backward",
        summary=summary,
        pattern="\n".join(lines),
        inputs={"dy": _SCORES[rank], "y": _SCORES[rank], **rng, "scale": "T[]", **_MASKS[mask]},
        outputs={"dx": _SCORES[rank]},
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes={a: _AXES[a] for a in "BHQK"[4 - rank :]},
        extents={a: _EXTENTS[a] for a in "BHQK"[4 - rank :]},
        attributes=attributes,
        constraints=("0 <= p and p <= 1",) if dropout else (),
        cases=_fitting(cases, rank, attributes),
        tolerances=(_CANCELLED,),
        workloads=workloads(f"{words}_backward"),
        kernels=kernels("backward", rank, ("dy", "y", "dx"), mask, causal=causal, dropout=dropout),
        tags=("S16", "attention", "training", "backward"),
    )


_DROPOUT_CASES = (
    Case(name="seeded", axes={"B": 1, "H": 1, "Q": 6, "K": 72}, attributes={"p": 0.4}, values={"rng": "seed"}),
    Case(name="seeded_odd", axes={"B": 1, "H": 1, "Q": 6, "K": 37}, attributes={"p": 0.4}, values={"rng": "seed"},
         summary="a block of eight elements spans rows"),
    Case(name="all_kept", attributes={"p": 0.0}, summary="p = 0 leaves dy as it is"),
    Case(name="all_dropped", attributes={"p": 1.0}, summary="p = 1 drops NaN as well"),
)  # fmt: skip

FUSIONS = (
    _forward("softmax", "softmax of scaled scores"),
    _forward("mask_softmax", "softmax of scaled scores, some hidden by a bool mask", mask="mask"),
    _forward("bias_softmax", "softmax of scaled scores and an additive mask", mask="bias"),
    _forward("causal_softmax", "softmax of scaled scores, later keys hidden", causal=True),
    _forward("mask_causal_softmax", "the same, others hidden by a bool mask", mask="mask", causal=True),
    _forward("bias_causal_softmax", "the same behind an additive mask", mask="bias", causal=True),
    _backward("softmax", "gradient of a softmax of scaled scores: y (dy - sum of dy y) * scale"),
    _backward("mask_softmax", "the same, 0 where the mask hides the score", mask="mask"),
    _backward("causal_softmax", "the same, 0 for later keys, which are not read", causal=True),
    _backward("mask_causal_softmax", "the same behind a mask, 0 for later keys", mask="mask", causal=True),
    _backward("softmax_dropout", "gradient of dropout(softmax); what was dropped is drawn again", dropout=True),
    _backward("mask_softmax_dropout", "the same, 0 where the mask hides the score", mask="mask", dropout=True),
    _backward("causal_softmax_dropout", "the same, 0 for later keys", causal=True, dropout=True),
)
