"""The first layer of a network and its pool on Hopper's tensor cores; one template, ``stem.cu.j2``."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec, TensorMap

from .kernels import EPILOGUES, tensors, vectors

_FUSION = "conv_bn_relu_pool"


def _step(axis: int, extent: str) -> str:
    """Elements from one row or image to the next; the stride of an axis of extent 1 says nothing."""
    return f"(stride(x, {axis}) if {extent} > 1 else align(W * C, 8))"


def stem(window: int) -> KernelSpec:
    """The kernel for windows of the pool of that extent. A warp goes down through TU of them, 8 or 7 side by side."""
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
    tasks = f"N * ceildiv(U, TU) * ceildiv(V, {side})"
    parts = "ceildiv(K, 64)"
    blocks = f"ceildiv({tasks}, 4)"
    return KernelSpec(
        name="stem" if window == 2 else "stem_wide",
        fusion=f"conv.{_FUSION}",
        template="stem.cu.j2",
        summary="up to 4 channels of x: patches of images by TMA, wgmma, windows of the pool in registers",
        targets="sm_90a",
        requires=(
            'T in ("float16", "bfloat16") and pool == "MaxPool"',
            "groups == 1 and C <= 4 and dilation_h == 1 and dilation_w == 1",
            "(C == 1 or stride(x, 1) == 1) and (W == 1 or stride(x, 3) == C)",
            f"N * U * V < 2147483648 and {parts} <= multiprocessors",
            vectors("y", "K").replace("P == 1", "U == 1").replace("Q == 1", "V == 1"),
            "not present(residual)",
            f"pool_h == {window} and pool_w == {window} and pool_stride_h == 2 and pool_stride_w == 2",
        ),
        strides=tensors(_FUSION),
        specialize=("C", "R", "S"),
        params={"STEP": (2, 1, 4), "ODD": (0, 1), "TU": (10, 4) if window == 3 else (4, 2)},
        valid=(
            "STEP == stride_h and STEP == stride_w",
            f"ODD == ((pool_left + {window - 2}) * STEP + pad_left) * C % 2",
            f"{pitch} <= 256 and {lines} <= 256",
        ),
        constants={
            "WINDOW": str(window),
            "LINES": lines,
            "PITCH": pitch,
            "BUFFERS": buffers,
            "ROWS": "2",
            **{n: e for n, e in EPILOGUES[_FUSION].items() if n != "ADD"},
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
        shared_memory=f"{steps} * 2048 + {patches} * {buffers}",
        estimate=f"4e-6 + ceildiv({blocks} * {parts}, {at_once} * 132) * TU * ({steps} * 1.5e-7 + 5e-7)",
        pending="not proven yet",
    )  # fmt: skip


def kernels() -> tuple[KernelSpec, ...]:
    """All of them, each naming its fusion."""
    return stem(2), stem(3)
