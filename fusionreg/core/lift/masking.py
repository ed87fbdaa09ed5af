"""Masks of scores in front of a softmax, spelled with Where: a bool mask, a triangle of later keys, both. Floor 3.

Only what is a softmax over the last axis in the end is rewritten, or the gradient of one, and only once no other rule
fits: an attention as a whole takes its mask itself. An additive mask stays an Add: a triangle of -inf that is added
lets a NaN behind it through, one that replaces does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..dtypes import DTYPES
from .engine import Rule
from .site import Site, floats, shape_is

if TYPE_CHECKING:
    import numpy

#: What may stand between a mask and its softmax, element by element, the scores first.
_BETWEEN = frozenset({"Mul", "Div", "Add", "Where", "Cast", "fusionreg::MaskedFill", "fusionreg::CausalMask"})


def _scores(site: Site) -> bool:
    """Whether y is normalised over its last axis in the end, and read by nothing else."""
    graph, name = site.graph, site.name("y")
    for _ in range(8):
        readers = graph.consumers.get(name, ())
        if len(readers) != 1 or name in graph.output_names:
            return False
        node, shape = readers[0], graph.values[name].shape
        if node.op == "Softmax":
            return shape is not None and len(shape) >= 2 and node.attrs.get("axis", -1) in (-1, len(shape) - 1)
        if node.op not in _BETWEEN or graph.values[node.outputs[0]].shape != shape:
            return False
        name = node.outputs[0]
    return False


def _diagonal(mask: numpy.ndarray | None, site: Site, keep: bool) -> int | None:
    """Of a constant that is true, or with ``keep`` false, exactly for later keys than q + diagonal; else None."""
    import numpy as np

    shape = site.shape("x")
    if mask is None or shape is None or mask.ndim < 2 or mask.size == 0:
        return None
    *leading, queries, keys = mask.shape
    if (queries, keys) != shape[-2:] or any(d != 1 for d in leading):
        return None
    visible = mask.reshape(queries, keys)
    visible = visible if keep else ~visible
    seen = visible.any(axis=1)
    first = int(seen.argmax())  # the first query that sees a key
    diagonal = int(visible[first].sum()) - 1 - first if seen.any() else -queries
    expected = np.arange(keys)[None] <= np.arange(queries)[:, None] + diagonal
    return diagonal if bool((visible == expected).all()) else None


def _value(site: Site) -> float | None:
    return site.number("low", like="y")


def _causal(mask: str, keep: bool) -> Any:
    def derive(site: Site) -> Mapping[str, Any] | None:
        value, diagonal = _value(site), _diagonal(site.array(mask), site, keep)
        return None if value is None or diagonal is None else {"value": value, "diagonal": diagonal, "keep": int(keep)}

    return derive


def _filled(keep: bool) -> Any:
    def derive(site: Site) -> Mapping[str, Any] | None:
        value = _value(site)
        if value is None or _diagonal(site.array("mask"), site, keep) is not None:
            return None
        return {"value": value, "keep": int(keep)}

    return derive


def _zeroed(keep: bool) -> Any:
    """Gradients of scores, 0 where a mask replaced them."""

    def derive(site: Site) -> Mapping[str, Any] | None:
        producer = site.graph.producers.get(site.name("x"))
        if producer is None or producer.op != "fusionreg::SoftmaxGrad" or _value(site) != 0.0:
            return None
        return {"value": 0.0, "keep": int(keep)}

    return derive


def _narrow(site: Site) -> bool:
    """A softmax whose rounding to 16 bits is the only one, inside it is float32 anyway."""
    row = DTYPES.get(site.value("x").dtype)
    return row is not None and row.floating and row.bits == 16 and site.value("y").dtype == row.name


_OVER = (floats("x", "low"), shape_is("x"), _scores)
_KEPT, _HIDDEN = "Where({mask}, x, low)", "Where({mask}, low, x)"


def _rules(where: str, both: str, keep: bool) -> tuple[Rule, ...]:
    causal = "fusionreg.CausalMask({}, value=value, diagonal=diagonal)"
    filled = "fusionreg.MaskedFill(x, mask, value=value, keep=keep)"
    alone, triangle = where.format(mask="mask"), f"{both}(mask, triangle)"
    return (
        Rule("causal_mask", f"y = {alone}", f"y = {causal.format('x')}", _OVER, _causal("mask", keep)),
        Rule("score_mask", f"y = {alone}", f"y = {filled}", _OVER, _filled(keep)),
        Rule(
            "mask_and_causal",
            f"y = {where.format(mask=triangle)}",
            f"y = {causal.format(filled)}",
            _OVER,
            _causal("triangle", keep),
        ),
        Rule("masked_gradient", f"y = {alone}", f"y = {filled}", _OVER[:2], _zeroed(keep)),
    )


RULES: tuple[Rule, ...] = (
    *_rules(_KEPT, "And", True),
    *_rules(_HIDDEN, "Or", False),
    # replaced by one number both, so the order does not matter
    Rule(
        "causal_last",
        "c = fusionreg.CausalMask(x, value=value, diagonal=diagonal)\n"
        "y = fusionreg.MaskedFill(c, mask, value=value, keep=keep)",
        "m = fusionreg.MaskedFill(x, mask, value=value, keep=keep)\n"
        "y = fusionreg.CausalMask(m, value=value, diagonal=diagonal)",
        (shape_is("x"),),
    ),
    Rule(
        "softmax_in_float32",
        'y = Cast(Softmax(Cast(x, to="float32"), axis=axis), to=kind)',
        "y = Softmax(x, axis=axis)",
        (_narrow,),
    ),
)
"""Rules for what is left when no other fits."""
