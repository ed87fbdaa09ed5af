"""Kernels of the fusions in ``sdpa``."""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.spec import KernelSpec, TensorMap

#: Which form of ``sdpa.MASK`` a mask takes, a number of its own where it is ``sdpa.BIAS``, -1 where there is none.
MASK_FORMS = {"": "-1", "mask": "form(mask)", "bias": "8", "lengths": "-1"}


def _switches(masked: str, statistics: bool) -> dict[str, str]:
    """Which mask; whether it gives the log-sum-exp; whether sequences have lengths of their own."""
    lengths = {"LENGTHS": "1"} if masked == "lengths" else {}
    return {"MASK_FORM": MASK_FORMS[masked], **({"LSE": "1"} if statistics else {}), **lengths}


def _strided(masked: str) -> tuple[str, ...]:
    return ("q", "k", "v", *(("mask",) if masked in ("mask", "bias") else ()), "y")


def _plain(masked: str, statistics: bool) -> KernelSpec:
    return KernelSpec(
        name="plain",
        template="sdpa_plain.cu.j2",
        summary="a warp for each query, fp32 FMA: any dtype, width and stride",
        strides=_strided(masked),
        constants=_switches(masked, statistics),
        grid="ceildiv(B * H * Q, 4)",
        block="128",
        estimate="5e-6 + B * H * Q * K * (2 * D + E) / 2e12" + (_STORED if statistics else ""),
    )


#: Where queries are few, a multiprocessor reads all keys of a tile of queries at that rate, one tile after the other.
_FEW = " + (ceildiv(B * H * ceildiv(Q, {}), multiprocessors) * K * (D + E) * 2 / {} if Q <= 16 else 0)"

#: Which of a parameter's values a problem has.
_CAPPED = "(CAPPED == 1) == (softcap > 0)"

#: Of the log-sum-exp.
_STORED = " + B * H * Q * 4 / 3e12"

#: Pairs of queries and keys that are multiplied.
_PAIRS = "B * H * Q * K * (0.5 if is_causal else 1.0)"


def _wgmma(masked: str, statistics: bool) -> KernelSpec:
    beside = masked in ("mask", "bias")

    def tile(operand: str, rows: str) -> TensorMap:
        return TensorMap(name=f"{operand}_map", operand=operand, box=("64", rows, "1", "1"), swizzle="128")

    return KernelSpec(
        name="wgmma",
        template="sdpa_wgmma.cu.j2",
        summary="wgmma fed by TMA, warp-specialised and persistent; warpgroups take turns at products and exponentials",
        targets="sm_90a",
        requires=(
            'T in ("float16", "bfloat16")',
            "D in (64, 128) and E in (64, 128)",
            "Q < 1000000000 and K < 1000000000",
        ),
        strides=_strided(masked),
        specialize=("D", "E"),
        params={
            # three have no registers left for a mask
            "CONSUMERS": (2,) if beside else (3,) if masked or statistics else (3, 2),
            "BK": (128,) if beside else (128, 64) if masked or statistics else (128, 64, 192),
            # powers of two by which weights may pass 1 before sums are rescaled
            "SLACK": (8,) if masked or statistics else (8, 0),
            # eighths of the exponentials that are polynomials, which the sum of all shows
            "FRACTION": (0,) if masked or statistics else (0, 1, 2),
            "CAPPED": (0, 1),  # whether there is a softcap
        },
        valid=(
            # registers: accumulators and weights of a warpgroup's 64 queries, in fp32 and in pairs
            "BK * 3 // 4 + E // 2 <= (192 if CONSUMERS == 2 else 128)",
            *(() if beside else ("CONSUMERS == 3 or BK >= 128", "FRACTION == 0 or SLACK == 8")),
            _CAPPED,
        ),
        constants={**_switches(masked, statistics), "ALTERNATE": "1"},
        tensor_maps=(tile("q", "64 * CONSUMERS"), tile("k", "BK"), tile("v", "BK"), tile("y", "64")),
        grid="max(1, min(multiprocessors, B * H * ceildiv(Q, 64 * CONSUMERS)))",
        block="128 * (CONSUMERS + 1)",
        min_blocks=1,
        shared_memory="64 * CONSUMERS * (D + E) * 2 + 2 * BK * (D + E) * 2 + 80",
        estimate=f"6e-6 + {_PAIRS} * 2 * (D + E) / "
        + ("(3e14 if D == 128 else 1.9e14)" if beside else "(6.8e14 if D == 128 else 4.5e14)")
        + ("" if beside else " * (1 if CONSUMERS == 3 and BK == (64 if E == 128 else 128) else 1.2)")
        + _FEW.format(128, 3.2e10)
        + (_STORED if statistics else ""),
    )


