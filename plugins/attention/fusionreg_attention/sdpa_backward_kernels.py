"""Kernels of the gradients of attention, which ``sdpa`` has the fusions of."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec, TensorMap

from .sdpa_kernels import MASK_FORMS

#: Pairs of queries and keys that are multiplied.
_PAIRS = "B * H * Q * K * (0.5 if is_causal else 1.0)"

#: The next tile, and two numbers of each query.
_STATISTICS = "16 + 8 * B * H * align(Q, 64)"

_TILES = "blocks take tiles of keys, then of queries; the same bits each time"

#: [B H Q] or [B G K] by a width.
_ROWS = ("dy", "q", "k", "v", "y", "dq", "dk", "dv")

#: Of `wgmma`: rows that are streamed at a time past tiles of keys, and of copies.
_BN_KEYS = "(64 if D + E <= 256 else 32)"
BOXES = {"dy": "BN_KEYS", "q": "BN_KEYS", "k": "BN_QUERIES", "v": "BN_QUERIES"}


#: What kernels that copy rows by TMA want of the operands that they read themselves.
_WHOLE_ROWS = (
    *(f"aligned({n}, 16) and stride({n}, 3) == 1" for n in ("dy", "y")),
    *(f"stride({n}, {axis}) % 8 == 0" for n in ("dy", "y") for axis in range(3)),
    "Q > 0 and K > 0",
    "Q < 1000000000 and K < 1000000000",
)


def _constants(mask: str) -> dict[str, str]:
    """Which mask, and whether it has a gradient."""
    return {"MASK_FORM": MASK_FORMS[mask], "BIAS": str(int(mask == "bias"))} if mask else {}


def _strides(mask: str) -> tuple[str, ...]:
    return (*_ROWS, "mask") if mask else _ROWS


def _work(mask: str) -> str:
    """Operations: a bias has the products of queries and keys, and of dy and values, once more."""
    return f"{_PAIRS} * ({'10 * D + 8 * E' if mask == 'bias' else '8 * D + 6 * E'})"


def _rate(mask: str, none: str, constant: str, bias: str) -> str:
    """Of operations, measured on an H200."""
    return {"": none, "mask": constant, "bias": bias}[mask]


def _plain(mask: str) -> KernelSpec:
    rows = "B * H * Q + B * G * K" + (" + MB * MH * MQ * ceildiv(K, 32)" if mask == "bias" else "")
    return KernelSpec(
        name="plain",
        template="sdpa_backward_plain.cu.j2",
        summary="a warp for each query, then for each key, fp32 FMA: any dtype, width and stride",
        strides=_strides(mask),
        constants=_constants(mask) or {"MASK_FORM": MASK_FORMS[mask]},
        grid=f"ceildiv({rows}, 4)",
        block="128",
        estimate=f"8e-6 + B * H * Q * K * ({'6 * D + 7 * E' if mask == 'bias' else '4 * D + 5 * E'}) / 2e12",
    )


def _tensor_core(mask: str) -> KernelSpec:
    tiles = "B * G * ceildiv(K, 16 * WARPS) + B * H * ceildiv(Q, 16 * WARPS)"
    if mask == "bias":
        tiles += " + MB * MH * ceildiv(K, 16 * WARPS) * (ceildiv(Q, BN) if MQ > 1 else 1)"
    return KernelSpec(
        name="tensor_core",
        template="sdpa_backward_tensor_core.cu.j2",
        summary=f"mma.sync m16n8k16 fed by cp.async, {_TILES}",
        requires=(
            'T in ("float16", "bfloat16")',
            "D % 16 == 0 and D <= 256 and E % 16 == 0 and E <= 256 and E > 0",
            *(f"aligned({n}, 16) and stride({n}, 3) == 1 and stride({n}, 2) % 8 == 0" for n in _ROWS),
            *(f"stride({n}, 0) % 8 == 0 and stride({n}, 1) % 8 == 0" for n in _ROWS),
            "Q < 1000000000 and K < 1000000000",
        ),
        strides=_strides(mask),
        specialize=("D", "E"),
        params={
            "WARPS": (8, 4),
            "BN": (64, 32, 16),
            "CAPPED": (0, 1),  # whether there is a softcap
        },
        valid=(
            "(CAPPED == 1) == (softcap > 0)",
            "BN == (64 if D + E <= 128 else 32 if D + E <= 256 else 16)",
            *(("WARPS == 4 or D + E <= 256",) if mask == "bias" else ()),
        ),
        constants=_constants(mask),
        grid=f"max(1, min(multiprocessors, {tiles}))",
        block="32 * WARPS",
        shared_memory=f"({'32' if mask == 'bias' else '16'} * WARPS + 2 * BN) * (D + E + 16) * 2 + 16 * BN + 16",
        workspace=_STATISTICS,
        cooperative=True,
        estimate=f"1e-5 + {_work(mask)} / {_rate(mask, '1.5e14', '1.3e14', '8e13')} * (1 if WARPS == 8 else 1.2)",
    )


def _held(mask: str) -> dict[str, str]:
    """Columns of a warpgroup's rows of k and v, or of q and dy, for which `wgmma` has registers beside its sums."""
    apart = "128 if D + E > 320 else {}"
    if mask == "bias":
        return {"HELD_K": apart.format(0), "HELD_V": "0", "HELD_Q": apart.format(0), "HELD_DY": "0"}
    return {
        "HELD_K": apart.format("D if D + E <= 128 else 0"),
        "HELD_V": "E if D + E <= 128 else 0",
        "HELD_Q": apart.format("D if D <= 128 or D == 192 and E > 64 else 0"),
        "HELD_DY": "0 if D + E > 320 else E if D <= 128 else 64 if D == 192 and E > 64 else 0",
    }


