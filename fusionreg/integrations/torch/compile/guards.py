"""Conditions of a match that only extents of a call decide, asked of Dynamo: where one holds, it becomes a guard."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from fusionreg.core.expressions import Expression
from fusionreg.core.ir import Dim
from fusionreg.core.matcher.match import Match
from fusionreg.core.registry.entries import FusionEntry

from .reading import Traced


class Extents:
    """The symbolic numbers of a trace by the text that graphs have for them."""

    def __init__(self, traced: Traced) -> None:
        self.known: dict[str, Any] = {}
        for value in traced.values.values():
            if isinstance(value, torch.Tensor):
                for extent in value.shape:
                    self.known.setdefault(str(extent), extent)
            elif isinstance(value, torch.SymInt):
                self.known.setdefault(str(value), value)

    def refusal(self, match: Match, entry: FusionEntry) -> str | None:
        """Why the conditions of a match do not hold, None where they do; what the answer rests on becomes a guard."""
        if not match.guards:
            return None
        axes: dict[str, Any] = {}
        for axis, extent in match.axes.items():
            axes[axis] = self._number(extent)
        leading = [self._number(d) for d in match.leading]
        if any(n is None for n in (*axes.values(), *leading)):
            return "an extent that its conditions depend on is not known when it is compiled"
        folded = _folded(entry)
        if folded and leading:
            axes[folded] = prod(leading) * axes[folded]
        axes = entry.completed(axes, {**match.attributes, **match.choices})
        names = {**axes, **match.attributes, **match.choices, **match.dtypes, **_predicates(match, entry, axes)}
        for text in match.guards:
            if not bool(Expression.parse(text)(names)):
                return f"its condition {text} does not hold"
        return None

    def _number(self, extent: Dim) -> Any:
        return extent if isinstance(extent, int) else self.known.get(extent)


def _folded(entry: FusionEntry) -> str:
    """The axis that the extents of ``...`` are folded into."""
    for tensor in entry.tensors.values():
        for form in tensor.forms:
            if form.folds:
                return form.folds
    return ""


def _predicates(match: Match, entry: FusionEntry, axes: Mapping[str, Any]) -> dict[str, Any]:
    bound = {t: entry.tensors[t].forms[i] for t, i in match.forms.items() if t in entry.tensors}
    return {
        "present": lambda t: t in match.inputs or t in match.outputs,
        "rank": lambda t: len(bound[t].axes) if t in bound else -1,
        "shape": lambda t, i: axes.get(str(a := bound[t].axes[i]), a),
        "form": lambda t: match.forms.get(t, -1),
    }
