"""Kernels on Hopper's tensor cores, for tensors that are channels last; one template, ``hopper.cu.j2``."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec, TensorMap

from .kernels import EPILOGUES, tensors, vectors

#: Bytes of shared memory of a block, without a few for barriers.
_MEMORY = 232448 - 1024
_MOST_STAGES = 12
#: A tile's pixels, rows of the image, columns and images; channels of x come 64 at a time.
_BM, _TH = "(64 * MB * SHARE)", "(1 if EDGE == 64 else EDGE)"
_TW = f"({_BM} if EDGE == 64 else EDGE)"
_TN = f"({_BM} // ({_TH} * {_TW}))"
_DEPTHS = "ceildiv(C, 64)"
#: Rows of the kernel that a box of x serves; bytes of such a box, with the tiles of w that come with it.
_TAPS = "(R if HALO else 1)"
_STAGE = f"(({_BM} * ({_TH} + {_TAPS} - 1) // {_TH} + (SHARE - 1) * {_TAPS} * BK) * 128)"
_KEPT = f"((2 - SHARE) * {_DEPTHS} * R * S * BK * 128)"  # of weights that stay in shared memory
#: Slots of a warp for y, and their bytes.
_SLOTS = "max(2, MB * min(BK // SPLIT // 64, {}))"
_ACROSS = "(EDGE != 8 and MB * SHARE < EDGE)"  # windows of a pool reach into two warps
_SLOTS_POOLED = f"((MB if EDGE == 8 or {_ACROSS} else 1) * (1 if {_ACROSS} else min(BK // 64, 2)))"


def _pixel(tensor: str, columns: str, channels: str) -> str:
    """Elements from one pixel to the next; the stride of an axis of extent 1 says nothing."""
    return f"(stride({tensor}, 3) if {columns} > 1 else {channels})"


def _step(tensor: str, axis: int, extent: str, channels: str) -> str:
    return f"(stride({tensor}, {axis}) if {extent} > 1 else {channels})"


def _dense(tensor: str, rows: str, columns: str, channels: str) -> str:
    """Whether all pixels follow each other at one stride."""
    pixel = _pixel(tensor, columns, channels)
    return (
        f"({rows} == 1 or stride({tensor}, 2) == {columns} * {pixel}) "
        f"and (N == 1 or stride({tensor}, 0) == {rows} * {columns} * {pixel})"
    )


def _result(name: str, tensor: str, rows: str, columns: str, box: tuple[str, ...]) -> TensorMap:
    """y or the residual, [N rows columns K], in pieces that a warp has."""
    pixel = _pixel(tensor, columns, "K")
    flat = ("K", f"N * {rows} * {columns}", "1", "1")
    dims = ("K", columns, "N", rows)
    return TensorMap(
        name=name,
        operand=tensor,
        dims=tuple(f"{a} if EDGE == 64 else {b}" if a != b else a for a, b in zip(flat, dims, strict=True)),
        strides=(
            pixel,
            f"{pixel} if EDGE == 64 else {_step(tensor, 0, 'N', 'K')}",
            f"{pixel} if EDGE == 64 else {_step(tensor, 2, rows, 'K')}",
        ),
        box=box,
        swizzle="128",
    )


def wgmma(words: str) -> KernelSpec:
    """The kernel for ``conv.<words>``."""
    pool = words.endswith("pool")
    add = "residual" in tensors(words)
    rows, columns = ("U", "V") if pool else ("P", "Q")
    slots = _SLOTS_POOLED if pool else _SLOTS.format("4 if present(residual) else 3 - SHARE" if add else "3 - SHARE")
    slot = f"(2048 if {_ACROSS} else 1024)" if pool else "2048"
    room = f"({_MEMORY} - 48 * BK - 8 * {slots} * {slot})"
    stages = f"min({_MOST_STAGES}, ({room} - {_KEPT}) // {_STAGE})"
    pixels = f"ceildiv(Q, {_TW}) * ceildiv(P, {_TH}) * ceildiv(N, {_TN})"
    pixels = f"(ceildiv(N * P * Q, {_BM}) if EDGE == 64 else {pixels})"
    sides = "ceildiv(K, BK)"
    teams = f"max(1, multiprocessors // {sides})"  # that share a tile of x
    grid = f"{sides} * (2 * {pixels} if SPLIT == 2 else min({pixels} if SHARE == 2 else ceildiv({pixels}, 2), {teams}))"
    flat = [
        "R * S * stride_h * stride_w == 1 and pad_top + pad_left + pad_bottom + pad_right == 0",
        _dense("x", "H", "W", "C"),
        _dense("y", rows, columns, "K"),
        *([f"(not present(residual) or {_dense('residual', rows, columns, 'K')})"] if add else []),
    ]
    wide = " and (SHARE == 1 or BK == 64 or not present(residual))" if add else ""  # what there is memory for
    x_pixel = _pixel("x", "W", "C")
    # seconds of a consumer for its part of a tile: products, and the epilogue; of all, in rounds; of memory and L2
    rate = "(1.9e-9 if BK == 64 else 1.35e-9 if BK == 128 else 1.305e-9)"
    rate += " * (1 if SHARE == 2 else 1.5 if MB == 1 and BK < 256 else 1.4 if EDGE == 2 else 1.05)"
    products, rest = f"MB * {_DEPTHS} * R * S * BK * {rate} / SPLIT", "(MB * BK * 1.1e-8 + (SPLIT - 1) * 6e-6)"
    turn = f"({products} + max({products} + (SHARE - 1) * {rest}, {rest}))"
    rounds = f"ceildiv({pixels}, (3 - SHARE) * {teams}) * {turn}"
    results = "(2 if present(residual) else 1)" if add else "1"
    memory = f"(N * C * min(H * W, P * Q * R * S) + N * {rows} * {columns} * K * {results}) * 2 / 3.8e12"
    cache = f"{pixels} * {sides} * {_DEPTHS} * (R * S // {_TAPS}) * {_STAGE} / 8.9e12"
    ahead = f"(2 if {room} - {_KEPT} < 40960 else 1)"  # so little is under way that its way from memory shows
    return KernelSpec(
        name="wgmma",
        fusion=f"conv.{words}",
        template="hopper.cu.j2",
        regions=() if pool else ("y",),
        summary="wgmma fed by TMA, channels last: boxes of x for each place of the kernel, persistent",
        targets="sm_90a",
        requires=(
            'T in ("float16", "bfloat16")',
            "groups == 1",
            "C % 8 == 0 and stride(x, 1) == 1 and stride(w, 1) == 1",
            vectors("y", "K").replace("P == 1", f"{rows} == 1").replace("Q == 1", f"{columns} == 1"),
            f"stride_h == 1 or (R == 1 and pad_top == 0 or H % stride_h == 0) and stride(x, 2) == W * {x_pixel}",
            "stride_w == 1 or S == 1 and pad_left == 0 or W % stride_w == 0",
            f"N * {rows} * {columns} < 2147483648",
            *(("not present(residual) or stride(residual, 1) == 1 and aligned(residual, 16)",) if add else ()),
            *(
                (
                    "pool_h == 2 and pool_w == 2 and pool_stride_h == 2 and pool_stride_w == 2",
                    "pool_top + pool_left + pool_bottom + pool_right == 0 and not present(residual)",
                )
                if pool
                else ()
            ),
        ),
        strides=tensors(words),
        params={
            "SHARE": (1, 2),  # consumers of a tile
            "MB": (2, 1),  # products of 64 rows that one has
            "BK": (64, 128, 256),
            "EDGE": (8, 4, 2) if pool else (8, 4, 2, 64),  # of a tile in the image; 64: pixels follow each other
            "SPLIT": (1,) if pool else (1, 2),  # blocks of a tile
            "ONCE": (1, 0),  # whether L2 is told that x is read once
            "HALO": (1, 0),  # whether boxes have the rows of the image that all rows of the kernel need
        },
        valid=(
            "MB * BK <= 256 and BK <= 2 * max(K, 64) and (EDGE != 2 or BK == 64)",
            "EDGE != 64" if pool else f"(EDGE == 64) == ({' and '.join(flat)})",
            "EDGE in (8, 64) or Q % (2 * EDGE) != 0 and Q <= 16 * EDGE",
            "ONCE == 0 or R * S == 1 and K <= BK",
            f"HALO == (1 if stride_h == 1 and dilation_h == 1 and R in (2, 3){wide} else 0)",
            f"({room} - {_KEPT}) // {_STAGE} >= 2",
            "MB == 2 or BK >= 128 or SHARE == 2 and N * P * Q <= 4096"
            f" or SHARE == 1 and ({_DEPTHS} * R * S * BK > 1024 or N < 2)",
            f"SPLIT == 1 or SHARE == 2 and MB == 1 and BK == 128 and {pixels} * {sides} * 2 <= multiprocessors"
            f" and R * S * {_DEPTHS} >= 16",
            *((f"EDGE == 8 or {_ACROSS} or MB == 2 and EDGE == 2 * SHARE",) if pool else ()),
        ),
        constants={
            "RESIDENT": "2 - SHARE",
            "TH": _TH, "TW": _TW, "TN": _TN, "TAPS": _TAPS,
            "TALL": "1 if EDGE == 8 else 0",
            "FLAT": "1 if EDGE == 64 else 0",
            "ACROSS": f"1 if {_ACROSS} else 0" if pool else "0",
            "SLOTS": slots,
            "SLOT": slot,
            "ROOM": room,
            "MOST_STAGES": str(_MOST_STAGES),
            **EPILOGUES[words],
        },
        specialize=("R", "S"),
        tensor_maps=(
            TensorMap(
                name="x_map", operand="x",
                dims=(
                    "C", "N * H * W if EDGE == 64 else ceildiv(W, stride_w)", "1 if EDGE == 64 else N",
                    "1 if EDGE == 64 else ceildiv(H, stride_h)", "(stride_h - 1) * W + stride_w",
                ),
                strides=(
                    f"{x_pixel} * stride_w",
                    f"{x_pixel} if EDGE == 64 else {_step('x', 0, 'N', 'C')}",
                    f"{x_pixel} if EDGE == 64 else {_step('x', 2, 'H', 'C')} * stride_h",
                    x_pixel,
                ),
                box=("64", "TW", "TN", "TH + TAPS - 1", "1"), swizzle="128", l2_promotion=256,
            ),
            TensorMap(
                name="w_map", operand="w", dims=("C", "S", "R", "K"),
                strides=(_step("w", 3, "S", "C"), _step("w", 2, "R", "C"), _step("w", 0, "K", "C")),
                box=("64", "1", "1", "BK"), swizzle="128", l2_promotion=256,
            ),
            _result(
                "y_map", "y", rows, columns,
                ("64", "EDGE // 2", "1 if EDGE == 8 else 16 // EDGE", "1") if pool else _BOX,
            ),
            *((_result("residual_map", "residual", rows, columns, _BOX),) if add and not pool else ()),
        ),
        grid=grid,
        block="384",
        min_blocks=1,
        cluster="SPLIT",
        programmatic=True,
        shared_memory=f"{stages} * {_STAGE} + {_KEPT} + {_MEMORY} + 1024 - {room}",
        # launch; weights that stay; the longest of what memory, L2 and the multiprocessors do, and some of the others
        estimate=f"4e-6 + {_KEPT} * 2e-11 + {ahead} * (0.9 * max({memory}, {cache}, {rounds})"
        f" + 0.1 * ({memory} + {cache} + {rounds} + ONCE * {memory}))",
    )  # fmt: skip


#: What a warp stores at a time: 16 pixels of 64 channels.
_BOX = (
    "64", "16 if EDGE == 64 else EDGE", "1 if EDGE in (8, 64) else 16 // EDGE", "2 if EDGE == 8 else 1"
)  # fmt: skip


def kernels() -> tuple[KernelSpec, ...]:
    """All of them, each naming its fusion."""
    return tuple(wgmma(words) for words in EPILOGUES)
