"""Coverage locks: which sites of a model fuse, kept in a file, and what became of them since.

The rule. A locked site is its fusion and its nodes, each written ``Operator @ place``. The place is the path of the
torch module that computes the node, else the file of its source, else its name in the ONNX graph without a number at
the end. Line numbers and generated names are no part of it, so that code and nodes elsewhere may come, go and be
renamed. In this order, a locked site

1. is kept where the same fusion takes all of its nodes (and maybe more);
2. is kept, and told, where one site of another fusion takes all of them;
3. has moved where the model has not all of these nodes any more and the same fusion takes the same operators at a
   place that was not locked;
4. is lost otherwise.

Sites of one fusion whose nodes are written alike are counted. A fusion that was derived from another, with the
point-wise operators around it, goes by the name of that other one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionreg.core.errors import ArgumentError, ModelError
from fusionreg.core.ir import Graph, Node

if TYPE_CHECKING:
    from fusionreg.core.matcher.match import FailedMatch, Match
    from fusionreg.core.planner.plan import Plan

KIND, VERSION = "fusionreg coverage", 1
_LINE = re.compile(r"(?P<file>.+\.\w+):\d+(?: \((?P<module>.+)\))?")
_NUMBER = re.compile(r"(?<=.)_\d+$")
AGAIN = "Write it again with match --write-expect"


@dataclass(frozen=True)
class LockedSite:
    """So many sites of a fusion whose nodes are written alike, in the order of the graph."""

    fusion: str
    nodes: tuple[str, ...]
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.fusion}: {', '.join(self.nodes)}{times}"


@dataclass(frozen=True)
class Lock:
    """What fuses in a model under a policy."""

    model: str
    policy: str
    sites: tuple[LockedSite, ...]

    @classmethod
    def of(cls, model: str, graph: Graph, plan: Plan) -> Lock:
        """The lock of a plan; ``model`` is a path, of which the file's name is kept, or ``package.module:factory``."""
        counts = Counter(_written(graph, m) for m in plan.chosen)
        name = Path(model).name if "/" in model or "\\" in model else model
        return cls(name, plan.policy, tuple(LockedSite(f, nodes, n) for (f, nodes), n in counts.items()))

    def write(self, path: Path) -> None:
        """As JSON, one site a line."""
        rows = [{"fusion": s.fusion, "count": s.count, "nodes": list(s.nodes)} for s in self.sites]
        head = {"kind": KIND, "version": VERSION, "model": self.model, "policy": self.policy}
        text = json.dumps(head, indent=1, ensure_ascii=False)[:-2]
        sites = ",\n".join(f"  {json.dumps(r, ensure_ascii=False)}" for r in rows)
        path.write_text(f'{text},\n "sites": [{f"{chr(10)}{sites}{chr(10)} " if rows else ""}]\n}}\n', encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Lock:
        """What :meth:`write` wrote; :class:`ModelError` for anything else."""
        try:
            data = json.loads(path.read_text("utf-8"))
            if data["kind"] != KIND or data["version"] != VERSION:
                found = f"kind {data['kind']!r}, version {data['version']!r}"
                raise ModelError("cannot read lock", str(path), found, f"{KIND!r}, version {VERSION}", AGAIN)
            return cls(_text(data["model"]), _text(data["policy"]), tuple(map(_site, data["sites"])))
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            found = f"{type(e).__name__}: {e}"
            raise ModelError("cannot read lock", str(path), found, "what match --write-expect writes", AGAIN) from e

    def compare(
        self, graph: Graph, plan: Plan, failures: Iterable[FailedMatch] = (), policy: str | None = None
    ) -> Comparison:
        """What became of the locked sites in ``plan`` for ``graph``, by the rule of this module.

        ``failures``: what nearly matched, to say why a site was lost. :class:`ArgumentError` for a plan under another
        policy than the lock's.
        """
        if plan.policy != self.policy:
            raise ArgumentError(
                "cannot compare", f"the lock of {self.model}", f"a plan under {plan.policy!r}", f"{self.policy!r}",
                f"Add --policy {self.policy}, or write the lock again",
            )  # fmt: skip
        found = [_Found(*_written(graph, m)) for m in plan.chosen]
        wanted = [LockedSite(s.fusion, s.nodes) for s in self.sites for _ in range(s.count)]
        gone = Counter(n for s in wanted for n in s.nodes) - Counter(label(n) for n in graph.nodes)
        outcomes: dict[int, tuple[str, _Found]] = {}

        def assign(outcome: str, takes: Callable[[LockedSite, _Found], bool]) -> None:
            for i, site in enumerate(wanted):
                if i not in outcomes and (taker := next((f for f in found if takes(site, f)), None)):
                    taker.left -= Counter(site.nodes)
                    taker.taken = True
                    outcomes[i] = outcome, taker

        assign("kept", lambda s, f: s.fusion == f.fusion and s.nodes == f.nodes and not f.taken)
        assign("kept", lambda s, f: s.fusion == f.fusion and f.covers(s))
        assign("replaced", lambda s, f: f.covers(s))
        assign(
            "moved",
            lambda s, f: s.fusion == f.fusion and not f.taken and any(n in gone for n in s.nodes) and f.computes(s),
        )
        rest = [s for i, s in enumerate(wanted) if i not in outcomes]
        lost = tuple(
            Lost(site, count, sum(1 for s in wanted if s == site), _why(site, graph, plan, failures))
            for site, count in Counter(rest).items()
        )
        new = Counter((f.fusion, f.nodes) for f in found if not f.taken)

        def pairs(outcome: str) -> tuple[tuple[LockedSite, LockedSite], ...]:
            return tuple(
                (wanted[i], LockedSite(f.fusion, f.nodes)) for i, (o, f) in sorted(outcomes.items()) if o == outcome
            )

        kept = sum(outcome == "kept" for outcome, _ in outcomes.values())
        return Comparison(
            lost, pairs("moved"), pairs("replaced"), tuple(LockedSite(*key, n) for key, n in new.items()), kept
        )


@dataclass(frozen=True)
class Lost:
    """A locked site that fuses no longer.

    Attributes:
        site: which.
        count, locked: how many of those that are written alike, and of how many.
        reason: what is there now, and why.
    """

    site: LockedSite
    count: int
    locked: int
    reason: str


@dataclass(frozen=True)
class Comparison:
    """What became of a lock's sites: lost ones, moved and replaced ones each with what they are now, sites that were
    not locked, and how many are kept."""

    lost: tuple[Lost, ...]
    moved: tuple[tuple[LockedSite, LockedSite], ...]
    replaced: tuple[tuple[LockedSite, LockedSite], ...]
    new: tuple[LockedSite, ...]
    kept: int

    @property
    def ok(self) -> bool:
        return not self.lost

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "ok": self.ok,
            "kept": self.kept,
            "lost": [
                {**_row(x.site), "count": x.count, "locked": x.locked, "reason": x.reason} for x in self.lost
            ],
            "moved": [{"from": _row(a), "to": _row(b)} for a, b in self.moved],
            "replaced": [{"from": _row(a), "to": _row(b)} for a, b in self.replaced],
            "new": [_row(s) for s in self.new],
        }

    def lines(self) -> Iterator[str]:
        """For people: ``-`` what was lost, ``~`` what is elsewhere or otherwise, ``+`` what is new."""
        for x in self.lost:
            of = f" ({x.count} of {x.locked})" if x.locked > 1 else ""
            yield f"- {x.site}{of}: {x.reason}"
        for a, b in self.moved:
            yield f"~ {a.fusion} moved: {', '.join(a.nodes)} → {', '.join(b.nodes)}"
        for a, b in self.replaced:
            yield f"~ {a} → {b}"
        for s in self.new:
            yield f"+ {s}"


