"""Calls of cuDNN as kernels: on which problems. Apart from the calls, whose code is part of their evidence."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec

from .cudnn_attention import CudnnAttention

_ROWS = ("q", "k", "v", "y")

#: Pairs of queries and keys that are multiplied, and bytes that move at least.
_PAIRS, _MOVED = "B * H * Q * K * (0.5 if is_causal else 1.0)", "B * (G * K + H * Q) * (D + E) * 2"

_RATE = "(4e14 if D <= 64 else 4.5e14 if D < 128 else 6e14)"


def _kernel(fusion: str) -> KernelSpec:
    return KernelSpec(
        name="cudnn",
        fusion=fusion,
        library=CudnnAttention.name,
        summary="NVIDIA's cuDNN",
        targets="sm_80+",
        requires=(
            'T == "bfloat16"',  # of float16 its kernels lose NaN in k (9.19)
            "D % 8 == 0 and E % 8 == 0 and max(D, E) <= 256 and K > 0",
            "softcap == 0 and left_window_size == -1 and right_window_size == -1",
            *(f"aligned({n}, 16) and stride({n}, 3) == 1 and stride({n}, 2) % 8 == 0" for n in _ROWS),
            *(f"stride({n}, 0) % 8 == 0 and stride({n}, 1) % 8 == 0" for n in _ROWS),
        ),
        strides=_ROWS,
        workspace=str(16 << 20),
        # each call takes its frontend about 50 microseconds of the host
        estimate=f"5e-5 + max({_PAIRS} * 2 * (D + E) / {_RATE}, {_MOVED} / 3e12)",
    )


KERNELS = (_kernel("attention.sdpa"), _kernel("attention.sdpa_training"))
