"""Kernels of ``moe.index_select_gemm`` and ``moe.gemm_scatter_add``: one template for each of plain and tensor cores.

Many rows are bound by the tensor cores, few by the bytes of the matrices that they name. Blocks stay for one tile after
another, so that a launch costs the same whatever groups there are, and nothing of them need be known to the host.
"""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec, TensorMap

from .gemv_kernels import WRAPPED

#: Rows and channels of a block, and how its warps divide them.
_SHAPE = {
    "BN": "128", "BK": "128 if BM == 16 else 64", "STAGES": "4",
    "WARPS_M": "1 if BM == 16 else 2", "WARPS_N": "8 if BM == 16 else 4",
}  # fmt: skip
#: At most so many tiles; a group's last one may be part of one.
_TILES = "(ceildiv(P, BM) + min(P, E)) * ceildiv(N, 128)"
_GRID = f"max(1, min(multiprocessors, {_TILES}))"


def _flags(gather: bool, combine: bool) -> dict[str, str]:
    weighted = "1 if present(weights) else 0" if combine else "0"
    wrapped = WRAPPED if gather or combine else {"WRAP": "0"}
    return {"COMBINE": str(int(combine)), "GATHER": str(int(gather)), "WEIGHTED": weighted, **wrapped}


def plain(*, gather: bool = False, combine: bool = False) -> KernelSpec:
    rows = "M" if combine else "P"
    return KernelSpec(
        name="plain",
        template="grouped_plain.cu.j2",
        summary="a block for 32 channels of a row: any shape, alignment and strides",
        requires=(f"{'M' if gather or combine else 'P'} <= 2147483647 and E <= 2147483647",),
        strides=("base", "x", "w") if combine else ("x", "w"),
        constants={"THREADS": "256", **_flags(gather, combine)},
        grid=f"{rows} * ceildiv(N, 32)",
        block="THREADS",
        estimate="5e-6 + ceildiv(P * ceildiv(N, 32), 8 * multiprocessors) * (3e-6 + 1.2e-8 * K)"
        " + P * N * K * bits(T) / 8 / 1e12",
    )


def tensor_core(*, gather: bool = False, combine: bool = False) -> KernelSpec:
    """Seconds on an H200: a launch, with two barriers of the grid where products are combined; the matrices of as many
    experts as rows can have, at the rate of memory; the rows, in whole tiles, at that of the tensor cores."""
    summary = "; rows are copied from where they lie" if gather else ""
    if combine:
        summary = "; weighed products in fp32 are added up in their order"
    combining = " + 6e-6 + P * N * 8 / 3e12" if combine else ""
    return KernelSpec(
        name="tensor_core",
        template="grouped.cu.j2",
        summary=f"mma.sync over tiles of a group's rows, one after the other{summary}",
        requires=(
            'T in ("float16", "bfloat16")',
            "K % 8 == 0 and N % 8 == 0",
            "aligned(x, 16) and aligned(w, 16) and aligned(y, 16)" + (" and aligned(base, 16)" if combine else ""),
            "P <= 2147483647 - 128 and E <= 4096" + (" and M <= 2147483647" if gather or combine else ""),
        ),
        params={"BM": (64, 128, 16)},
        constants={**_SHAPE, **_flags(gather, combine)},
        grid=_GRID,
        block="256",
        cooperative=combine,
        shared_memory="STAGES * (BM + BN) * BK * 2 + 8 * (E + 2)",
        workspace="4 * (P * N + 33 * M)" if combine else "0",
        min_blocks=1,
        estimate=f"5e-6{combining} + min(P, E) * N * K * 2 / 3.5e12"
        " + 2 * (P + min(P, E) * BM / 2) * align(N, 128) * K / ((3.5e14 if BM == 128 else 2.8e14 if BM == 64 else 9e13)"
        f" * min(1, {_TILES} / multiprocessors))",
    )


#: Tiles of 128 rows and 256 channels; the last one of a group may be part of one.
_WIDE_TILES = "(P // 128 + min(P, E + 1)) * ceildiv(N, 256)"


def wgmma(*, gather: bool = False, combine: bool = False) -> KernelSpec:
    """Seconds on an H200: as of ``tensor_core``, at the rate of its tensor cores."""
    combining = " + 6e-6 + P * N * 8 / 3e12" if combine else ""
    return KernelSpec(
        name="wgmma",
        template="grouped_wgmma.cu.j2",
        summary="wgmma over tiles of a group's rows; matrices by TMA, rows by cp.async from where they lie; persistent",
        targets="sm_90a",
        requires=(
            'T in ("float16", "bfloat16")',
            "K % 8 == 0 and N % 8 == 0",
            "aligned(x, 16) and aligned(y, 16)" + (" and aligned(base, 16)" if combine else ""),
            "P <= 2147483647 - 128 and E <= 2048 and K <= 2147483647 - 64 and N <= 2147483647 - 256"
            + (" and M <= 2147483647" if gather or combine else ""),
        ),
        constants={"THREADS": "384", "STAGES": "4", **_flags(gather, combine)},
        tensor_maps=(TensorMap(name="w_map", operand="w", box=("64", "64", "1"), swizzle="128", l2_promotion=256),),
        grid=f"max(1, min(multiprocessors, {_WIDE_TILES}))",
        block="THREADS",
        cooperative=combine,
        min_blocks=1,
        shared_memory="STAGES * ((256 + 128) * 128 + 16) + 8 * 16 * 16 * 2 + 8 * (E + 2)",
        workspace="4 * (P * N + 33 * M)" if combine else "0",
        estimate=f"7e-6{combining} + min(P, E) * N * K * 2 / 4e12"
        f" + 2 * (P + min(P, E) * 16) * align(N, 256) * K / (6e14 * min(1, {_WIDE_TILES} / multiprocessors))",
    )
