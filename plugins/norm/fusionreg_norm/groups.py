"""Fusions that normalise groups of channels: GroupNorm with the Swish and the dropout that follow it.

Tensors are [N C S ...] in shape, whatever the number of spatial axes; in memory they may be channels last instead, as
torch has them. The mask of dropout depends on the index of an element in the shape, and so not on the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.spec import AttributeSpec, Backward, Case, FusionSpec, KernelSpec, Tolerance

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

#: Bytes of a group, and whether 16-byte accesses reach all of it.
BYTES = "C // groups * S * bits(T) // 8"
WHOLE = "C // groups * S * bits(T) % 128 == 0 and aligned(x, 16) and aligned(y, 16)"
#: Blocks of a team that shares so many bytes: no more than have something to do.
TEAM = "max(1, min({} // TEAMS, ceildiv({}, THREADS * 16)))"
#: Every team has something to do, and all blocks, with some memory of their own, fit at once: they meet at barriers.
TEAMS = "TEAMS <= {} and {} * ({} + 2560) <= 233472"
#: Every block of a cluster has something to do.
SPREADS = "SPREAD == 1 or {} >= SPREAD * 2048"
#: Architectures whose multiprocessors have as much shared memory as that.
LARGE = ("sm_90", "sm_90a", "sm_100f")
#: Blocks of eight elements have numbers of 32 bits.
FEW = "N * C * S < 34359738368"
#: Whether the channels of a pixel lie side by side, and 16-byte accesses reach them.
LAST = (
    "(C == 1 or stride({0}, 1) == 1) and stride({0}, 2) * bits(T) % 128 == 0 "
    "and (N == 1 or stride({0}, 0) * bits(T) % 128 == 0)"
)


#: Channels of a slice; rows of a block's threads, each with VEC of them.
WIDTH = "(C // groups * SLICE)"
ROWS = f"max(1, THREADS // max(1, {WIDTH} // VEC))"


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
    return (
        KernelSpec(
            name="plain",
            template="group_forward_plain.cu.j2",
            summary="a group of any size and memory order to a block, read three times",
            strides=("x", "y"),
            params={"VEC": (8, 4, 1), "THREADS": (512,)},
            valid=(
                "VEC == 1 or VEC * bits(T) == 128 and S % VEC == 0 and contiguous(x) and contiguous(y) "
                "and aligned(x, 16) and aligned(y, 16)",
            ),
            constants={**flags, "PACKED": "0"},
            grid="N * groups",
            block="THREADS",
            estimate="6e-6 + 4 * N * C * S * bits(T) / 8 / (2e12 if VEC > 1 else 4e11)",
        ),
        _chip(
            "cluster", "SPREAD", "a group in the shared memory of a cluster of blocks, read once", flags,
            {"SPREAD": (2, 1, 4, 8)}, cluster="SPREAD",
        ),
        _ring(flags),
        _tiles(
            "last_tiles", "SPREAD", "channels last: some groups in the registers of a cluster, read once", flags,
            {"SPREAD": (2, 1, 4, 8)}, cluster="SPREAD",
        ),
        _tiles(
            "last_grid", f"max(1, min(multiprocessors // (N * (groups // SLICE)), ceildiv(S // 8, {ROWS})))",
            "channels last: all groups in the registers of all blocks, read once", flags, {}, grid=True,
            cooperative=True,
        ),
        _last(
            "last_cluster", "SPREAD", "channels last: some groups in the shared memory of a cluster, read once", flags,
            {"SPREAD": (2, 1, 4, 8)}, cluster="SPREAD",
        ),
        _last(
            "last_stream", TEAM.format("multiprocessors", f"{BYTES} * SLICE"),
            "channels last: teams of blocks, each with some groups in its shared memory, read once", flags, TEAM_COUNTS,
            grid=True, cooperative=True, min_blocks=2, workspace="N * groups * {} * 8",
        ),
    )  # fmt: skip


#: Teams that all blocks make up; each takes one group, or slice of groups, at a time.
TEAM_COUNTS = {"TEAMS": (1, 2, 4, 8, 16, 32)}
#: Bytes of a block's ring and of its table of channels, at most.
RING = 228000


def _ring(flags: Mapping[str, str]) -> KernelSpec:
    """Group after group through rings of chunks in the shared memory of teams of blocks."""
    blocks = TEAM.format("multiprocessors", BYTES)
    chunks = f"ceildiv(ceildiv({BYTES}, 16 * {blocks}), STEPS * THREADS)"
    rounds = "ceildiv(N * groups, TEAMS)"
    table = "C // groups * 16"
    slots = f"min({rounds} * {chunks}, ({RING} - {table}) // (STEPS * THREADS * 16))"
    return KernelSpec(
        name="stream",
        template="group_forward_stream.cu.j2",
        summary="teams of blocks, group after group, read once; the next ones arrive while one is finished",
        targets=LARGE,
        requires=(WHOLE, FEW, "C // groups * S < 2147483648", f"{table} <= 65536"),
        params={"WHOLE": (1, 0), "TEAMS": (1, 2, 4, 8, 16, 33, 66, 132), "STEPS": (2,), "THREADS": (512,)},
        valid=(
            "WHOLE == 0 or S * bits(T) % 128 == 0",
            f"TEAMS <= N * groups and TEAMS <= multiprocessors and {slots} >= min(2, {rounds}) * {chunks}",
        ),
        constants={**flags, "PACKED": "1 if bits(T) == 16 else 0", "RING": str(RING)},
        grid=f"TEAMS * {blocks}",
        block="THREADS",
        shared_memory=f"{slots} * STEPS * THREADS * 16 + {table}",
        cooperative=True,
        min_blocks=1,
        workspace=f"N * groups * {blocks} * 8",
        estimate=f"8e-6 + {rounds} * (2e-6 + 2 * TEAMS * {BYTES} / 3.8e12) + 2 * TEAMS * {BYTES} / 4e12",
    )


def _chip(
    name: str, blocks: str, summary: str, flags: Mapping[str, str], params: Mapping[str, Any], **fields: Any
) -> KernelSpec:  # fmt: skip
    """A group in the shared memory of so many blocks."""
    held = f"ceildiv({BYTES}, {blocks} * 16) * 16"
    words = f" + (ceildiv({held}, 64 * THREADS) * THREADS * 4 if bits(T) == 16 else 0)"
    masks = words if flags["DROPOUT"] == "1" else ""
    return KernelSpec(
        name=name,
        template="group_forward_chip.cu.j2",
        summary=summary,
        targets="sm_90+",
        requires=(WHOLE, FEW, "C // groups * S < 2147483648"),
        params={"WHOLE": (1, 0), **params, "THREADS": (256, 512)},
        valid=("WHOLE == 0 or S * bits(T) % 128 == 0", SPREADS.format(BYTES)),
        constants={**flags, "PACKED": "1 if bits(T) == 16 else 0", "BLOCKS": blocks},
        grid=f"N * groups * {blocks}",
        block="THREADS",
        shared_memory=f"{held} + C // groups * 16{masks}",
        estimate=_waves("N * groups", held, "3e12"),
        **fields,
    )


def _last(
    name: str, blocks: str, summary: str, flags: Mapping[str, str], params: Mapping[str, Any], grid: bool = False,
    **fields: Any,
) -> KernelSpec:  # fmt: skip
    """A slice of groups, channels last, in the shared memory of so many blocks."""
    width = "C // groups * SLICE"
    tiles = f"ceildiv(S, 8 * {blocks})"
    held = f"{tiles} * {width} * bits(T)"
    masks = f" + {tiles} * {width}" if flags["DROPOUT"] == "1" else ""
    memory = f"{held} + THREADS * 1024 // bits(T){masks}"
    rate = f"(2e12 if {width} * bits(T) >= 1024 else 1.7e12) + SLICE * 3e-7"
    return KernelSpec(
        name=name,
        template="group_forward_last.cu.j2",
        summary=summary,
        targets=LARGE if grid else "sm_90+",
        strides=("x", "y"),
        requires=(LAST.format("x"), LAST.format("y"), "aligned(x, 16) and aligned(y, 16)", "S % 8 == 0", FEW),
        params={"SLICE": (1, 2, 4, 8, 16, 32), **params, "THREADS": (320,)},
        valid=(
            f"groups % SLICE == 0 and {width} * bits(T) % 128 == 0 and {width} * bits(T) <= THREADS * 128",
            TEAMS.format("N * (groups // SLICE)", 1, memory) if grid else SPREADS.format(f"{BYTES} * SLICE"),
        ),
        constants={**flags, "PACKED": "1", "GRID": "1" if grid else "0", "BLOCKS": "1" if grid else blocks},
        grid=f"TEAMS * {blocks}" if grid else f"N * (groups // SLICE) * {blocks}",
        block="THREADS",
        shared_memory=memory,
        estimate=_rounds("N * groups // SLICE", f"{BYTES} * SLICE", rate)
        if grid
        else _waves("N * groups // SLICE", held, rate),
        **{**fields, **({"workspace": fields["workspace"].format(blocks)} if grid else {})},
    )


def _tiles(
    name: str, blocks: str, summary: str, flags: Mapping[str, str], params: Mapping[str, Any], grid: bool = False,
    **fields: Any,
) -> KernelSpec:  # fmt: skip
    """A slice of groups, channels last, in the registers of so many blocks."""
    units = "N * (groups // SLICE)"
    each = f"ceildiv(S // 8, {blocks})"
    return KernelSpec(
        name=name,
        template="group_forward_tiles.cu.j2",
        summary=summary,
        targets=LARGE if grid else "sm_90+",
        strides=("x", "y"),
        requires=(
            "bits(T) == 16", LAST.format("x"), LAST.format("y"), "aligned(x, 16) and aligned(y, 16)", "S % 8 == 0", FEW,
        ),
        params={
            "SLICE": (1, 2, 4, 8, 16, 32), **params, "VEC": (8, 4), "TILES": (1, 2, 3), "THREADS": (640, 320, 512, 768),
        },
        valid=(
            f"groups % SLICE == 0 and {WIDTH} % VEC == 0 and {WIDTH} <= THREADS * VEC",
            f"TILES == ceildiv({each}, {ROWS})",
            "TILES * VEC * THREADS <= 12288",
            f"{units} <= multiprocessors" if grid else SPREADS.format(f"{BYTES} * SLICE"),
        ),
        constants={**flags, "PACKED": "1", "GRID": "1" if grid else "0", "BLOCKS": "1" if grid else blocks},
        grid=f"{units} * {blocks}",
        block="THREADS",
        shared_memory=f"0 if SLICE == 1 else {ROWS} * {WIDTH} * 8",
        min_blocks=1,
        estimate="5e-6 + 2 * N * C * S * bits(T) / 8 / 2.5e12",
        **{**fields, **({"workspace": f"N * groups * {blocks} * 8"} if grid else {})},
    )  # fmt: skip


def _waves(units: str, held: str, rate: str) -> str:
    """Seconds of clusters that hold so many bytes in each block: larger clusters of blocks do not reach every
    multiprocessor, and two blocks of one overlap better than one."""
    reached = "(multiprocessors if SPREAD <= 2 else multiprocessors * 10 // 11)"
    work = f"ceildiv({units} * SPREAD, {reached}) * {held} * (1.1 if {held} > 114000 else 1)"
    few = f"(1 if (THREADS > 256) == ({held} > 114000) else 1.03)"
    return f"4e-6 + SPREAD * 2e-7 + 2 * {work} * {few} * multiprocessors / {rate}"


def _rounds(units: str, held: str, rate: str) -> str:
    """Seconds of teams that hold so many bytes each, all of them together at a time."""
    return f"8e-6 + ceildiv({units}, TEAMS) * (3e-6 + 2 * TEAMS * {held} / {rate})"


def _fusion(words: str, summary: str, pattern: str, dropout: bool) -> FusionSpec:
    rng = RNG if dropout else {}
    return FusionSpec(
        api=1,
        name=f"norm.{words}",
        summary=summary,
        pattern=pattern,
        inputs={"x": MAP, **rng, **AFFINE},
        outputs={"y": MAP},
        layouts={"y": "x"},
        backward=Backward(fusion=f"norm.{words}_backward"),
        autocast="float32",
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes=AXES,
        attributes={**GROUPS, **(DROPOUT if dropout else {}), **EPSILON},
        constraints=(*DIVIDES, *(("0 <= p and p <= 1",) if dropout else ())),
        cases=group_cases({"x": "offset", "scale": "ones", "bias": "zeros"}, dropout),
        tolerances=(GROUP_TOLERANCE,),
        workloads=workloads(words),
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

FUSIONS = (GROUPNORM_SWISH, GROUPNORM_SWISH_DROPOUT, SWISH_DROPOUT)
