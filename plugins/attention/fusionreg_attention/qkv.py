"""Self-attention from its input on: projections to q, k and v, heads, attention, heads merged again.

The rule's constraints: q, k and v are products of one x, heads divide their columns, the softmax is over keys. Heads
are split and merged as transformers do it, ``(0, 0, H, -1)`` and Transpose (0, 2, 1, 3), so nothing is copied for it.
With weights of their own (``qkv_sdpa``), or with one for all three (``qkv_packed_sdpa``), whose columns are q's, k's
and v's, each by head. Decoders rotate q and k in between, and some normalise each head in front of that
(``qkv_rope_sdpa``: Llama, Qwen; ``qkv_rope_norm_sdpa``: Gemma), with one weight, too (``qkv_packed_rope_sdpa``: Phi).
Heads that are normalised and not rotated have ``qkv_norm_sdpa`` and ``qkv_packed_groups_sdpa``, which is as well for
one weight with fewer heads of k and v.
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
_MIDDLE = AttributeSpec(type="int", default=0, summary="half of a head where Slices cut it, else 0")
_EPSILON = AttributeSpec(type="float", default=1e-6, summary="of the normalisation of heads, where there is one")
_KV_HEADS = AttributeSpec(type="int", default=4, summary="of k and v")
_FEWER = _KV_HEADS.model_copy(update={"default": 2})
_COLUMNS_OF = {
    "columns_q": AttributeSpec(type="int", default=64, summary="of the weight that are q's, first of all"),
    "columns_k": AttributeSpec(type="int", default=32, summary="that are k's, and as many are v's"),
}

_ATTEND = (
    'a = any_of("scaling", usual=Attention(), given=Attention(scale=scale))(qh, kh, vh, optional(mask), '
    "is_causal=is_causal{})\n"
    "y = Reshape(Transpose(a, perm=(0, 2, 1, 3)), (0, 0, -1))"
)
#: In any precision of the softmax that is written: it is float32 in any case.
_PRECISIONS = ("", ', softmax_precision="float32"')


def _product(name: str) -> str:
    return f"{name} = optional(Add)(MatMul(x, w{name}, transB=transB), b{name})\n"


def _heads(name: str, heads: str, norm: str = "{}") -> str:
    return f"{name}h = Transpose({norm.format(f'Reshape({name}, (0, 0, {heads}, -1))')}, perm=(0, 2, 1, 3))\n"


_NORMALISED = "optional(RMSNormalization)({x}, g{name}, epsilon=epsilon)"
#: Gemma's: the scale is 1 + a weight, and rounded only with what it scales.
_WIDE = 'Cast(RMSNormalization(Cast({x}, to="float32"), g{name}, epsilon=epsilon), to=T)'


def _turned(name: str, heads: str, cut: str, norm: str = _NORMALISED) -> str:
    halves = cut.format(x=f"{name}t")
    return (
        f"{name}n = {norm.format(x=f'Reshape({name}, (0, 0, {heads}, -1))', name=name)}\n"
        f"{name}t = Transpose({name}n, perm=(0, 2, 1, 3))\n{halves}\n"
        f"{name}h = Add(Mul({name}t, cos), Mul(Concat(Neg({name}t2), {name}t1, axis=-1), sin))\n"
    )


def _rotary(norm: str) -> tuple[str, ...]:
    return tuple(
        "".join(_product(n) + _turned(n, heads, cut, norm) for n, heads in ("qH", "kG"))
        + _product("v") + _heads("v", "G")
        for cut in CUTS
    )  # fmt: skip


_THREE = "".join(_product(n) + _heads(n, h) for n, h in ("qH", "kG", "vG"))
_NORMED = "".join(
    _product(n) + _heads(n, h, f"RMSNormalization({{}}, g{n}, epsilon=epsilon)" if n != "v" else "{}")
    for n, h in ("qH", "kG", "vG")
)
_PACKED = "h = optional(Add)(MatMul(x, w, transB=transB), b)\n"
#: timm's, and GPT-2's, also as exported.
_PACKED_HEADS = (
    "s = Transpose(Reshape(h, (0, 0, 3, H, -1)), perm=(2, 0, 3, 1, 4))\n"
    "qh = Gather(s, 0)\nkh = Gather(s, 1)\nvh = Gather(s, 2)\n",
    *(
        f"q, k, v = Split({split}, axis=-1)\n" + "".join(_heads(n, "H") for n in "qkv")
        for split in ("h, (-1, -1, -1)", "h, num_outputs=3")
    ),
)
#: All else is made so by lifting.
_SPLIT = _PACKED + "q, k, v = Split(h, (columns_q, columns_k, columns_k), axis=-1)\n"
_PACKED_GROUPS = (
    _SPLIT
    + "".join(_heads(n, h, f"optional(RMSNormalization)({{}}, g{n}, epsilon=epsilon)") for n, h in ("qH", "kG"))
    + _heads("v", "G")
)
_PACKED_ROTARY = tuple(_SPLIT + _turned("q", "H", cut) + _turned("k", "G", cut) + _heads("v", "G") for cut in CUTS)

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


def _columns(kind: Kind, heads: int, groups: int, width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Axes and attributes."""
    n, j = heads * width, groups * width
    shared = {"G": groups} if kind.groups else {}
    if not kind.packed:
        return {"N": n, "J": j, "U": j}, {"H": heads, **shared}
    return {"N": n + 2 * j}, {"H": heads, **shared, **({"columns_q": n, "columns_k": j} if kind.groups else {})}


