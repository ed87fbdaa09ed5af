"""Self-attention from its input on: projections to q, k and v, heads, attention, heads merged again.

The rule's constraints: q, k and v are products of one x, heads divide their columns, the softmax is over keys. Heads
are split and merged as transformers do it, ``(0, 0, H, -1)`` and Transpose (0, 2, 1, 3), so nothing is copied for it.
With weights of their own (``qkv_sdpa``), or with one for all three (``qkv_packed_sdpa``), whose columns are q's, k's
and v's, each by head. Decoders rotate q and k in between, and some normalise each head in front of that
(``qkv_rope_sdpa``: Llama, Qwen).
"""

from __future__ import annotations

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, Tolerance, Workload

from .qkv_kernels import Kind, kernels
from .rope_alone import CUTS
from .sdpa import MASK

_ATTRIBUTES = {
    "H": AttributeSpec(type="int", default=4, summary="of q"),
    "transB": AttributeSpec(type="int", default=1, choices=(0, 1), static=True, summary="1: weights are [columns C]"),
    "scale": AttributeSpec(type="float", default=0.125, summary="of the scores, where scaling is given"),
    "is_causal": AttributeSpec(type="int", default=0, choices=(0, 1), summary="1: query i sees keys 0 to i"),
}
_ROTATION = {
    "middle": AttributeSpec(type="int", default=0, summary="half of a head where Slices cut it, else 0"),
    "epsilon": AttributeSpec(type="float", default=1e-6, summary="of the normalisation of heads, where there is one"),
}
_KV_HEADS = AttributeSpec(type="int", default=4, summary="of k and v")

_ATTEND = (
    'a = any_of("scaling", usual=Attention(), given=Attention(scale=scale))(qh, kh, vh, optional(mask), '
    "is_causal=is_causal{})\n"
    "y = Reshape(Transpose(a, perm=(0, 2, 1, 3)), (0, 0, -1))"
)
#: In any precision of the softmax that is written: it is float32 in any case.
_PRECISIONS = ("", ', softmax_precision="float32"')


def _projected(name: str, heads: str) -> str:
    return (
        f"{name} = optional(Add)(MatMul(x, w{name}, transB=transB), b{name})\n"
        f"{name}h = Transpose(Reshape({name}, (0, 0, {heads}, -1)), perm=(0, 2, 1, 3))\n"
    )


def _turned(name: str, heads: str, cut: str) -> str:
    halves = cut.format(x=f"{name}t")
    return (
        f"{name} = optional(Add)(MatMul(x, w{name}, transB=transB), b{name})\n"
        f"{name}n = optional(RMSNormalization)(Reshape({name}, (0, 0, {heads}, -1)), g{name}, epsilon=epsilon)\n"
        f"{name}t = Transpose({name}n, perm=(0, 2, 1, 3))\n{halves}\n"
        f"{name}h = Add(Mul({name}t, cos), Mul(Concat(Neg({name}t2), {name}t1, axis=-1), sin))\n"
    )


_ROTARY = tuple(_turned("q", "H", cut) + _turned("k", "G", cut) + _projected("v", "G") for cut in CUTS)
_THREE = _projected("q", "H") + _projected("k", "G") + _projected("v", "G")
_PACKED = "h = optional(Add)(MatMul(x, w, transB=transB), b)\n"
#: timm's, and GPT-2's, also as exported.
_PACKED_HEADS = (
    "s = Transpose(Reshape(h, (0, 0, 3, H, -1)), perm=(2, 0, 3, 1, 4))\n"
    "qh = Gather(s, 0)\nkh = Gather(s, 1)\nvh = Gather(s, 2)\n",
    *(
        f"q, k, v = Split({split}, axis=-1)\n"
        + "".join(f"{n}h = Transpose(Reshape({n}, (0, 0, H, -1)), perm=(0, 2, 1, 3))\n" for n in "qkv")
        for split in ("h, (-1, -1, -1)", "h, num_outputs=3")
    ),
)

_AXES = {"B": "sequences", "S": "tokens of each", "C": "channels", "N": "columns: heads times the width of a head"}

