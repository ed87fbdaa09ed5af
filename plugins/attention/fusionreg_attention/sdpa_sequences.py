"""Attention of sequences that do not lie in one tensor with an axis for each: one behind the other (FlashAttention's
``varlen``, ``cu_seqlens``), or with keys in pages that a table names (vLLM's paged attention).

Their last query is at their last key, from where causal queries and windows count.
"""

from __future__ import annotations

from typing import Any

from fusionreg.core.spec import AttributeSpec, Backward, Case, FusionSpec, KernelSpec, TensorMap, Workload

from .sdpa import ATTRIBUTES, CONSTRAINTS, FLOATS, GRADIENT_TOLERANCES, LENGTHS_TOLERANCES, MILD
from .sdpa_kernels import tensor_core
from .varlen_gradient_kernels import varlen_gradient_kernels

_NAMES = ", ".join(f"{name}={name}" for name in ATTRIBUTES if name != "scale")
_AXES = {
    "H": "heads of q", "G": "heads of k and v, each for H / G of q", "D": "width of a head of q and k",
    "E": "width of a head of v",
}  # fmt: skip


def _attend(operator: str, operands: str, results: str = "y") -> str:
    return f'{results} = any_of("scaling", usual={operator}(), given={operator}(scale=scale))({operands}, {_NAMES})'


def _plain(rows: str, constants: dict[str, str], keys: str) -> KernelSpec:
    return KernelSpec(
        name="plain",
        template="sdpa_plain.cu.j2",
        summary="a warp for each query, fp32 FMA: any dtype, width and stride",
        strides=("q", "k", "v", "y"),
        constants={"MASK_FORM": "-1", **constants},
        requires=(f"{keys} < 1000000000",),
        grid=f"ceildiv({rows}, 4)",
        block="128",
        estimate=f"5e-6 + {rows} * {keys} * (2 * D + E) / 2e12",
    )


def _tensor_core(tiles: str, constants: dict[str, str], keys: str, pairs: str, axes: int) -> KernelSpec:
    """``axes``: of q and y, the last of which is a head's width."""
    strided = {"q": axes, "k": len("QHD") if axes == 3 else 4, "v": len("QHD") if axes == 3 else 4, "y": axes}
    return tensor_core(
        (
            *(f"aligned({n}, 16) and stride({n}, {a - 1}) == 1" for n, a in strided.items()),
            *(f"stride({n}, {i}) % 8 == 0" for n, a in strided.items() for i in range(a - 1)),
            f"Q < 1000000000 and {keys} < 1000000000",
        ),
        tuple(strided),
        {"MASK_FORM": "-1", **constants},
        tiles,
        f"6e-6 + {pairs} * (0.5 if is_causal else 1.0) * 2 * (D + E) / 2.1e14"
        " * (1 if (WARPS == 8) == (D + E > 128) else 1.1)",
    )


#: What makes kernels those of sequences one behind the other, and has them give the log-sum-exp.
_VARLEN = {"VARLEN": "1"}
_STATISTICS = {"LSE": "1"}


