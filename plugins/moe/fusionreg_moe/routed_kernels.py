"""Kernels of ``moe.routed_ffn``: one launch each, routing and all on the device."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec, TensorMap

PLAIN = KernelSpec(
    name="plain",
    template="routed_plain.cu.j2",
    summary="a block for each token: any shape, alignment, strides and number of experts",
    rounding="per_op",
    requires=("E <= 2147483647 - 32",),
    strides=("x", "logits", "gate_up", "down"),
    constants={"THREADS": "256", "FAST": "0"},
    grid="M",
    block="THREADS",
    workspace="max(16, M * top_k * I * bits(T) // 8)",
    estimate="5e-6 + ceildiv(M, 4 * multiprocessors) * (2e-6 + top_k * I * D * 3 * bits(T) / 8 / 5e9)",
)

#: Rows of tokens that a tile has at most.
_TOKENS = "128"
#: Rows of tokens of all experts, and blocks of them, at most; tiles of the products with the most.
_ROWS = "M * top_k"
_TILES = f"(min(E, {_ROWS}) + {_ROWS} // {_TOKENS}) * max(ceildiv(I, 128), ceildiv(D, 256))"
_GRID = f"max(1, min(multiprocessors, {_TILES}))"
#: Numbers of each row, rows of experts by block, second products, and what is between the products, by whole tiles.
_WORKSPACE = (
    f"4 * align({_ROWS} * 4, 128) + align({_GRID} * E * 4, 128) + align({_ROWS} * D * 2, 128)"
    f" + (min(E, {_ROWS}) + {_ROWS} // {_TOKENS}) * {_TOKENS} * align(I, 64) * 2"
)

WGMMA = KernelSpec(
    name="wgmma",
    template="routed_wgmma.cu.j2",
    summary="tokens sorted by expert on the device; weights by TMA, rows of tokens gathered, wgmma; persistent",
    targets="sm_90a",
    rounding="per_op",
    requires=(
        'T in ("float16", "bfloat16")',
        "D % 8 == 0 and I % 8 == 0",
        "aligned(x, 16) and aligned(y, 16)",
        f"E <= 512 and {_ROWS} <= 2147483647 // 2",
    ),
    constants={"TOKENS": _TOKENS, "THREADS": "384", "FAST": "1", "STAGES": "4"},
    tensor_maps=tuple(
        TensorMap(name=f"{name}_map", operand=name, box=("64", "64", "1"), swizzle="128", l2_promotion=256)
        for name in ("gate_up", "down")
    ),
    grid=_GRID,
    block="THREADS",
    cooperative=True,
    min_blocks=1,
    shared_memory="STAGES * ((256 + TOKENS) * 128 + 16) + 8 * 16 * 16 * 2",
    workspace=_WORKSPACE,
    estimate=f"2.5e-5 + max(min(E, {_ROWS}) * I * D * 6 / 4.3e12, {_ROWS} * I * D * 6 / 6e14)",
)

DECODE = KernelSpec(
    name="decode",
    template="routed_decode.cu.j2",
    summary="up to 8 tokens: weights stream past once, straight into the operands of mma.sync; one barrier of the grid",
    rounding="per_op",
    requires=(
        'T in ("float16", "bfloat16")',
        "M <= 8 and I >= 8",
        "D % 8 == 0 and I % 8 == 0",
        "aligned(x, 16) and aligned(gate_up, 16) and aligned(down, 16)",
        f"E <= 512 and {_ROWS} * max(I, D) <= 2147483647",
    ),
    constants={"THREADS": "512", "FAST": "1"},
    grid=f"max(1, min(multiprocessors, ceildiv(max(min(E, {_ROWS}) * I // 8, ceildiv(D, 16)), 4)))",
    block="THREADS",
    cooperative=True,
    min_blocks=1,
    shared_memory="131072",
    workspace=f"max(16, {_ROWS} * I * 2)",
    estimate=f"1.3e-5 + min(E, {_ROWS}) * I * D * 6 / 3.8e12",
)

KERNELS = (DECODE, WGMMA, PLAIN)
