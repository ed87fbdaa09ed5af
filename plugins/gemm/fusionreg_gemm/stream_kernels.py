"""A kernel for up to 16 rows of x, or a few times as many, whose blocks have channels of their own: ``stream.cu.j2``.

A block keeps 130 to 200 KB of the weight under way from its first to its last channel; ``skinny`` divides k among
blocks where there are too few channels for that.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.spec import KernelSpec

#: Bytes of a row of a tile of w, such that what lanes read at once lies in different banks; of the sums of two tiles.
_W_PITCH, _SUMS = "KP * W_BYTES + 64", "WARPS * BM * 128"


def stream(constants: Mapping[str, str], weight: str = "T") -> KernelSpec:
    """The kernel for a fusion whose epilogue has these ``constants``; ``weight``: a dtype variable."""
    size = f"(bits({weight}) // 8)"
    return KernelSpec(
        name="stream",
        template="stream.cu.j2",
        summary="mma.sync with the weight as its rows, streamed by bulk copies; a block has channels and all of k",
        targets=("sm_90a", "sm_100f"),
        requires=(
            *(('T in ("float16", "bfloat16")',) if weight == "T" else ()),
            "transB == 1",
            f"K * {size} % 16 == 0 and K % 8 == 0",
            "aligned(x, 16) and stride(x, 1) == 1 and (M == 1 or stride(x, 0) % 8 == 0)",
            f"aligned(w, 16) and stride(w, 1) == 1 and stride(w, 0) * {size} % 16 == 0",
        ),
        strides=("x", "w"),
        regions="y",
        params={"BM": (8, 16)},
        valid=("BM == 16 or M <= 8",),
        constants={
            "PRESCALED": "0", **constants,
            "W_BYTES": f"bits({weight}) // 8",
            "WARPS": "8", "PRODUCERS": "4", "KP": "1024", "TILES": "4 if PRESCALED else 8",  # as many as registers hold
            "W_PITCH": _W_PITCH, "STAGES": f"min(8, (230000 - {_SUMS}) // (16 * W_PITCH))",
        },
        grid="max(1, min(multiprocessors, ceildiv(N, 16)))",
        block="32 * (WARPS + PRODUCERS)",
        shared_memory=f"STAGES * 16 * W_PITCH + {_SUMS}",
        programmatic=True,
        min_blocks=1,
        estimate=f"1e-6 + ceildiv(M, BM) * (1e-6 + max(N * K * {size} / (4.3e12 if {size} == 2 else 3.5e12),"
        f" ceildiv(ceildiv(N, 16), multiprocessors) * 16 * K * {size} / 5e10))",
    )  # fmt: skip
