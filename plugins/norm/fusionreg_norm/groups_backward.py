"""Gradients of the group fusions: dx of every element, dscale and dbias of every channel.

Statistics, Swish and mask are computed from the forward pass's inputs again: nothing is saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.spec import Case, FusionSpec, KernelSpec, Region, TensorMap, Tolerance

from .group_kernels import LARGE, WIDTH
from .group_kernels import LAST as LAST_EIGHT
from .groups import AFFINE, AXES, DIVIDES, FEW, GROUP_TOLERANCE, GROUPS, MAP, NORM_STEP, SWISH_DROPOUT, group_cases
from .groups_backward_workloads import workloads
from .rows import DROPOUT, EPSILON, RNG

#: Whether 16-byte accesses reach every channel of x, dy and dx, in the order of the shape.
WHOLE = (
    "S * bits(T) % 128 == 0 and contiguous(x) and contiguous(dy) and contiguous(dx) "
    "and aligned(x, 16) and aligned(dy, 16) and aligned(dx, 16)"
)
#: Whether the channels of a pixel are neighbours, and four of them can be reached at once.
LAST = "stride({0}, 1) == 1 and stride({0}, 0) % 4 == 0 and stride({0}, 2) % 4 == 0 and aligned({0}, 16)"
#: Rows of a block's threads, each with four channels of a slice.
ROWS = f"(THREADS // max(1, {WIDTH} // 4))"
#: Bits of a group.
SIZE = "C // groups * S * bits(T)"
#: A warp's elements are of one channel, or of two at most and a chunk's of one, or those of 8 lanes.
SPANS = (
    "S * bits(T) % 1024 == 0 and SPAN == "
    "('warp' if S * bits(T) % (4096 * ITEMS) == 0 else "
    "'chunk' if S * bits(T) % 4096 == 0 and S * bits(T) >= 4096 * ITEMS else 'lanes')"
)
BYTES = "3 * N * C * S * bits(T) / 8"


#: Those of half precision matter where all gradients of a group are equal: where nothing is dropped. In float32 a
#: channel whose scale is next to nothing has a gradient of the group's sums alone, and shows their rounding.
TOLERANCES = (
    GROUP_TOLERANCE.model_copy(update={"inputs": 4.0}),
    *(
        Tolerance(
            dtype=dtype,
            ulp=0.01,
            inputs=2.0,
            reason="a gradient less its mean over the group: the chain rounds gradients to so few bits that sums of "
            "equal ones are exact and cancel, while float32 keeps all bits and rounds the sum",
        )
        for dtype in ("float16", "bfloat16")
    ),
)


def _cases(dropout: bool) -> tuple[Case, ...]:
    """Those of the forward pass, and what the kernels for whole chunks and for channels last have edges at."""
    found = list(group_cases({"x": "offset", "scale": "ones", "bias": "zeros"}, dropout))

    def add(name: str, n: int, c: int, s: int, groups: int, last: bool = False, **fields: Any) -> None:
        attributes = {"groups": groups, **({"p": 0.4} if dropout else {})}
        layouts = dict.fromkeys(("dy", "x"), "channels_last") if last else {}
        found.append(Case(name=name, axes={"N": n, "C": c, "S": s}, attributes=attributes, layouts=layouts, **fields))

    add("whole_chunks", 2, 8, 512, 2, summary="a warp's elements are of one channel, a chunk's are in float32")
    add("chunks_left", 1, 10, 256, 2, summary="channels end within a warp's elements, some warps have none")
    add("many_chunks", 2, 2, 20480, 2, summary="more than one block to a group")
    far = {"x": "offset", "scale": "ones", "bias": "zeros"}
    add("far_chunks", 1, 4, 256, 2, values=far)
    add("last", 3, 24, 40, 4, last=True)
    add("last_across", 2, 24, 64, 8, last=True, summary="four channels of a thread belong to two groups")
    add("last_special", 2, 16, 24, 2, last=True, values={"x": "special"})
    add("last_far", 2, 8, 64, 2, last=True, values=far)
    add("last_odd", 2, 9, 25, 3, last=True, summary="no vector divides it")
    return tuple(found)


def _kernels(dropout: bool) -> tuple[KernelSpec, ...]:
    flags = {"DROPOUT": "1" if dropout else "0"}
    plain_grid = "max(1, min(N * groups, multiprocessors * 2))"
    # Registers hold what two blocks of a multiprocessor have at hand, shared memory what comes next.
    constants = {
        **flags, "VEC": "128 // bits(T)", "THREADS": "256",
        "STAGES": "max(1, min(4, (113664 - 2048 - ITEMS * 256) // (ITEMS * 8192)))",
    }  # fmt: skip
    few = (FEW,) if dropout else ()
    parts = "max(1, min(S // 8, multiprocessors // AT_ONCE))"
    teams = "max(1, min(N * groups, multiprocessors * 2 // K))"
    # clusters of a part's multiprocessors are not all complete: of 132, those of more than two reach 120
    clusters = "max(1, min(N * groups, (multiprocessors if K <= 2 else multiprocessors * 10 // 11) * 2 // K))"
    return (
        KernelSpec(
            name="plain",
            template="group_backward_plain.cu.j2",
            summary="a group of any size and memory order to a block, x read four times and dy twice",
            strides=("dy", "x", "dx"),
            params={"VEC": (8, 4, 1)},
            valid=(f"VEC == (128 // bits(T) if {WHOLE} else 1)",),
            constants={**flags, "MEAN": "1", "THREADS": "512"},
            grid=plain_grid,
            block="THREADS",
            cooperative=True,
            workspace="max(N * C, 1) * 8",
            min_blocks=2,
            estimate=f"9e-6 + 2 * {BYTES} / (2e12 if VEC > 1 else 3e11)",
        ),
        KernelSpec(
            name="last",
            template="group_backward_last.cu.j2",
            summary="channels last: some samples at a time over all blocks, x read three times and dy twice",
            strides=("dy", "x", "dx"),
            requires=("S % 8 == 0 and S >= 8", "C % 4 == 0 and C >= 4"),
            params={"WIDE": (1, 0), "AT_ONCE": (2, 1)},
            valid=(
                f"WIDE == (1 if {' and '.join(LAST.format(t) for t in ('dy', 'x', 'dx'))} else 0)",
                "C <= 2048", "AT_ONCE == (2 if N >= 2 else 1)",
            ),
            constants={**flags, "MEAN": "1", "THREADS": "512"},
            grid=f"AT_ONCE * {parts}",
            block="THREADS",
            cooperative=True,
            shared_memory="THREADS * 48 + groups * 20",
            workspace=f"AT_ONCE * {parts} * groups * 20 + N * {parts} * C * 8",
            min_blocks=1,
            estimate=f"9e-6 + {BYTES} / (1.8e12 if WIDE else 2e11) + ceildiv(N, AT_ONCE) * 2.8e-5",
        ),
        _pixels(flags),
        KernelSpec(
            name="team",
            template="group_backward_chip.cu.j2",
            summary="a group in the registers of a team of blocks, read once, the next groups on their way",
            regions=("dx",),
            targets=("sm_90+",),
            requires=(f"{WHOLE} and S >= 1 and {SIZE} % 4096 == 0", *few),
            params={
                "SPAN": ("warp", "chunk", "lanes"), "FULL": (1, 0), "ITEMS": (4, 2, 1),
                "K": (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 32, 40, 48, 60, 64, 128, 256),
            },
            valid=(
                SPANS,
                f"(K - 1) * ITEMS * 32768 < {SIZE} and {SIZE} <= K * ITEMS * 32768",
                f"FULL == (1 if K * ITEMS * 32768 == {SIZE} else 0)",
                "K <= multiprocessors * 2",
            ),
            constants={**constants, "CLUSTER": "0"},
            grid=f"{teams} * K",
            block="THREADS",
            cooperative=True,
            shared_memory="STAGES * ITEMS * 8192",
            workspace=f"{teams} * K * 64 + max(N * C, 1) * K * 8",
            min_blocks=2,
            estimate=f"8e-6 + {BYTES} / 4e12 * (1 if SPAN == 'warp' else 1.1 if SPAN == 'chunk' else 1.3) * "
            f"max(1, K * ITEMS * 32768 / ({SIZE})) + 1e-6 / ITEMS",
        ),
        KernelSpec(
            name="cluster",
            template="group_backward_chip.cu.j2",
            summary="a group in the registers of a cluster, read once, the next groups on their way",
            regions=("dx",),
            targets=("sm_90+",),
            requires=(f"{WHOLE} and S >= 1 and {SIZE} % 4096 == 0", *few),
            params={"SPAN": ("warp", "chunk", "lanes"), "FULL": (1, 0), "K": (2, 4, 8), "ITEMS": (4, 2, 1)},
            valid=(
                SPANS,
                f"(K - 1) * ITEMS * 32768 < {SIZE} and {SIZE} <= K * ITEMS * 32768",
                f"FULL == (1 if K * ITEMS * 32768 == {SIZE} else 0)",
            ),
            constants={**constants, "CLUSTER": "1"},
            grid=f"{clusters} * K",
            block="THREADS",
            cluster="K",
            cooperative=True,
            shared_memory="STAGES * ITEMS * 8192",
            workspace="max(N * C, 1) * K * 8",
            min_blocks=2,
            estimate=f"7e-6 + {BYTES} / 4e12 * (1 if SPAN == 'warp' else 1.1 if SPAN == 'chunk' else 1.3) * "
            f"max(1, K * ITEMS * 32768 / ({SIZE})) + 1e-6 / ITEMS",
        ),
    )


def _pixels(flags: Mapping[str, str]) -> KernelSpec:
    """Slices of groups, channels last, in the registers of teams: moments by the tensor cores."""
    blocks, units = f"ceildiv(S // 8, {ROWS} * TILES)", "N * (groups // SLICE)"
    swizzle = f"({WIDTH} * 2 if {WIDTH} == 16 or {WIDTH} == 32 or {WIDTH} == 64 else 0)"
    each = f"align(ceildiv(S // 8, {blocks}), 8 if {swizzle} else 1)"
    teams = f"max(1, min({units}, multiprocessors // {blocks}))"
    stage = f"({each} * 32 * {WIDTH})"
    others = f"(max({WIDTH}, THREADS // 4) * 8 + max({WIDTH}, THREADS) * 8 + THREADS * 32)"
    return KernelSpec(
        name="last_pixels",
        template="group_backward_pixels.cu.j2",
        summary="channels last: some groups in the registers of a team of blocks, read once, the next ones coming",
        targets=LARGE,
        strides=("dy", "x", "dx"),
        requires=(
            "bits(T) == 16", *(LAST_EIGHT.format(t) for t in ("dy", "x", "dx")), "aligned(dx, 16)",
            "aligned(scale, 16) and aligned(bias, 16)", "S % 8 == 0 and S >= 8", FEW,
            "C < 2147483648 and N * groups < 2147483648", "S * stride(dx, 2) < 2147483648",
        ),
        params={"SLICE": (1, 2, 4, 8, 16, 32), "STAGES": (3, 2), "THREADS": (512, 320, 256), "TILES": (1, 2)},
        valid=(
            f"groups % SLICE == 0 and {WIDTH} % 8 == 0 and {WIDTH} <= THREADS",
            f"{WIDTH} <= 64 or {WIDTH} % 64",  # rows that eight of share no bank
            "TILES == (1 if THREADS == 512 else 2)",
            f"{blocks} <= multiprocessors",
            f"STAGES == min(3, (229376 - {others}) // {stage})",
        ),
        constants={**flags, "PACKED": "1"},
        tensor_maps=tuple(
            TensorMap(
                name=f"{t}_map", operand=t, dims=("C", "S // 8", "8", "N"), swizzle=swizzle, l2_promotion=256,
                strides=(f"stride({t}, 2) * 8", f"stride({t}, 2)", f"stride({t}, 0)"), box=(WIDTH, each, "8", "1"),
            )
            for t in ("x", "dy")
        ),
        grid=f"{teams} * {blocks}",
        block="THREADS",
        cooperative=True,
        shared_memory=f"STAGES * {stage} + {others}",
        workspace=f"N * groups * {blocks} * 16 + N * C * {blocks} * 8",
        min_blocks=1,
        estimate=f"1.4e-5 + ceildiv({units}, {teams}) * (TILES * THREADS * 1.35e-8 + SLICE * {blocks} * 9e-9)"
        f" * (1 if {WIDTH} >= 40 else 1.1) * (1 if STAGES == 3 or {units} <= {teams} * 4 else 1.15)",
    )  # fmt: skip


#: What the slot of dx is proven on: what a residual connection adds to a gradient, a gate, and a cast.
_GATED = Region(
    name="gated",
    summary="gates of elements and of channels, the gradient of another path, and a cast behind dx",
    pattern="...\nopen = Sigmoid(gate)\nv0 = Mul(dx, open)\nv1 = Mul(v0, gain)\nv2 = Add(v1, other)\n"
    'z = Cast(v2, to="float32")',
    slots=("dx",),
    inputs={"dy": "T[N C S]", "x": "T[N C S]", **AFFINE, "gate": "T[N C S]", "gain": "T[C 1]", "other": "T[N C S]"},
    outputs={"z": "float32[N C S]", "dscale": "T[C]", "dbias": "T[C]"},
    dtypes={"T": ("bfloat16",)},
    extents={"N": 2, "C": 24, "S": 256},
    cases=(Case(name="many_groups", axes={"N": 3, "C": 24, "S": 256}, attributes={"groups": 2}),),
)


def _fusion(words: str, summary: str, steps: str, dropout: bool) -> FusionSpec:
    return FusionSpec(
        api=1,
        name=f"norm.{words}",
        summary=summary,
        pattern=f"{NORM_STEP}{steps}"
        "dx, dscale, dbias = fusionreg.GroupNormalizationGrad(g, x, scale, num_groups=groups, epsilon=epsilon)",
        inputs={"dy": MAP, "x": MAP, **(RNG if dropout else {}), **AFFINE},
        outputs={"dx": MAP, "dscale": "T[C]", "dbias": "T[C]"},
        layouts={"dx": "x"},
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes=AXES,
        attributes={**GROUPS, **(DROPOUT if dropout else {}), **EPSILON},
        constraints=(*DIVIDES, *(("0 <= p and p <= 1",) if dropout else ())),
        cases=_cases(dropout),
        tolerances=TOLERANCES[:1] if dropout else TOLERANCES,
        workloads=workloads(words),
        regions=() if dropout else (_GATED,),
        kernels=_kernels(dropout),
        tags=("norm", "S17", "training", "backward"),
    )


GROUPNORM_SWISH_BACKWARD = _fusion(
    "groupnorm_swish_backward",
    "gradients of swish(GroupNorm(x)): dx, dscale, dbias",
    "g = fusionreg.SwishGrad(dy, n)\n",
    dropout=False,
)

GROUPNORM_SWISH_DROPOUT_BACKWARD = _fusion(
    "groupnorm_swish_dropout_backward",
    "gradients of dropout(swish(GroupNorm(x))): dx, dscale, dbias; the mask is made again from rng",
    "d = fusionreg.Dropout(dy, rng, p=p)\ng = fusionreg.SwishGrad(d, n)\n",
    dropout=True,
)

SWISH_DROPOUT_BACKWARD = FusionSpec(
    api=1,
    name="norm.swish_dropout_backward",
    summary="gradient of dropout(x * sigmoid(x)); the mask is made again from rng",
    pattern="d = fusionreg.Dropout(dy, rng, p=p)\ndx = fusionreg.SwishGrad(d, x)",
    inputs={"dy": "T[... M N]", "x": "T[... M N]", **RNG},
    outputs={"dx": "T[... M N]"},
    dtypes=SWISH_DROPOUT.dtypes,
    axes=SWISH_DROPOUT.axes,
    attributes=DROPOUT,
    constraints=SWISH_DROPOUT.constraints,
    cases=SWISH_DROPOUT.cases,
    workloads=workloads("swish_dropout_backward"),
    kernels=(
        KernelSpec(
            name="elements",
            template="swish_dropout_backward.cu.j2",
            summary="16 bytes a thread and turn",
            params={"VEC": (8, 4, 1), "THREADS": (256,)},
            valid=(
                "VEC == 1 or VEC * bits(T) == 128 and M * N % VEC == 0 "
                "and aligned(dy, 16) and aligned(x, 16) and aligned(dx, 16)",
            ),
            grid="max(1, min(ceildiv(M * N, THREADS * VEC), 2147483647))",
            block="THREADS",
            estimate="2e-6 + 3 * M * N * bits(T) / 8 / (4e12 if VEC > 1 else 1e12)",
        ),
    ),
    tags=("norm", "S17", "training", "backward"),
)

FUSIONS = (GROUPNORM_SWISH_BACKWARD, GROUPNORM_SWISH_DROPOUT_BACKWARD, SWISH_DROPOUT_BACKWARD)
