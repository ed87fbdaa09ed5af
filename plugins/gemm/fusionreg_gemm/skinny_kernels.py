"""Kernels for few rows of x, which stream the weight past once: its bytes over the rate of memory is their time.

One template, :file:`skinny.cu.j2`, serves weights of 16 and of 8 bits, and x of 16 and of 8. Blocks divide k among a
cluster (``SPLIT``) until there are enough of them to keep all of the memory busy: to hide 1 µs at 4.4 TB/s, 4.4 MB
must be under way, 33 KB on each of 132 multiprocessors.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.spec import KernelSpec

#: Warps of a block along channels and along k, and its stages, by rows of x. A block has 64 KB of w under way, and two
#: fit on a multiprocessor. More rows want wider blocks: x is read again for each, from L2.
_SHAPE = {
    "WARPS_N": "2 if BM <= 16 else 4",
    "WARPS_K": "4 if BM <= 16 else 1",
    "STAGES": "3 if BM <= 16 else 5",
}
#: Elements along k and channels of a block's tile, as the template lays them out.
_TILE = {
    "BN": "(64 if transB else 128 // W_BYTES) * WARPS_N",
    "BK": "(64 // W_BYTES if transB else 32) * WARPS_K",
}
_THREADS = "32 * WARPS_N * WARPS_K"
_SHARED = "max(STAGES * (WARPS_N * WARPS_K * 4096 + BM * BK * X_BYTES), WARPS_K * BM * (BN + 4) * 4)"

#: Rows and their stride such that 16-byte chunks of x and w are aligned; what is left at their ends is masked.
_ALIGNED = (
    "aligned(x, 16) and stride(x, 1) == 1 and (M == 1 or stride(x, 0) * {x} % 16 == 0)",
    "aligned(w, 16) and stride(w, 1) == 1 and stride(w, 0) * {w} % 16 == 0",
)

_BLOCKS = "ceildiv(N, {bn}) * ceildiv(M, BM) * SPLIT"
#: Seconds on an H200: a launch; the weight once for every BM rows, and x once for every BN channels (that from L2), at
#: the rate that the blocks can draw, each and all together: 8-bit weights are converted, and more than 16 rows want
#: more of shared memory than memory gives; waves.
_ESTIMATE = (
    "3e-6 + 2e-7 * log2(SPLIT) + N * K * {w} * ceildiv(M, BM) * (1 + 0.5 * {x} * BM / ({w} * {bn}))"
    " / min((4.2e12 if {w} == 2 else 3.3e12) if BM <= 16 else 2.4e12,"
    f" (4.5e10 if BM <= 16 else 3.3e10 if BM == 32 else 2.1e10) * {_BLOCKS})"
    f" + 6e-7 * ceildiv({_BLOCKS}, 2 * multiprocessors)"
)


def skinny(constants: Mapping[str, str], weight: str, x: str = "T") -> KernelSpec:
    """The kernel for a fusion whose epilogue has these ``constants``; ``weight``, ``x``: a dtype, or a variable."""
    bn = _TILE["BN"].replace("W_BYTES", f"({_bytes(weight)})").replace("WARPS_N", f"({_SHAPE['WARPS_N']})")
    sizes = {"w": f"({_bytes(weight)})", "x": f"({_bytes(x)})", "bn": f"({bn})"}
    wide = ('T in ("float16", "bfloat16")',) if x == weight == "T" else ()
    return KernelSpec(
        name="skinny",
        template="skinny.cu.j2",
        summary="mma.sync with the weight as its rows, streamed by cp.async; k divided among the blocks of a cluster",
        targets=("sm_90+",),
        requires=(*wide, *(a.format(**sizes) for a in _ALIGNED)),
        strides=("x", "w"),
        regions="y",
        spaces={"w": "pinned_host"},  # it is read once for every BM rows: at the rate of the bus
        params={"BM": (16, 8, 32, 64), "SPLIT": (4, 1, 2, 8)},
        valid=() if weight == "T" else ("BM <= 32 or transB == 1",),  # else a warp has 128 channels: too many sums
        constants={**_kinds(weight, x), "ALIGNED": "1", **_SHAPE, **_TILE, **_NO_SCALES, **constants},
        grid=_BLOCKS.format(bn="BN"),
        block=_THREADS,
        cluster="SPLIT",
        shared_memory=_SHARED,
        min_blocks=2,
        estimate=_ESTIMATE.format(**sizes),
    )


def general(constants: Mapping[str, str], weight: str, x: str = "T") -> KernelSpec:
    """The same for any alignment and strides, on any architecture: element by element, and nothing of it ahead."""
    return KernelSpec(
        name="plain",
        template="skinny.cu.j2",
        summary="mma.sync with the weight as its rows: any shape, alignment and row or column stride",
        strides=("x", "w"),
        regions="y",
        params={"BM": (16, 32)},
        constants={
            **_kinds(weight, x), "ALIGNED": "0", "SPLIT": "1", "WARPS_N": "2", "WARPS_K": "1", "STAGES": "2", **_TILE,
            **_NO_SCALES, **constants,
        },
        grid="ceildiv(N, BN) * ceildiv(M, BM)",
        block=_THREADS,
        shared_memory=_SHARED,
        estimate="3e-6 + 2 * align(M, BM) * align(N, 128) * K / min(2e13, 2e11 * ceildiv(N, 128) * ceildiv(M, BM))",
    )  # fmt: skip


#: What stands beside a scale behind the product.
_NO_SCALES = {"SCALED": "0", "PRESCALED": "0"}


def _kinds(weight: str, x: str) -> dict[str, str]:
    return {"W_BYTES": _bytes(weight), "X_BYTES": _bytes(x)}


def _bytes(dtype: str) -> str:
    """Bytes of a dtype, or of a dtype variable, as an expression."""
    return "1" if dtype.startswith("float8") else f"bits({dtype}) // 8"
