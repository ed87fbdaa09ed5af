"""Experts of the best groups alone, as DeepSeek-V3 routes: ``moe.group_limited_ffn`` and ``moe.group_limited_route``.

Experts lie in groups of as many each. The groups are kept in which the best experts, ranked by their sigmoids and a
bias, have the largest sums, and experts are chosen among theirs; otherwise they are ``moe.routed_ffn`` and
``moe.route``.
"""

from __future__ import annotations

from typing import Any

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec

from .routed import ATTRIBUTES, ROUTED_FFN, ROUTING
from .routing import ROUTE

_LIMITED = """
weights, ids = fusionreg.Route(
    logits, optional(bias), top_k=top_k, scoring="sigmoid", renormalise=renormalise, scale=scale, groups=groups,
    kept_groups=kept_groups, leaders=leaders
)
""".strip()
_ATTRIBUTES = {
    **{name: attribute for name, attribute in ATTRIBUTES.items() if name != "scoring"},
    "groups": AttributeSpec(type="int", default=2, static=True, summary="of experts, as many consecutive ones in each"),
    "kept_groups": AttributeSpec(type="int", default=1, static=True, summary="groups that are chosen from"),
    "leaders": AttributeSpec(
        type="int", default=2, choices=(2, 1), static=True, summary="best experts of a group whose sum ranks it"
    ),
}
_CONSTRAINTS = (
    "groups >= 2 and groups <= 32 and E % groups == 0 and leaders <= E // groups",
    "kept_groups >= 1 and kept_groups <= groups and top_k <= kept_groups * (E // groups)",
)


def _kernel(kernel: KernelSpec) -> KernelSpec:
    constants = {**kernel.constants, "scoring": '"limited"'}  # templates read: sigmoids, of groups
    pending = "no GPU has run its cases with groups" if kernel.name == "token" else kernel.pending
    return kernel.model_copy(update={"constants": constants, "pending": pending})


def _limited(spec: FusionSpec, words: str, summary: str, axes: dict[str, int]) -> FusionSpec:
    """``spec`` with a router of groups; ``axes``: all but tokens and experts of a small problem."""
    first = spec.pattern[0]
    assert first.startswith(ROUTING)

    def case(name: str, tokens: int, experts: int, summary: str, **fields: Any) -> Case:
        sizes = {**axes, "M": tokens, "E": experts} | ({"K": fields["attributes"]["top_k"]} if "K" in spec.axes else {})
        return Case(name=name, axes=sizes, summary=summary, **fields)

    cases = (
        case(
            "deepseek",
            9,
            256,
            "as DeepSeek-V3",
            attributes={"top_k": 8, "groups": 8, "kept_groups": 4, "renormalise": 1, "scale": 2.5},
        ),
        case(
            "ties",
            5,
            12,
            "of equal groups and of equal experts the lower first",
            attributes={"top_k": 3, "groups": 4, "kept_groups": 2},
            values={"logits": "zeros", "bias": "zeros"},
        ),
        case(
            "one_leader",
            11,
            33,
            "groups ranked by their best expert, without a bias",
            attributes={"top_k": 2, "groups": 11, "kept_groups": 3, "leaders": 1},
            absent=("bias",),
        ),
        case(
            "one_token",
            1,
            12,
            "decoding",
            attributes={"top_k": 3, "groups": 4, "kept_groups": 2} | ({"activation": "Swish"} if "J" in axes else {}),
        ),
        case(
            "special",
            7,
            8,
            "NaN and infinities in what experts and groups are ranked by",
            attributes={"top_k": 2, "groups": 4, "kept_groups": 2},
            values={"logits": "special", "bias": "special"},
        ),
    )
    return FusionSpec(
        api=1,
        name=f"moe.{words}",
        summary=summary,
        pattern=first.replace(ROUTING, _LIMITED),
        inputs=spec.inputs,
        outputs=spec.outputs,
        dtypes=spec.dtypes,
        axes=spec.axes,
        extents={**spec.extents, "E": 12},
        attributes=_ATTRIBUTES,
        autocast=spec.autocast,
        constraints=(*spec.constraints, *_CONSTRAINTS),
        cases=cases,
        kernels=tuple(_kernel(k) for k in spec.kernels),
        tags=spec.tags,
    )


FUSIONS = (
    _limited(
        ROUTED_FFN,
        "group_limited_ffn",
        "moe.routed_ffn with experts of the best groups alone",
        {"D": 64, "J": 32, "I": 16},
    ),
    _limited(ROUTE, "group_limited_route", "moe.route among the experts of the best groups", {}),
)