def _wgmma_wide(masked: str, statistics: bool) -> KernelSpec:
    """The same for wide heads."""
    kernel = _wgmma(masked, statistics)
    changes = {
        "name": "wgmma_wide",
        "summary": "the same for wide heads: y takes the room of q, and scores are summed up in two halves",
        "requires": (
            # scores of wide heads may be steep, where fp16 has no weights left of most keys
            'T in ("float16", "bfloat16")' if masked or statistics else 'T == "bfloat16"',
            "D in (192, 256) and E in (128, 192, 256) and E <= D",
            "Q < 1000000000 and K < 1000000000",
        ),
        "params": FrozenDict({"CONSUMERS": (2,), "BK": (64,), "SLACK": (8,), "FRACTION": (0,), "CAPPED": (0, 1)}),
        "valid": (_CAPPED,),
        "constants": FrozenDict({**kernel.constants, "WIDE": "1"}),
        "shared_memory": "128 * D * 2 + 2 * BK * (D + E) * 2 + 80",
        "estimate": f"6e-6 + {_PAIRS} * 2 * (D + E) / {'2.5e14' if masked else '5e14'}"
        + _FEW.format(128, 3.2e10)
        + (_STORED if statistics else ""),
    }
    return kernel.model_copy(update=changes)


def tensor_core(
    where: tuple[str, ...], strides: tuple[str, ...], constants: Mapping[str, str], grid: str, estimate: str
) -> KernelSpec:
    """``where``: what it requires beside dtype and widths."""
    return KernelSpec(
        name="tensor_core",
        template="sdpa_tensor_core.cu.j2",
        summary="mma.sync m16n8k16 fed by cp.async, a block for each tile of queries",
        requires=(
            'T in ("float16", "bfloat16")', "D % 16 == 0 and D <= 256 and E % 16 == 0 and E <= 256 and E > 0", *where,
        ),
        strides=strides,
        specialize=("D", "E"),
        params={
            "WARPS": (4, 8),
            "BK": (64, 32),
            "CAPPED": (0, 1),  # whether there is a softcap
        },
        valid=(_CAPPED, "BK == (64 if D + E <= 256 else 32)", "WARPS == 4 or D + E <= 256"),
        constants=constants,
        grid=grid,
        block="32 * WARPS",
        shared_memory="16 * WARPS * (max(D, E) + 8) * 2 + 4 * BK * (D + E + 16)",
        estimate=estimate,
    )  # fmt: skip


def _tensor_core(masked: str, statistics: bool) -> KernelSpec:
    rows = ("q", "k", "v", "y")
    return tensor_core(
        (
            *(f"aligned({n}, 16) and stride({n}, 3) == 1 and stride({n}, 2) % 8 == 0" for n in rows),
            *(f"stride({n}, 0) % 8 == 0 and stride({n}, 1) % 8 == 0" for n in rows),
            "Q < 1000000000 and K < 1000000000",
        ),
        _strided(masked),
        _switches(masked, statistics),
        "B * H * ceildiv(Q, 16 * WARPS)",
        f"6e-6 + {_PAIRS} * 2 * (D + E) / {'1.2e14' if masked in ('mask', 'bias') else '2.1e14'}"
        " * (1 if (WARPS == 8) == (D + E > 128) else 1.1)" + _FEW.format(64, 1.4e10) + (_STORED if statistics else ""),
    )


def kernels(masked: str = "", statistics: bool = False) -> tuple[KernelSpec, ...]:
    """All of them, for the fusion with a mask or lengths (a key of :data:`MASK_FORMS`), and with the log-sum-exp."""
    of = masked, statistics
    wide = () if masked and (statistics or masked != "mask") else (_wgmma_wide(*of),)
    return _wgmma(*of), *wide, _tensor_core(*of), _plain(*of)