def _wgmma(more: dict[str, str]) -> KernelSpec:
    """Of sequences one behind the other."""
    boxes = {"q": "64 * CONSUMERS", "k": "BK", "v": "BK", "y": "64"}
    return KernelSpec(
        name="wgmma",
        template="sdpa_wgmma.cu.j2",
        summary="wgmma fed by TMA, warp-specialised and persistent; tiles of queries of one sequence after the other",
        targets="sm_90a",
        requires=(
            'T in ("float16", "bfloat16")',
            "D in (64, 128) and E in (64, 128)",
            "aligned(y, 16) and stride(y, 2) == 1 and stride(y, 0) % 8 == 0 and stride(y, 1) % 8 == 0",
            "Q > 0 and K > 0 and Q < 1000000000 and K < 1000000000",
        ),
        strides=("q", "k", "v", "y"),
        specialize=("D", "E"),
        params={"CONSUMERS": (3,), "BK": (128, 64), "SLACK": (8,), "FRACTION": (0,), "CAPPED": (0, 1)},
        valid=("BK == (64 if E == 128 else 128)", "(CAPPED == 1) == (softcap > 0)"),
        constants={"MASK_FORM": "-1", **_VARLEN, **more},
        tensor_maps=tuple(
            TensorMap(name=f"{n}_map", operand=n, box=("64", "1", rows), swizzle="128") for n, rows in boxes.items()
        ),
        grid="max(1, min(multiprocessors, H * (ceildiv(Q, 64 * CONSUMERS) + C + 1)))",
        block="128 * (CONSUMERS + 1)",
        min_blocks=1,
        shared_memory="64 * CONSUMERS * (D + E) * 2 + 2 * BK * (D + E) * 2 + 80",
        estimate="8e-6 + H * Q * K / max(1, C - 1) * (0.5 if is_causal else 1.0) * 2 * (D + E)"
        " / (5e14 if D == 128 else 3.5e14)",
    )


_PACKED_CASES = (
    Case(name="several", axes={"C": 6, "Q": 20, "K": 24}, values={"cu_q": "rising", "cu_k": "rising"},
         summary="some are empty; tokens before the first and behind the last"),
    Case(name="causal", axes={"C": 9, "Q": 30, "K": 40}, attributes={"is_causal": 1},
         values={"cu_q": "rising", "cu_k": "rising"}),
    Case(name="window", axes={"C": 40, "Q": 150, "K": 140}, attributes={"left_window_size": 3, "right_window_size": 1},
         values={"cu_q": "rising", "cu_k": "rising"}, summary="more sequences than a warp has lanes"),
    Case(name="one", axes={"C": 2, "Q": 200, "K": 200}, attributes={"is_causal": 1},
         values={"cu_q": "bytes", "cu_k": "bytes"}, summary="numbers below 0 are 0"),
    Case(name="tiles", axes={"C": 3, "Q": 450, "K": 520}, attributes={"is_causal": 1},
         values={"cu_q": "rising", "cu_k": "rising"}, summary="several tiles of a sequence, and others behind it"),
    Case(name="no_sequence", axes={"C": 1}, values={"cu_q": "7", "cu_k": "0"}),
    Case(name="capped", axes={"C": 5}, attributes={"softcap": 3.0}, values={"cu_q": "rising", "cu_k": "rising"}),
    *(
        Case(name=f"width_{d}", axes={"C": 7, "D": d, "E": d}, values={"cu_q": "rising", "cu_k": "rising"})
        for d in (32, 128, 256)
    ),
    Case(name="width_odd", axes={"C": 4, "D": 35, "E": 21}, values={"cu_q": "rising", "cu_k": "rising"}),
)  # fmt: skip

_WORKLOADS = tuple(
    Workload(
        name=f"{n}x{h}.{g}x{t // n}x{d}",
        row="S12 more",
        axes={"Q": t, "K": t, "C": n + 1, "H": h, "G": g, "D": d, "E": d},
        dtypes={"T": "bfloat16", "I": "int32"},
        values={"cu_q": f"rising {t}", "cu_k": f"rising {t}"},
        attributes={"is_causal": 1, "scaling": "usual"},
        summary="documents of one length each",
    )
    for n, h, g, t, d in ((8, 32, 8, 16384, 128),)
)
_Q, _K, _V, _Y, _LSE = "T[Q H D]", "T[K G D]", "T[K G E]", "T[Q H E]", {"lse": "float32[H Q]"}
_BOUNDS = {"cu_q": "I[C]", "cu_k": "I[C]"}


def _packed(words: str, summary: str, pattern: str, **fields: Any) -> FusionSpec:
    return FusionSpec(
        api=1,
        name=f"attention.{words}",
        summary=summary,
        pattern=pattern,
        dtypes={"T": FLOATS, "I": ("int32", "int64")},
        axes={"Q": "queries of all sequences", "K": "keys of all", "C": "sequences, and one", **_AXES},
        extents={"Q": 24, "K": 40, "C": 3, "H": 2, "G": 1, "D": 64, "E": 64},
        constraints=CONSTRAINTS,
        workloads=_WORKLOADS,
        tags=("S12", "attention", *(("training",) if "lse" in pattern else ())),
        **fields,
    )


