"""Routers in front of products with experts: scores, TopK and what each choice counts, as fusionreg::Route. Floor 3.

Two values come of a router, so it is no rule; otherwise it is done in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..frozen import FrozenDict
from ..ir import Graph, Names, Node, Value
from ..matcher.program import PatternIndex
from ..matcher.search import Search, View, scan
from ..ops import Vocabulary
from ..pattern.instantiate import parse_pattern
from ..rewrite import Replacement, replace_nodes
from .site import Site


@dataclass(frozen=True)
class _Form:
    """One spelling, whose outputs are ``weights`` and ``ids``, and what Route calls it."""

    text: str
    scoring: str
    renormalise: int = 0


_SUM = "ReduceSum({}, last)"


def _softmax() -> Iterator[_Form]:
    """Softmax of all logits."""
    for scores in ("Softmax(logits)", 'Softmax(Cast(logits, to="float32"))'):
        yield _Form(f"weights, ids = TopK({scores}, many)", "softmax")
        yield _Form(f"v, ids = TopK({scores}, many)\nweights = Div(v, {_SUM.format('v')})", "softmax", 1)


def _softmax_after() -> Iterator[_Form]:
    """Softmax of those chosen."""
    for logits, chosen in (
        ("logits", "Softmax(v)"),
        ("logits", 'Softmax(Cast(v, to="float32"))'),
        ('Cast(logits, to="float32")', "Softmax(v)"),
    ):
        yield _Form(f"v, ids = TopK({logits}, many)\nweights = {chosen}", "softmax_after")


def _sigmoid() -> Iterator[_Form]:
    """Sigmoids, chosen with a bias that they are weighed without."""
    for scores, ranked, many in product(
        ("Sigmoid(logits)", 'Sigmoid(Cast(logits, to="float32"))'), ("s", "Add(s, bias)"), ("many", "many, sorted=0")
    ):
        head = f"s = {scores}\n_, ids = TopK({ranked}, {many})\n"
        taken = "GatherElements(s, ids, axis=1)"
        yield _Form(f"{head}weights = {taken}", "sigmoid")
        divided = f"{head}v = {taken}\nw = Div(v, Add({_SUM.format('v')}, small))"
        yield _Form(divided.replace("w = Div", "weights = Div"), "sigmoid", 1)
        yield _Form(f"{divided}\nweights = Mul(w, factor)", "sigmoid", 1)


_GROUPS = """
s = {scores}
best, _ = TopK(Reshape({ranked}, apart), leaders, axis=2)
_, chosen = TopK(ReduceSum(best, last, keepdims=0), kept{sorting})
m = ScatterElements(zeros, chosen, ones, axis=1)
inside = Cast(Reshape(Expand(Unsqueeze(m, two), spread), together), to="bool")
_, ids = TopK(Where(Not(inside), lowest, {ranked}), many{sorting})
v = GatherElements(s, ids, axis=1)
"""


def _sigmoid_of_groups() -> Iterator[_Form]:
    """The same among the groups whose best experts have the largest sums."""
    for scores, biased, sorting in product(
        ("Sigmoid(logits)", 'Sigmoid(Cast(logits, to="float32"))'), (True, False), ("", ", sorted=0")
    ):
        head = _GROUPS.format(scores=scores, ranked="r" if biased else "s", sorting=sorting).strip()
        head = head.replace("best, _", "r = Add(s, bias)\nbest, _") if biased else head
        divided = f"w = Div(v, Add({_SUM.format('v')}, small))"
        yield _Form(head.replace("v = Gather", "weights = Gather"), "sigmoid")
        yield _Form(f"{head}\nweights = Mul(v, factor)", "sigmoid")
        yield _Form(f"{head}\n{divided.replace('w = ', 'weights = ')}", "sigmoid", 1)
        yield _Form(f"{head}\n{divided}\nweights = Mul(w, factor)", "sigmoid", 1)


FORMS = (*_softmax(), *_softmax_after(), *_sigmoid(), *_sigmoid_of_groups())


def _index(ops: Vocabulary) -> PatternIndex:
    return PatternIndex([parse_pattern(f.text, ops, "router", ("weights", "ids")) for f in FORMS], ops)


def lift_routers(graph: Graph, ops: Vocabulary, log: list[tuple[str, str]] | None = None) -> Graph:
    """The graph with its routers as Route, where experts' products and sums read what comes of them."""
    present = {n.op for n in graph.nodes}
    if not {"TopK", "fusionreg::RoutedMatMul", "fusionreg::RoutedSum"} <= present:
        return graph
    view, index = View(graph), _index(ops)
    names = Names({*graph.values, *graph.node_by_name})
    found: list[tuple[int, Site]] = []
    for node, i, anchor in scan(view, index):
        for bindings in Search(view, index.programs[i]).at(node, anchor):
            if not view.legality.check(bindings.nodes, bindings.inputs.values(), bindings.outputs.values()):
                found.append((i, Site(graph, bindings, index.programs[i].pattern)))
    replacements: list[Replacement] = []
    taken: set[str] = set()
    for i, site in sorted(found, key=lambda f: -len(f[1].found.nodes)):
        made = _route(view, FORMS[i], site, names)
        if made is not None and taken.isdisjoint(made.nodes):
            taken.update(made.nodes)
            replacements.append(made)
            if log is not None:
                log.append(("router", site.found.root.name))
    return replace_nodes(graph, replacements) if replacements else graph