def _cases(kind: Kind) -> tuple[Case, ...]:
    plain = kind.norms == "never"
    gone = ("b",) if kind.packed else ("bq", "bk", "bv")

    def case(
        name: str, heads: int, summary: str = "", values: dict[str, str] | None = None, *, groups: int = 0,
        width: int = 0, **axes: int,
    ) -> Case:  # fmt: skip
        own, attributes = _columns(kind, heads, groups or heads, width or 64 // heads)
        axes |= (own if width or groups or kind.packed else {}) | ({} if plain else {"E": width or 64 // heads})
        attributes |= {"is_causal": int("causal" in name)}
        return Case(name=name, axes=axes, attributes=attributes, values=values or {}, summary=summary)

    def wide(name: str, heads: int, width: int, groups: int = 0, **axes: int) -> Case:
        found = case(name, heads, f"heads of {width}", None, groups=groups, width=width, **axes)
        return found.model_copy(update={"absent": ("mask",), "attributes": found.attributes | {"scaling": "usual"}})

    def beside(name: str, heads: int, width: int, values: dict[str, str] | None = None, **axes: int) -> Case:
        found = wide(name, heads, width, **axes)  # with its mask
        return found.model_copy(update={"absent": (), "values": FrozenDict(values or {})})

    def bare(name: str, groups: int = 2, **attributes: int) -> Case:
        """Without norms and all else that may be absent."""
        found = wide(name, 2, 128, S=72, groups=groups)
        without = ("mask", *gone, *(("gq", "gk") if kind.norms == "maybe" else ()))
        return found.model_copy(update={"absent": without, "attributes": found.attributes | attributes})

    shared = case("shared_heads", 4, groups=2, width=16)
    return (
        case("one_head", 1, S=9),
        case("causal", 2, B=1, S=70),
        case("nothing_allowed", 4, "no key: rows of 0", {"mask": "zeros"}, S=20),
        case("tiles", 2, "several tiles of each", S=130, C=72),
        *((shared,) if kind.groups else ()),
        *((wide("one_key_head", 3, 64, S=72, groups=1),) if kind.groups and kind.packed else ()),
        wide("wide", 2, 64, S=24),
        wide("wide_causal", 3, 64, S=200, C=136),
        wide("wider", 1, 128, S=130),
        wide("wider_causal", 2, 128, S=72, C=72),
        *((bare("rotated"), bare("rotated_from_rows", transB=0)) if kind.rotary else ()),
        *((bare("one_wide_key_head", 1),) if kind.groups and kind.packed else ()),
        # what kernels for masks alone have their edges around: few scores each
        beside("beside_mask", 2, 64, B=1) if plain else beside("beside_mask", 1, 64, B=2),
        beside("beside_mask_tails", 2, 64, S=70),
        beside("beside_mask_causal", 2, 128, S=130, C=72),
        beside("beside_mask_nothing", 1, 64, {"mask": "zeros"}, S=20),
    )


def _workload(
    name: str, sequences: int, tokens: int, channels: int, heads: int, kind: Kind, padded: bool = False,
    row: str = "S12",
) -> Workload:  # fmt: skip
    groups, rotary = heads // (4 if kind.norms != "never" else 1), kind.rotary
    width = channels // heads
    columns, attributes = _columns(kind, heads, groups, width)
    weights = ("w",) if kind.packed else ("wq", "wk", "wv")
    axes = {"B": sequences, "S": tokens, "C": channels, **columns}
    axes |= {} if kind.norms == "never" else {"E": width}
    return Workload(
        name=f"{name}-padding" if padded else name,
        row=row if not padded else "S12 more",
        axes=axes,
        dtypes={"T": "bfloat16", "P": "bool"},
        forms=({w: f"T[{a} C]" for w, a in zip(weights, columns, strict=True)})
        | (dict.fromkeys(_TABLES, "T[1 1 S E]") if rotary else {})
        | ({"mask": "P[B 1 1 S]"} if padded else {}),
        attributes={**attributes, "transB": 1, "scaling": "usual", **({"is_causal": 1} if rotary else {})},
        goal="best" if tokens > 1000 and row == "S12" and not padded else "",
        absent=(
            *(() if padded else ("mask",)),
            *(("b",) if kind.packed else ("bq", "bk", "bv")),
            *(("gq", "gk") if kind.norms == "maybe" else ()),
        ),
        summary="a layer of a decoder in prefill"
        if rotary
        else f"a layer of an encoder{', sentences padded' if padded else ''}",
    )


_COLUMNS = {"q": "N", "k": "J", "v": "U"}
_TABLES = ("cos", "sin")
_SHAPES = (("8x2048x4096-h32", 8, 2048, 4096, 32), ("1x128x768-h12", 1, 128, 768, 12))


def _constraints(kind: Kind) -> tuple[str, ...]:
    sizes = {"w": "N"} if kind.packed else {f"w{n}": a for n, a in _COLUMNS.items()}
    if not kind.packed:
        columns: tuple[str, ...] = (
            "G > 0 and H % G == 0", "N % H == 0 and J * H == N * G", "U % G == 0", "Y == U // G * H",
        )  # fmt: skip
    elif not kind.groups:
        columns = ("N % (3 * H) == 0", "Y == N // 3")
    else:
        columns = (
            "G > 0 and H % G == 0", "N % (H + 2 * G) == 0", "Y == N // (H + 2 * G) * H",
            *(() if kind.rotary else ("present(gq) or G < H",)),
            "columns_q == N // (H + 2 * G) * H and columns_k == N // (H + 2 * G) * G", "E == N // (H + 2 * G)",
        )  # fmt: skip
    rotary = ("E * H == N and E % 2 == 0 and (middle == 0 or 2 * middle == E)", "form(cos) == form(sin)")
    if kind.packed:
        rotary = ("E % 2 == 0 and (middle == 0 or 2 * middle == E)", "form(cos) == form(sin)")
    norms = {"maybe": ("present(gq) == present(gk)",), "always": () if kind.rotary else ("E * H == N",), "never": ()}
    return (
        "B > 0 and S > 0 and H > 0",
        "scale > 0",
        'not present(mask) or P in ("bool", T)',
        *(f"shape({w}, 0) == ({a} if transB else C)" for w, a in sizes.items()),
        *columns,
        *(rotary if kind.rotary else ()),
        *norms[kind.norms],
    )


def _fusion(
    words: str,
    summary: str,
    kind: Kind,
    pattern: tuple[str, ...],
    workloads: tuple[Workload, ...],
    pending: tuple[str, ...] = (),
) -> FusionSpec:
    packed, rotary, normed = kind.packed, kind.rotary, kind.norms != "never"
    shared = packed and kind.groups
    weights = {"w": "T[N C] | T[C N]"} if packed else {f"w{n}": f"T[{a} C] | T[C {a}]" for n, a in _COLUMNS.items()}
    biases = {"b": "T[N]"} if packed else {f"b{n}": f"T[{a}]" for n, a in _COLUMNS.items()}
    scales = dict.fromkeys(("gq", "gk"), f"{'float32' if kind.wide else 'T'}[E]") if normed else {}
    tables = dict.fromkeys(_TABLES, "T[1 1 S E] | T[B 1 S E] | T[S E]") if rotary else {}
    return FusionSpec(
        api=1,
        name=f"attention.{words}",
        summary=summary,
        pattern=tuple(h + _ATTEND.format(p) for h in pattern for p in _PRECISIONS),
        inputs={
            "x": "T[B S C]", **weights, **biases, **scales, **tables,
            "mask": MASK.replace("Q", "S").replace("K", "S"),
        },
        outputs={"y": "T[B S Y]"},
        dtypes={"T": ("bfloat16", "float16", "float32"), "P": ("bool", "float16", "bfloat16", "float32")},
        axes=_AXES
        | {"Y": "columns of v"}
        | ({} if packed else {"J": "columns of k", "U": "columns of v"})
        | ({"E": "width of a head"} if normed else {}),
        extents={
            "B": 2, "S": 24, "C": 8, **({"N": 128 if shared else 192} if packed else {"N": 64, "J": 64, "U": 64}),
            **({"E": 16} if normed else {}),
        },
        attributes={
            **_ATTRIBUTES,
            **({"G": _FEWER if shared else _KV_HEADS} if kind.groups else {}),
            **(_COLUMNS_OF if shared else {}),
            **({"middle": _MIDDLE} if rotary else {}),
            **({"epsilon": _EPSILON} if normed else {}),
        },
        autocast="lower",
        constraints=_constraints(kind),
        cases=_cases(kind),
        tolerances=_SCORES,
        workloads=workloads,
        kernels=kernels(kind, pending),
        tags=("S12", "attention"),
    )  # fmt: skip


_ONE, _PACK, _TURN = Kind(), Kind(packed=True, groups=False), Kind(norms="maybe", rotary=True)
_GEMMA = Kind(norms="always", rotary=True, wide=True)
_NORM, _GROUP = Kind(norms="always"), Kind(packed=True, norms="maybe")
_ALL = Kind(packed=True, norms="maybe", rotary=True)
FUSIONS: tuple[FusionSpec, ...] = (
    _fusion(
        "qkv_sdpa", "q, k and v projected from one x by three weights, attention of heads", _ONE, (_THREE,),
        (*(_workload(*s, _ONE) for s in _SHAPES), _workload(*_SHAPES[0], _ONE, padded=True)),
    ),
    _fusion(
        "qkv_packed_sdpa", "q, k and v projected from one x by one weight, attention of heads", _PACK,
        tuple(_PACKED + heads for heads in _PACKED_HEADS),
        (*(_workload(*s, _PACK) for s in _SHAPES), _workload(*_SHAPES[0], _PACK, padded=True)),
    ),
    _fusion(
        "qkv_rope_sdpa", "the same with a rotary embedding of q and k, whose heads may be normalised in front of it",
        _TURN, _rotary(_NORMALISED), tuple(_workload(*s, _TURN) for s in _SHAPES),
    ),
    _fusion(
        "qkv_rope_norm_sdpa", "the same with scales of norms in float32, which models make of their weights",
        _GEMMA, _rotary(_WIDE), (_workload(*_SHAPES[0], _GEMMA, row="S12 more"),), ("wgmma", "fused"),
    ),
    _fusion(
        "qkv_norm_sdpa", "q, k and v projected from one x by three weights, heads of q and k normalised, attention",
        _NORM, (_NORMED,), (_workload(*_SHAPES[0], _NORM, row="S12 more"),), ("fused",),
    ),
    _fusion(
        "qkv_packed_groups_sdpa",
        "q, k and v projected from one x by one weight; heads of k and v may be fewer, and those of q and k normalised",
        _GROUP, (_PACKED_GROUPS,), (_workload(*_SHAPES[0], _GROUP, row="S12 more"),), ("wgmma",),
    ),
    _fusion(
        "qkv_packed_rope_sdpa", "the same with a rotary embedding of q and k", _ALL, _PACKED_ROTARY,
        (_workload(*_SHAPES[0], _ALL, row="S12 more"),), ("wgmma", "fused"),
    ),
)  # fmt: skip
