"""The first layer of a network and its pool on Hopper's tensor cores; one template, ``stem.cu.j2``."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec, TensorMap

from .kernels import EPILOGUES, tensors, vectors

#: Windows of a pool below each other that a warp goes through.
_TALL = {0: (8, 2), 2: (4, 2), 3: (10, 4)}


def _step(axis: int, extent: str) -> str:
    """Elements from one row or image to the next; the stride of an axis of extent 1 says nothing."""
    return f"(stride(x, {axis}) if {extent} > 1 else align(W * C, 8))"


def stem(words: str, pool: int = 0) -> KernelSpec:
    """The kernel for ``conv.<words>``; where a pool follows, for windows of that extent. A warp goes down through TU of
    them, 8 or 7 side by side; without a pool they are four places each."""
    window = pool or 2
    side, at_once = 10 - window, 6 - window
    taps = "(S * C + (ODD if STEP * C % 2 == 0 else 0))"
    pairs = f"(({taps} + 1) // 2)"
    rest = f"{pairs} % 4"
    quads = f"({pairs} // 4 + (1 if {rest} == 3 else 0))"
    rests = f"(ceildiv(R, 5 - {rest} if {rest} == 1 else 2) if {rest} in (1, 2) else 0)"
    steps = f"ceildiv(R * {quads} + {rests}, 2)"
    lines = f"((2 * TU + {window - 3}) * STEP + R)"
    pitch = f"align(6 + 15 * STEP * C + STEP * C % 2 * 2 + max(8 * {quads}, 2 * {pairs}), 8)"
    patches = f"4 * align({lines} * {pitch} * 2, 128)"
    buffers = f"(2 if {patches} <= 24576 else 1)"
    rows, columns = ("U", "V") if pool else ("ceildiv(P, 2)", "ceildiv(Q, 2)")
    tasks = f"N * ceildiv({rows}, TU) * ceildiv({columns}, {side})"
    parts = "ceildiv(K, CHANNELS)"
    blocks = f"ceildiv({tasks}, 4)"
    last = vectors("y", "K")
    return KernelSpec(
        name="stem_wide" if pool == 3 else "stem",
        fusion=f"conv.{words}",
        template="stem.cu.j2",
        regions=() if pool else ("y",),
        summary="up to 4 channels of x: patches of images by TMA, wgmma, windows of the pool in registers",
        targets="sm_90a",
        requires=(
            'T in ("float16", "bfloat16")',
            "groups == 1 and C <= 4 and dilation_h == 1 and dilation_w == 1",
            "(C == 1 or stride(x, 1) == 1) and (W == 1 or stride(x, 3) == C)",
            f"N * P * Q < 2147483648 and {parts.replace('CHANNELS', '32')} <= multiprocessors",
            last.replace("P == 1", "U == 1").replace("Q == 1", "V == 1") if pool else last,
            *(("not present(residual)",) if "residual" in tensors(words) else ()),
            *(
                (
                    'pool == "MaxPool"',
                    f"pool_h == {pool} and pool_w == {pool} and pool_stride_h == 2 and pool_stride_w == 2",
                )
                if pool
                else ()
            ),
        ),
        strides=tensors(words),
        specialize=("C", "R", "S"),
        params={"STEP": (2, 1, 4), "ODD": (0, 1), "TU": _TALL[pool], "CHANNELS": (64, 32)},
        valid=(
            "STEP == stride_h and STEP == stride_w",
            f"ODD == ({f'(pool_left + {window - 2}) * STEP + pad_left' if pool else 'pad_left'}) * C % 2",
            "CHANNELS == (32 if K <= 32 else 64)",
            f"{pitch} <= 256 and {lines} <= 256",
        ),
        constants={
            "WINDOW": str(window),
            "LINES": lines,
            "PITCH": pitch,
            "BUFFERS": buffers,
            "ROWS": "2",
            **{n: e for n, e in EPILOGUES[words].items() if n != "ADD"},
        },
        tensor_maps=(
            TensorMap(
                name="x_map", operand="x", dims=("W * C", "H", "N"), strides=(_step(2, "H"), _step(0, "N")),
                box=("PITCH", "LINES", "1"),
            ),
        ),
        grid=f"{parts} * max(1, min({blocks}, {at_once} * multiprocessors // {parts}))",
        block="128",
        min_blocks=at_once,
        programmatic=True,
        shared_memory=f"{steps} * 32 * CHANNELS + {patches} * {buffers}",
        estimate=f"4e-6 + ceildiv({blocks} * {parts}, {at_once} * 132) * TU * ({steps} * 1.5e-7 + 5e-7)",
    )  # fmt: skip


def kernels() -> tuple[KernelSpec, ...]:
    """All of them, each naming its fusion."""
    return stem("conv_bn"), stem("conv_bn_relu"), stem("conv_bn_relu_pool", 2), stem("conv_bn_relu_pool", 3)
