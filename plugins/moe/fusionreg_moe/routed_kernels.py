"""Kernels of ``moe.routed_ffn``: one launch each, routing and all on the device."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec, TensorMap


def _stored(bits: int) -> dict[str, str]:
    """How weights are stored: their bits, 16 for those of the dtype T; of a row the weights with one scale, 0 where all
    have the same; whether all of an expert have."""
    whole = "form(gate_up_scale)" if bits == 8 else "0"
    return {"BITS": str(bits), "BLOCK": "block" if bits == 4 else "0", "WHOLE": whole}


def plain(bits: int = 16) -> KernelSpec:
    """For weights of so many bits."""
    return KernelSpec(
        name="plain",
        template="routed_plain.cu.j2",
        summary="a block for each token: any shape, alignment, strides and number of experts",
        rounding="per_op",
        requires=("E <= 2147483647 - 32",),
        strides=("x", "logits", "gate_up", "down") if bits == 16 else ("x", "logits"),
        constants={"THREADS": "256", "FAST": "0", **_stored(bits)},
        grid="M",
        block="THREADS",
        workspace="max(16, M * top_k * J * bits(T) // 16)",
        estimate="5e-6 + ceildiv(M, 4 * multiprocessors) * (2e-6 + top_k * J * D * 1.5 * bits(T) / 8 / 5e9)",
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
#: Seconds that so many of the products' matrices take to stream past, at the rate of memory or of the blocks there are.
_STREAMED = f"min(E, {_ROWS}) * I * D * {{products}} * 2 / min(4.3e12, 6.6e10 * min(E, {_ROWS}) * {{tiles}})"

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
    estimate=f"2.5e-5 + max({_STREAMED.format(tiles='ceildiv(I, 128)', products=2)}"
    f" + {_STREAMED.format(tiles='ceildiv(D, 256)', products=1)}, {_ROWS} * I * D * 6 / 6e14)",
)

#: Bytes of weights a second on an H200, by their bits: of ``decode``, and of ``tiles``. Fewer bits take as many
#: instructions to become operands.
_DECODE = {16: "3.8e12", 8: "3.35e12", 4: "2e12"}
_ANY = {16: "3.2e12", 8: "2.7e12", 4: "1.3e12"}


def decode(bits: int = 16) -> KernelSpec:
    """For weights of so many bits."""
    return KernelSpec(
        name="decode",
        template="routed_decode.cu.j2",
        summary="up to 8 tokens: weights stream past once, into the operands of mma.sync; one barrier of the grid",
        rounding="per_op",
        requires=(
            *(('T in ("float16", "bfloat16")',) if bits == 16 else ()),
            "M <= 8 and J >= 16",
            f"D % {128 // bits} == 0 and J % {256 // bits} == 0",
            *(("block % 128 == 0 or block in (32, 64)",) if bits == 4 else ()),
            "aligned(x, 16) and aligned(gate_up, 16) and aligned(down, 16)",
            f"E <= 512 and {_ROWS} * max(J // 2, D) <= 2147483647",
        ),
        constants={
            "THREADS": "512",
            "FAST": "1",
            "PIECES": "4" if bits > 4 else "2 if block > 32 else 1",
            **_stored(bits),
        },
        grid=f"max(1, min(multiprocessors, ceildiv(max(min(E, {_ROWS}) * J // 16, ceildiv(D, 16)), 4)))",
        block="THREADS",
        cooperative=True,
        min_blocks=1,
        shared_memory="131072",
        workspace=f"max(16, {_ROWS} * J)",
        estimate=f"1.3e-5 + min(E, {_ROWS}) * J * D * {1.5 * bits / 8:g} / {_DECODE[bits]}",
    )


#: One token, whose experts' weights stream past at 4.3 TB/s.
TOKEN = KernelSpec(
    name="token",
    template="routed_token.cu.j2",
    summary="one token: a warp for a channel, rows of weights by bulk copies of its own; one barrier of the grid",
    targets="sm_90+",
    rounding="per_op",
    requires=(
        'T in ("float16", "bfloat16")',
        "M == 1 and J >= 16",
        "D % 8 == 0 and J % 16 == 0",
        "aligned(x, 16) and aligned(gate_up, 16) and aligned(down, 16)",
        "E <= 512 and top_k * max(J // 2, D) <= 2147483647",
    ),
    constants={"THREADS": "512", "FAST": "1", "CHUNKS": "4", "AHEAD": "4"},
    grid="max(1, min(multiprocessors, ceildiv(max(top_k * J // 2, D), 32)))",
    block="THREADS",
    cooperative=True,
    min_blocks=1,
    shared_memory="THREADS * AHEAD * CHUNKS * 16",
    workspace="max(16, top_k * J)",
    estimate="8e-6 + top_k * J * D * 3 / 4.3e12",
)

#: What the kernel on any tensor cores keeps: as above, but rows between the products as they are.
_SORTED = f"max(1, min(multiprocessors, (min(E, {_ROWS}) + {_ROWS} // 64) * max(ceildiv(J, 256), ceildiv(D, 256))))"


def tiles(bits: int = 16) -> KernelSpec:
    """For weights of so many bits."""
    scales = "1024 * max(1, 128 // block)" if bits == 4 else "0"
    return KernelSpec(
        name="tiles",
        template="routed_tiles.cu.j2",
        summary="tokens sorted by expert on the device; rows gathered and weights by cp.async, mma.sync; persistent",
        rounding="per_op",
        requires=(
            *(('T in ("float16", "bfloat16")',) if bits == 16 else ()),
            f"D > 0 and D % {128 // bits} == 0 and J > 0 and J % {256 // bits} == 0",
            *(("block % 128 == 0 or block in (32, 64)",) if bits == 4 else ()),
            "aligned(x, 16) and aligned(gate_up, 16) and aligned(down, 16) and aligned(y, 16)",
            f"E <= 512 and {_ROWS} <= 2147483647 // 2",
        ),
        params={"STAGES": (4, 3, 2), "CHUNKS": (2, 1)},
        valid=("STAGES > 2 if CHUNKS == 2 else STAGES != 3",),
        constants={"THREADS": "256", "TOKENS": "64", "FAST": "1", **_stored(bits)},
        grid=_SORTED,
        block="THREADS",
        cooperative=True,
        min_blocks=1,
        shared_memory=f"STAGES * CHUNKS * (16384 + 64 * {1024 // bits} + {scales}) + 4096",
        workspace=f"4 * align({_ROWS} * 4, 128) + align({_SORTED} * E * 4, 128)"
        f" + align({_ROWS} * D * 2, 128) + {_ROWS} * J",
        estimate=f"3e-5 + max(min(E, {_ROWS}) * J * D * {1.5 * bits / 8:g} / {_ANY[bits]}, {_ROWS} * J * D * 3 / 2e14)",
    )


KERNELS = (TOKEN, decode(), WGMMA, tiles(), plain())
