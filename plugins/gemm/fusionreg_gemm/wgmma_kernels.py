"""Kernels on Hopper's tensor cores: 16-bit operands and e4m3, one weight or two; one template, ``wgmma.cu.j2``."""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.spec import KernelSpec, TensorMap

#: A stage has 128 bytes of k, of BM rows of x and BN columns of w; beside the stages there are 32 KB of y.
_STAGES = "4 if BN > 128 else 6 if BN > 64 else 8"
#: FLOP/s of one multiprocessor, by operands.
_WIDE = "4.9e12 if BN > 128 else 4.2e12 if BN > 64 else 2.8e12"
_NARROW = "9e12 if BN > 128 else 8e12 if BN > 64 else 5e12"


def wgmma(constants: Mapping[str, str], narrow: bool = False, weights: tuple[str, ...] = ("w",)) -> KernelSpec:
    """The kernel for a fusion whose epilogue has these ``constants``.

    Args:
        constants: forms of scales and bias.
        narrow: whether x and w are e4m3, else they are of dtype T.
        weights: w, or gate and up, of each of which a tile has half as many columns.
    """
    run = 128 if narrow else 64  # elements of k in a row of a tile
    gated = len(weights) == 2
    width = "(BN // 2)" if gated else "BN"
    box = "BN // 2" if gated else "BN // CLUSTER"
    tiles = f"ceildiv(M, BM * CLUSTER) * ceildiv(N, {width})"
    contiguous = " and ".join(f"stride({name}, 1) == 1" for name in weights)
    return KernelSpec(
        name="wgmma",
        template="wgmma.cu.j2",
        regions="y",
        summary="wgmma fed by TMA, warp-specialised and persistent; clusters share tiles of w",
        targets="sm_90a",
        requires=(
            'T in ("float16", "bfloat16")',
            contiguous,
            *(("transB == 1",) if narrow else ()),  # 8-bit operands have k in their rows
            "aligned(y, 16) and N % 8 == 0",
        ),
        strides=("x", *weights),
        params={
            "BM": (128,),
            "BN": (192, 128, 64) if narrow else (256, 128) if gated else (256, 128, 64),
            "CLUSTER": (2, 1),
            "XT": (0,) if narrow else (0, 1),  # whether columns of x are contiguous: of 16-bit operands either may be
        },
        valid=(f"{width} >= 64 and BN >= 64 * CLUSTER", "stride(x, 1 - XT) == 1 and (XT == 0 or stride(x, 1) != 1)"),
        constants={
            "NARROW": str(int(narrow)), "GATED": str(int(gated)), "SCALED": "0", "STAGES": _STAGES, **constants
        },
        tensor_maps=(
            TensorMap(
                name="x_map", operand="x", dims=("M if XT else K", "K if XT else M"),
                strides="stride(x, XT)", box=(run, "64 if XT else BM"), swizzle="128", l2_promotion=256,
            ),
            *(
                TensorMap(
                    name=name, operand=weight, dims=("K if transB else N", "N if transB else K"),
                    strides=f"stride({weight}, 0)", box=(run, f"{box} if transB else 64"), swizzle="128",
                    l2_promotion=256,
                )
                for name, weight in zip(("w_map", "up_map"), weights, strict=False)
            ),
            TensorMap(name="y_map", operand="y", dims=("N", "M"), strides="N", box=("64", "64"), swizzle="128"),
        ),
        grid=f"CLUSTER * max(1, min({tiles}, multiprocessors // CLUSTER))",
        block="384",
        cluster="CLUSTER",
        min_blocks=1,
        shared_memory="STAGES * (BM + BN) * 128 + 4 * 64 * 128 + STAGES * 16",
        pending="no GPU has run it yet",
        estimate=f"4e-6 + ceildiv({tiles}, multiprocessors // CLUSTER)"
        f" * (BM * BN * K * 2 / ({_NARROW if narrow else _WIDE}) + 2e-6)",
    )  # fmt: skip