_SCORES = tuple(
    Tolerance(
        dtype=kind,
        ulp=2.0,
        inputs=4.0,
        reason="scores are products of sums of C terms; a weight has the absolute error of its score as relative one",
    )
    for kind in ("float16", "bfloat16", "float32")
)


def _cases(kind: Kind) -> tuple[Case, ...]:
    packed = kind == "packed"

    def case(name: str, heads: int, summary: str = "", values: dict[str, str] | None = None, **axes: int) -> Case:
        attributes = {"H": heads, **({} if packed else {"G": heads}), "is_causal": int("causal" in name)}
        width = axes.get("N", 64) // heads
        axes |= {"E": width} if kind == "rotary" else {}
        return Case(name=name, axes=axes, attributes=attributes, values=values or {}, summary=summary)

    def wide(name: str, heads: int, width: int, **axes: int) -> Case:
        n = heads * width
        columns = {"N": 3 * n} if packed else {"N": n, "J": n, "U": n}
        found = case(name, heads, f"heads of {width}", None, **columns, **axes)
        return found.model_copy(update={"absent": ("mask",), "attributes": found.attributes | {"scaling": "usual"}})

    def beside(name: str, heads: int, width: int, values: dict[str, str] | None = None, **axes: int) -> Case:
        found = wide(name, heads, width, **axes)  # with its mask
        return found.model_copy(update={"absent": (), "values": FrozenDict(values or {})})

    def rotated(name: str, **attributes: int) -> Case:
        found = wide(name, 2, 128, S=72)
        gone = ("mask", "bq", "bk", "bv", "gq", "gk")
        return found.model_copy(update={"absent": gone, "attributes": found.attributes | attributes})

    shared = Case(name="shared_heads", axes={"J": 32, "U": 32}, attributes={"H": 4, "G": 2})
    return (
        case("one_head", 1, S=9),
        case("causal", 2, B=1, S=70),
        case("nothing_allowed", 4, "no key: rows of 0", {"mask": "zeros"}, S=20),
        case("tiles", 2, "several tiles of each", S=130, C=72),
        *(() if packed else (shared,)),
        wide("wide", 2, 64, S=24),
        wide("wide_causal", 3, 64, S=200, C=136),
        wide("wider", 1, 128, S=130),
        wide("wider_causal", 2, 128, S=72, C=72),
        *((rotated("rotated"), rotated("rotated_from_rows", transB=0)) if kind == "rotary" else ()),
        # what kernels for masks alone have their edges around: few scores each
        beside("beside_mask", 1, 64, B=2) if kind == "rotary" else beside("beside_mask", 2, 64, B=1),
        beside("beside_mask_tails", 2, 64, S=70),
        beside("beside_mask_causal", 2, 128, S=130, C=72),
        beside("beside_mask_nothing", 1, 64, {"mask": "zeros"}, S=20),
    )


