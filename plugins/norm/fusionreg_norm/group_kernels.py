"""The forward kernels of group fusions: groups in shared memory, in registers, passing through, or read three times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.spec import KernelSpec

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


def kernels(dropout: bool, swish: bool = True) -> tuple[KernelSpec, ...]:
    """Those of GroupNorm with Swish or without, and with dropout or without."""
    flags = {"DROPOUT": "1" if dropout else "0", **({} if swish else {"SWISH": "0"})}
    return (
        _plain(
            "plain", "a group of any size to a block, read three times", flags, {"VEC": (8, 4, 1)}, regions=("x", "y"),
            valid=("VEC == 1 or VEC * bits(T) == 128 and S % VEC == 0 and aligned(x, 16) and aligned(y, 16)",),
        ),
        _plain(
            "strided", "a group of any size and memory order to a block, read three times", flags, {},
            strides=("x", "y"),
        ),
        _chip(
            "cluster", "SPREAD", "a group in the shared memory of a cluster of blocks, read once", flags,
            {"SPREAD": (2, 1, 4, 8)}, cluster="SPREAD", regions=("x", "y"),
        ),
        _ring(flags),
        _stream(flags),
        _tiles(
            "last_tiles", "SPREAD", "channels last: some groups in the registers of a cluster, read once", flags,
            {"SPREAD": (2, 1, 4, 8)}, cluster="SPREAD", regions=("x", "y"),
        ),
        _tiles(
            "last_grid", f"max(1, min(multiprocessors // (N * (groups // SLICE)), ceildiv(S // 8, {ROWS})))",
            "channels last: all groups in the registers of all blocks, read once", flags, {}, grid=True,
            cooperative=True, regions=("y",),
        ),
        _pixels(flags),
        *(() if dropout else (_whole(flags),)),
        _last(
            "last_cluster", "SPREAD", "channels last: some groups in the shared memory of a cluster, read once", flags,
            {"SPREAD": (2, 1, 4, 8)}, cluster="SPREAD", regions=("x", "y"), min_blocks=2,
        ),
        _last(
            "last_stream", TEAM.format("multiprocessors", f"{BYTES} * SLICE"),
            "channels last: teams of blocks, each with some groups in its shared memory, read once", flags, TEAM_COUNTS,
            grid=True, cooperative=True, min_blocks=1, workspace="N * groups * {} * 8", regions=("y",),
        ),
    )  # fmt: skip


def _plain(
    name: str, summary: str, flags: Mapping[str, str], params: Mapping[str, Any], **fields: Any
) -> KernelSpec:  # fmt: skip
    """A group to a block: what takes everything that the others do not."""
    strided = "strides" in fields
    return KernelSpec(
        name=name,
        template=f"group_forward_{name}.cu.j2",
        summary=summary,
        params={**params, "THREADS": (512,)},
        constants={**flags, "PACKED": "0"},
        grid="N * groups",
        block="THREADS",
        estimate=f"6e-6 + 4 * N * C * S * bits(T) / 8 / ({'4e11' if strided else '2e12 if VEC > 1 else 4e11'})",
        **fields,
    )


#: Teams that all blocks make up; each takes one group, or slice of groups, at a time.
TEAM_COUNTS = {"TEAMS": (1, 2, 4, 8, 16, 32)}


def _stream(flags: Mapping[str, str]) -> KernelSpec:
    """Group after group through rings in shared memory, one to a multiprocessor: loads run ahead of statistics."""
    blocks = TEAM.format("multiprocessors", BYTES)
    part, rounds = f"ceildiv(ceildiv({BYTES}, 16), {blocks})", "ceildiv(N * groups, TEAMS)"
    stage = "(TURN * (THREADS - 64 - LOOKERS))"
    stages = f"ceildiv({part}, {stage})"  # the last one may be short, but takes a place in the ring all the same
    return KernelSpec(
        name="stream",
        template="group_forward_stream.cu.j2",
        regions=("y",),
        summary="teams of blocks, each with rings of stages in its shared memory, loads always under way, read once",
        targets=LARGE,
        requires=(WHOLE, FEW, "C // groups * S < 2147483648 and N * groups < 2147483648", "C // groups <= 320"),
        params={
            "WHOLE": (2, 1, 0), "TEAMS": (*TEAM_COUNTS["TEAMS"], 64, 128), "TURN": (2,), "LOOKERS": (128,),
            "THREADS": (640, 608, 704),
        },
        valid=(
            "WHOLE == 0 or S * bits(T) % 128 == 0",
            "(bits(T) == 16 and S % (256 * TURN) == 0) if WHOLE == 2 else THREADS == 640",
            f"TEAMS <= N * groups and TEAMS * {blocks} <= multiprocessors",
            f"{stages} + 1 < 221184 // ({stage} * 16)",
        ),
        constants={
            **flags, "PACKED": "1 if bits(T) == 16 else 0", "EARLY": "0", "SHARED": "2",
            "WORKERS": "THREADS - 64 - LOOKERS", "SLOTS": f"221184 // ({stage} * 16)",
        },
        grid=f"TEAMS * {blocks}",
        block="THREADS",
        shared_memory=f"SLOTS * {stage} * 16 + C // groups * 32",
        cooperative=True,
        min_blocks=1,
        workspace=f"N * groups * {blocks} * 8",
        estimate=f"8e-6 + {rounds} * 4.5e-7 + (2 * {rounds} + 1) * {stages} * {stage} * 16 * multiprocessors / 3.4e12"
        f" * (1.06 if {part} * 16 > 110000 else 1)",
    )  # fmt: skip


def _ring(flags: Mapping[str, str]) -> KernelSpec:
    """Group after group through places in the memory of clusters: one finished, one looked at, one on its way."""
    held, clusters = f"{BYTES} // SPREAD", "max(1, min(N * groups, multiprocessors // SPREAD))"
    return KernelSpec(
        name="ring",
        template="group_forward_ring.cu.j2",
        summary="clusters of blocks, each with several groups in its shared memory, loads always under way, read once",
        targets=LARGE,
        programmatic=True,
        requires=(WHOLE, FEW, "bits(T) == 16", "C // groups * S < 2147483648 and N * groups < 2147483648", "C <= 2048"),
        params={"SPREAD": (2,), "SLOTS": (3,), "TURN": (4, 2), "THREADS": (512,)},
        valid=(
            f"S % (256 * TURN) == 0 and {BYTES} % (SPREAD * 512 * TURN) == 0",
            f"SLOTS * ({held}) + C * 8 + 6144 <= 232448",
        ),
        constants={**flags, "PACKED": "1", "BLOCKS": "SPREAD", "SHARED": "0"},
        grid=f"{clusters} * SPREAD",
        block="THREADS",
        cluster="SPREAD",
        min_blocks=1,
        shared_memory=f"SLOTS * ({held}) + C * 8",
        estimate=f"6e-6 + ceildiv(N * groups, {clusters}) * ({held}) * 2 * multiprocessors / 3.2e12"
        " * (1 if TURN == 4 else 1.08)",
    )  # fmt: skip


def _chip(
    name: str, blocks: str, summary: str, flags: Mapping[str, str], params: Mapping[str, Any], **fields: Any
) -> KernelSpec:  # fmt: skip
    """A group in the shared memory of so many blocks."""
    held = f"ceildiv({BYTES}, {blocks} * 16) * 16"
    words = f" + (ceildiv({held}, TURN * 16 * THREADS) * THREADS * 4 if EARLY else 0)"
    masks = words if flags["DROPOUT"] == "1" else ""
    early = "1 if bits(T) == 16 else 0" if masks else "0"
    return KernelSpec(
        name=name,
        template="group_forward_chip.cu.j2",
        summary=summary,
        targets="sm_90+",
        programmatic=True,
        requires=(WHOLE, FEW, "C // groups * S < 2147483648 and C < 2147483648"),
        params={"WHOLE": (1, 0), **params, "THREADS": (256, 512)},
        valid=(
            "WHOLE == 0 or S * bits(T) % 128 == 0",
            SPREADS.format(BYTES),
        ),
        constants={
            **flags, "PACKED": "1 if bits(T) == 16 else 0", "BLOCKS": blocks, "EARLY": early, "TURN": "4",
        },
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
    bits = f"{width} * bits(T)"  # of a pixel
    narrow = f"(1 if {bits} >= 1024 else {0.6 if grid else 0.85} if {bits} >= 512 else {bits} / 700)"
    rate = f"({'2.6e12' if grid else '2e12'} * {narrow}) + SLICE * 3e-7"
    return KernelSpec(
        name=name,
        template="group_forward_last.cu.j2",
        summary=summary,
        targets=LARGE if grid else "sm_90+",
        programmatic=True,
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


def _of_pixels(few: str) -> tuple[str, ...]:
    """What kernels require that take eight pixels of 16 bits at a time, channels last; ``few``: of which numbers."""
    return (
        "bits(T) == 16", LAST.format("x"), LAST.format("y"), "aligned(x, 16) and aligned(y, 16)", "S % 8 == 0", FEW,
        "aligned(scale, 16) and aligned(bias, 16)", few,
        "S * stride(x, 2) < 2147483648 and S * stride(y, 2) < 2147483648",
    )  # fmt: skip


def _tiles(
    name: str, blocks: str, summary: str, flags: Mapping[str, str], params: Mapping[str, Any], grid: bool = False,
    **fields: Any,
) -> KernelSpec:  # fmt: skip
    """A slice of groups, channels last, in the registers of so many blocks."""
    units = "N * (groups // SLICE)"
    each = f"ceildiv(S // 8, {blocks})"
    idle = f"TILES * THREADS * VEC * 8 * {blocks} / ({WIDTH} * S + 1)"  # elements that there is room for, to one
    return KernelSpec(
        name=name,
        template="group_forward_tiles.cu.j2",
        summary=summary,
        targets=LARGE if grid else "sm_90+",
        programmatic=not grid,
        strides=("x", "y"),
        requires=_of_pixels("C < 2147483648"),
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
        shared_memory=f"0 if SLICE == 1 else {ROWS} * {WIDTH} * 8 + max(THREADS, {WIDTH}) * 8 + {WIDTH} * 8",
        min_blocks=1,
        estimate=f"ceildiv({units} * {blocks}, multiprocessors) * ({6e-6 if grid else 4e-6} + (VEC == 8) * 1e-6)"
        f" + {idle} * (1 if SLICE == 1 else 3) * N * C * S * bits(T) / 1e13",
        **{**fields, **({"workspace": f"N * groups * {blocks} * 8"} if grid else {})},
    )  # fmt: skip


def _pixels(flags: Mapping[str, str]) -> KernelSpec:
    """Slices of groups, channels last, in the shared memory of teams: sums by the tensor cores."""
    units, blocks = "N * (groups // SLICE)", TEAM.format("multiprocessors", f"{BYTES} * SLICE")
    each, rows = f"ceildiv(S // 8, {blocks})", f"max(1, THREADS // max(1, {WIDTH} // 4))"
    memory = f"({each} * 128 * ({WIDTH} // 16 * 2 + 1) + max({WIDTH}, THREADS // 4) * 8)"
    moved, bits = f"2 * {each} * {WIDTH} * bits(T) * multiprocessors", f"{WIDTH} * bits(T)"
    rate = f"(3.2e12 if {bits} >= 2048 else 3e12 if {bits} >= 1024 else 1.9e12 if {bits} >= 512 else {bits} * 4e9)"
    return KernelSpec(
        name="last_pixels",
        template="group_forward_pixels.cu.j2",
        summary="channels last: teams of blocks, each with some groups in its shared memory, sums by the tensor cores",
        targets=LARGE,
        regions=("y",),
        programmatic=True,
        strides=("x", "y"),
        requires=_of_pixels("C < 2147483648 and N * groups < 2147483648"),
        params={
            "SLICE": (1, 2, 4, 8, 16, 32), "TEAMS": (1, 2, 4, 8, 16, 32), "TILES": (1, 2, 3, 4, 5, 6, 7, 8),
            "THREADS": (640,),
        },
        valid=(
            f"groups % SLICE == 0 and {WIDTH} % 8 == 0 and {WIDTH} <= THREADS * 4",
            TEAMS.format(units, 1, memory),
            f"TILES == ceildiv({each}, {rows})",
        ),
        constants={**flags, "PACKED": "1", "VEC": "4"},
        grid=f"TEAMS * {blocks}",
        block="THREADS",
        shared_memory=memory,
        cooperative=True,
        min_blocks=1,
        workspace=f"N * groups * {blocks} * 8",
        estimate=f"2e-6 + ceildiv({units}, TEAMS) * (3e-6 + SLICE * {blocks} * 7e-10 + {moved} / {rate}"
        " * (1 if TEAMS > 1 else 1.05))",
    )  # fmt: skip


def _whole(flags: Mapping[str, str]) -> KernelSpec:
    """Whole pixels, sample after sample, through rings in shared memory of teams: what is too much is read twice."""
    workers, size = "(THREADS - 32)", "C // groups"
    pixels = f"(max(1, {workers} // max(1, C // 8)) * ITEMS)"
    blocks = f"max(1, min(multiprocessors // TEAMS, ceildiv(S, {pixels})))"
    tiles = f"ceildiv(ceildiv(S, {pixels}), {blocks})"
    place, others = f"({workers} * ITEMS * 16)", f"({workers} * SPAN * 12 + 2048 + 1536)"
    slots = f"min(32, (232448 - {others}) // {place})"
    rounds, moved = "ceildiv(N, TEAMS)", f"({blocks} * TEAMS * {pixels} * C * 2)"
    again = f"max(0, {tiles} - {slots} - 40000000 // {moved})"
    return KernelSpec(
        name="last_whole",
        template="group_forward_whole.cu.j2",
        summary="channels last: whole pixels through rings in shared memory, what they cannot hold is read twice",
        targets=LARGE,
        programmatic=True,
        strides=("x", "y"),
        requires=(
            "bits(T) == 16", LAST.format("x"), LAST.format("y"), "C % 8 == 0 and (S == 1 or stride(x, 2) == C)",
            "aligned(x, 16) and aligned(y, 16) and aligned(scale, 16) and aligned(bias, 16)",
            "C * S < 2147483648 and N * groups < 2147483648 and S * stride(y, 2) < 2147483648",
        ),
        params={"TEAMS": (1, 2, 4, 8, 16, 32), "ITEMS": (4, 2, 1), "THREADS": (544,), "SPAN": (1, 2)},
        valid=(
            f"C // 8 <= {workers}", f"SPAN == (1 if {size} % 8 == 0 else 2) and ({size} >= 7 or {size} == 4)",
            "groups <= 128", "TEAMS <= N",
        ),
        constants={**flags, "PACKED": "1", "SLOTS": slots},
        grid=f"TEAMS * {blocks}",
        block="THREADS",
        shared_memory=f"{slots} * {place} + groups * 16",
        cooperative=True,
        min_blocks=1,
        workspace=f"N * groups * {blocks} * 8",
        estimate=f"6e-6 + {rounds} * (9e-6 + (2 * {tiles} + {again}) * {moved} / 3.35e12"
        " * (1 if ITEMS == 4 else 1.03 if ITEMS == 2 else 1.1))",
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
    return f"4e-6 + ceildiv({units}, TEAMS) * (1e-6 + 2 * TEAMS * {held} / {rate})"
