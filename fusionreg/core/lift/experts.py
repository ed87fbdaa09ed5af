"""Layers of routed experts: products with the experts that TopK gives tokens, and what it chooses from. Floor 3.

transformers has two forms. ``grouped_mm``: rows of tokens are gathered in the order of their experts, multiplied group
by group, weighed, brought back into the order of the tokens and added. ``batched_mm``: the matrices of all rows are
gathered. What remains of either is a product with the matrix of its expert for each token and choice.
"""

from __future__ import annotations

from itertools import product

from .engine import Rule
from .site import Site

ACTIVATIONS = ("Swish({})", "Gelu({})", 'Gelu({}, approximate="tanh")', "fusionreg.SquaredRelu({})")
"""Of gates, as texts with a place for the gate."""

#: How torch's histc counts whole numbers from 0 on, and where their groups end.
_ENDS = """
v, _ = TopK(ids, n, axis=0, largest=0)
c = {sorted}
f = Floor(Mul(Sub(c, low), parts))
w = Where(Equal(c, high), last, f)
hits = And(Equal(Unsqueeze(w, one), bins), Unsqueeze(LessOrEqual(c, high), one))
count = ReduceSum(Cast(hits, to="int64"), zero, keepdims=0)
y = CumSum({count}, axis)
"""
_SORTED = ('Cast(v, to="float32")', 'Cast(Cast(v, to="int32"), to="float32")')
_COUNTS = ('Cast(Cast(count, to="float32"), to="int32")', 'Cast(count, to="int32")')

#: Rows of tokens in the order of experts, and their way back.
_LAYER = """
i = Reshape(ids, flat)
{sorted}
rows = Gather(x, Div(Sub(p, Mod(p, k)), k))
ends = fusionreg.GroupEnds(i, experts=experts)
h = fusionreg.GroupedMatMul(rows, gate_up, ends, trans=1)
g, u = Split(h, halves, axis=1)
d = fusionreg.GroupedMatMul(Mul({activated}, u), down, ends, trans=1)
{places}
q = Where(Less(p, zero), Add(p, total), p)
back = ScatterND(empty, Concat(Unsqueeze(Add(q, Sub(q, q)), one), axis=1), places)
z = Mul({wide}, Unsqueeze(Gather(Reshape(weights, flat_too), p), one))
{end}
"""
_TOP = "_, p = TopK(i, n, axis=0, largest=0)"
#: Sorting and scattering, where the number of tokens is known and where it is not.
_LENGTHS = (
    (_TOP, ""),
    (
        f"n = Unsqueeze(Gather(Shape(i), first), zeros)\n{_TOP}",
        "empty = Expand(filled, Unsqueeze(Gather(Shape(p), first), zeros))\ntotal = Gather(Shape(empty), first)\n"
        "places = Range(first, stop, step)",
    ),
)
_SUM = "ReduceSum(Reshape(Gather(z, back), shape), along, keepdims=0)"
_ROUNDED = (("d", f"y = {_SUM}"), ('Cast(d, to="float32")', f"y = Cast({_SUM}, to=kind)"))

PRODUCTS = """
h = fusionreg.RoutedMatMul(Unsqueeze(x, one_), gate_up, ids, trans=1)
g, u = Split(h, axis=-1, num_outputs=2)
d = fusionreg.RoutedMatMul(Mul({activated}, u), down, ids, trans=1)
y = fusionreg.RoutedSum(d, weights)
"""


#: Matrices gathered for all rows.
_BATCHED = """
at = Reshape(ids, flat)
r = Reshape(Expand(Unsqueeze(x, one), times), rows)
h = Squeeze(MatMul(Gather(gate_up, at), Unsqueeze(r, two)), two)
g, u = Split(h, halves, axis=1)
d = Squeeze(MatMul(Gather(down, at), Unsqueeze(Mul({activated}, u), two)), two)
z = Mul({wide}, Unsqueeze(Reshape(weights, flat_too), one))
{end}
"""


def _column(site: Site) -> dict[str, object] | None:
    """That of the weights of all rows in one column, which something is multiplied by."""
    import numpy as np

    shape, y, readers = site.shape("x"), site.shape("y"), site.graph.consumers.get(site.name("y"), ())
    if shape is None or y is None or len(shape) != 2 or len(y) != 2 or y[1] != 1 or shape[1] == 1:
        return None
    if not readers or any(r.op != "Mul" for r in readers):
        return None
    return {"flat": np.asarray([-1]), "one": np.asarray([1])}


def _counts(site: Site) -> dict[str, int] | None:
    """As many experts as there are bins, where a bin is a whole number."""
    bins = site.array("bins")
    if bins is None or bins.ndim != 1 or bins.size < 2 or site.rank("ids") != 1:
        return None
    experts = bins.size
    found = {name: site.array(name) for name in ("low", "parts", "high", "last")}
    numbers = {name: float(a.reshape(())) for name, a in found.items() if a is not None and a.size == 1}
    whole = bins.tolist() == list(range(experts))
    if not whole or len(numbers) < 4 or site.ints("axis") != (0,) or site.ints("zero") != (0,):
        return None
    last = experts - 1
    # a whole number e in [0, last] is in bin floor(e · experts / last), which is e itself but for the last one
    if numbers["low"] or numbers["high"] != last or numbers["last"] != last:
        return None
    if any(int(e * numbers["parts"]) != e for e in range(last)):
        return None
    return {"experts": experts}


