"""Kernels of the gradients of attention whose sequences lie one behind the other: those of
:mod:`.sdpa_backward_kernels`, which find whose the tile is that they take.
"""

from __future__ import annotations

from typing import Any

from fusionreg.core.spec import KernelSpec, TensorMap

from .sdpa_backward_kernels import BOXES, gradient_kernels

#: Each is [Q H D] or [K G D].
_ROWS = ("dy", "q", "k", "v", "y", "dq", "dk", "dv")

#: The next tile, and two numbers of each query; a tile that is read may reach out of the last sequence.
_STATISTICS = "16 + 8 * H * (align(Q, 64) + 64)"

_PAIRS = "H * Q * K / max(1, C - 1) * (0.5 if is_causal else 1.0)"

#: Tokens whose numbers, and their distances, fit 32 bits.
_FEW = "Q < 500000000 and K < 500000000"


def _tiles(width: str, passes: str = "1") -> str:
    """At most: each sequence, and what lies in front of them and behind, may end within a tile."""
    of_keys, of_queries = (f"(ceildiv({rows}, {width}) + C + 1)" for rows in ("K", "Q"))
    return f"max(1, min(multiprocessors, {passes} * G * {of_keys} + H * {of_queries}))"


def _changed(kernel: KernelSpec, **changes: Any) -> KernelSpec:
    return KernelSpec.model_validate(kernel.model_dump() | changes)


def varlen_gradient_kernels() -> tuple[KernelSpec, ...]:
    _, wgmma, tensor_core, plain = gradient_kernels()
    return (
        _changed(
            wgmma,
            requires=(
                'T in ("float16", "bfloat16")',
                "D in (64, 96, 128, 192, 256) and E in (64, 96, 128, 192, 256)",
                *(f"aligned({n}, 16) and stride({n}, 2) == 1" for n in ("dy", "y")),
                *(f"stride({n}, {axis}) % 8 == 0" for n in ("dy", "y") for axis in range(2)),
                "Q > 0 and K > 0",
                _FEW,
            ),
            constants={**wgmma.constants, "VARLEN": "2"},
            tensor_maps=tuple(
                TensorMap(name=f"{n}_map", operand=n, box=("64", "1", box), swizzle="128")
                for n, box in {n: BOXES.get(n, "64") for n in _ROWS if n != "y"}.items()
            ),
            grid=_tiles("128", "(1 + APART)"),
            shared_memory=wgmma.shared_memory.replace("8 * BN_KEYS * STAGES", "8 * (BN_KEYS + 2) * STAGES"),
            workspace=_STATISTICS,
            estimate=f"1.2e-5 + {_PAIRS} * (8 * D + 6 * E) / 4.5e14 * (1.2 if D + E > 320 else 1)",
        ),
        _changed(
            tensor_core,
            requires=(
                'T in ("float16", "bfloat16")',
                "D % 16 == 0 and D <= 256 and E % 16 == 0 and E <= 256 and E > 0",
                *(f"aligned({n}, 16) and stride({n}, 2) == 1" for n in _ROWS),
                *(f"stride({n}, {axis}) % 8 == 0" for n in _ROWS for axis in range(2)),
                _FEW,
            ),
            constants={**tensor_core.constants, "VARLEN": "2"},
            grid=_tiles("16 * WARPS"),
            shared_memory=tensor_core.shared_memory.replace("16 * BN", "16 * (BN + 2)"),
            workspace=_STATISTICS,
            estimate=f"1e-5 + {_PAIRS} * (8 * D + 6 * E) / 1.4e14 * (1 if WARPS == 8 else 1.2)",
        ),
        _changed(
            plain,
            constants={"MASK_FORM": "-1", "VARLEN": "2"},
            grid="ceildiv(H * Q + G * K, 4)",
            estimate=f"8e-6 + {_PAIRS} * (4 * D + 5 * E) / 2e12",
        ),
    )
