"""A turn for each expert: a loop over experts, unrolled, as products with the experts that tokens have. Floor 3.

Models that gave each expert a module of its own wrote it so: where the mask of an expert is set, rows of tokens are
gathered, go through the expert, are weighed, and added to those of the result. With all experts of a router among the
turns, and matrices that are known, what they compute is one layer of stacked matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from ..ir import Graph, Names
from ..matcher.search import View
from ..ops import Vocabulary
from ..pattern.instantiate import PatternGraph
from ..rewrite import replace_nodes
from .engine import Compiled, Emitter, Rule, compile_rules, relevant
from .experts import ACTIVATIONS, PRODUCTS
from .site import Site
from .turns import Chain, chains, closed, nodes_of

#: Where tokens have the expert of a turn: in a mask of all experts, or where their ids are its number.
_MASK = 'mask = Transpose(Cast(Equal(Unsqueeze(ids, last), bins), to="int64"), perm=(2, 1, 0))\n'
_HEAD = f"""{_MASK}set = NonZero(Cast(Gather(mask, number), to="bool"))
rank = Gather(set, first)
token = Gather(set, second)
"""
_HEAD_ONNX = f"""{_MASK}set = Transpose(NonZero(Gather(mask, number)), perm=(1, 0))
rank = Gather(set, first, axis=1)
place = Gather(set, second, axis=1)
token = Unsqueeze(place, one)
"""
_EQUAL = "set = NonZero(Equal(ids, number))\ntoken = Gather(set, first)\nrank = Gather(set, second)\n"
_EQUAL_ONNX = """set = Transpose(NonZero(Equal(ids, number)), perm=(1, 0))
place = Gather(set, first, axis=1)
token = Unsqueeze(place, one)
rank = Gather(set, second, axis=1)
"""
_HEADS_ONNX = (_HEAD_ONNX, _EQUAL_ONNX)
#: One turn. Indices below 0 would count from the end; there are none among those that are not zero.
_TURN = """
{head}rows = {rows}
{products}
t = Where(Less(token, zero), Add(token, tokens), token)
r = Where(Less(rank, zero), Add(rank, ranks), rank)
both = Add(t, r)
none = Sub(both, both)
at = Concat(Unsqueeze(Add(t, none), one), Unsqueeze(Add(r, none), one), axis=1)
share = {share}
{places}y = {scattered}
"""
#: The same as torch.onnx writes it.
_TURN_ONNX = """
{head}rows = {rows}
{products}
at = Concat(token, Unsqueeze(rank, one), axis=-1)
share = {share}
y = {scattered}
"""
_SHARES = ("GatherND(Unsqueeze(weights, last_too), at)", "Unsqueeze(GatherND(weights, at), side)")
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
#: Read, added to, and written: a token has an expert once.
_PUT = "ScatterND(base, Concat(Unsqueeze(Add(p, Sub(p, p)), one), axis=1), Add(Gather(base, token), Mul(share, d)))"
_PLACES = "p = Where(Less(token, zero), Add(token, tokens), token)\n"
_PUT_ONNX = "ScatterND(base, token, Add(GatherND(base, token), Mul(share, d)))"
_FORMS = (
    (_TURN, _HEAD, _ROWS, _SHARES, "Unsqueeze(token, one)", ()),
    (_TURN_ONNX, _HEAD_ONNX, _ROWS_ONNX, _SHARES, "token", ()),
    (_TURN, _EQUAL, _ROWS[:1], _SHARES, "Unsqueeze(token, one)", (_PUT,)),
    (_TURN_ONNX, _EQUAL_ONNX, _ROWS_ONNX[:1], _SHARES, "token", (_PUT_ONNX,)),
    *((_TURN_ONNX, head, ("Gather(x, place)",), _SHARES, "Unsqueeze(place, edge)", ()) for head in _HEADS_ONNX),
)
TURNS = tuple(
    Rule(
        "expert_loop",
        turn.format(
            head=head,
            rows=taken,
            products=experts.format(activation.format(gate)),
            share=share,
            places=_PLACES if added is _PUT else "",
            scattered=added.format(token=token),
        ),
        PRODUCTS.format(activated=activation.format("g")),
    )
    for turn, head, rows, shares, token, put in _FORMS
    for activation, taken, (experts, gate), share, added in product(
        ACTIVATIONS, rows, zip(_EXPERTS, _GATES, strict=True), shares, (*_ADDED, *put)
    )
)


def lift_loops(graph: Graph, ops: Vocabulary, log: list[tuple[str, str]] | None = None) -> Graph:
    """The graph with such loops as layers; the same where there are none."""
    rules = relevant(TURNS, {n.op for n in graph.nodes})
    if not rules:
        return graph
    compiled = compile_rules(rules, ops)
    replacements = []
    for chain, derived in _loops(graph, compiled):
        if isinstance(derived, str):
            continue
        index, site = chain[0]
        template = compiled.replacements[index]
        assert isinstance(template, PatternGraph)
        last = site.found.outputs["y"]
        made = Emitter(graph, ops, site, derived, Names({*graph.values, *graph.node_by_name})).build(
            template, nodes_of(chain), graph.values[last]
        )
        if made is not None:
            replacements.append(made)
            if log is not None:
                log.append((rules[index].name, site.found.root.name))
    return replace_nodes(graph, replacements) if replacements else graph


def unfinished(graph: Graph, ops: Vocabulary) -> dict[str, tuple[int, str]]:
    """Of turns that are no layer: the node of the last one → how many nodes they have, and why they are none."""
    rules = relevant(TURNS, {n.op for n in graph.nodes})
    if not rules:
        return {}
    loops = _loops(graph, compile_rules(rules, ops))
    return {c[0][1].found.root.name: (len(nodes_of(c)), why) for c, why in loops if isinstance(why, str)}


def _loops(graph: Graph, compiled: Compiled) -> Iterator[tuple[Chain, dict[str, Any] | str]]:
    """Turns that follow each other and their matrices, or why they are no layer."""
    view = View(graph)
    for chain in chains(view, compiled):
        if len({compiled.rules[i].replacement for i, _ in chain}) > 1:
            yield chain, "experts have different activations"
        else:
            yield chain, _stacked(view, [site for _, site in chain])


def _stacked(view: View, turns: list[Site]) -> dict[str, Any] | str:
    """The matrices of all experts, where the turns are those of one layer and nobody else reads what is between; else
    what is wrong."""
    import numpy as np

    first = turns[0]
    ids, scores = first.shape("ids"), None
    start = turns[-1].array("base")
    from_top = view.producers.get(first.name("ids"))
    masked = "bins" in first.found.inputs
    same = ("x", "ids", "weights", *(("bins",) if masked else ()))
    if not all(("bins" in t.found.inputs) == masked and t.name(n) == first.name(n) for t in turns for n in same):
        return "turns read other tokens, indices or weights"
    if start is None or start.astype("float32").any():
        return f"the first of {len(turns)} turns adds to no zeros: before it stands an expert in another spelling"
    if from_top is not None and from_top.op == "TopK":
        scores = view.graph.values[from_top.inputs[0]].shape
    bins = first.array("bins") if masked else np.arange(scores[-1]) if scores and isinstance(scores[-1], int) else None
    if bins is None or ids is None or len(ids) != 2 or scores is None:
        return "experts are not those that TopK chooses for each token"
    if not all(map(_usual, turns)):
        return "shapes or axes of a turn are not those of a layer of experts"
    matrices = {}
    for turn in turns:
        number, pair = turn.ints("number"), _matrices(turn)
        if number is None or pair is None:
            return "matrices of an expert are no constants: a caller may bring others"
        matrices[number[0]] = pair
    experts = list(range(bins.size))
    if bins.reshape(-1).tolist() != experts or sorted(matrices) != experts or len(turns) != len(experts):
        return f"there are turns for experts {sorted(matrices)} of {len(experts)}"
    if not closed(view, [t.found for t in turns], first.found.outputs["y"]):
        return "something else reads what is computed within the loop"
    gate_up, down = (np.stack([matrices[e][side] for e in experts]) for side in (0, 1))
    return {"gate_up": gate_up, "down": down, "one_": np.asarray([1], np.int64)}


def _usual(turn: Site) -> bool:
    """Whether constants are what the turn's text takes for granted."""
    wanted = {
        "first": ((0,),), "second": ((1,),), "zero": ((0,),), "one": ((1,), (-1,)), "last": ((2,), (-1,)),
        "last_too": ((2,), (-1,)), "zeros": ((0,),), "side": ((1,), (-1,)), "edge": ((1,), (-1,)),
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
