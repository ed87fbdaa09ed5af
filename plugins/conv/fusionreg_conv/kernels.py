"""The kernels of the fusions in ``fusions.py``: which template, on which problems, with which tiles."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec

#: What each fusion's epilogue does behind the normalised sum: constants of its templates.
EPILOGUES = {
    "conv_bn": {"ADD": "0", "ACT": '"none"', "POOL": '"none"'},
    "conv_bn_relu": {"ADD": "1 if present(residual) else 0", "ACT": '"Relu"', "POOL": '"none"'},
    "conv_bn_relu_pool": {"ADD": "1 if present(residual) else 0", "ACT": "activation", "POOL": "pool"},
}


def tensors(words: str) -> tuple[str, ...]:
    """The tensors that lie in four axes."""
    return ("x", "w", *(("residual",) if words != "conv_bn" else ()), "y")


def places(words: str) -> str:
    """How many elements a channel of the result has, as an expression."""
    return "N * U * V" if words.endswith("pool") else "N * P * Q"


def flops(words: str) -> str:
    return "2 * N * P * Q * K * G * R * S"


def _plain(words: str) -> KernelSpec:
    again = "pool_h * pool_w" if words.endswith("pool") else "1"  # a window of the pool computes all that it needs
    return KernelSpec(
        name="plain",
        template="plain.cu.j2",
        regions=() if words.endswith("pool") else ("y",),
        summary="fp32 FMA, a few channels of one place a thread: any shape, alignment and stride",
        strides=tensors(words),
        params={"CHANNELS": (8, 1)},
        valid=("CHANNELS == (8 if K // groups > 1 else 1)",),
        constants=EPILOGUES[words],
        grid=f"ceildiv({places(words)}, 128) * groups * ceildiv(K // groups, CHANNELS)",
        block="128",
        estimate=f"4e-6 + {flops(words)} * {again} / 3e12",
    )


#: Windows of a pool that a block has: 16 times those one below the other, and those side by side.
_POOL_TILES = (4 * 16 + 8, 3 * 16 + 8, 7 * 16 + 15, 6 * 16 + 14, 2 * 16 + 8, 1 * 16 + 8, 1 * 16 + 1)


def vectors(tensor: str, channels: str, wide: str = "8") -> str:
    """Whether channels lie side by side in chunks of 16 bytes; an axis of extent 1 may have any stride."""
    extents = {"x": ("N", "H", "W"), "w": ("K", "R", "S")}.get(tensor, ("N", "P", "Q"))
    steps = (f"({e} == 1 or stride({tensor}, {i}) % {wide} == 0)" for i, e in zip((0, 2, 3), extents, strict=True))
    return f"{channels} % {wide} == 0 and stride({tensor}, 1) == 1 and aligned({tensor}, 16) and {' and '.join(steps)}"


def _tensor_core(words: str) -> KernelSpec:
    pool = words.endswith("pool")
    tiles = "ceildiv(N * P * Q, PIXELS)"
    params: dict[str, tuple[int, ...]] = {"PIXELS": (128, 64), "CHANNELS": (128, 64)}
    constants = {"WARPS_M": "2", "WARPS_N": "2 if CHANNELS == 64 else 4", "DEPTH": "32", "STAGES": "4"}
    last = vectors("y", "K // groups")
    valid = ["PIXELS == 128 or CHANNELS == 64"]
    if "residual" in tensors(words):
        last += f" and (not present(residual) or {vectors('residual', 'K')})"
    if pool:
        tu, tv = "(POOLED // 16)", "(POOLED % 16)"
        tiles = f"N * ceildiv(U, {tu}) * ceildiv(V, {tv})"
        params |= {"POOLED": _POOL_TILES}
        constants |= {"TU": "POOLED // 16", "TV": "POOLED % 16"}
        valid += [f"(({tu} - 1) * pool_stride_h + pool_h) * (({tv} - 1) * pool_stride_w + pool_w) <= PIXELS"]
        last = last.replace("P == 1", "U == 1").replace("Q == 1", "V == 1")
    blocks = f"{tiles} * groups * ceildiv(K // groups, CHANNELS)"
    work = "PIXELS * CHANNELS * G * R * S * 2"
    return KernelSpec(
        name="tensor_core",
        template="tensor_core.cu.j2",
        regions=() if pool else ("y",),
        summary="mma.sync m16n8k16, channels last by cp.async, any other layout an element at a time",
        requires=('T in ("float16", "bfloat16")', "G * R * S < 1073741824"),
        strides=tensors(words),
        params={**params, "X": (0, 1, 2), "WEIGHTS": (0, 1), "LAST": (1, 0)},
        valid=(
            *valid,
            f"X == (0 if {vectors('x', 'G')} else 1 if G % 8 == 0 else 2)",
            f"WEIGHTS == (0 if {vectors('w', 'G')} else 1)",
            f"LAST == (1 if {last} else 0)",
        ),
        constants={**constants, **EPILOGUES[words]},
        grid=blocks,
        block="32 * WARPS_M * WARPS_N",
        shared_memory="max(STAGES * (PIXELS + CHANNELS) * DEPTH * 2, PIXELS * (CHANNELS + 8) * 4)",
        # measured on an H200: what each tile takes beside its products, tiles of 128 x 64 of vectors, and of C = 3
        estimate=f"4e-6 + ceildiv({blocks}, 132) * (1.5e-6 + {work} / (1.1e12 if PIXELS == 128 else 9e11)"
        " * (1 if X == 0 else 4 if X == 1 else 12))",
    )


def _image(words: str, window: int = 2) -> KernelSpec:
    """Tiles of 128 places: 8 x 16 without a pool, or what windows of 2 x 2 by steps of 2 make of them. Windows of 3 x 3
    share rows with those below: their tiles have 256 places."""
    pool = words.endswith("pool")
    rows, columns = ("(2 * TU + WINDOW - 2)", "(2 * TV + WINDOW - 2)") if pool else ("TU", "TV")
    pairs = "((S * C + 1) // 2)"
    last = vectors("y", "K")
    size, at_once = (256, 2) if window == 3 else (128, 4)
    tiles = {"PLACES": str(size), "WINDOW": "1", "SHIFT": "1", "TU": "8", "TV": "16"}
    if pool:
        last = last.replace("P == 1", "U == 1").replace("Q == 1", "V == 1")
        tiles |= {"WINDOW": str(window), "SHIFT": "2", "TU": "7" if window == 3 else "4", "TV": "8"}
    where = {"TU": f"({tiles['TU']})", "TV": f"({tiles['TV']})"}
    copy = f"(({rows} - 1) * STEP + R) * align(({columns} - 1) * STEP * C + {pairs} * 2, 2) + 2"
    copy = copy.replace("TU", where["TU"]).replace("TV", where["TV"]).replace("WINDOW", str(window))
    height, width = ("U", "V") if pool else ("P", "Q")
    blocks = f"N * ceildiv({height}, {where['TU']}) * ceildiv({width}, {where['TV']})"
    parts = "ceildiv(K, 64)"
    held = "(2 if pool == 'MaxPool' else 4)" if pool else "4"
    depth = f"align(R * {pairs} * 2, 16)"
    patch = f"({copy}) * (2 if STEP * C % 2 == 1 else 1) * 2"
    return KernelSpec(
        name="image_wide" if window == 3 else "image",
        template="image.cu.j2",
        regions=() if pool else ("y",),
        summary="up to 4 channels of x: patches of images in shared memory, weights laid out once for many tiles",
        requires=(
            'T in ("float16", "bfloat16")',
            "groups == 1 and C <= 4 and dilation_h == 1 and dilation_w == 1",
            f"N * {height} * {width} < 2147483648",
            last,
            *(("not present(residual)",) if "residual" in tensors(words) else ()),
            *(
                (f"pool_h == {window} and pool_w == {window} and pool_stride_h == 2 and pool_stride_w == 2",)
                if pool
                else ()
            ),
        ),
        strides=tensors(words),
        specialize=("C", "R", "S"),
        params={"STEP": (2, 1, 4)},
        valid=("STEP == stride_h and STEP == stride_w",),
        constants={**tiles, **{n: e for n, e in EPILOGUES[words].items() if n != "ADD"}},
        grid=f"{parts} * max(1, min({blocks}, {at_once} * multiprocessors // {parts}))",
        block=str(size),
        min_blocks=at_once,
        shared_memory=f"{size} * 72 * {held} + 64 * ({depth} + 8) * 2 + {patch}",
        estimate=f"5e-6 + ceildiv({blocks} * {parts}, 132) * {size} * (2.9e-9 + 64 * {depth} * 2 / 1.26e12)",
    )


def _depthwise(words: str) -> KernelSpec:
    wide = "(128 // bits(T))"
    vectors_of = f"(K // {wide})"
    parts = f"ceildiv(K, LANES * {wide})"
    tiles = "ceildiv(N * P * ceildiv(Q, 4), 256 // LANES)"
    residual = "residual" in tensors(words)
    return KernelSpec(
        name="depthwise",
        template="depthwise.cu.j2",
        regions="y",
        summary="each channel by itself, channels last: 16 bytes of channels of four places a thread",
        requires=(
            "G == 1 and K == groups and dilation_h == 1 and dilation_w == 1",
            "N * P * Q < 2147483648",
            vectors("x", "C", wide),
            vectors("y", "K", wide),
            *((f"not present(residual) or {vectors('residual', 'K', wide)}",) if residual else ()),
        ),
        strides=tensors(words),
        specialize=("R", "S"),
        params={"STEP": (1, 2), "LANES": (8, 6, 4, 2, 1)},
        valid=(
            "STEP == stride_h and STEP == stride_w",
            f"LANES == (6 if {vectors_of} > 4 and ceildiv({vectors_of}, 6) * 6 < ceildiv({vectors_of}, 8) * 8"
            f" else min(8, next_pow2({vectors_of})))",
        ),
        constants={n: e for n, e in EPILOGUES[words].items() if n != "POOL"} | {"POOL": '"none"'},
        grid=f"{parts} * max(1, min({tiles}, 2 * multiprocessors // {parts}))",
        block="256",
        min_blocks=2,
        estimate="3e-6 + (N * C * H * W + N * K * P * Q) * bits(T) / 8 / 2.5e12",
    )


def kernels(words: str) -> tuple[KernelSpec, ...]:
    """All of them, for the fusion of that name."""
    found = (_image(words), _tensor_core(words), _plain(words))
    return (_image(words, 3), *found) if words.endswith("pool") else (*found, _depthwise(words))