def _route(view: View, form: _Form, site: Site, names: Names) -> Replacement | None:
    logits, many, bias = site.shape("logits"), site.ints("many"), site.found.inputs.get("bias")
    weights, ids = (site.found.outputs.get(n, "") for n in ("weights", "ids"))
    readers = {n.op for n in view.consumers.get(ids, ())}
    if logits is None or len(logits) != 2 or many is None or len(many) != 1 or not _read_by_experts(view, weights):
        return None
    if "fusionreg::RoutedMatMul" not in readers or not _numbers(site, logits[1]):
        return None
    attributes: dict[str, Any] = {"top_k": many[0], "scoring": form.scoring, "renormalise": form.renormalise}
    if "apart" in site.found.inputs:
        groups = _groups(site, logits[1])
        if groups is None:
            return None
        attributes |= groups
    if "factor" in site.found.inputs:
        attributes["scale"] = float(site.array("factor").reshape(()))  # type: ignore[union-attr]
    kind = view.graph.values[weights].dtype
    made = Value(names.fresh(f"{weights}_routed"), "float32", view.graph.values[weights].shape)
    chosen = Value(names.fresh(f"{ids}_routed"), "int64", view.graph.values[ids].shape)
    root = site.found.root
    given = (site.found.inputs["logits"], *((bias,) if bias else ()))
    new = [Node(names.fresh("route"), "fusionreg::Route", given, (made.name, chosen.name), FrozenDict(attributes),
                source=root.source)]  # fmt: skip
    values, result = [made, chosen], made.name
    if kind != "float32":  # as it was for who reads it
        values.append(Value(names.fresh(weights), kind, made.shape))
        result = values[-1].name
        new.append(Node(names.fresh("route_cast"), "Cast", (made.name,), (result,), FrozenDict(to=kind)))
    renames: FrozenDict[str, str] = FrozenDict({weights: result, ids: chosen.name})
    return Replacement(tuple(n.name for n in site.found.nodes), tuple(new), tuple(values), FrozenDict(), renames)


def _groups(site: Site, experts: Any) -> dict[str, int] | None:
    """Groups of consecutive experts, and how many of them and of their experts count, where constants say so."""
    import numpy as np

    apart, spread, together = (site.ints(name) for name in ("apart", "spread", "together"))
    leaders, kept, lowest = site.ints("leaders"), site.ints("kept"), site.array("lowest")
    zeros, ones = site.array("zeros"), site.array("ones")
    if not apart or not spread or not together or leaders is None or kept is None or len(apart) != 3:
        return None
    if lowest is None or zeros is None or ones is None or site.ints("two") not in ((2,), (-1,)):
        return None
    told = apart[1] * apart[2] == experts and spread[-1] == apart[2] and together[-1] == experts
    told = told and lowest.size == 1 and bool(np.isneginf(lowest).all()) and not zeros.any() and bool((ones == 1).all())
    if told and kept[0] == apart[1]:  # all of them, or the only one
        return {}
    return {"groups": apart[1], "kept_groups": kept[0], "leaders": leaders[0]} if told else None


def _read_by_experts(view: View, weights: str) -> bool:
    """Whether a weighted sum reads them, cast or not."""
    readers = view.consumers.get(weights, ())
    further = [r for n in readers if n.op == "Cast" for r in view.consumers.get(n.outputs[0], ())]
    return any(n.op == "fusionreg::RoutedSum" for n in (*readers, *further))


def _numbers(site: Site, experts: Any) -> bool:
    """Whether constants are what Route has: sums along the last axis, a scale, DeepSeek's 1e-20, a bias of experts."""
    inputs = site.found.inputs
    if "last" in inputs and site.ints("last") not in ((-1,), (1,)):
        return False
    for name in ("small", "factor"):
        array = site.array(name) if name in inputs else None
        if name in inputs and (array is None or array.size != 1):
            return False
        if name == "small" and array is not None and not 0 <= float(array.reshape(())) <= 1e-19:
            return False
    return "bias" not in inputs or (site.shape("bias") in ((experts,), (1, experts)) and _float32(site))


def _float32(site: Site) -> bool:
    return site.value("bias").dtype == "float32" and len(site.shape("bias") or ()) == 1
