"""Kernels of the fusions in ``softmax``: rows in registers of a warp, a block or a cluster, and rows of any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusionreg.core.spec import KernelSpec

from . import softmax_estimates as estimates

#: Longest row of the kernel of that name: of one warp, of one block, of a cluster of eight.
WARP, BLOCK, CLUSTER = 2048, 32768, 262144


def _along(mask: str, bits: str) -> tuple[str, ...]:
    """Whether VEC elements along the keys are one access, where the mask has that axis."""
    apart = " and ".join(
        f"(rank({mask}) < {i} or shape({mask}, -{i}) == 1 or stride({mask}, -{i}) % VEC == 0)" for i in (2, 3, 4)
    )
    return (f"VEC == 1 or {_HAS_KEYS.format(mask)} == 0 or aligned({mask}, VEC * {bits} // 8) and {apart}",)


#: 8 B + 4 H + 2 Q + K: which axes a mask has; -1 where there is none. Forms stand in falling order, see ``softmax``.
_AXES = "15 - form({0}) if present({0}) else -1"
_HAS_KEYS = "((15 - form({0})) % 2 if present({0}) else 0)"


def kernels(
    template: str, rank: int, tensors: Sequence[str], mask: str = "", *, causal: bool = False,
    dropout: bool = False, stem: str = "softmax",
) -> tuple[KernelSpec, ...]:  # fmt: skip
    """All kernels of a fusion.

    Args:
        template: ``forward`` or ``backward``.
        rank: axes of its rows, keys included.
        tensors: those of the rows' size.
        mask: the one that is broadcast over them, "" for none.
        causal: whether keys are hidden.
        dropout: whether probabilities are dropped.
        stem: what names of templates begin with.
    """
    masks = (mask,) if mask else ()
    rows = {2: "Q", 3: "H * Q", 4: "B * H * Q"}[rank]
    constants = {"RANK": str(rank), "CAUSAL": "1" if causal else "0"}
    for name in ("mask", "bias") if template == "forward" else ("mask",):
        constants[name.upper()] = _AXES.format(name) if name in masks else "-1"
        if (stem, template) != ("log_softmax", "backward"):
            constants[f"{name.upper()}_RANK"] = f"rank({name})" if name in masks else "-1"
    if (stem, template) == ("softmax", "backward"):
        constants["DROPOUT"] = "1" if dropout else "0"
    turned = causal and (stem, template) == ("softmax", "backward")
    ends = {"ENDS": "1"} if turned else {}  # tiles of rows are taken from both ends in turn
    wide = " and ".join(f"aligned({t}, 16)" for t in tensors)
    whole = (
        f"VEC == 1 or VEC * bits(T) == 128 and K % VEC == 0 and {wide}",
        *(rule for m in masks for rule in _along(m, "8" if m == "mask" else "bits(T)")),
    )
    requires = (
        f"{rows} < {2**31} and K < {2**31}",
        *(f"{_HAS_KEYS.format(m)} == 0 or shape({m}, -1) == 1 or stride({m}, -1) == 1" for m in masks),
    )

    grid = {2: (), 3: ("1 if FLAT else H",), 4: ("1 if FLAT else H", "1 if FLAT else B")}[rank]
    matrices = {2: (), 3: ("FLAT or H <= 65535",), 4: ("FLAT or H <= 65535 and B <= 65535",)}[rank]

    def held(
        name: str, summary: str, most: int, params: Mapping[str, Any], valid: Sequence[str], threads: str,
        start: float, **fields: Any,
    ) -> KernelSpec:  # fmt: skip
        groups = f"({threads} // LANES)"
        return KernelSpec(
            name=name,
            template=f"{stem}_{template}.cu.j2",
            summary=summary,
            strides=tuple(masks),
            requires=(*requires, f"K <= {most}"),
            params={"VEC": (8, 4, 1), "FLAT": (1,) if rank == 2 else (0, 1), **params},
            valid=(
                *whole,
                *matrices,
                *(() if rank == 2 else (f"FLAT == (0 if Q % {groups} == 0 or Q >= 8 * {groups} else 1)",)),
                "K <= LANES * SPREAD * VALUES", *valid,
            ),
            constants={**constants, "THREADS": threads, **ends},
            grid=(f"ceildiv({rows} if FLAT else Q, {groups}) * SPREAD", *grid),
            block=threads,
            estimate=estimates.held(stem, template, f"({rows})", threads, causal, start),
            **fields,
        )  # fmt: skip

    return (
        held(
            "rows", "rows in the registers of a warp or a part of it, read once", WARP,
            {"LANES": (8, 16, 32), "VALUES": (8, 16, 32, 64), "SPREAD": (1,)},
            ("VALUES == 8 or LANES == 32", "LANES * VALUES == 64 or 2 * K > LANES * VALUES"),
            "128", 2e-6,
        ),
        held(
            "block", "a row in the registers of a block, read once", BLOCK,
            {"LANES": (128, 256, 512, 1024), "VALUES": (16, 32), "SPREAD": (1,)},
            ("LANES * VALUES == 2048 or 2 * K > LANES * VALUES",),
            "LANES", 2.3e-6,
        ),
        *(() if rank == 4 else (held(
            "cluster", "a row in the registers of a cluster of blocks, read once", CLUSTER,
            {"LANES": (128, 256, 512, 1024), "VALUES": (16, 32), "SPREAD": (2, 4, 8)},
            (
                "LANES * VALUES * SPREAD == 4096 or 2 * K > LANES * VALUES * SPREAD",
                "LANES > 128 or SPREAD == 2",
                "LANES < 1024 or SPREAD == 8",
            ),
            "LANES", 2.6e-6,
            targets="sm_90+",
            cluster="SPREAD",
        ),)),
        KernelSpec(
            name="long",
            template=f"{stem}_{template}_long.cu.j2",
            summary="a row of any length to a block, read twice",
            strides=tuple(masks),
            requires=requires,
            params={"VEC": (8, 4, 1), "THREADS": (512, 1024)},
            valid=whole,
            constants={**constants, "FLAT": "1", "SPREAD": "1"},
            grid=rows,
            block="THREADS",
            estimate=estimates.long(stem, template, f"({rows})", causal),
        ),
    )  # fmt: skip
