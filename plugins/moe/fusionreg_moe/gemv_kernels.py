"""Kernels of ``moe.expert_gemv``.

What bounds them is the bytes of the matrices, so one that several rows name is read once for all of them, and all
multiprocessors read: blocks divide the channels and, in a cluster, k.
"""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec

#: Whether indices below 0 count from the end.
WRAPPED = {"WRAP": '1 if indices == "FromEnd" else 0'}

_PLAIN = KernelSpec(
    name="plain",
    template="gemv_plain.cu.j2",
    summary="a block for 32 channels of a row: any shape, alignment and strides",
    strides=("x", "w"),
    constants={"THREADS": "256", **WRAPPED},
    grid="M * ceildiv(N, 32)",
    block="THREADS",
    estimate="5e-6 + ceildiv(M * ceildiv(N, 32), 8 * multiprocessors) * (2e-6 + 1.2e-8 * K)"
    " + M * N * K * bits(T) / 8 / 1e12",
)

#: Channels of a block: a row of a tile is 128 bytes of channels, or as many chunks of k as warps read at once.
_CHANNELS = "(32 if trans else 1024 // bits(T))"
#: Lanes of a warp along k, and 16-byte chunks of k in a tile.
_LANES = f"(128 // {_CHANNELS})"
_CHUNKS = f"(THREADS // 32 * {_LANES})"
#: Rows whose sums the warps add at a time.
_PART = f"min(ROWS, 4 * {_LANES})"
#: Tiles of w, and of x, or in place of these the warps' sums.
_SHARED = f"STAGES * 64 * THREADS + max(STAGES * ROWS * {_CHUNKS} * 16, THREADS // 32 * PART * BN * 4)"
_GROUPS = f"min(M, E) * ceildiv(N, {_CHANNELS}) * SPLIT"
#: Seconds on an H200: a launch; for each wave of blocks the ids, a first tile, and adding up, which clusters wait for
#: each other with; the matrices, again for every ROWS rows of an expert, at the rate of memory or of the blocks there
#: are; multiplying.
_ESTIMATE = (
    f"{{launch}} + ceildiv({_GROUPS}, {{slots}} * multiprocessors) * ({{wave}} + 1.3e-6 * log2(SPLIT))"
    f" + min(M, E) * N * K * bits(T) / 8 * max(1, M / ({{rows}} * E)) / min(4.4e12, {{draw}} * {_GROUPS})"
    " + M * N * K / 3e13"
)


def _stream(
    name: str,
    summary: str,
    *,
    rows: int = 16,
    split: tuple[int, ...] = (1,),
    threads: int = 256,
    blocks: int = 1,
    ahead: bool = True,
    pinned: bool = False,
) -> KernelSpec:
    cluster = split != (1,)
    return KernelSpec(
        name=name,
        template="gemv.cu.j2",
        summary=summary,
        targets=("sm_90+",) if cluster else ("sm_80+",),
        requires=(
            "E > 0 and M <= 65536",  # each block looks through all ids
            "K * bits(T) % 128 == 0 and (trans == 1 or N * bits(T) % 128 == 0)",
            "aligned(x, 16) and aligned(w, 16)",
        ),
        spaces={"w": "pinned_host"} if pinned else {},
        params={"SPLIT": split},
        constants={
            "THREADS": str(threads), "ROWS": str(rows), "STAGES": "4", "BN": _CHANNELS, "PART": _PART,
            "AHEAD": str(int(ahead)), **WRAPPED,
        },
        grid=_GROUPS,
        block="THREADS",
        cluster=("SPLIT",) if cluster else (),
        programmatic=True,
        shared_memory=_SHARED,
        min_blocks=blocks,
        estimate=_ESTIMATE.format(
            launch="4.5e-6" if pinned else "4e-6",
            slots=blocks,
            wave="4e-6" if cluster else "3e-6" if rows > 4 else "1e-6",
            rows=rows,
            draw="6e10" if cluster else "2.4e10",
        ),
    )  # fmt: skip


