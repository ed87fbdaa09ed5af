"""Kernels on Hopper's tensor cores: 16-bit operands and e4m3, one weight or two; one template, ``wgmma.cu.j2``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.spec import KernelSpec, TensorMap

#: Bytes of a stage: 128 of k, of BM rows of x and BN columns of w, and two barriers; of y, two times 16 rows to a warp.
_STAGE, _OUT = "((BM + BN) * 128 + 16)", "8 * 2 * 16 * COLUMNS * 2"
#: Seconds of a stage on an H200: what the tensor cores take, and what the L2 cache does to bring it; both are faster
#: where blocks take one tile each. What no other row of tiles asks for comes from memory: two multiprocessors that are
#: neighbours, as those of a cluster are, draw 72 GB/s, one whose neighbour has no tile 55.
_STEP = (
    "max(BN * 2.1e-9 + 2e-8 if {waves} == 1 else BN * 2.28e-9 + 8e-8,"
    " (min(BM, M) + BN // CLUSTER) * (1.05e-9 if {waves} == 1 else 1.65e-9),"
    " BN // CLUSTER * (3.55e-9 if SPLIT > 1 or {tiles} * 2 > multiprocessors else 2.3e-9) / {rows})"
)


def wgmma(
    constants: Mapping[str, str], narrow: bool = False, weights: tuple[str, ...] = ("w",), batched: bool = False
) -> KernelSpec:
    """The kernel for a fusion whose epilogue has these ``constants``.

    Args:
        constants: forms of scales and bias.
        narrow: whether x and w are e4m3, else they are of dtype T.
        weights: w, or gate and up, of each of which a tile has half as many columns.
        batched: whether all tensors have an axis of products in front.
    """
    run = 128 if narrow else 64  # elements of k in a row of a tile
    gated = len(weights) == 2
    width = "(BN // 2)" if gated else "BN"
    box = "BN // 2" if gated else "BN // CLUSTER"
    row, column = (1, 2) if batched else (0, 1)  # axes of matrices
    rows = "ceildiv(M, BM * CLUSTER)"
    tiles = f"{'B * ' if batched else ''}{rows} * ceildiv(N, {width})"
    waves = f"ceildiv({tiles}, multiprocessors // (CLUSTER * SPLIT))"
    pairs = [name for name in ("scale", "bias") if constants[f"{name.upper()}_FORM"] != "-1"]  # are read two at a time
    contiguous = " and ".join(f"stride({name}, {column}) == 1" for name in weights)

    def tensor_map(operand: str, dims: tuple[str, str], stride: str, box: tuple[str, str], **fields: Any) -> TensorMap:
        products = {"x": "stride(x, 0)", "w": "stride(w, 0)", "y": "M * N"}
        deep = ("B",) if batched else ()
        return TensorMap(
            operand=operand, dims=(*dims, *deep), strides=(stride, *(products[operand] for _ in deep)),
            box=(*box, *("1" for _ in deep)), **fields,
        )  # fmt: skip

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
            *(f"aligned({name}, 4)" for name in pairs),
        ),
        strides=("x", *weights),
        params={
            "BM": (128,),
            "BN": (192, 128, 64) if narrow else (256, 128) if gated else (256, 224, 192, 160, 128, 64),
            "CLUSTER": (2, 1),
            "SPLIT": (1,) if gated else (1, 2),  # blocks that have a tile together
            "XT": (0,) if narrow else (0, 1),  # whether columns of x are contiguous: of 16-bit operands either may be
        },
        valid=(
            f"{width} >= 64 and BN >= 64 * CLUSTER",
            "CLUSTER == 1 or SPLIT == 1",
            "SPLIT == 1 or BN % (32 * SPLIT) == 0",
            *(() if narrow or gated else ("transB == 1 or BN % (64 * CLUSTER) == 0",)),
            f"stride(x, {column} - XT) == 1 and (XT == 0 or stride(x, {column}) != 1)",
        ),
        constants={
            "NARROW": str(int(narrow)), "GATED": str(int(gated)), "SCALED": "0",
            "OWN": f"{width} // SPLIT",  # columns of a tile that a block finishes
            "COLUMNS": "32 if OWN % 64 else 64",  # those that a warp stores at a time
            "STAGES": f"min(8, (232448 - {_OUT}) // {_STAGE})",
            "BATCHED": str(int(batched)),
            **constants,
        },
        tensor_maps=(
            tensor_map(
                "x", ("M if XT else K", "K if XT else M"), "stride(x, 1 + XT)" if batched else "stride(x, XT)",
                (str(run), "64 if XT else min(BM, M)"), name="x_map", swizzle="128", l2_promotion=256,
            ),
            *(
                tensor_map(
                    weight, ("K if transB else N", "N if transB else K"), f"stride({weight}, {row})",
                    (str(run), f"{box} if transB else 64"), name=name, swizzle="128", l2_promotion=256,
                )
                for name, weight in zip(("w_map", "up_map"), weights, strict=False)
            ),
            tensor_map("y", ("N", "M"), "N", ("COLUMNS", "16"), name="y_map", swizzle="COLUMNS * 2"),
        ),
        grid=f"SPLIT * {tiles} if SPLIT > 1 else CLUSTER * max(1, min({tiles}, multiprocessors // CLUSTER))",
        block="384",
        programmatic=True,
        cluster="CLUSTER * SPLIT",
        min_blocks=1,
        shared_memory=f"STAGES * {_STAGE} + {_OUT}",
        estimate=f"4.5e-6 + max({'B * ' if batched else ''}((M + N * {len(weights)}) * K * {128 // run} + M * N * 2)"
        f" / 3.95e12 + 2e-6, {waves} * (ceildiv(K, {run} * SPLIT) * {_STEP.format(waves=waves, rows=rows, tiles=tiles)}"
        f" + {width} // SPLIT * 1.6e-8 + (SPLIT - 1) * (2.5e-6 if {waves} == 1 else 4e-6)))",
    )  # fmt: skip
