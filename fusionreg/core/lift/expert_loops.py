"""A turn for each expert: a loop over experts, unrolled, as products with the experts that tokens have. Floor 3.

Models that gave each expert a module of its own wrote it so: where the mask of an expert is set, rows of tokens are
gathered, go through the expert, are weighed, and added to those of the result. With all experts of a router among the
turns, and matrices that are known, what they compute is one layer of stacked matrices.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from ..ir import Graph, Names
from ..matcher.match import Bindings
from ..matcher.search import Search, View, scan
from ..ops import Vocabulary
from ..pattern.instantiate import PatternGraph
from ..rewrite import replace_nodes
from .engine import Emitter, Rule, compile_rules, relevant
from .experts import ACTIVATIONS, PRODUCTS
from .site import Site

#: One turn. Indices below 0 would count from the end; there are none among those that are not zero.
_TURN = """
mask = Transpose(Cast(Equal(Unsqueeze(ids, last), bins), to="int64"), perm=(2, 1, 0))
set = NonZero(Cast(Gather(mask, number), to="bool"))
rank = Gather(set, first)
token = Gather(set, second)
rows = {rows}
{products}
t = Where(Less(token, zero), Add(token, tokens), token)
r = Where(Less(rank, zero), Add(rank, ranks), rank)
both = Add(t, r)
none = Sub(both, both)
at = Concat(Unsqueeze(Add(t, none), one), Unsqueeze(Add(r, none), one), axis=1)
share = GatherND(Unsqueeze(weights, last_too), at)
y = {scattered}
"""
#: The same as torch.onnx writes it.
_TURN_ONNX = """
mask = Transpose(Cast(Equal(Unsqueeze(ids, last), bins), to="int64"), perm=(2, 1, 0))
set = Transpose(NonZero(Gather(mask, number)), perm=(1, 0))
rank = Gather(set, first, axis=1)
token = Unsqueeze(Gather(set, second, axis=1), one)
rows = {rows}
{products}
share = GatherND(Unsqueeze(weights, last_too), Concat(token, Unsqueeze(rank, one), axis=-1))
y = {scattered}
"""
_ROWS = ("Gather(x, token)", "Reshape(Gather(Unsqueeze(x, zeros), token, axis=1), shape)")
_ROWS_ONNX = (
    "GatherND(x, token)",
    "Reshape(Transpose(GatherND(Transpose(Unsqueeze(x, zeros), perm=(1, 0, 2)), token), perm=(1, 0, 2)), shape)",
)
_EXPERTS = (
    "d = MatMul(Mul({}, MatMul(rows, up, transB=1)), down, transB=1)",
    "h = MatMul(rows, gate_up, transB=1)\ng, u = Split(h, halves, axis=1)\nd = MatMul(Mul({}, u), down, transB=1)",
    "h = MatMul(rows, gate_up, transB=1)\ng, u = Split(h, axis=1, num_outputs=2)\n"
    "d = MatMul(Mul({}, u), down, transB=1)",
)
_GATES = ("MatMul(rows, gate, transB=1)", "g", "g")
_ADDED = (
    'ScatterND(base, {token}, Mul(d, share), reduction="add")',
    'ScatterND(base, {token}, Cast(Mul(Cast(d, to="float32"), share), to=kind), reduction="add")',
)
_TURNS = tuple(
    Rule(
        "expert_loop",
        turn.format(rows=taken, products=experts.format(activation.format(gate)), scattered=added.format(token=token)),
        PRODUCTS.format(activated=activation.format("g")),
    )
    for turn, rows, token in ((_TURN, _ROWS, "Unsqueeze(token, one)"), (_TURN_ONNX, _ROWS_ONNX, "token"))
    for activation, taken, (experts, gate), added in product(
        ACTIVATIONS, rows, zip(_EXPERTS, _GATES, strict=True), _ADDED
    )
)


def lift_loops(graph: Graph, ops: Vocabulary, log: list[tuple[str, str]] | None = None) -> Graph:
    """The graph with such loops as layers; the same where there are none."""
    rules = relevant(_TURNS, {n.op for n in graph.nodes})
    if not rules:
        return graph
    compiled = compile_rules(rules, ops)
    view = View(graph)
    turns: dict[str, tuple[int, Site]] = {}  # by the value that a turn gives
    for node, i, anchor in scan(view, compiled.index):
        for found in Search(view, compiled.index.programs[i], prune=False).at(node, anchor):
            turns.setdefault(found.outputs["y"], (i, Site(graph, found, compiled.index.programs[i].pattern)))
    followed = {site.found.inputs["base"] for _, site in turns.values()}
    replacements = []
    for last in [y for y in turns if y not in followed]:
        chain = _chain(turns, last)
        if len({rules[i].replacement for i, _ in chain}) > 1:
            continue  # experts of other activations
        derived = _stacked(view, [site for _, site in chain])
        if derived is None:
            continue
        index, site = chain[0]
        template = compiled.replacements[index]
        assert isinstance(template, PatternGraph)
        made = Emitter(graph, ops, site, derived, Names({*graph.values, *graph.node_by_name})).build(
            template, _nodes(chain), graph.values[last]
        )
        if made is not None:
            replacements.append(made)
            if log is not None:
                log.append((rules[index].name, site.found.root.name))
    return replace_nodes(graph, replacements) if replacements else graph


def _chain(turns: dict[str, tuple[int, Site]], last: str) -> list[tuple[int, Site]]:
    """The turns that lead to ``last``, itself first."""
    found = []
    while last in turns:
        found.append(turns[last])
        last = turns[last][1].found.inputs["base"]
    return found


def _nodes(chain: list[tuple[int, Site]]) -> list[Any]:
    return list({n.name: n for _, site in chain for n in site.found.nodes}.values())


def _stacked(view: View, turns: list[Site]) -> dict[str, Any] | None:
    """The matrices of all experts, where the turns are those of one layer and nobody else reads what is between."""
    import numpy as np

    first = turns[0]
    ids, bins = first.shape("ids"), first.array("bins")
    same = all(t.name(n) == first.name(n) for t in turns for n in ("x", "ids", "weights", "bins"))
    start = turns[-1].array("base")
    from_top = view.producers.get(first.name("ids"))
    if not same or bins is None or ids is None or len(ids) != 2 or start is None or start.astype("float32").any():
        return None
    if from_top is None or from_top.op != "TopK" or not all(map(_usual, turns)):
        return None
    matrices = {}
    for turn in turns:
        number, pair = turn.ints("number"), _matrices(turn)
        if number is None or pair is None:
            return None
        matrices[number[0]] = pair
    experts = list(range(bins.size))
    if bins.reshape(-1).tolist() != experts or sorted(matrices) != experts or len(turns) != len(experts):
        return None
    if not _closed(view, [t.found for t in turns], first.found.outputs["y"]):
        return None
    gate_up, down = (np.stack([matrices[e][side] for e in experts]) for side in (0, 1))
    return {"gate_up": gate_up, "down": down, "one_": np.asarray([1], np.int64)}


def _usual(turn: Site) -> bool:
    """Whether constants are what the turn's text takes for granted."""
    wanted = {
        "first": ((0,),), "second": ((1,),), "zero": ((0,),), "one": ((1,), (-1,)), "last": ((2,), (-1,)),
        "last_too": ((2,), (-1,)), "zeros": ((0,),),
    }  # fmt: skip
    given = all(turn.ints(n) in allowed for n, allowed in wanted.items() if n in turn.found.inputs)
    shape, halves = (turn.ints(n) if n in turn.found.inputs else None for n in ("shape", "halves"))
    x, kind = turn.shape("x"), turn.value("x").dtype
    return (
        given
        and x is not None
        and len(x) == 2
        and turn.shape("ids") == turn.shape("weights")
        and (shape is None or (len(shape) == 2 and shape[1] in (x[1], -1)))
        and (halves is None or halves == (halves[0],) * 2)
        and turn.found.attributes.get("kind", kind) == kind
    )


def _matrices(turn: Site) -> tuple[Any, Any] | None:
    """Those of an expert, gate's rows in front of up's; None where a caller may bring others."""
    import numpy as np

    names = ("gate_up", "down") if "gate_up" in turn.found.inputs else ("gate", "up", "down")
    arrays = [a for a in map(turn.array, names) if a is not None and a.ndim == 2]
    if len(arrays) < len(names):
        return None
    return (arrays[0] if len(arrays) == 2 else np.concatenate(arrays[:2])), arrays[-1]


def _closed(view: View, turns: list[Bindings], result: str) -> bool:
    """Whether nobody else reads what the turns compute, not even the masks of experts."""
    nodes = {n.name for t in turns for n in t.nodes}
    inner = {v for t in turns for n in t.nodes for v in n.outputs if v and v != result}
    return not inner & view.output_names and all(c.name in nodes for v in inner for c in view.consumers.get(v, ()))