def _packed_forward(words: str, summary: str, statistics: bool, **fields: Any) -> FusionSpec:
    """``statistics``: whether it gives the log-sum-exp of scores as well."""
    more = _STATISTICS if statistics else {}
    found = (
        _wgmma(more),
        _tensor_core("H * (ceildiv(Q, 16 * WARPS) + C + 1)", _VARLEN | more, "K", "H * Q * K / max(1, C - 1)", 3),
        _plain("Q * H", _VARLEN | more, "K"),
    )
    return _packed(
        words,
        summary,
        _attend("fusionreg.VarlenAttention", "q, k, v, cu_q, cu_k", "y, lse" if statistics else "y"),
        inputs={"q": _Q, "k": _K, "v": _V, **_BOUNDS},
        outputs={"y": _Y, **(_LSE if statistics else {})},
        layouts={"y": "q"},
        autocast="lower",
        tolerances=_STATISTICS_TOLERANCES if statistics else LENGTHS_TOLERANCES,
        kernels=found,
        **fields,
    )


_STATISTICS_TOLERANCES = (
    LENGTHS_TOLERANCES[0].model_copy(
        update={
            "absolute": 2.0**-21,
            "reason": "a weight has the absolute error of its score as its relative one, and the log-sum-exp is the "
            "largest score and a logarithm, which may cancel",
        }
    ),
    *LENGTHS_TOLERANCES[1:],
)

#: Of a forward pass with its log-sum-exp, what is another path than without; then of gradients.
_STATISTICS_CASES = tuple(case for case in _PACKED_CASES if case.name in ("several", "causal", "tiles", "width_128"))
_RISING = {"cu_q": "rising", "cu_k": "rising"}
_GRADIENT_CASES = (
    *(case for case in _PACKED_CASES if case.name in ("causal", "window", "one", "no_sequence", "capped", "width_odd")),
    Case(name="tiles", axes={"C": 3, "H": 2, "G": 1, "Q": 290, "K": 330}, attributes={"is_causal": 1}, values=_RISING,
         summary="several tiles of a sequence, and others behind it"),
    *(
        Case(name=f"width_{d}", axes={"C": 4, "H": 1, "Q": 90, "K": 70, "D": d, "E": d}, values=_RISING)
        for d in (96, 128, 256)
    ),
)  # fmt: skip

_PACKED = (
    _packed_forward(
        "sdpa_varlen", "attention of sequences that lie one behind the other, as FlashAttention's varlen has it",
        False, cases=_PACKED_CASES, attributes=ATTRIBUTES,
    ),
    _packed_forward(
        "sdpa_varlen_training", "the same, differentiable: also gives the log-sum-exp of each query's scores",
        True, cases=_STATISTICS_CASES, attributes=ATTRIBUTES | MILD,
        backward=Backward(fusion="attention.sdpa_varlen_backward"),
    ),
    _packed(
        "sdpa_varlen_backward", "gradients of attention of sequences that lie one behind the other",
        _attend("fusionreg.VarlenAttentionGrad", "dy, q, k, v, y, lse, cu_q, cu_k", "dq, dk, dv"),
        inputs={"dy": _Y, "q": _Q, "k": _K, "v": _V, "y": _Y, **_LSE, **_BOUNDS},
        outputs={"dq": _Q, "dk": _K, "dv": _V},
        layouts={"dq": "q", "dk": "k", "dv": "v"},
        cases=_GRADIENT_CASES,
        attributes=ATTRIBUTES | MILD,
        tolerances=GRADIENT_TOLERANCES,
        kernels=varlen_gradient_kernels(),
    ),
)  # fmt: skip


