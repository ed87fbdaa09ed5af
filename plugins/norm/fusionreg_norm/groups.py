"""Fusions that normalise groups of channels: GroupNorm with the Swish and the dropout that follow it.

Tensors are [N C S ...] in shape, whatever the number of spatial axes; in memory they may be channels last instead, as
torch has them. The mask of dropout depends on the index of an element in the shape, and so not on the memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.spec import AttributeSpec, Backward, Case, FusionSpec, KernelSpec, Region, Tolerance

from .group_kernels import FEW as FEW
from .group_kernels import kernels
from .groups_workloads import workloads
from .rows import DROPOUT, EPSILON, RNG

MAP = "T[N C S ...]"
AXES = {"N": "samples", "C": "channels", "S": "pixels: all spatial axes in one"}
AFFINE = {"scale": "T[C]", "bias": "T[C]"}
GROUPS = {"groups": AttributeSpec(type="int", summary="groups that the channels are divided into")}
DIVIDES = ("groups >= 1", "C % groups == 0")

#: The pattern's steps up to Swish; what is normalised is called ``n``, its Swish ``a``.
NORM_STEP = "n = GroupNormalization(x, scale, bias, num_groups=groups, epsilon=epsilon)\n"

GROUP_TOLERANCE = Tolerance(
    dtype="float32",
    ulp=2.0,
    inputs=2.0,
    reason="a group carries the rounding of mean, variance and root; the chain sums in another order",
)


def group_cases(values: Mapping[str, str], dropout: bool) -> tuple[Case, ...]:
    """What derived cases, which have one group, leave open. ``values``: of the inputs of the case far from zero."""
    chance = {"p": 0.4} if dropout else {}
    made = [
        Case(name="groups", axes={"N": 3, "C": 24, "S": 40}, attributes={**chance, "groups": 4}),
        Case(name="each_channel", axes={"N": 2, "C": 8, "S": 33}, attributes={**chance, "groups": 8}),
        Case(name="pixel", axes={"N": 2, "C": 40, "S": 1}, attributes={**chance, "groups": 5}),
        Case(
            name="channels_across_vectors", axes={"N": 2, "C": 16, "S": 49}, attributes={**chance, "groups": 2},
            batch=(1,), summary="a vector of 16 bytes holds the end of one channel and the start of another",
        ),
        Case(name="volume", axes={"N": 1, "C": 6, "S": 2}, batch=(3, 4), attributes={**chance, "groups": 3}),
        Case(
            name="far_from_zero", axes={"N": 2, "C": 8, "S": 64}, attributes={**chance, "groups": 2}, values=values,
            summary="E[x^2] - E[x]^2 cancels to nothing here",
        ),
    ]  # fmt: skip
    if dropout:
        seeded = {"p": 0.4, "groups": 2}
        made += [
            Case(name="seeded", axes={"N": 2, "C": 8, "S": 24}, attributes=seeded, values={"rng": "seed"}),
            Case(
                name="seeded_odd", axes={"N": 3, "C": 6, "S": 35}, attributes=seeded, values={"rng": "seed"},
                summary="a block of eight elements spans channels and groups",
            ),
            Case(name="all_kept", axes={"C": 8}, attributes={"p": 0.0, "groups": 2}, values={"x": "special"}),
            Case(
                name="all_dropped", axes={"C": 8}, attributes={"p": 1.0, "groups": 2}, values={"x": "special"},
                summary="p = 1 drops NaN as well",
            ),
        ]  # fmt: skip
    return tuple(made)


#: What the slots are proven on: a sum of maps in front, a residual connection and a gate behind.
_BETWEEN = Region(
    name="between",
    summary="a sum of two maps in front, a residual connection and a gate behind",
    pattern="x = Add(a, before)\n...\nv = Add(y, residual)\ng = Sigmoid(gate)\nz = Mul(v, g)",
    slots=("x", "y"),
    inputs={"a": MAP, **AFFINE, "before": MAP, "residual": MAP, "gate": MAP},
    outputs={"z": MAP},
    dtypes={"T": ("bfloat16",)},
)


#: One number for each channel of a sample, as a network makes them of a time step or of a class.
SAMPLE = "T[N C 1 ...]"

_SLOT_CASE = Case(name="slices", axes={"N": 2, "C": 32, "S": 40}, attributes={"groups": 4}, summary="slices of groups")
_EMBEDDED = Region(
    name="embedded",
    summary="the embedding of a time step, added to every pixel in front",
    pattern="x = Add(a, embedding)\n...",
    slots=("x",),
    inputs={"a": MAP, **AFFINE, "embedding": SAMPLE},
    outputs={"y": MAP},
    dtypes={"T": ("bfloat16", "float16")},
    cases=(_SLOT_CASE,),
)
_FILM = Region(
    name="film",
    summary="a gain and a shift for each channel of a sample behind (FiLM), then Swish",
    pattern="...\ng = Add(gain, 1.0)\nv0 = Mul(y, g)\nv1 = Add(v0, shift)\nz = Swish(v1)",
    slots=("y",),
    inputs={"x": MAP, **AFFINE, "gain": SAMPLE, "shift": SAMPLE},
    outputs={"z": MAP},
    dtypes={"T": ("bfloat16", "float16")},
    cases=(_SLOT_CASE,),
)
_ADDED = Region(
    name="added",
    summary="the embedding of a time step in front, a residual connection behind",
    pattern="x = Add(h, embedding)\n...\nz = Add(y, residual)",
    slots=("x", "y"),
    inputs={"h": MAP, **RNG, **AFFINE, "embedding": SAMPLE, "residual": MAP},
    outputs={"z": MAP},
    dtypes={"T": ("bfloat16",)},
    cases=(_SLOT_CASE.model_copy(update={"attributes": {"groups": 4, "p": 0.4}}),),
)


def _chunk_cases(dropout: bool) -> tuple[Case, ...]:
    """For kernels whose warps have chunks of one channel."""
    attributes = {"groups": 4, **({"p": 0.4} if dropout else {})}
    return (
        Case(name="chunks", axes={"N": 2, "C": 8, "S": 1024}, attributes=attributes),
        Case(
            name="chunks_in_turn", axes={"N": 50, "C": 4, "S": 1024}, attributes=attributes,
            summary="each multiprocessor has more groups than it holds",
        ),
    )  # fmt: skip


def _fusion(
    words: str, summary: str, pattern: str, regions: tuple[Region, ...], dropout: bool = False, swish: bool = True
) -> FusionSpec:
    rng = RNG if dropout else {}
    return FusionSpec(
        api=1,
        name=f"norm.{words}",
        summary=summary,
        pattern=pattern,
        inputs={"x": MAP, **rng, **AFFINE},
        outputs={"y": MAP},
        layouts={"y": "x"},
        backward=Backward(fusion=f"norm.{words}_backward") if swish else None,
        autocast="float32",
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes=AXES,
        attributes={**GROUPS, **(DROPOUT if dropout else {}), **EPSILON},
        constraints=(*DIVIDES, *(("0 <= p and p <= 1",) if dropout else ())),
        cases=group_cases({"x": "offset", "scale": "ones", "bias": "zeros"}, dropout) + _chunk_cases(dropout),
        tolerances=(GROUP_TOLERANCE,),
        workloads=workloads(words),
        regions=regions,
        kernels=kernels(dropout, swish),
        tags=("norm", "S17", *(("training",) if dropout else ())),
    )


GROUPNORM = _fusion(
    "groupnorm",
    "GroupNorm(x): the scale and bias of each channel",
    "y = GroupNormalization(x, scale, bias, num_groups=groups, epsilon=epsilon)",
    (_FILM,),
    swish=False,
)

GROUPNORM_SWISH = _fusion(
    "groupnorm_swish",
    "swish(GroupNorm(x)): the scale and bias of each channel, then x * sigmoid(x)",
    f"{NORM_STEP}y = Swish(n)",
    (_BETWEEN, _EMBEDDED),
)

GROUPNORM_SWISH_DROPOUT = _fusion(
    "groupnorm_swish_dropout",
    "dropout(swish(GroupNorm(x))); the mask is a function of rng and stored nowhere",
    f"{NORM_STEP}a = Swish(n)\ny = fusionreg.Dropout(a, rng, p=p)",
    (_ADDED,),
    dropout=True,
)

SWISH_DROPOUT = FusionSpec(
    api=1,
    name="norm.swish_dropout",
    summary="dropout(x * sigmoid(x)); the mask is a function of rng and stored nowhere",
    pattern="a = Swish(x)\ny = fusionreg.Dropout(a, rng, p=p)",
    inputs={"x": "T[... M N]", **RNG},
    outputs={"y": "T[... M N]"},
    dtypes={"T": ("float16", "bfloat16", "float32")},
    axes={"M": "all axes but the last in one", "N": "the last axis"},
    attributes=DROPOUT,
    backward=Backward(fusion="norm.swish_dropout_backward"),
    constraints=("0 <= p and p <= 1",),
    cases=(
        Case(name="seeded", axes={"M": 6, "N": 72}, attributes={"p": 0.4}, values={"rng": "seed"}),
        Case(name="seeded_odd", axes={"M": 6, "N": 37}, attributes={"p": 0.4}, values={"rng": "seed"}),
        Case(name="all_kept", attributes={"p": 0.0}, values={"x": "special"}),
        Case(name="all_dropped", attributes={"p": 1.0}, values={"x": "special"}, summary="p = 1 drops NaN as well"),
        Case(name="tails", attributes={"p": 0.0}, values={"x": "saturating"}, summary="both ends of the sigmoid"),
    ),
    workloads=workloads("swish_dropout"),
    kernels=(
        KernelSpec(
            name="elements",
            template="swish_dropout.cu.j2",
            summary="16 bytes a thread and turn",
            params={"VEC": (8, 4, 1), "THREADS": (256,)},
            valid=(
                "VEC == 1 or VEC * bits(T) == 128 and M * N % VEC == 0 and aligned(x, 16) and aligned(y, 16) "
                "and M * N < 34359738368",
            ),
            constants={"DROPOUT": "1", "PACKED": "1 if VEC == 8 else 0"},
            grid="max(1, min(ceildiv(M * N, THREADS * VEC), multiprocessors * 16))",
            block="THREADS",
            estimate="2e-6 + 2 * M * N * bits(T) / 8 / (4e12 if VEC > 1 else 1e12)",
        ),
    ),
    tags=("norm", "S17", "training"),
)  # fmt: skip

FUSIONS = (GROUPNORM, GROUPNORM_SWISH, GROUPNORM_SWISH_DROPOUT, SWISH_DROPOUT)