@dataclass
class _Found:
    """A site of the present plan, and which of its nodes no locked site has claimed."""

    fusion: str
    nodes: tuple[str, ...]
    taken: bool = False
    left: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.left = Counter(self.nodes)

    def covers(self, site: LockedSite) -> bool:
        return Counter(site.nodes) <= self.left

    def computes(self, site: LockedSite) -> bool:
        return Counter(map(_operator, site.nodes)) <= Counter(map(_operator, self.left.elements()))


def label(node: Node) -> str:
    """``Operator @ place``."""
    return f"{node.op} @ {place(node)}"


def place(node: Node) -> str:
    """Where the node is, in terms that survive changes elsewhere; see the rule."""
    found = _LINE.fullmatch(node.source)
    if found is None:
        return _NUMBER.sub("", node.source or node.name)
    return found["module"] or Path(found["file"]).name


def _written(graph: Graph, match: Match) -> tuple[str, tuple[str, ...]]:
    base = match.base or (match.fusion.rpartition(".")[0] if match.captured else match.fusion)
    return base, tuple(label(graph.node_by_name[n]) for n in match.nodes)


def _operator(text: str) -> str:
    return text.partition(" @ ")[0]


def _why(site: LockedSite, graph: Graph, plan: Plan, failures: Iterable[FailedMatch]) -> str:
    """What takes some of its nodes now, and why not all of them, as far as that is known."""
    nodes = Counter(site.nodes)
    absent = nodes - Counter(label(n) for n in graph.nodes)
    if absent:
        return f"the model has no {', '.join(absent)}"
    now = [_written(graph, m) for m in plan.chosen]
    part = [(fusion, nodes & Counter(written)) for fusion, written in now]
    said = [f"{fusion} takes {', '.join(shared.elements())}" for fusion, shared in part if shared and shared != nodes]
    for loser in plan.losers:
        fusion, written = _written(graph, loser.match)
        if fusion == site.fusion and nodes <= Counter(written):
            return "; ".join([*said, f"not taken: {loser.reason}"])
    near = [f for f in failures if f.fusion == site.fusion and label(graph.node_by_name[f.root]) in nodes]
    if near:
        best = max(near, key=lambda f: f.depth)
        return "; ".join([*said, f"{best.clause} at {best.source or best.node}: {best.found} — {best.expected}"])
    return "; ".join(said) or "it does not match any more"


def _row(site: LockedSite) -> dict[str, Any]:
    return {"fusion": site.fusion, "count": site.count, "nodes": list(site.nodes)}


def _site(row: Any) -> LockedSite:
    count, nodes = row["count"], row["nodes"]
    if not isinstance(count, int) or isinstance(count, bool) or count < 1 or not isinstance(nodes, list):
        raise ValueError(f"a site with count {count!r} and nodes {nodes!r}")
    return LockedSite(_text(row["fusion"]), tuple(map(_text, nodes)), count)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
