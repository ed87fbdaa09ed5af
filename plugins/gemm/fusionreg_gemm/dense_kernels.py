"""The kernels of the four fusions in ``dense.py``: which template, on which problems, with which tiles."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec, TensorMap

from .skinny_kernels import skinny

#: Of kernels without evidence.
_UNSEEN = "no GPU has run it yet"

#: Tiles of the problem, and FLOPs of one.
_TILES, _WORK = "ceildiv(M, BM) * ceildiv(N, BN)", "BM * BN * K * 2"


def _estimate(alone: str, full: str) -> str:
    """Seconds: a launch, then waves of tiles over the 132 multiprocessors of an H200. One tile alone runs at ``alone``
    FLOP/s, a multiprocessor full of them at ``full``; both were measured there (bf16, fp32 for the plain kernel)."""
    return f"3e-6 + max({_WORK} / ({alone}), ceildiv({_TILES}, 132) * {_WORK} / ({full}))"


def _by_tile(*rates: str) -> str:
    """One rate for each tile area: 64 x 64, 64 x 128 and 128 x 64, 128 x 128, 128 x 256."""
    small, narrow, square, wide = rates
    return f"{small} if BM * BN == 4096 else {narrow} if BM * BN == 8192 else {square} if BM * BN == 16384 else {wide}"


def _plain(constants: dict[str, str]) -> KernelSpec:
    return KernelSpec(
        name="plain",
        template="plain.cu.j2",
        regions="y",
        slots_pending=_UNSEEN,
        summary="fp32 FMA over shared-memory tiles: any shape, alignment and row or column stride",
        strides=("x", "w"),
        params={"BM": (64,), "BN": (64,), "BK": (16,)},
        constants=constants,
        grid=_TILES,
        block="256",
        estimate=_estimate("1.5e11", "2.1e11"),
    )


def _tensor_core(constants: dict[str, str]) -> KernelSpec:
    return KernelSpec(
        name="tensor_core",
        template="tensor_core.cu.j2",
        regions="y",
        slots_pending=_UNSEEN,
        summary="mma.sync m16n8k16 fed by cp.async; rows of x and w are whole 16-byte chunks",
        requires=(
            'T in ("float16", "bfloat16")',
            "K % 8 == 0",
            "transB == 1 or N % 8 == 0",
            "aligned(x, 16) and stride(x, 1) == 1 and stride(x, 0) % 8 == 0",
            "aligned(w, 16) and stride(w, 1) == 1 and stride(w, 0) % 8 == 0",
        ),
        strides=("x", "w"),
        params={"BM": (128, 64), "BN": (128, 64, 256), "BK": (32, 64)},
        valid=("BK == (32 if BM == 128 else 64)", "BM == 128 or BN <= 128"),
        constants={
            "STAGES": "4 if BM == 128 else 3",
            "WARPS_M": "2",
            "WARPS_N": "2 if BN == 64 else 4",
            **constants,
        },
        grid=_TILES,
        block="32 * WARPS_M * WARPS_N",
        shared_memory="max(STAGES * (BM + BN) * BK * 2, BM // WARPS_M * (BN + 8) * 4)",
        estimate=_estimate(
            _by_tile("1.1e12", "1.6e12", "2.3e12", "2.8e12"), _by_tile("1.8e12", "2.1e12", "2.4e12", "2.9e12")
        ),
    )


def _wgmma(constants: dict[str, str]) -> KernelSpec:
    tiles = "ceildiv(M, BM * CLUSTER) * ceildiv(N, BN)"
    return KernelSpec(
        name="wgmma",
        template="wgmma.cu.j2",
        regions="y",
        summary="wgmma fed by TMA, warp-specialised and persistent; clusters share tiles of w",
        targets="sm_90a",
        requires=(
            'T in ("float16", "bfloat16")',
            "stride(x, 1) == 1 and stride(w, 1) == 1",
            "aligned(y, 16) and N % 8 == 0",
        ),
        strides=("x", "w"),
        params={"BM": (128,), "BN": (256, 128, 64), "CLUSTER": (2, 1)},
        valid=("BN >= 64 * CLUSTER",),
        constants={"STAGES": "4 if BN == 256 else 6 if BN == 128 else 8", **constants},
        tensor_maps=(
            TensorMap(
                name="x_map", operand="x", dims=("K", "M"), strides="stride(x, 0)", box=("64", "BM"), swizzle="128",
                l2_promotion=256,
            ),
            TensorMap(
                name="w_map", operand="w", dims=("K if transB else N", "N if transB else K"), strides="stride(w, 0)",
                box=("64", "BN // CLUSTER if transB else 64"), swizzle="128", l2_promotion=256,
            ),
            TensorMap(name="y_map", operand="y", dims=("N", "M"), strides="N", box=("64", "64"), swizzle="128"),
        ),
        grid=f"CLUSTER * max(1, min({tiles}, multiprocessors // CLUSTER))",
        block="384",
        cluster="CLUSTER",
        min_blocks=1,
        shared_memory="STAGES * (BM + BN) * 128 + 4 * 64 * 128 + STAGES * 16",
        pending=_UNSEEN,
        estimate=f"4e-6 + ceildiv({tiles}, multiprocessors // CLUSTER) * (BM * BN * K * 2 / "
        "(4.9e12 if BN == 256 else 4.2e12 if BN == 128 else 2.8e12) + 2e-6)",
    )  # fmt: skip


def kernels(constants: dict[str, str]) -> tuple[KernelSpec, ...]:
    """All of them, for a fusion whose epilogue has these ``constants``."""
    return (*(kernel(constants) for kernel in (_wgmma, _tensor_core, _plain)), skinny(constants, weight="T"))