def _workload(
    name: str, sequences: int, tokens: int, channels: int, heads: int, kind: Kind, padded: bool = False
) -> Workload:
    groups, rotary = heads // (4 if kind == "rotary" else 1), kind == "rotary"
    of_k = channels // heads * groups
    axes = {"B": sequences, "S": tokens, "C": channels, "N": channels * (3 if kind == "packed" else 1)}
    axes |= {} if kind == "packed" else {"J": of_k, "U": of_k}
    return Workload(
        name=f"{name}-padding" if padded else name,
        row="S12 more" if padded else "S12",
        axes=axes | ({"E": channels // heads} if rotary else {}),
        dtypes={"T": "bfloat16", "P": "bool"},
        forms=({"w": "T[N C]"} if kind == "packed" else {"wq": "T[N C]", "wk": "T[J C]", "wv": "T[U C]"})
        | (dict.fromkeys(_TABLES, "T[1 1 S E]") if rotary else {})
        | ({"mask": "P[B 1 1 S]"} if padded else {}),
        attributes={
            "H": heads, "transB": 1, "scaling": "usual",
            **({} if kind == "packed" else {"G": groups}), **({"is_causal": 1} if rotary else {}),
        },
        goal="best" if tokens > 1000 and not padded else "",
        absent=(
            *(() if padded else ("mask",)),
            *(("b",) if kind == "packed" else ("bq", "bk", "bv")),
            *(("gq", "gk") if rotary else ()),
        ),
        summary="a layer of a decoder in prefill"
        if rotary
        else f"a layer of an encoder{', sentences padded' if padded else ''}",
    )  # fmt: skip


_COLUMNS = {"q": "N", "k": "J", "v": "U"}
_TABLES = ("cos", "sin")
_SUMMARIES = {
    "three": "q, k and v projected from one x by three weights, attention of heads",
    "packed": "q, k and v projected from one x by one weight, attention of heads",
    "rotary": "the same with a rotary embedding of q and k, whose heads may be normalised in front of it",
}
_WORDS = {"three": "qkv_sdpa", "packed": "qkv_packed_sdpa", "rotary": "qkv_rope_sdpa"}
_HEADS = {"three": (_THREE,), "packed": tuple(_PACKED + h for h in _PACKED_HEADS), "rotary": _ROTARY}


def _fusion(kind: Kind) -> FusionSpec:
    packed, rotary = kind == "packed", kind == "rotary"
    weights = {"w": "T[N C] | T[C N]"} if packed else {f"w{n}": f"T[{a} C] | T[C {a}]" for n, a in _COLUMNS.items()}
    biases = {"b": "T[N]"} if packed else {f"b{n}": f"T[{a}]" for n, a in _COLUMNS.items()}
    sizes = {"w": "N"} if packed else {f"w{n}": a for n, a in _COLUMNS.items()}
    scales = {"gq": "T[E]", "gk": "T[E]"} if rotary else {}
    tables = dict.fromkeys(_TABLES, "T[1 1 S E] | T[B 1 S E] | T[S E]") if rotary else {}
    workloads = (("8x2048x4096-h32", 8, 2048, 4096, 32), ("1x128x768-h12", 1, 128, 768, 12))
    return FusionSpec(
        api=1,
        name=f"attention.{_WORDS[kind]}",
        summary=_SUMMARIES[kind],
        pattern=tuple(h + _ATTEND.format(p) for h in _HEADS[kind] for p in _PRECISIONS),
        inputs={
            "x": "T[B S C]", **weights, **biases, **scales, **tables,
            "mask": MASK.replace("Q", "S").replace("K", "S"),
        },
        outputs={"y": "T[B S Y]"},
        dtypes={"T": ("bfloat16", "float16", "float32"), "P": ("bool", "float16", "bfloat16", "float32")},
        axes=_AXES
        | {"Y": "columns of v"}
        | ({} if packed else {"J": "columns of k", "U": "columns of v"})
        | ({"E": "width of a head"} if rotary else {}),
        extents={
            "B": 2, "S": 24, "C": 8, "N": 192 if packed else 64, **({} if packed else {"J": 64, "U": 64}),
            **({"E": 16} if rotary else {}),
        },
        attributes=_ATTRIBUTES | ({} if packed else {"G": _KV_HEADS}) | (_ROTATION if rotary else {}),
        autocast="lower",
        constraints=(
            "B > 0 and S > 0 and H > 0",
            "scale > 0",
            'not present(mask) or P in ("bool", T)',
            *(f"shape({w}, 0) == ({a} if transB else C)" for w, a in sizes.items()),
            *(
                ("N % (3 * H) == 0", "Y == N // 3")
                if packed
                else (
                    "G > 0 and H % G == 0",
                    "N % H == 0 and J * H == N * G",
                    "U % G == 0",
                    "Y == U // G * H",
                )
            ),
            *(
                (
                    "E * H == N and E % 2 == 0 and (middle == 0 or 2 * middle == E)",
                    "form(cos) == form(sin)",
                    "present(gq) == present(gk)",
                )
                if rotary
                else ()
            ),
        ),
        cases=_cases(kind),
        tolerances=_SCORES,
        workloads=(
            *(_workload(*w, kind) for w in workloads),
            *(() if rotary else (_workload(*workloads[0], kind, padded=True),)),
        ),
        kernels=kernels(kind),
        tags=("S12", "attention"),
    )  # fmt: skip


FUSIONS: tuple[FusionSpec, ...] = (_fusion("three"), _fusion("packed"), _fusion("rotary"))
