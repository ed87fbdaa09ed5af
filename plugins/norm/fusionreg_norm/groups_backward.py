"""Gradients of the group fusions: dx of every element, dscale and dbias of every channel.

Statistics, Swish and mask are computed from the forward pass's inputs again: nothing is saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.spec import FusionSpec, KernelSpec, Workload

from .groups import AFFINE, AXES, DIVIDES, GROUP_TOLERANCE, GROUPS, MAP, NORM_STEP, SWISH_DROPOUT, group_cases
from .rows import DROPOUT, EPSILON, PENDING, RNG

#: Whether 16-byte accesses reach every channel of x, dy and dx, in the order of the shape.
WHOLE = (
    "S * bits(T) % 128 == 0 and contiguous(x) and contiguous(dy) and contiguous(dx) "
    "and aligned(x, 16) and aligned(dy, 16) and aligned(dx, 16)"
)
BYTES = "3 * N * C * S * bits(T) / 8"

#: What a block of the cluster kernel holds of one group: x and dy.
STAGE = "2 * THREADS * ITEMS * 16"


def _kernels(dropout: bool) -> tuple[KernelSpec, ...]:
    flags = {"DROPOUT": "1" if dropout else "0"}
    plain_grid = "max(1, min(N * groups, multiprocessors * (1024 // THREADS)))"
    # some of a part's clusters of multiprocessors are incomplete: of 132, larger clusters of blocks reach 120
    clusters = "max(1, min(N * groups, (multiprocessors if K <= 2 else multiprocessors * 10 // 11) // K * BLOCKS))"
    return (
        KernelSpec(
            name="plain",
            pending=PENDING,
            template="group_backward_plain.cu.j2",
            summary="a group of any size and memory order to a block, x read four times and dy twice",
            strides=("dy", "x", "dx"),
            params={"VEC": (8, 4, 1), "THREADS": (512, 128)},
            valid=(f"VEC == 1 or VEC * bits(T) == 128 and {WHOLE}",),
            constants={**flags, "MEAN": "1"},
            grid=plain_grid,
            block="THREADS",
            cooperative=True,
            workspace="max(N * C, 1) * 8",
            min_blocks=2,
            estimate=f"9e-6 + 2 * {BYTES} / (2e12 if VEC > 1 else 3e11) * "
            "(1.5 if (THREADS > 128) != (C // groups * S > 8192) else 1)",
        ),
        KernelSpec(
            name="cluster",
            pending=PENDING,
            template="group_backward_cluster.cu.j2",
            summary="a group in the registers of a cluster, read once, the next groups on their way",
            targets=("sm_90+",),
            params={
                "SPAN": ("warp", "chunk", "lanes"), "FULL": (1, 0), "K": (1, 2, 4, 8), "THREADS": (128, 256, 512),
                "ITEMS": (1, 2, 4, 5),
            },
            requires=(f"{WHOLE} and S >= 1 and C // groups * S * bits(T) % 4096 == 0",),
            valid=(
                "S * bits(T) % (1024 if SPAN == 'lanes' else 4096 if SPAN == 'chunk' else 4096 * ITEMS) == 0",
                "K * THREADS * ITEMS * 128 >= C // groups * S * bits(T)",
                "FULL == 0 or K * THREADS * ITEMS * 128 == C // groups * S * bits(T)",
            ),
            constants={
                **flags,
                "VEC": "128 // bits(T)",
                "BLOCKS": "max(1, 512 // THREADS)",
                "STAGES": f"max(1, min(4, (233472 // BLOCKS - 4096 - THREADS * ITEMS) // ({STAGE})))",
            },
            grid=f"{clusters} * K",
            block="THREADS",
            cluster="K",
            cooperative=True,
            shared_memory=f"STAGES * {STAGE}",
            workspace="max(N * C, 1) * K * 8",
            max_registers=128,
            estimate=f"6e-6 + {BYTES} / 4e12 * (1 if SPAN == 'warp' else 1.1 if SPAN == 'chunk' else 1.3) * "
            "max(1, K * THREADS * ITEMS * 128 / (C // groups * S * bits(T))) + 1e-7 * ITEMS + 1e-7 * (1 - FULL)",
        ),
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
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes=AXES,
        attributes={**GROUPS, **(DROPOUT if dropout else {}), **EPSILON},
        constraints=(*DIVIDES, *(("0 <= p and p <= 1",) if dropout else ())),
        cases=group_cases({"x": "offset", "scale": "ones", "bias": "zeros"}, dropout),
        tolerances=(GROUP_TOLERANCE,),
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
    kernels=(
        KernelSpec(
            name="elements",
            pending=PENDING,
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
