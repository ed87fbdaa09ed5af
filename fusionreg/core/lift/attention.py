"""Attention that exporters spell out: softmax(scale · q kᵀ + mask) v, per head. Floor 3.

``Attention`` gives 0 in a row whose every key is forbidden, the spelled-out chain gives NaN (−∞ − −∞) or, with a finite
fill, the mean of v. So a mask is only taken in where no row can be forbidden as a whole: a constant that is seen to
have none, or an additive mask that is made of finite numbers; or where the chain itself makes such rows 0.

torch's exporter to ONNX spells such rows ``Where(IsNaN(p), 0, p)``, which hides a NaN of q or k as well; Attention lets
it through.

Where heads were put into the batch, as products of three axes take them, or there is one alone, each is a batch of one
head.

Of what is ``Attention`` already, a number that q is scaled by in front of it, before or behind its heads, becomes part
of the scale, and heads that were put into the batch come out of it again. Constant masks that are triangles or bands
become positions (``is_causal``, windows; one where the last query sees the last key), and heads of k and v that are
repeated for those of q become heads that are
shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import isfinite, sqrt
from typing import Any

from ..dtypes import dtype
from . import attention_masks as masks
from .engine import Rule
from .site import Site, floats

_SCORES = (
    "s = MatMul({q}, {k}, transB=transB)",
    "s = Mul(MatMul({q}, {k}, transB=transB), c)",
    "s = Div(MatMul({q}, {k}, transB=transB), c)",
    "s = MatMul(Mul({q}, c), {k}, transB=transB)",
    "s = MatMul(Div({q}, c), {k}, transB=transB)",
    "s = MatMul({q}, Mul({k}, c), transB=transB)",
    "s = MatMul(Mul({q}, c), Mul({k}, d), transB=transB)",
)
#: By a number that is computed: as ``Attention`` has none but constants, q is brought to that scale in front of it.
_RUNTIME = {f"s = {by}(MatMul({{q}}, {{k}}, transB=transB), c)": f"{by}(q, c)" for by in ("Mul", "Div")}
#: What brings scores below a number, first of all: c · tanh(score / c), also with 1/c where c is a power of two.
_CAPS = ("s = Mul(Tanh(Div(r, cap)), cap)", "s = Mul(Tanh(Mul(r, inverse)), cap)")
#: In front of the softmax, and as ``Attention`` takes it.
_MASKS = {
    "": "", "m = Add(s, mask)\n": ", mask", "m = Where(allowed, s, low)\n": ", allowed",
    "m = Where(hidden, low, s)\n": ", Not(hidden)",
}  # fmt: skip
_SOFTMAX = (
    ("p = Softmax({m})", ""),
    ('p = Cast(Softmax(Cast({m}, to="float32")), to=kind)', ', softmax_precision="float32"'),
)
#: Softmax that makes rows without a key 0.
_GUARDED = "p = Where(Equal(ReduceMax({m}, (-1,), keepdims=1), lowest), zero, Softmax({m}))"
_CLEARED = "n = Softmax({m})\np = Where(IsNaN(n), zero, n)"

_ATTRIBUTES = (
    "scale=scale, softcap=softcap, softmax_precision=precision, is_causal=causal, left_window_size=left, "
    "right_window_size=right"
)


def _repeated(site: Site) -> bool:
    """k[B G T D] as [B G n T D] as [B G·n T D], and v as well."""
    for plain, spread, flat in (("k", "ke", "kr"), ("v", "ve", "vr")):
        shape, wide, heads = site.shape(plain), site.shape(spread), site.shape(flat)
        if shape is None or wide is None or heads is None or not len(shape) == len(heads) == 4 or len(wide) != 5:
            return False
        (b, g, t, d), h = shape, heads[1]
        if not isinstance(g, int) or not isinstance(h, int) or g < 1 or heads != (b, h, t, d):
            return False
        if wide != (b, g, h // g, t, d) or h % g:
            return False
    return True


def _axes(site: Site, rank: int) -> bool:
    """q[B H S D], k[B H T D] or its transpose, v[B H T D'], no head shared by several; or all of them without H."""
    q, k, v, y = (site.shape(n) for n in ("q", "k", "v", "y"))
    if q is None or k is None or v is None or y is None or not len(q) == len(k) == len(v) == len(y) == rank:
        return False
    return q[:-2] == k[:-2] == v[:-2] and y == (*q[:-1], v[-1])


def _scale(site: Site) -> Mapping[str, Any] | None:
    scale = 1.0
    divides = "Div(" in site.pattern.text.partition("\n")[0]
    for name, like in (("c", "q"), ("d", "k")):
        if name in site.found.inputs:
            number = site.number(name, like)
            if number is None or not isfinite(number) or number <= 0.0:
                return None
            scale *= 1.0 / number if divides else number
    shape = site.shape("q")
    rounding = max(1e-6, 1.05 * 2.0 ** -dtype(site.value("q").dtype).mantissa)  # of two constants, each to its dtype
    usual = shape is not None and isinstance(shape[-1], int) and abs(scale * sqrt(shape[-1]) - 1.0) <= rounding
    return {"scale": None if usual else scale}


def _capped(site: Site) -> float | None:
    """The number that scores stay below; None where it is not one and the same."""
    cap = site.number("cap", like="s")
    if cap is None or not isfinite(cap) or cap <= 0.0:
        return None
    if "inverse" in site.found.inputs and site.number("inverse", like="s") != 1.0 / cap:
        return None
    return cap


def _one_number(site: Site) -> bool:
    """A tensor of one element, which no constant is."""
    shape, scores = site.shape("c"), site.shape("s")
    fits = shape is not None and scores is not None and len(shape) <= len(scores) and all(d == 1 for d in shape)
    return fits and not site.graph.is_constant(site.name("c"))


def _rescaled(site: Site) -> Mapping[str, Any] | None:
    """The scale of scores with that of q."""
    number, shape, before = site.number("c", like="n"), site.shape("q"), site.attribute("scale")
    if number is None or not isfinite(number) or number <= 0.0 or shape is None or not isinstance(shape[-1], int):
        return None
    width = site.shape("k")
    if width is None or not isinstance(width[-1], int):
        return None
    usual = 1.0 / sqrt(width[-1])
    scale = number * (usual if before is None else before)
    rounding = max(1e-6, 1.05 * 2.0 ** -dtype(site.value("q").dtype).mantissa)
    return {"scale": None if abs(scale / usual - 1.0) <= rounding else scale}


def _in_a_batch(site: Site) -> Mapping[str, Any] | None:
    """q, k and v are [B H S D], each reshaped to [B·H S D]; and what the result is reshaped to."""
    import numpy as np

    wide = [site.shape(n) for n in "qkv"]
    flat = [site.shape(f"{n}f") for n in "qkv"]
    y = site.shape("y")
    for w, f in zip(wide, flat, strict=True):
        if w is None or f is None or len(w) != 4 or len(f) != 3 or w[2:] != f[1:] or w[:2] != (wide[0] or ())[:2]:
            return None
    if y is None or 0 in y[1:] or not all(isinstance(d, int) for d in y[1:]):
        return None
    return {"target": np.asarray((-1, *y[1:]), np.int64)}


def _derive(transposed: int, cast: bool, rank: int = 4, runtime: bool = False) -> Any:
    def derive(site: Site) -> Mapping[str, Any] | None:
        if site.attribute("transB") != transposed or not _axes(site, rank):
            return None
        if cast and site.attribute("kind") != site.value("s").dtype:
            return None
        if not transposed:  # kᵀ is there: undoing its Transpose must leave one fewer, not one more
            producer = site.graph.producers.get(site.name("k"))
            if producer is None or producer.op != "Transpose":
                return None
        found = {"scale": 1.0} if runtime else _scale(site)
        if found is None or "cap" not in site.found.inputs:
            return found
        cap = _capped(site)
        return None if cap is None else {**found, "softcap": cap}

    return derive


def _rules() -> Iterator[Rule]:
    every = (*((scores, "q") for scores in _SCORES), *_RUNTIME.items())
    for (scores, query), (mask, given), (soft, precision), transposed in product(
        every, _MASKS.items(), _SOFTMAX, (1, 0)
    ):
        head, runtime = scores.format(q="q", k="k"), query != "q"
        conditions: tuple[Any, ...] = (floats("q", "k", "v", *("c" * runtime), *(("mask",) if "mask" in mask else ())),)
        if mask:
            conditions = (*conditions, masks.additive if "mask" in mask else masks.boolean)
        if runtime:
            conditions = (*conditions, _one_number)
        key = "k" if transposed else "Transpose(k, perm=(0, 1, 3, 2))"
        yield Rule(
            "attention",
            f"{head}\n{mask}{soft.format(m='m' if mask else 's')}\ny = MatMul(p, v)",
            f"y = Attention({query}, {key}, v{given}, scale=scale{precision})",
            conditions,
            _derive(transposed, bool(precision), runtime=runtime),
        )
        if transposed and not given.startswith((", allowed", ", Not")):
            q, k, v = (f"Unsqueeze({name}, (1,))" for name in (query, "k", "v"))
            yield Rule(
                "attention_of_one_head",
                f"{head}\n{mask}{soft.format(m='m' if mask else 's')}\ny = MatMul(p, v)",
                f"y = Squeeze(Attention({q}, {k}, {v}{given}, scale=scale{precision}), (1,))",
                conditions,
                _derive(transposed, bool(precision), 3, runtime),
            )
    for scores, cap, (mask, given), (soft, precision) in product(_SCORES[:4], _CAPS, _MASKS.items(), _SOFTMAX):
        head = scores.format(q="q", k="k").replace("s = ", "r = ", 1)
        fits = (masks.additive,) if "mask" in mask else (masks.boolean,) if mask else ()
        yield Rule(
            "attention_capped",
            f"{head}\n{cap}\n{mask}{soft.format(m='m' if mask else 's')}\ny = MatMul(p, v)",
            f"y = Attention(q, k, v{given}, scale=scale, softcap=softcap{precision})",
            (floats("q", "k", "v", *(("mask",) if "mask" in mask else ())), *fits),
            _derive(1, bool(precision)),
        )
    for scores, (mask, given) in product(_SCORES, [m for m in _MASKS.items() if m[0]]):
        yield Rule(
            "attention_guarded",
            f"{scores.format(q='q', k='k')}\n{mask}{_GUARDED.format(m='m')}\ny = MatMul(p, v)",
            f"y = Attention(q, k, v{given}, scale=scale)",
            (floats("q", "k", "v"), masks.guard),
            _derive(1, False),
        )
    for scores, (mask, given), transposed in product(_SCORES, _MASKS.items(), (1, 0)):
        key = "k" if transposed else "Transpose(k, perm=(0, 1, 3, 2))"
        yield Rule(
            "attention_cleared",
            f"{scores.format(q='q', k='k')}\n{mask}{_CLEARED.format(m='m' if mask else 's')}\ny = MatMul(p, v)",
            f"y = Attention(q, {key}, v{given}, scale=scale)",
            (floats("q", "k", "v"), masks.clear),
            _derive(transposed, False),
        )
    yield Rule(
        "attention_positions",
        f"y = Attention(q, k, v, mask, {_ATTRIBUTES})",
        f"y = Attention(q, k, v, {_ATTRIBUTES})",
        derive=masks.positions,
    )
    yield Rule(
        "attention_in_a_batch",
        "qf = Reshape(q, qs)\nkf = Reshape(k, ks)\nvf = Reshape(v, vs)\n"
        "a = Attention(Unsqueeze(qf, (1,)), Unsqueeze(kf, (1,)), Unsqueeze(vf, (1,)), "
        f"{_ATTRIBUTES})\ny = Squeeze(a, (1,))",
        f"y = Reshape(Attention(q, k, v, {_ATTRIBUTES}), target)",
        derive=_in_a_batch,
    )
    for more in ("", ", mask"):
        for heads in ("{}", "Transpose(Reshape({}, qs), perm=perm)"):
            yield Rule(
                "attention_scaled",
                f"n = Mul(q, c)\ny = Attention({heads.format('n')}, k, v{more}, {_ATTRIBUTES})",
                f"y = Attention({heads.format('q')}, k, v{more}, {_ATTRIBUTES})",
                (floats("q", "c"),),
                _rescaled,
            )
        repeat = "{0}e = Expand(Unsqueeze({0}, (2,)), {0}shape)\n{0}r = Reshape({0}e, {0}flat)\n"
        yield Rule(
            "attention_groups",
            f"{repeat.format('k')}{repeat.format('v')}y = Attention(q, kr, vr{more}, {_ATTRIBUTES})",
            f"y = Attention(q, k, v{more}, {_ATTRIBUTES})",
            (_repeated,),
        )


RULES: tuple[Rule, ...] = tuple(_rules())


def trained(rule: Rule) -> Rule:
    """The rule as it may act where gradients are made of the log-sum-exp of scores."""
    return replace(rule, conditions=(*rule.conditions, masks.mild)) if masks.additive in rule.conditions else rule


def _of_rank(rank: int) -> Any:
    """A mask of fewer axes than scores, of a number for each of them or one for all."""
    return lambda site: len(site.shape("mask") or ()) == rank and _axes_of_scores(site)


def _axes_of_scores(site: Site) -> bool:
    q, k, mask = (site.shape(n) for n in ("q", "k", "mask"))
    if q is None or k is None or mask is None or len(q) != 4 or site.graph.is_constant(site.name("mask")):
        return False
    scores = (*q[:-1], k[2])
    return mask[-1] == k[2] and all(m in (1, s) for m, s in zip(mask[::-1], scores[::-1], strict=False))


#: What is added to scores and has a gradient: a mask with all axes, as kernels of its gradient take it.
DIFFERENTIATED: tuple[Rule, ...] = tuple(
    Rule(
        "attention_bias",
        f"y = Attention(q, k, v, mask, {_ATTRIBUTES})",
        f"y = Attention(q, k, v, Unsqueeze(mask, {axes}), {_ATTRIBUTES})",
        (floats("q", "mask"), _of_rank(4 - len(axes))),
    )
    for axes in ((0,), (0, 1))
)
