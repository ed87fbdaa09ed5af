"""Casts to float32 inside of what one kernel computes, moved to where its operands come in. Floor 3.

Mixed precision leaves a row in 16 bits until it is normalised: a GELU and a dropout round, then comes the cast. A
kernel that takes all of it keeps float32 inside and rounds once, at its end; with the cast before the GELU that is what
is said. Values only come nearer to the exact ones, but they change: these rules are no part of lifting, and not for
whoever wants each operator rounded. Only what such a kernel exists for is moved.
"""

from __future__ import annotations

from ..ir import Graph
from ..ops import Vocabulary
from ..rewrite import eliminate_dead
from .engine import Rule, compile_rules, relevant, run
from .site import Site

_WIDE = 'to="float32"'


def _narrow(site: Site) -> bool:
    """Of 16 bits, in a row that is normalised next, perhaps with a residual added: what was asked for stays a value."""
    readers = site.graph.consumers.get(site.name("y"), ())
    if len(readers) == 1 and readers[0].op == "Add":
        readers = site.graph.consumers.get(readers[0].outputs[0], ())
    return (
        site.value("x").dtype in ("float16", "bfloat16")
        and bool(readers)
        and all(n.op == "LayerNormalization" for n in readers)
        and site.name("y") not in site.graph.outputs
    )


RULES: tuple[Rule, ...] = tuple(
    Rule("widening", before, after, (_narrow,))
    for before, after in (
        (f"y = Cast(fusionreg.Dropout(x, rng, p=p), {_WIDE})", f"y = fusionreg.Dropout(Cast(x, {_WIDE}), rng, p=p)"),
        (
            f"y = Cast(Add(fusionreg.Dropout(x, rng, p=p), r), {_WIDE})",
            f"y = Add(fusionreg.Dropout(Cast(x, {_WIDE}), rng, p=p), Cast(r, {_WIDE}))",
        ),
        (
            f"y = fusionreg.Dropout(Cast(Gelu(x, approximate=kind), {_WIDE}), rng, p=p)",
            f"y = fusionreg.Dropout(Gelu(Cast(x, {_WIDE}), approximate=kind), rng, p=p)",
        ),
    )
)


def widen(graph: Graph, ops: Vocabulary) -> Graph:
    """A lifted graph with such casts moved; inputs and outputs keep their names."""
    rules = relevant(RULES, {n.op for n in graph.nodes})
    return eliminate_dead(run(graph, compile_rules(rules, ops))) if rules else graph