#: Blocks of a cluster that divide k: each warp has 2048 elements of the matrix.
_SLICES = "next_pow2(max(1, ceildiv(K * BN, 2048 * 16)))"

#: Blocks at a time: of clusters larger than two an H200 does not fill all of its multiprocessors.
_SLOTS = f"max(1, multiprocessors - (0 if {_SLICES} <= 2 else 12))"


def _resident(name: str, types: str, bits: int, targets: tuple[str, ...] = ("sm_90+",)) -> KernelSpec:
    return KernelSpec(
        name=name,
        template="gemv_resident.cu.j2",
        summary="a cluster for an expert's rows: all of its matrix is under way at once, and stays in registers",
        targets=targets,
        requires=(
            f"{types} and E > 0 and M <= 1024",
            f"K <= 8192 and K % {128 // bits} == 0 and (trans == 1 or N % 4 == 0)",
            "aligned(x, 16) and aligned(w, 16)",
        ),
        specialize=("K", "N"),
        params={"BN": (16, 32), "EARLY": (1, 0)},
        # rows at a time, as shared memory holds x of so many
        constants={
            "THREADS": "512", "ROWS": "24 if BN == 16 else 16", "WK": "2048 // BN", "SPLIT": _SLICES, **WRAPPED,
        },
        grid="min(M, E) * ceildiv(N, BN) * SPLIT",
        block="THREADS",
        cluster="SPLIT",
        programmatic=True,
        shared_memory=f"{bits // 8} * THREADS // 32 * ROWS * WK",
        min_blocks=1,
        estimate="2e-6 + 5e-7 * EARLY"  # x, which all wait for, stands behind what is asked for early
        f" + ceildiv(min(M, E) * ceildiv(N, BN) * {_SLICES}, {_SLOTS}) * (5.6e-6 + 1e-7 * M / E)",
    )  # fmt: skip


#: Few rows, most of whose experts have one: seconds on an H200 as of the others.
_ROWS = KernelSpec(
    name="rows",
    template="gemv_rows.cu.j2",
    summary="a warp for some channels of an expert, which it reads once for 4 rows, straight to registers",
    targets="sm_80+",
    requires=(
        "trans == 1 and E > 0 and M <= 1024",  # each warp looks through all ids
        "K * bits(T) % 128 == 0 and K * bits(T) <= 131072",
        "aligned(x, 16) and aligned(w, 16)",
    ),
    params={"CHANNELS": (2, 4)},
    valid="CHANNELS == (4 if K * bits(T) <= 32768 else 2)",
    constants={"THREADS": "128", "ROWS": "4", "DEEP": "8 // CHANNELS", **WRAPPED},
    grid="min(M, E) * ceildiv(N, THREADS // 32 * CHANNELS)",
    block="THREADS",
    programmatic=True,
    min_blocks=6,
    estimate="2e-6 + min(M, E) * N * K * bits(T) / 8 * max(1, M / (4 * E)) / (4.4e12 if 2 * M <= E else 1.1e12)"
    " + M * N * K / 3e13",
)

KERNELS = (
    _ROWS,
    _resident("resident", 'T == "float32"', 32),
    _resident(
        "resident_narrow",
        'T in ("float16", "bfloat16")',
        16,
        targets=("sm_90a", "sm_100f"),  # others have less shared memory
    ),
    _stream(
        "stream_cluster",
        "a cluster for an expert's rows: its matrix is read once for 16 of them",
        split=(4, 8, 2),
        threads=512,
    ),
    _stream("stream", "a block for an expert's rows: its matrix is read once for 16 of them", blocks=2),
    _stream(
        "decode",
        "a block for an expert's rows: its matrix is read once for 4 of them",
        rows=4,
        blocks=3,
    ),
    _stream(
        "offloaded",
        "the same for matrices in host memory too: none is asked for before a row is known to need it",
        blocks=2,
        ahead=False,
        pinned=True,
    ),
    _PLAIN,
)
