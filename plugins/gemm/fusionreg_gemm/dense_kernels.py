"""The kernels of the fusions in ``dense.py``: which template, on which problems, with which tiles."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec

from .skinny_kernels import skinny
from .stream_kernels import stream
from .wgmma_kernels import wgmma

#: Tiles of the problem, and FLOPs of one.
_TILES, _WORK = "ceildiv(M, BM) * ceildiv(N, BN)", "BM * BN * K * 2"


def _tiles(batched: bool) -> str:
    return f"B * {_TILES}" if batched else _TILES


def _estimate(alone: str, full: str, batched: bool = False) -> str:
    """Seconds: a launch, then waves of tiles over the 132 multiprocessors of an H200, or all of w from memory. One tile
    alone runs at ``alone`` FLOP/s, a multiprocessor full of them at ``full``; both were measured there (bf16, fp32 for
    the plain kernel)."""
    waves = f"ceildiv({_tiles(batched)}, 132) * {_WORK} / ({full})"
    return f"3e-6 + max({_WORK} / ({alone}), {waves}, {'B * ' if batched else ''}N * K * 2 / 3.5e12)"


def _by_tile(*rates: str) -> str:
    """One rate for each tile area: 64 x 64, 64 x 128 and 128 x 64, 128 x 128, 128 x 256."""
    small, narrow, square, wide = rates
    return f"{small} if BM * BN == 4096 else {narrow} if BM * BN == 8192 else {square} if BM * BN == 16384 else {wide}"


def _plain(constants: dict[str, str], batched: bool = False) -> KernelSpec:
    return KernelSpec(
        name="plain",
        template="plain.cu.j2",
        regions="y",
        summary="fp32 FMA over shared-memory tiles: any shape, alignment and row or column stride",
        strides=("x", "w"),
        params={"BM": (64,), "BN": (64,), "BK": (16,)},
        constants={"BATCHED": str(int(batched)), **constants},
        grid=_tiles(batched),
        block="256",
        estimate=_estimate("1.5e11", "2.1e11", batched),
    )


def _tensor_core(constants: dict[str, str], batched: bool = False) -> KernelSpec:
    row, column = (1, 2) if batched else (0, 1)  # axes of x and w
    return KernelSpec(
        name="tensor_core",
        template="tensor_core.cu.j2",
        regions="y",
        summary="mma.sync m16n8k16 fed by cp.async; rows of x and w are whole 16-byte chunks",
        requires=(
            'T in ("float16", "bfloat16")',
            "K % 8 == 0",
            "transB == 1 or N % 8 == 0",
            *(
                f"aligned({t}, 16) and stride({t}, {column}) == 1 and stride({t}, {row}) % 8 == 0"
                + (f" and stride({t}, 0) % 8 == 0" if batched else "")
                for t in ("x", "w")
            ),
        ),
        strides=("x", "w"),
        params={"BM": (128, 64), "BN": (128, 64, 256), "BK": (32, 64)},
        valid=("BK == (32 if BM == 128 else 64)", "BM == 128 or BN <= 128"),
        constants={
            "STAGES": "4 if BM == 128 else 3",
            "WARPS_M": "2",
            "WARPS_N": "2 if BN == 64 else 4",
            "BATCHED": str(int(batched)),
            **constants,
        },
        grid=_tiles(batched),
        block="32 * WARPS_M * WARPS_N",
        shared_memory="max(STAGES * (BM + BN) * BK * 2, BM // WARPS_M * (BN + 8) * 4)",
        estimate=_estimate(
            _by_tile("1.1e12", "1.6e12", "2.3e12", "2.8e12"),
            _by_tile("1.8e12", "2.1e12", "2.4e12", "2.9e12"),
            batched,
        ),
    )


def kernels(constants: dict[str, str]) -> tuple[KernelSpec, ...]:
    """All of them, for a fusion whose epilogue has these ``constants``."""
    few = skinny(constants, weight="T"), stream(constants, weight="T")
    return wgmma(constants), _tensor_core(constants), _plain(constants), *few


def batched(constants: dict[str, str]) -> tuple[KernelSpec, ...]:
    """Those that compute many products in a launch, each of a weight of its own."""
    return wgmma(constants, batched=True), _tensor_core(constants, batched=True), _plain(constants, batched=True)