def _pages(name: str, width: str) -> str:
    gathered = f"{name}p = Gather({name}, table, axis=0)\n"
    return f"{gathered}{name}s = Transpose(Reshape({name}p, (0, -1, heads, {width})), perm=(0, 2, 1, 3))\n"


_PAGED_CASES = (
    Case(name="anywhere", axes={"B": 6, "M": 4, "N": 9}, values={"lengths": "bytes", "table": "integers"},
         summary="pages that count from the last one, and that several sequences have"),
    Case(name="causal", axes={"B": 5, "Q": 20, "M": 4}, values={"lengths": "bytes", "table": "integers"},
         attributes={"is_causal": 1}),
    Case(name="window", axes={"Q": 5, "M": 4}, values={"lengths": "40", "table": "integers"},
         attributes={"left_window_size": 20}),
    Case(name="small_pages", axes={"W": 3, "M": 11}, values={"lengths": "29", "table": "integers"}),
    Case(name="decoding", axes={"B": 4, "H": 8, "Q": 1, "M": 20, "N": 7},
         values={"lengths": "bytes", "table": "integers"}),
    Case(name="width_128", axes={"D": 128, "E": 128, "M": 4},
         values={"lengths": "50", "table": "integers"}),
    Case(name="none", values={"lengths": "0"}),
)  # fmt: skip

_PAGED = FusionSpec(
    api=1,
    name="attention.sdpa_paged",
    summary="attention whose keys lie in pages that a table names for each sequence",
    pattern=tuple(
        pages + _attend("Attention", "q, ks, vs, None, None, None, lengths")
        for pages in (
            "ks = attention.Pages(k, table)\nvs = attention.Pages(v, table)\n",
            _pages("k", "width") + _pages("v", "width_of_v"),
        )
    ),
    inputs={"q": "T[B H Q D]", "k": "T[N W G D]", "v": "T[N W G E]", "table": "J[B M]", "lengths": "I[B]"},
    outputs={"y": "T[B H Q E]"},
    layouts={"y": "q"},
    dtypes={"T": FLOATS, "J": ("int64", "int32"), "I": ("int64", "int32")},
    axes={
        "B": "sequences", "Q": "queries", "N": "pages", "W": "keys of a page", "M": "pages of a sequence", **_AXES,
    },
    extents={"B": 2, "H": 2, "G": 1, "Q": 3, "N": 5, "W": 16, "M": 3, "D": 64, "E": 64},
    attributes={
        **ATTRIBUTES,
        "heads": AttributeSpec(type="int", default=0, summary="G where Reshape has it, else 0"),
        "width": AttributeSpec(type="int", default=0, summary="D, the same"),
        "width_of_v": AttributeSpec(type="int", default=0, summary="E, the same"),
    },
    constraints=(*CONSTRAINTS, "heads in (0, G) and width in (0, D) and width_of_v in (0, E)", "N > 0 and W > 0"),
    autocast="lower",
    cases=_PAGED_CASES,
    tolerances=LENGTHS_TOLERANCES,
    workloads=(
        Workload(
            name="decode-16x32.8x8192x128",
            row="S12 more",
            axes={"B": 16, "H": 32, "G": 8, "Q": 1, "N": 8192, "W": 16, "M": 512, "D": 128, "E": 128},
            dtypes={"T": "bfloat16", "I": "int64", "J": "int32"},
            values={"table": "distinct N", "lengths": "below M * W"},
            attributes={"scaling": "usual"},
            summary="a layer of a decoder whose cache is paged; lengths anywhere",
        ),
    ),
    kernels=(
        _tensor_core(
            "B * H * ceildiv(Q, 16 * WARPS)",
            {"LENGTHS": "1", "PAGED": "1"},
            "M * W",
            "B * H * align(Q, 16 * WARPS) * M * W",
            4,
        ),
        _plain("B * H * Q", {"LENGTHS": "1", "PAGED": "1"}, "M * W"),
    ),
    tags=("S12", "S23", "attention"),
)  # fmt: skip

FUSIONS: tuple[FusionSpec, ...] = (*_PACKED, _PAGED)
