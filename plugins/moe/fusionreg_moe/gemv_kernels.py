"""Kernels of ``moe.expert_gemv``.

What bounds them is the bytes of the matrices, so one that several rows name is read once for all of them, and all
multiprocessors read: blocks divide the channels and, in a cluster, k.
"""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec

_PLAIN = KernelSpec(
    name="plain",
    template="gemv_plain.cu.j2",
    summary="a block for 32 channels of a row: any shape, alignment and strides",
    strides=("x", "w"),
    constants={"THREADS": "256"},
    grid="M * ceildiv(N, 32)",
    block="THREADS",
    pending="no evidence of a GPU yet",
    estimate="4e-6 + M * ceildiv(N, 32) * (1e-6 + 32 * K * bits(T) / 8 / 1e10) / (8 * multiprocessors)",
)

#: Channels of a block: a row of a tile is 128 bytes of channels, or 512 of k.
_CHANNELS = "32 if trans else 1024 // bits(T)"
_SHAPE = {"THREADS": "256", "ROWS": "16", "STAGES": "4", "BN": _CHANNELS}
#: Bytes of x beside the 16 KB of w in each stage.
_SHARED = "STAGES * (16384 + ROWS * (8 * 32 // (BN // 4)) * 16)"
_GROUPS = f"min(M, E) * ceildiv(N, {_CHANNELS}) * SPLIT"
#: Seconds on an H200: a launch, which matrix, adding up; the matrices at the rate of memory or of the blocks.
_ESTIMATE = (
    "5e-6 + 3e-7 * log2(SPLIT) + min(M, E) * N * K * bits(T) / 8 * max(1, M / (16 * E))"
    f" / min({{rate}}, 2.2e10 * {_GROUPS}) + 5e-7 * ceildiv({_GROUPS}, 2 * multiprocessors)"
)


def _stream(name: str, summary: str, *, split: tuple[int, ...], ahead: bool = True, pinned: bool = False) -> KernelSpec:
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
        constants={**_SHAPE, "AHEAD": str(int(ahead))},
        grid=_GROUPS,
        block="THREADS",
        cluster=("SPLIT",) if cluster else (),
        programmatic=True,
        shared_memory=_SHARED,
        min_blocks=2,
        pending="no evidence of a GPU yet",
        estimate=_ESTIMATE.format(rate="4.4e12" if not pinned else "3e12"),
    )


KERNELS = (
    _stream(
        "stream_cluster", "a cluster for an expert's rows: its matrix is read once for 16 of them", split=(8, 4, 2)
    ),
    _stream("stream", "a block for an expert's rows: its matrix is read once for 16 of them", split=(1,)),
    _stream(
        "offloaded",
        "the same for matrices in host memory too: none is asked for before a row is known to need it",
        split=(1,),
        ahead=False,
        pinned=True,
    ),
    _PLAIN,
)
