"""Kernels on Hopper's tensor cores, of 16-bit operands and of e4m3: one template, ``wgmma.cu.j2``."""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.spec import KernelSpec, TensorMap

_TILES = "ceildiv(M, BM * CLUSTER) * ceildiv(N, BN)"
#: A stage has 128 bytes of k, of BM rows of x and BN columns of w; beside the stages there are 32 KB of y.
_STAGES = "4 if BN > 128 else 6 if BN > 64 else 8"


def wgmma(constants: Mapping[str, str], narrow: bool = False) -> KernelSpec:
    """The kernel for a fusion whose epilogue has these ``constants``; ``narrow``: x and w are e4m3, else of dtype T."""
    run = 128 if narrow else 64  # elements of k in a row of a tile
    columns = "BN // CLUSTER" if narrow else "BN // CLUSTER if transB else 64"
    rates = (
        "9e12 if BN > 128 else 8e12 if BN > 64 else 5e12"
        if narrow
        else "4.9e12 if BN > 128 else 4.2e12 if BN > 64 else 2.8e12"
    )
    return KernelSpec(
        name="wgmma",
        template="wgmma.cu.j2",
        regions="y",
        summary="wgmma fed by TMA, warp-specialised and persistent; clusters share tiles of w",
        targets="sm_90a",
        requires=(
            'T in ("float16", "bfloat16")',
            "stride(x, 1) == 1 and stride(w, 1) == 1",
            *(("transB == 1",) if narrow else ()),  # 8-bit operands have k in their rows
            "aligned(y, 16) and N % 8 == 0",
        ),
        strides=("x", "w"),
        params={"BM": (128,), "BN": (192, 128, 64) if narrow else (256, 128, 64), "CLUSTER": (2, 1)},
        valid=("BN >= 64 * CLUSTER",),
        constants={"NARROW": str(int(narrow)), "SCALED": "0", "STAGES": _STAGES, **constants},
        tensor_maps=(
            TensorMap(
                name="x_map", operand="x", dims=("K", "M"), strides="stride(x, 0)", box=(run, "BM"), swizzle="128",
                l2_promotion=256,
            ),
            TensorMap(
                name="w_map", operand="w", dims=("K if transB else N", "N if transB else K"), strides="stride(w, 0)",
                box=(run, columns), swizzle="128", l2_promotion=256,
            ),
            TensorMap(name="y_map", operand="y", dims=("N", "M"), strides="N", box=("64", "64"), swizzle="128"),
        ),
        grid=f"CLUSTER * max(1, min({_TILES}, multiprocessors // CLUSTER))",
        block="384",
        cluster="CLUSTER",
        min_blocks=1,
        shared_memory="STAGES * (BM + BN) * 128 + 4 * 64 * 128 + STAGES * 16",
        pending="no GPU has run it yet",
        estimate=f"4e-6 + ceildiv({_TILES}, multiprocessors // CLUSTER) * (BM * BN * K * 2 / ({rates}) + 2e-6)",
    )  # fmt: skip