def _axes(site: Site) -> dict[str, object] | None:
    """That of one new axis of x, where a token's choices lie side by side and rows are in the order of tokens."""
    import numpy as np

    ids, weights, x, y = (site.shape(name) for name in ("ids", "weights", "x", "y"))
    gate_up, down = site.shape("gate_up"), site.shape("down")
    if ids is None or weights is None or x is None or y is None or gate_up is None or down is None:
        return None
    k, halves = ids[-1], site.ints("halves")
    if len(ids) != 2 or ids != weights or len(x) != 2 or len(gate_up) != 3 or not isinstance(k, int):
        return None
    from_top = site.graph.producers.get(site.found.inputs["ids"])
    told = (
        from_top is not None
        and from_top.op == "TopK"  # no index is below 0, and none is counted from the end
        and site.ints("one") == (1,)
        and site.ints("along") == (1,)
        and halves is not None
        and halves == (halves[0],) * 2
        and gate_up[0] == down[0]
        and _summed(site, k, x[1])
        and (_sorted(site, ids, k) if "k" in site.found.inputs else _repeated(site, k))
    )
    return {"one_": np.asarray([1], np.int64)} if told else None


def _sorted(site: Site, ids: tuple[object, ...], k: int) -> bool:
    """Whether rows are k for each token, and where they are brought back to is known."""
    every = isinstance(ids[0], int)
    if every and not site.shape("p") == site.shape("empty") == (ids[0] * k,):  # type: ignore[operator]
        return False
    groups = site.shape("gate_up")
    return (
        site.ints("k") == (k,)
        and site.ints("zero") == (0,)
        and groups is not None
        and site.attribute("experts") == groups[0]
        and _in_order(site, every)
    )


def _repeated(site: Site, k: int) -> bool:
    """Whether each token is there k times, one after another."""
    return site.ints("times") == (1, k, 1) and site.ints("two") == (2,) and site.rank("r") == 2


def _summed(site: Site, k: int, channels: object) -> bool:
    """Whether what is summed is [tokens, choices, channels]."""
    shape = site.ints("shape")
    return shape is not None and len(shape) == 3 and shape[1] == k and shape[2] in (channels, -1)


def _in_order(site: Site, every: bool) -> bool:
    """Whether what is scattered along the sorted places are 0, 1, 2, …"""
    if "first" in site.found.inputs:
        return site.ints("first") == (0,) and site.ints("step") == (1,)
    places = site.array("places")
    return places is not None and every and places.tolist() == list(range(places.size))


def _kind(site: Site) -> bool:
    return "kind" not in site.found.attributes or site.attribute("kind") == site.value("x").dtype


def _whole_rows(site: Site) -> bool:
    """Whether an index of rows is repeated along all columns of base."""
    base, updates, index = (site.shape(n) for n in ("base", "updates", "index"))
    if base is None or updates is None or index is None or len(base) != 2 or len(updates) != 2 or len(index) != 1:
        return False
    return base[1] == updates[1] and site.ints("one") in ((1,), (-1,)) and site.shape("at") == updates


def _rounded_weights(site: Site) -> bool:
    """Whether weights in float32 are rounded to what the sum is rounded to."""
    return site.value("weights").dtype == "float32" and site.attribute("kind") == site.value("d").dtype


RULES: tuple[Rule, ...] = (
    Rule(
        "rows_added",
        'at = Expand(Unsqueeze(index, one), shape)\ny = ScatterElements(base, at, updates, axis=0, reduction="add")',
        'y = ScatterND(base, Unsqueeze(index, one), updates, reduction="add")',
        (_whole_rows,),
    ),
    Rule(
        "weights_as_they_are",
        "y = fusionreg.RoutedSum(d, Cast(weights, to=kind))",
        "y = fusionreg.RoutedSum(d, weights)",
        (_rounded_weights,),
    ),
    Rule("column_of_weights", "y = Reshape(x, s)", "y = Unsqueeze(Reshape(x, flat), one)", (), _column),
    *(
        Rule(
            "ends_of_sorted",
            _ENDS.format(sorted=numbers, count=count),
            "y = fusionreg.GroupEnds(ids, experts=experts)",
            derive=_counts,
            shared=True,
        )
        for numbers, count in product(_SORTED, _COUNTS)
    ),
    *(
        Rule(
            "sorted_experts",
            _LAYER.format(activated=activation.format("g"), sorted=sorting, places=places, wide=wide, end=end),
            PRODUCTS.format(activated=activation.format("g")),
            (_kind,),
            _axes,
        )
        for activation, (sorting, places), (wide, end) in product(ACTIVATIONS, _LENGTHS, _ROUNDED)
    ),
    *(
        Rule(
            "batched_experts",
            _BATCHED.format(activated=activation.format("g"), wide=wide, end=end.replace("Gather(z, back)", "z")),
            PRODUCTS.format(activated=activation.format("g")),
            (_kind,),
            _axes,
        )
        for activation, (wide, end) in product(ACTIVATIONS, _ROUNDED)
    ),
)
