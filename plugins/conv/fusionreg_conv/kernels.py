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


def kernels(words: str) -> tuple[KernelSpec, ...]:
    """All of them, for the fusion of that name."""
    return (_plain(words),)
