"""What taking a match costs the backward pass of a training graph. Floor 4; which gradients there are it is told.

A fused call saves nothing but inputs and outputs. Where no backward fusion reads those alone, the operators that the
call takes the place of are differentiated one by one, and values in between that their gradients read are computed
again. Unfused they would have been kept: written by the forward pass anyway, and read by the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir import Graph
from .costs import ROUTED, Cost, CostModel, Gain
from .executor import PRODUCTS

if TYPE_CHECKING:
    from ..matcher.match import Match

#: Why a site is not taken whose backward fusion has more to multiply than others have.
UNSURE = "its backward pass multiplies matrices again: it needs a measurement, and there is none of the like"


@dataclass(frozen=True)
class Backward:
    """How the gradients of a match are computed.

    Attributes:
        fusion: the backward fusion that computes them; "" where those of the operators are taken.
        call: that fusion, as the match that its call would be; None where that is not known.
        saved: the inputs and outputs that are kept for it.
        graph: the operators by themselves; with a backward fusion that of ``call``.
        again: nodes of ``graph`` that the backward pass computes again.
        values: what they give to the gradients.
    """

    fusion: str = ""
    saved: tuple[str, ...] = ()
    graph: Graph | None = None
    again: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    call: Match | None = None

    @property
    def products(self) -> tuple[str, ...]:
        """Operators among those computed again that are matrix products and the like."""
        return tuple(op for op in self.operators if op in PRODUCTS)

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that are computed again, in order."""
        return () if self.graph is None else tuple(self.graph.node_by_name[n].op for n in self.again)

    def refusal(self, policy: str, model: CostModel) -> str | None:
        """Why a policy does not take a match for what its backward pass computes again, None where it does."""
        if policy != "aggressive" and self._multiplies_again() and self._gain(model) is None:
            return UNSURE
        if policy == "conservative" and self.again:
            return f"policy conservative: its backward pass would compute {_listed(self.operators)} again"
        if policy != "aggressive" and self.products:
            return f"its backward pass would compute {_listed(self.products)} again, which only policy aggressive takes"
        return None

    def cost(self, model: CostModel) -> Cost:
        """What is computed again costs, and so does a backward fusion that measured slower than the executor.

        Point-wise operators run in the kernel that reads them, whoever makes that one: they read operands in place of
        results, which may even be less. Anything else runs as the executor runs it.
        """
        if self.call is not None and self.graph is not None:
            return self._slower(model, self.call)
        if self.graph is None or not self.again:
            return Cost()
        graph, mine = self.graph, {*self.again}
        nodes = [graph.node_by_name[n] for n in self.again]
        if not all(n.op in model.free or (n.op in model.ops and model.ops[n.op].pointwise) for n in nodes):
            return model.on(graph).unfused(self.again)
        made = {o for n in nodes for o in n.outputs if o}
        read = {i for n in nodes for i in n.inputs if i and i not in made and not graph.is_constant(i)}
        moved = sum(model.size(graph.values[v]) for v in read) - sum(model.size(graph.values[v]) for v in self.values)
        if model.executor.chains:  # which would compute them again as well, where that is less
            moved = max(moved, 0)
        flops = sum(model.flops(graph, n) for n in nodes if n.name in mine)
        seconds = moved / model.device.bandwidth + flops / model.device.vector_flops
        return Cost(moved, flops, 0, seconds)

    def _multiplies_again(self) -> bool:
        """Whether a backward fusion has products of the forward pass to make again that others keep: all of layers of
        experts do, and no other."""
        if self.call is None or self.graph is None:
            return False
        return any(self.graph.node_by_name[n].op in ROUTED for n in self.call.nodes)

    def _gain(self, model: CostModel) -> Gain | None:
        """How the backward fusion measured against the executor."""
        if self.call is None or self.graph is None:
            return None
        values = (*self.call.inputs.values(), *self.call.outputs.values())
        return model.gains(self.call, model.executor, sum(model.size(self.graph.values[v]) for v in values))

    def _slower(self, model: CostModel, call: Match) -> Cost:
        """What a backward fusion takes more than the executor, where somebody measured that. Where it takes less, that
        is left to the graph of the backward pass, which has what stands around it."""
        gain, own = self._gain(model), model.kernels(call)
        if gain is None or own is None or gain.ratio <= 1.0:
            return Cost()
        return Cost(seconds=own - own / gain.ratio)

    def describe(self, model: CostModel) -> str:
        """In words: which gradients, and what is computed again for how long."""
        if self.fusion:
            seconds = self.cost(model).seconds
            return f"{self.fusion}, {seconds * 1e6:+.2f} µs as measured" if seconds else self.fusion
        if not self.again:
            return f"from {', '.join(self.saved) or 'the gradient alone'}"
        seconds = self.cost(model).seconds
        return f"computes {_listed(self.operators)} again, {seconds * 1e6:+.2f} µs"


def _listed(operators: tuple[str, ...]) -> str:
    counted = dict.fromkeys(operators)
    return ", ".join(op.rpartition(":")[2] for op in counted)
