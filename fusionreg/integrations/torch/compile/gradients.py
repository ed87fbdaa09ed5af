"""Which values of a traced program carry a gradient, and how fused calls pass it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.matcher.match import Match
from fusionreg.core.planner.training import Backward

from ..operators import Operators
from .lowering import Lowered
from .reading import Traced


class Gradients:
    """Which values of a lifted graph carry a gradient.

    Args:
        strides: match → those of its inputs that do not lie row by row, by name; a gradient lies as its value.
    """

    def __init__(
        self, traced: Traced, lowered: Lowered, operators: Operators, values: Sequence[Any],
        strides: Callable[[Match], Mapping[str, tuple[int, ...]]],
    ) -> None:  # fmt: skip
        self.operators, self.graph, self.strides = operators, lowered.graph, strides
        self.carrying: set[str] = set()
        if not torch.is_grad_enabled():
            return
        for spec, value in zip(traced.arguments, values, strict=True):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self.carrying.add(spec.name)
        for node in self.graph.nodes:
            ends = node.attrs.get("target", "") in _ENDS
            if not ends and any(i in self.carrying for i in node.inputs):
                self.carrying.update(o for o in node.outputs if o and self._floating(o))

    def _floating(self, name: str) -> bool:
        return "float" in self.graph.values[name].dtype

    def wanted(self, match: Match) -> tuple[str, ...]:
        """Inputs of the fusion whose gradient somebody will ask for."""
        return tuple(tensor for tensor, name in match.inputs.items() if name in self.carrying)

    def backward(self, match: Match) -> Backward | str | None:
        """How a fused call computes them, or why it cannot; None where nobody asks for them."""
        wanted = self.wanted(match)
        found = self.operators.backward(match, self.graph, wanted) if wanted else None
        if not isinstance(found, Backward) or found.call is None:
            return found
        return replace(found, call=replace(found.call, strides=FrozenDict(self.strides(found.call))))


_ENDS = frozenset({"aten.detach.default", "aten.detach_copy.default"})
