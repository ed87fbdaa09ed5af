"""Spelled-out forms → canonical operators, as rewrites in the pattern language. Floor 3.

Frontends emit what a model says; fusions are written for canonical operators. Lifting stands between: it folds
constants, removes what does nothing, and replaces public spellings of a LayerNorm, a GELU, a Softmax by the operator.
"""

from __future__ import annotations

from ..ir import Graph
from ..ops import Vocabulary
from ..rewrite import eliminate_dead, fold_constants
from .adapter_loops import lift_adapters
from .attention import DIFFERENTIATED
from .engine import Compiled, Rule, compile_rules, relevant, run
from .expert_loops import lift_loops
from .lengths import lift_lengths
from .merging import merge_indices
from .packed import lift_packed
from .routers import lift_routers
from .rules import EARLY, LATE, RULES, TRAINED
from .site import Site

__all__ = ["EARLY", "LATE", "RULES", "Compiled", "Rule", "Site", "compile_rules", "lift", "relevant", "run"]


def lift(
    graph: Graph, ops: Vocabulary, log: list[tuple[str, str]] | None = None, *, differentiated: bool = False
) -> Graph:
    """The graph in canonical operators, constants folded and dead nodes gone. Inputs and outputs keep their names.

    Numerics never get worse: a rule only applies where the canonical operator computes the same function, dtypes
    included. Sub-graphs of If, Loop and Scan stay as they are.

    Args:
        graph: as a frontend emits it, with types.
        ops: the vocabulary.
        log: when given, receives (rule, node) for every rewrite.
        differentiated: gradients will be recorded: what has none that is fused stays as it is.
    """
    graph = _rewritten(eliminate_dead(graph), EARLY, ops, log)
    while True:
        rules = TRAINED if differentiated else RULES
        lifted = _rewritten(eliminate_dead(fold_constants(graph, ops)), rules, ops, log)
        lifted = eliminate_dead(lift_adapters(lift_routers(lift_loops(lifted, ops, log), ops, log), ops, log))
        if lifted.nodes == graph.nodes:
            late = _rewritten(lift_packed(lifted, ops, log), LATE, ops, log)
            late = _rewritten(late, DIFFERENTIATED, ops, log) if differentiated else lift_lengths(late, ops, log)
            return eliminate_dead(merge_indices(late))
        graph = lifted


def _rewritten(graph: Graph, rules: tuple[Rule, ...], ops: Vocabulary, log: list[tuple[str, str]] | None) -> Graph:
    compiled = compile_rules(relevant(rules, {n.op for n in graph.nodes}), ops)
    return eliminate_dead(run(graph, compiled, log))
