"""Kernels of ``moe.routed_ffn_backward``: one launch each."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec, TensorMap

PLAIN = KernelSpec(
    name="plain",
    template="routed_backward_plain.cu.j2",
    summary="a block for each token, then for each row of a matrix: any shape, alignment and number of experts",
    rounding="per_op",
    requires=("E <= 2147483647 - 32",),
    strides=("dy", "x", "logits", "gate_up", "down"),
    constants={"THREADS": "256", "FAST": "0"},
    grid="max(1, min(multiprocessors, max(M, E)))",
    block="THREADS",
    cooperative=True,
    workspace="16 + align(M * top_k * 4, 16) + M * top_k * (J + I) * bits(T) // 8",
    estimate="1e-5 + (M * top_k * I * D * 16 / 2e11 + E * (J + D) * M * top_k * D / 2e12)",
)

#: Rows of tokens of all experts, and blocks of 128 of them, at most; tiles of the products that have most of them.
_ROWS = "M * top_k"
_BLOCKS = f"(min(E, {_ROWS}) + {_ROWS} // 128)"
_TILES = f"max({_BLOCKS} * ceildiv(I, 64), E * ceildiv(J, 128) * ceildiv(D, 128))"
_GRID = f"max(1, min(multiprocessors, {_TILES}))"

TENSOR_CORE = KernelSpec(
    name="tensor_core",
    template="routed_backward.cu.j2",
    summary="tokens sorted by expert on the device; mma.sync over tiles of an expert's rows, persistent",
    rounding="per_op",
    requires=(
        'T in ("float16", "bfloat16")',
        "D % 8 == 0 and I % 8 == 0",
        "aligned(dy, 16) and aligned(x, 16) and aligned(gate_up, 16) and aligned(down, 16)",
        "aligned(dx, 16) and aligned(dgate_up, 16) and aligned(ddown, 16)",
        f"E <= 512 and {_ROWS} <= 2147483647 // 2 and J <= 2147483647 // 2 and D <= 2147483647 // 2",
    ),
    constants={"THREADS": "256", "STAGES": "4", "FAST": "1"},
    grid=_GRID,
    block="THREADS",
    cooperative=True,
    min_blocks=1,
    shared_memory="STAGES * (128 + 128) * 64 * 2",
    workspace=f"4 * align({_ROWS} * 4, 128) + align({_GRID} * E * 4, 128) + align({_ROWS} * D * 2, 128)"
    f" + align({_ROWS} * J, 64) * 2 + align({_ROWS} * I, 64) * 2 + {_ROWS} * ceildiv(I, 64) * 4",
    estimate=f"3e-5 + {_ROWS} * I * D * 16 / 2.3e14 + E * I * D * 12 / 3e12",
)

#: Of the first products a tile has 128 hidden channels; what is kept are whole tiles of 128 rows.
_WGMMA_TILES = f"max({_BLOCKS} * ceildiv(I, 128), E * ceildiv(J, 256) * ceildiv(D, 128))"
_WGMMA_GRID = f"max(1, min(multiprocessors, {_WGMMA_TILES}))"

WGMMA = KernelSpec(
    name="wgmma",
    template="routed_backward_wgmma.cu.j2",
    summary="tokens sorted by expert on the device; weights by TMA, rows of tokens gathered, wgmma; persistent",
    targets="sm_90a",
    rounding="per_op",
    requires=(
        'T in ("float16", "bfloat16")',
        "D % 8 == 0 and I % 8 == 0 and I > 0",
        "aligned(dy, 16) and aligned(x, 16)",
        "aligned(dx, 16) and aligned(dgate_up, 16) and aligned(ddown, 16)",
        f"E <= 512 and {_ROWS} <= 2147483647 // 2 and J <= 2147483647 // 2 and D <= 2147483647 // 2",
    ),
    constants={"THREADS": "384", "STAGES": "4", "FAST": "1"},
    tensor_maps=tuple(
        TensorMap(name=f"{name}_map", operand=name, box=("64", "64", "1"), swizzle="128", l2_promotion=256)
        for name in ("gate_up", "down")
    ),
    grid=_WGMMA_GRID,
    block="THREADS",
    cooperative=True,
    min_blocks=1,
    shared_memory="STAGES * ((256 + 128) * 128 + 16) + 8 * 16 * 16 * 2",
    workspace=f"4 * align({_ROWS} * 4, 128) + align({_WGMMA_GRID} * E * 4, 128) + align({_ROWS} * D * 2, 128)"
    f" + {_BLOCKS} * 256 * (align(J, 64) + align(I, 64)) + {_ROWS} * ceildiv(I, 128) * 4",
    estimate=f"3e-5 + {_ROWS} * I * D * 16 / 4.6e14 + E * I * D * 12 / 3e12",
)

KERNELS = (WGMMA, TENSOR_CORE, PLAIN)
