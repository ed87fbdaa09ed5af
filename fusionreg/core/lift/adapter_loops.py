"""A turn for each adapter: a loop over low-rank adapters, unrolled, as products with those of tokens. Floor 3.

Where a token's id is that of the adapter, its row goes through the two small matrices and is added. Ids that no turn
has add nothing, which is what products with the matrices of ids mean. A delta that is multiplied by a mask of 0 and 1
is another function: it lets a NaN of other adapters through.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from ..ir import Graph, Names
from ..matcher.search import View
from ..ops import Vocabulary
from ..pattern.instantiate import PatternGraph
from ..rewrite import replace_nodes
from .engine import Emitter, Rule, compile_rules, relevant
from .site import Site
from .turns import chains, closed, nodes_of

#: Rows that an adapter has, and how they come back; the mask says which they are.
_EQUAL = "m = Equal(ids, number)\n"
_FORMS = (
    ("", "x", "y = Add(base, Where(Unsqueeze(m, one), {}, nought))"),
    ("", "x", "y = Where(Unsqueeze(m, one), Add(base, {}), base)"),
    (
        "t = Gather(NonZero(m), zero)\n",
        "Gather(x, t)",
        'y = ScatterND(base, Unsqueeze(t, one), {}, reduction="add")',
    ),
    (
        "",
        "GatherND(x, Transpose(NonZero(m), perm=(1, 0)))",
        "r = GatherND(base, Transpose(NonZero(m), perm=(1, 0)))\n"
        "y = ScatterND(base, Transpose(NonZero(m), perm=(1, 0)), Add(r, {}))",
    ),
)
_DELTA = "d = MatMul(MatMul({}, a, transB=ta), b, transB=tb)\n"
_SCALES = ("d", "Mul(d, scale)")
_LAYER = """
h = fusionreg.RoutedMatMul(x, a_, ids, trans=1)
{limited}d = fusionreg.RoutedMatMul({h}, {b}, ids, trans=1)
y = Add(base_, {delta})
"""
_RANKS = "u = fusionreg.RoutedLimit(h, ranks_, ids)\nv = fusionreg.LimitRank(b_, ranks_, trans=1)\n"


def _layer(mixed: bool, delta: str) -> str:
    h, b = ("u", "v") if mixed else ("h", "b_")
    return _LAYER.format(limited=_RANKS if mixed else "", h=h, b=b, delta=delta)


#: What a loop becomes: by whether ranks differ, and by the scales that it has.
_MADE = {
    (mixed, kind): Rule("adapters", "y = Add(base_, ids)", _layer(mixed, delta))
    for mixed in (False, True)
    for kind, delta in (("none", "d"), ("one", "Mul(d, scale_)"), ("each", "fusionreg.RoutedScale(d, scales_, ids)"))
}
TURNS = tuple(
    Rule("adapter_loop", f"{_EQUAL}{head}{_DELTA.format(rows)}{end.format(scaled)}", "y = Add(base, x)")
    for (head, rows, end), scaled in product(_FORMS, _SCALES)
)


def lift_adapters(graph: Graph, ops: Vocabulary, log: list[tuple[str, str]] | None = None) -> Graph:
    """The graph with such loops as products with routed matrices; the same where there are none."""
    rules = relevant(TURNS, {n.op for n in graph.nodes})
    if not rules:
        return graph
    compiled, view = compile_rules(rules, ops), View(graph)
    replacements, names = [], Names({*graph.values, *graph.node_by_name})
    for chain in chains(view, compiled, _usual):
        derived = _stacked(view, [site for _, site in chain])
        if derived is None:
            continue
        scales = next((kind for kind in ("one", "each") if f"scale{'s' * (kind == 'each')}_" in derived), "none")
        made = compile_rules([_MADE["ranks_" in derived, scales]], ops)
        (template,) = made.replacements
        assert isinstance(template, PatternGraph)
        site, base = chain[0][1], chain[-1][1].found.inputs["base"]
        emitter = Emitter(graph, ops, _renamed(site, base), derived, names)
        replaced = emitter.build(template, nodes_of(chain), graph.values[site.found.outputs["y"]])
        if replaced is not None:
            replacements.append(replaced)
            if log is not None:
                log.append(("adapter_loop", site.found.root.name))
    return replace_nodes(graph, replacements) if replacements else graph


def _renamed(site: Site, base: str) -> Site:
    """The last turn, with what the first one adds to as ``base_``."""
    return replace(site, found=replace(site.found, inputs=site.found.inputs | {"base_": base}))


def _usual(turn: Site) -> bool:
    """Whether a mask is one of tokens, and constants are what the turn's text takes for granted."""
    ids, x, base, number = turn.shape("ids"), turn.shape("x"), turn.shape("base"), turn.ints("number")
    if ids is None or x is None or base is None or number is None or len(number) != 1:
        return False
    if len(ids) != 1 or len(x) != 2 or len(base) != 2 or turn.shape("y") != base:
        return False
    axes = {"one": ((1,), (-1,)), "zero": ((0,),)}
    nought = turn.array("nought") if "nought" in turn.found.inputs else None
    return (
        turn.value("ids").dtype in ("int64", "int32")
        and x[0] == base[0] == ids[0]
        and all(turn.ints(n) in allowed for n, allowed in axes.items() if n in turn.found.inputs)
        and ("nought" not in turn.found.inputs or (nought is not None and not nought.astype("float32").any()))
    )


def _stacked(view: View, turns: list[Site]) -> dict[str, Any] | None:
    """The adapters stacked, those of fewer ranks filled up, where turns are of one layer and nobody reads between."""
    import numpy as np

    first, adapters = turns[0], {}
    if any(t.name(n) != first.name(n) for t in turns for n in ("x", "ids")):
        return None
    for turn in turns:
        number, a, b = turn.ints("number"), turn.array("a"), turn.array("b")
        scale = turn.array("scale") if "scale" in turn.found.inputs else np.ones((), np.float32)
        if number is None or a is None or b is None or scale is None or scale.size != 1 or a.ndim != 2 or b.ndim != 2:
            return None
        a, b = (a if turn.attribute("ta") else a.T), (b if turn.attribute("tb") else b.T)
        adapters[number[0]] = a, b, float(scale.reshape(()))
    if sorted(adapters) != list(range(len(turns))) or len(turns) < 2:
        return None
    if not closed(view, [t.found for t in turns], first.found.outputs["y"]):
        return None
    every = [adapters[e] for e in sorted(adapters)]
    ranks = [a.shape[0] for a, _, _ in every]
    most, kind = max(ranks), every[0][0].dtype
    made: dict[str, Any] = {
        "a_": np.stack([np.concatenate([a, np.zeros((most - len(a), a.shape[1]), kind)]) for a, _, _ in every]),
        "b_": np.stack([np.concatenate([b, np.zeros((len(b), most - b.shape[1]), kind)], 1) for _, b, _ in every]),
    }
    if len(set(ranks)) > 1:
        made["ranks_"] = np.asarray(ranks, first.value("ids").dtype)
    scales = [s for _, _, s in every]
    if len(set(scales)) > 1:
        made["scales_"] = np.asarray(scales).astype(kind)
    elif scales[0] != 1.0:
        made["scale_"] = np.asarray(scales[0]).astype(kind)
    return made
