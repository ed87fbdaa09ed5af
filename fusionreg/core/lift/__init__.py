"""Spelled-out forms → canonical operators, as rewrites in the pattern language. Floor 3.

Frontends emit what a model says; fusions are written for canonical operators. Lifting stands between: it folds
constants, removes what does nothing, and replaces public spellings of a LayerNorm, a GELU, a Softmax by the operator.
"""

from __future__ import annotations

from ..ir import Graph
from ..ops import Vocabulary
from ..rewrite import eliminate_dead, fold_constants
from .engine import Compiled, Rule, compile_rules, run
from .rules import EARLY, RULES
from .site import Site

__all__ = ["EARLY", "RULES", "Compiled", "Rule", "Site", "compile_rules", "lift", "run"]


def lift(graph: Graph, ops: Vocabulary, log: list[tuple[str, str]] | None = None) -> Graph:
    """The graph in canonical operators, constants folded and dead nodes gone. Inputs and outputs keep their names.

    Numerics never get worse: a rule only applies where the canonical operator computes the same function, dtypes
    included. Sub-graphs of If, Loop and Scan stay as they are.

    Args:
        graph: as a frontend emits it, with types.
        ops: the vocabulary.
        log: when given, receives (rule, node) for every rewrite.
    """
    graph = eliminate_dead(graph)
    graph = eliminate_dead(run(graph, compile_rules(EARLY, ops), log))
    rules = compile_rules(RULES, ops)
    while True:
        folded = fold_constants(graph, ops)
        lifted = eliminate_dead(run(eliminate_dead(folded), rules, log))
        if lifted.nodes == graph.nodes:
            return lifted
        graph = lifted
