"""Fusions that normalise groups of channels: GroupNorm with the Swish and the dropout that follow it.

Tensors are [N C S ...] in shape, whatever the number of spatial axes; in memory they may be channels last instead, as
torch has them. The mask of dropout depends on the index of an element in the shape, and so not on the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec, Tolerance

from .rows import DROPOUT, EPSILON, PENDING, RNG

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

#: Bytes of a group, and whether 16-byte accesses reach all of it.
BYTES = "C // groups * S * bits(T) // 8"
WHOLE = "C // groups * S * bits(T) % 128 == 0 and aligned(x, 16) and aligned(y, 16)"
#: Blocks that share a group in kernel ``stream``: no more than have something to do.
TEAM = f"max(1, min(multiprocessors // TEAMS, ceildiv({BYTES}, THREADS * 16)))"
#: Blocks of eight elements have numbers of 32 bits.
FEW = "N * C * S < 34359738368"
#: Whether the channels of a pixel lie side by side, and 16-byte accesses reach them.
LAST = (
    "(C == 1 or stride({0}, 1) == 1) and stride({0}, 2) * bits(T) % 128 == 0 "
    "and (N == 1 or stride({0}, 0) * bits(T) % 128 == 0)"
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


def _kernels(dropout: bool) -> tuple[KernelSpec, ...]:
    flags = {"DROPOUT": "1" if dropout else "0"}
    packed = {**flags, "PACKED": "1 if bits(T) == 16 else 0"}
    last = {**flags, "PACKED": "1"}
    return (
        KernelSpec(
            name="plain",
            pending=PENDING,
            template="group_forward_plain.cu.j2",
            summary="a group of any size and memory order to a block, read three times",
            strides=("x", "y"),
            params={"VEC": (8, 4, 1), "THREADS": (256, 512)},
            valid=(
                "VEC == 1 or VEC * bits(T) == 128 and S % VEC == 0 and contiguous(x) and contiguous(y) "
                "and aligned(x, 16) and aligned(y, 16)",
            ),
            constants={**flags, "PACKED": "0"},
            grid="N * groups",
            block="THREADS",
            estimate="6e-6 + 4 * N * C * S * bits(T) / 8 / (2e12 if VEC > 1 else 4e11)",
        ),
        _chip("block", "1", packed, params={"WHOLE": (1, 0), "THREADS": (256, 512, 1024)}),
        _chip(
            "cluster",
            "SPREAD",
            packed,
            params={"WHOLE": (1, 0), "SPREAD": (2, 4, 8), "THREADS": (256, 512, 1024)},
            cluster="SPREAD",
            targets="sm_90+",
        ),
        KernelSpec(
            name="stream",
            pending=PENDING,
            template="group_forward_stream.cu.j2",
            summary="some groups at a time in the shared memory of all blocks, read once; the next ones on their way",
            requires=(WHOLE, FEW, "C // groups * S < 2147483648"),
            params={"WHOLE": (1, 0), "TEAMS": (1, 2, 3, 4, 6, 8, 12, 16), "THREADS": (512, 1024, 256)},
            valid=("WHOLE == 0 or S * bits(T) % 128 == 0", "TEAMS <= multiprocessors"),
            constants=packed,
            grid=f"TEAMS * {TEAM}",
            block="THREADS",
            shared_memory=f"2 * ceildiv({BYTES}, {TEAM} * 16) * 16",
            workspace=f"2 * TEAMS * {TEAM} * 12",
            cooperative=True,
            min_blocks=1,
            estimate=f"4e-6 + ceildiv(N * groups, TEAMS) * (1e-6 + 2 * TEAMS * {BYTES} / 4e12)",
        ),
        _last("last_block", "1", last, params={"SLICE": (1, 2, 4, 8), "THREADS": (256, 320, 384, 512, 640)}),
        _last(
            "last_cluster",
            "SPREAD",
            last,
            params={"SLICE": (1, 2, 4, 8), "SPREAD": (2, 4, 8), "THREADS": (256, 320, 384, 512, 640)},
            cluster="SPREAD",
            targets="sm_90+",
        ),
    )


def _chip(name: str, blocks: str, flags: Mapping[str, str], **fields: Any) -> KernelSpec:
    """A group in the shared memory of so many blocks."""
    many = "a cluster of blocks" if "cluster" in fields else "one block"
    return KernelSpec(
        name=name,
        pending=PENDING,
        template="group_forward_chip.cu.j2",
        summary=f"a group in the shared memory of {many}, read once",
        requires=(WHOLE, FEW),
        valid=("WHOLE == 0 or S * bits(T) % 128 == 0",),
        constants={**flags, "BLOCKS": blocks},
        grid=f"N * groups * {blocks}",
        block="THREADS",
        shared_memory=f"ceildiv({BYTES}, {blocks} * 16) * 16",
        estimate="4e-6 + 2 * N * C * S * bits(T) / 8 / 3e12",
        **fields,
    )


def _last(name: str, blocks: str, flags: Mapping[str, str], **fields: Any) -> KernelSpec:
    """A slice of groups, channels last, in the shared memory of so many blocks."""
    many = "a cluster of blocks" if "cluster" in fields else "one block"
    width = "C // groups * SLICE"
    return KernelSpec(
        name=name,
        pending=PENDING,
        template="group_forward_last.cu.j2",
        summary=f"channels last: some groups in the shared memory of {many}, read once",
        strides=("x", "y"),
        requires=(LAST.format("x"), LAST.format("y"), "aligned(x, 16) and aligned(y, 16)", "S % 8 == 0", FEW),
        valid=(f"groups % SLICE == 0 and {width} * bits(T) % 128 == 0 and {width} * bits(T) <= THREADS * 128",),
        constants={**flags, "BLOCKS": blocks},
        grid=f"N * groups // SLICE * {blocks}",
        block="THREADS",
        shared_memory=f"ceildiv(S, 8 * {blocks}) * {width} * bits(T) + THREADS * max(1024 // bits(T), 0)",
        estimate="5e-6 + 2 * N * C * S * bits(T) / 8 / 3e12",
        **fields,
    )


def _fusion(words: str, summary: str, pattern: str, dropout: bool) -> FusionSpec:
    rng = RNG if dropout else {}
    return FusionSpec(
        api=1,
        name=f"norm.{words}",
        summary=summary,
        pattern=pattern,
        inputs={"x": MAP, **rng, **AFFINE},
        outputs={"y": MAP},
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes=AXES,
        attributes={**GROUPS, **(DROPOUT if dropout else {}), **EPSILON},
        constraints=(*DIVIDES, *(("0 <= p and p <= 1",) if dropout else ())),
        cases=group_cases({"x": "offset", "scale": "ones", "bias": "zeros"}, dropout),
        tolerances=(GROUP_TOLERANCE,),
        kernels=_kernels(dropout),
        tags=("norm", "S17", *(("training",) if dropout else ())),
    )


GROUPNORM_SWISH = _fusion(
    "groupnorm_swish",
    "swish(GroupNorm(x)): the scale and bias of each channel, then x * sigmoid(x)",
    f"{NORM_STEP}y = Swish(n)",
    dropout=False,
)

GROUPNORM_SWISH_DROPOUT = _fusion(
    "groupnorm_swish_dropout",
    "dropout(swish(GroupNorm(x))); the mask is a function of rng and stored nowhere",
    f"{NORM_STEP}a = Swish(n)\ny = fusionreg.Dropout(a, rng, p=p)",
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
    constraints=("0 <= p and p <= 1",),
    cases=(
        Case(name="seeded", axes={"M": 6, "N": 72}, attributes={"p": 0.4}, values={"rng": "seed"}),
        Case(name="seeded_odd", axes={"M": 6, "N": 37}, attributes={"p": 0.4}, values={"rng": "seed"}),
        Case(name="all_kept", attributes={"p": 0.0}, values={"x": "special"}),
        Case(name="all_dropped", attributes={"p": 1.0}, values={"x": "special"}, summary="p = 1 drops NaN as well"),
        Case(name="tails", attributes={"p": 0.0}, values={"x": "saturating"}, summary="both ends of the sigmoid"),
    ),
    kernels=(
        KernelSpec(
            name="elements",
            pending=PENDING,
            template="swish_dropout.cu.j2",
            summary="16 bytes a thread and turn",
            params={"VEC": (8, 4, 1), "THREADS": (256,)},
            valid=(
                "VEC == 1 or VEC * bits(T) == 128 and M * N % VEC == 0 and aligned(x, 16) and aligned(y, 16)",
            ),
            grid="max(1, min(ceildiv(M * N, THREADS * VEC), 2147483647))",
            block="THREADS",
            estimate="2e-6 + 2 * M * N * bits(T) / 8 / (4e12 if VEC > 1 else 1e12)",
        ),
    ),
    tags=("norm", "S17", "training"),
)  # fmt: skip

FUSIONS = (GROUPNORM_SWISH, GROUPNORM_SWISH_DROPOUT, SWISH_DROPOUT)
