"""Kernels of ``gemm.lora_routed``.

What bounds them is the adapters' bytes: a token of an adapter that no other one has brings R · (K + N) elements, 262 KB
at rank 16 and 4096 channels, against 16 KB of its own. So ``decode`` streams both matrices once for each token, all of
it under way from the start; ``grouped`` reads an adapter once for up to BM tokens that share it.
"""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec

_PLAIN = KernelSpec(
    name="plain",
    template="lora_plain.cu.j2",
    summary="a block for each token: any rank, shape, alignment and strides",
    strides=("base", "x", "a", "b"),
    constants={"THREADS": "256"},
    grid="M",
    block="THREADS",
    shared_memory="4 * R",
    estimate="4e-6 + ceildiv(M, 8 * multiprocessors) * (1e-6 + R * (K + N) * 9e-10)",
)

#: What the vector kernels ask for: ranks as adapters have them, chunks of 16 bytes that lie in one row.
_VECTORS = (
    "R in (8, 16, 32, 64, 128)",
    "K * bits(T) % 128 == 0 and (transB == 1 or N * bits(T) % 128 == 0)",
    "aligned(x, 16) and aligned(a, 16) and aligned(b, 16)",
)

#: Bytes of one token's adapter.
_ADAPTER = "R * (K + N) * bits(T) / 8"


def _decode(split: bool) -> KernelSpec:
    """A launch, and one block after another on each multiprocessor: 5 us, and its part of an adapter at 2e10 bytes per
    second, as an H200 does it."""
    return KernelSpec(
        name="decode_cluster" if split else "decode",
        template="lora_decode.cu.j2",
        summary=f"a {'cluster' if split else 'block'} for each token streams its adapter past once",
        targets=("sm_90+",) if split else ("sm_80+",),
        requires=_VECTORS,
        specialize=("R",),
        params={"SPLIT": (2, 4, 8) if split else (1,)},
        constants={"THREADS": "512"},
        grid="M * SPLIT",
        block="THREADS",
        cluster=("SPLIT",) if split else (),
        programmatic=True,
        min_blocks=1,
        estimate=f"3e-6 + ceildiv(M * SPLIT, multiprocessors) * (5e-6 + {_ADAPTER} / SPLIT / 2e10)",
    )


#: Each wave of blocks takes 3 us beside its bytes, which a block draws at 7.8e10 per second and all of them at 3.5e12,
#: as an H200 does it. It has room for 15 clusters of 8 at a time.
_RESIDENT = KernelSpec(
    name="resident",
    template="lora_resident.cu.j2",
    summary="a cluster for each token: all of its adapter is under way at once, A x on tensor cores",
    targets=("sm_90+",),
    requires=(
        'T in ("float16", "bfloat16") and R in (8, 16, 32, 64)',
        *_VECTORS[1:],
        "transA == 1 and transB == 1",
    ),
    specialize=("R",),
    params={"SPLIT": (2, 4, 8)},
    constants={"THREADS": "512"},
    grid="M * SPLIT",
    block="THREADS",
    cluster="SPLIT",
    programmatic=True,
    min_blocks=1,
    estimate=f"7e-7 + max(ceildiv(M * SPLIT, multiprocessors - (12 if SPLIT == 8 else 0))"
    f" * (3.1e-6 + {_ADAPTER} / SPLIT / 7.8e10), M * {_ADAPTER} / 3.5e12)",
)


def _grouped(split: bool) -> KernelSpec:
    """A launch, counting and finding tokens; then blocks for groups, half of them beside others: a microsecond, as much
    for every two tokens, and the part of an adapter at 1.5e10 bytes per second, as an H200 does it."""
    groups = "min(M, E + M // BM)"
    return KernelSpec(
        name="grouped_cluster" if split else "grouped",
        template="lora_grouped.cu.j2",
        summary=f"a {'cluster' if split else 'block'} for up to BM tokens of one adapter, on tensor cores",
        targets=("sm_90+",) if split else ("sm_80+",),
        requires=(
            'T in ("float16", "bfloat16")',
            *_VECTORS,
            "transA == 1 and transB == 1",
            "N % 8 == 0 and aligned(base, 16) and aligned(y, 16)",
            "M <= 2147483647 - 1024 and E <= 8192",
        ),
        specialize=("R",),
        params={"BM": (16, 32), "SPLIT": (4, 2, 8) if split else (1,)},
        valid=("BM * R <= 2048",),
        constants={
            "THREADS": "256", "PITCH": "8 if R == 8 else R + 8",
            "AHEAD": "max(1, (64 if R <= 32 else 32) // max(R, 16) * 16 // BM)",
            "BYTES": "4 * BM * ((THREADS // 32 + 1) * PITCH + (SPLIT * R if SPLIT > 1 else 0))",
        },
        grid=f"SPLIT * min({groups}, max(1, 2 * multiprocessors // SPLIT))",
        block="THREADS",
        cluster=("SPLIT",) if split else (),
        programmatic=True,
        shared_memory="BYTES + THREADS // 16 * AHEAD * (32 * R + (8 * R if R < 32 else 0) + 32 * BM) + 4 * (E + 2)",
        min_blocks=1,
        estimate=f"5e-6 + max(1, SPLIT * {groups} / (1.5 * multiprocessors))"
        f" * (1e-6 + 5e-7 * BM + {_ADAPTER} / SPLIT / 1.5e10)",
    )  # fmt: skip


KERNELS = (_RESIDENT, _decode(True), _decode(False), _grouped(True), _grouped(False), _PLAIN)