def _wgmma(mask: str) -> KernelSpec:
    tiles = "(1 + APART) * B * G * ceildiv(K, 128) + B * H * ceildiv(Q, 128)"
    if mask == "bias":
        tiles += f" + MB * MH * ceildiv(K, 128) * (ceildiv(Q, {_BN_KEYS}) if MQ > 1 else 1)"
    return KernelSpec(
        name="wgmma",
        template="sdpa_backward_wgmma.cu.j2",
        summary=f"wgmma fed by TMA, warp-specialised, {_TILES}",
        targets="sm_90a",
        requires=(
            'T in ("float16", "bfloat16")',
            "D in (64, 96, 128, 192, 256) and E in (64, 96, 128, 192, 256)",
            *_WHOLE_ROWS,
            *(("B > 0",) if mask == "bias" else ()),
        ),
        strides=_strides(mask),
        specialize=("D", "E"),
        params={"CAPPED": (0, 1)},  # whether there is a softcap
        valid=("(CAPPED == 1) == (softcap > 0)",),
        constants={
            # rows that are streamed at a time past tiles of keys, and of queries
            "BN_KEYS": _BN_KEYS,
            "BN_QUERIES": "128 if D + E <= 128 else " + _BN_KEYS if not mask else _BN_KEYS,
            "APART": "1 if D + E > 320 else 0",  # registers hold but one of dk and dv
            **_held(mask),
            # more of them leave little of a cache to what does not fit registers
            "STAGES": "5 if D + E <= 192 else 3",
            # where sums need all registers, products wait for words, and turns for both
            "TURNS": "1 - APART",
            **_constants(mask),
        },
        tensor_maps=tuple(
            TensorMap(name=f"{n}_map", operand=n, box=("64", BOXES.get(n, "64"), "1", "1"), swizzle="128")
            for n in _ROWS
            if n != "y"
        ),
        grid=f"max(1, min(multiprocessors, {tiles}))",
        block="384",
        min_blocks=1,
        shared_memory="(128 + max(BN_KEYS, BN_QUERIES) * STAGES) * (align(D, 64) + align(E, 64)) * 2"
        " + 8 * BN_KEYS * STAGES + 16 * STAGES + 32",
        workspace=_STATISTICS,
        cooperative=True,
        estimate=f"1.2e-5 + {_work(mask)} / {_rate(mask, '5e14', '1.7e14', '1e14')} * (1.2 if D + E > 320 else 1)",
    )


def _wide() -> KernelSpec:
    """Of heads so wide that registers of a warpgroup hold but one of dk and dv."""
    return KernelSpec(
        name="wgmma_wide",
        template="sdpa_backward_wide.cu.j2",
        summary=f"the same for wide heads: one warpgroup has the weights and dv of keys, another one dk; {_TILES}",
        targets="sm_90a",
        requires=(
            # scores of wide heads may be steep, where fp16 has no weights left of most keys
            'T == "bfloat16"',
            "D in (96, 128, 192, 256) and E in (96, 128, 192, 256) and D + E > 320",
            *_WHOLE_ROWS,
        ),
        strides=_ROWS,
        specialize=("D", "E"),
        params={"CAPPED": (0, 1)},  # whether there is a softcap
        valid=("(CAPPED == 1) == (softcap > 0)",),
        tensor_maps=tuple(
            TensorMap(name=f"{n}_map", operand=n, box=("64", "64", "1", "1"), swizzle="128") for n in _ROWS if n != "y"
        ),
        grid="max(1, min(multiprocessors, B * G * ceildiv(K, 64) + B * H * ceildiv(Q, 128)))",
        block="384",
        min_blocks=1,
        shared_memory="128 * (4 * align(D, 64) + 3 * align(E, 64)) + 1024 + 96",
        workspace=_STATISTICS,
        cooperative=True,
        estimate=f"1.2e-5 + {_PAIRS} * (8 * D + 6 * E) / 5e14",
    )


def gradient_kernels(mask: str = "") -> tuple[KernelSpec, ...]:
    """All of them, for the fusion with that mask (a key of :data:`.sdpa_kernels.MASK_FORMS`)."""
    return (*(() if mask else (_wide(),)), _wgmma(mask), _tensor_core(mask), _plain(mask))
