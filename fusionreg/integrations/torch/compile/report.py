"""What the backend did with one graph, for people and for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class FusedSite:
    """One fused call.

    Attributes:
        fusion: name.
        operators: the torch operators whose place it takes, in order: those of the model, before any was lifted.
        source: where the last of them stands in the model.
        differentiable: whether gradients go through it.
        seconds: that the plan expects it to save, what its backward pass computes again counted.
        backward: how its gradients are computed: the backward fusion, or what of its operators' gradients is read from
            inputs and results, and what is computed again.
        again: those of ``operators`` that run beside the fused call as well, since what they give is read elsewhere.
    """

    fusion: str
    operators: tuple[str, ...]
    source: str = ""
    differentiable: bool = False
    seconds: float = 0.0
    backward: str = ""
    again: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = f"; backward: {self.backward}" if self.backward else ""
        kind = f"; computes {', '.join(self.again)} once more{kind}" if self.again else kind
        at = f" at {self.source}" if self.source else ""
        return f"{self.fusion}: {' → '.join(self.operators)}{at}, saves {self.seconds * 1e6:.2f} µs{kind}"


@dataclass(frozen=True)
class LostSite:
    """A match that was not fused, and why."""

    fusion: str
    operators: tuple[str, ...]
    source: str
    reason: str

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        return f"{self.fusion}{at}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """One graph.

    Attributes:
        fused: what was fused, in the order of the graph.
        lost: matches that were not, and why.
        refused: parts of the graph that could not be rewritten, and why.
        opaque: operators that have no form in the vocabulary: nothing is fused across them.
        policy: under which the choice was made.
        stage: which graph it was: ``captured``, before autograd, or what autograd made of it: ``forward``, ``backward``
            or ``inference``.
        seconds: that all this took.
        plans: digests of the plans of its parts: equal on every rank that compiles the same graph.
        moved: how many of its inputs are moved to channels last first.
        masks: at how many attentions a mask that torch has no fast kernel for was laid out by keys, or left out because
            it allows all.
        unmeasured: how many sites there was no time to measure; the next compilation goes on with them.
    """

    fused: tuple[FusedSite, ...] = ()
    lost: tuple[LostSite, ...] = ()
    refused: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    policy: str = "balanced"
    seconds: float = 0.0
    stage: str = "captured"
    plans: tuple[str, ...] = ()
    moved: int = 0
    unmeasured: int = 0
    masks: int = 0

    @classmethod
    def joined(cls, reports: Iterable[Report], policy: str, seconds: float, stage: str = "captured") -> Report:
        """One report of several parts of a graph."""
        parts = list(reports)
        return cls(
            tuple(s for r in parts for s in r.fused),
            tuple(s for r in parts for s in r.lost),
            tuple(dict.fromkeys(s for r in parts for s in r.refused)),
            tuple(dict.fromkeys(s for r in parts for s in r.opaque)),
            policy,
            seconds,
            stage,
            tuple(p for r in parts for p in r.plans),
            sum(r.moved for r in parts),
            sum(r.unmeasured for r in parts),
            sum(r.masks for r in parts),
        )

    @property
    def deepest(self) -> int:
        """How many operators the largest site stands for."""
        return max((len(s.operators) for s in self.fused), default=0)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The report as text."""
        head = f"fusionreg, {self.stage} graph: {len(self.fused)} sites fused, {len(self.lost)} not"
        yield f"{head} ({self.policy}, {self.seconds:.2f} s)"
        for title, items in (("fused", self.fused), ("not fused", self.lost)):
            for item in items:
                yield f"  {title}: {item}"
        if self.moved:
            yield f"  moved to channels last: {self.moved} inputs"
        if self.masks:
            yield f"  masks laid out by keys, or left out where they allow all: {self.masks}"
        if self.unmeasured:
            yield f"  not measured: {self.unmeasured} sites, for which the time was too short"
        for text in self.refused:
            yield f"  left as it was: {text}"
        if self.opaque:
            yield f"  not in the vocabulary: {', '.join(self.opaque)}"
