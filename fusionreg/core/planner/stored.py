"""A plan on paper: as JSON, and as a table. Floor 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from typing import Any, Literal

from pydantic import ValidationError

from ..errors import PlanError
from ..frozen import FrozenDict
from ..ir import Graph
from ..matcher.match import Match
from ..spec import Record
from .costs import Cost
from .digest import graph_digest
from .plan import Loser, Plan
from .policies import Policy

FORMAT = "fusionreg-plan/1"
#: How a float that JSON has no number for is written.
_FLOAT = "float"


class _Saved(Record):
    bytes: int
    flops: int
    launches: int
    seconds: float


class _Match(Record):
    fusion: str
    plugin: str
    spelling: int
    root: str
    nodes: tuple[str, ...]
    inputs: dict[str, str]
    outputs: dict[str, str]
    dtypes: dict[str, str]
    axes: dict[str, int | str]
    leading: tuple[int | str, ...]
    attributes: dict[str, Any]
    choices: dict[str, str]
    guards: tuple[str, ...]
    forms: dict[str, int]
    base: str
    around: int = 0
    captured: bool
    kept: tuple[str, ...] = ()

    def match(self) -> Match:
        values = {name: getattr(self, name) for name in type(self).model_fields if name in _FIELDS}
        values["attributes"] = {k: _thawed(v) for k, v in self.attributes.items()}
        return Match(**{k: FrozenDict(v) if isinstance(v, dict) else v for k, v in values.items()})


_FIELDS = frozenset(f.name for f in fields(Match))


class _Chosen(_Match):
    saved: _Saved
    basis: str
    backward: str = ""


class _By(Record):
    fusion: str
    root: str


class _Loser(_Match):
    reason: str
    by: _By | None


class _Plan(Record):
    format: Literal["fusionreg-plan/1"]
    graph: str
    policy: Policy
    executor: str
    exact: bool
    fuel: int | None
    moved: tuple[str, ...] = ()
    digest: str
    saved: _Saved
    chosen: tuple[_Chosen, ...]
    losers: tuple[_Loser, ...]


def to_dict(plan: Plan) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "format": FORMAT,
        "graph": plan.graph,
        "policy": plan.policy,
        "executor": plan.executor,
        "exact": plan.exact,
        "fuel": plan.fuel,
        "moved": list(plan.moved),
        "digest": plan.digest,
        "saved": plan.saved.to_dict(),
        "chosen": [
            _plain(m) | {"saved": s.to_dict(), "basis": b, "backward": g}
            for m, s, b, g in zip(plan.chosen, plan.savings, *_words(plan), strict=True)
        ],
        "losers": [
            _plain(x.match)
            | {"reason": x.reason, "by": None if x.by is None else {"fusion": x.by.fusion, "root": x.by.root}}
            for x in plan.losers
        ],
    }


def from_dict(data: Mapping[str, Any]) -> Plan:
    """The plan again; :class:`PlanError` names what is damaged."""
    try:
        found = _Plan.model_validate(dict(data))
    except (ValidationError, TypeError, ValueError) as e:
        where, said = "plan", str(e)
        if isinstance(e, ValidationError):
            first = e.errors()[0]
            where, said = ".".join(map(str, first["loc"])) or where, first["msg"]
        raise PlanError("cannot read", "a plan", f"{where}: {said}", "what Plan.to_dict gave", field=where) from None
    chosen = tuple(c.match() for c in found.chosen)
    of_root = {m.root: m for m in chosen}
    losers = []
    for n, x in enumerate(found.losers):
        by = of_root.get(x.by.root) if x.by is not None else None
        if x.by is not None and (by is None or by.fusion != x.by.fusion):
            where = f"losers.{n}.by"
            said = f"{where}: {x.by.fusion} at {x.by.root} is not among the chosen"
            raise PlanError("cannot read", "a plan", said, "what Plan.to_dict gave", field=where)
        losers.append(Loser(x.match(), x.reason, by))
    made = Plan(
        chosen, tuple(Cost(**c.saved.model_dump()) for c in found.chosen), tuple(losers), found.policy, found.exact,
        found.executor, tuple(c.basis for c in found.chosen), found.graph, found.fuel,
        tuple(c.backward for c in found.chosen) if any(c.backward for c in found.chosen) else (), found.moved,
    )  # fmt: skip
    if made.digest != found.digest:
        said = f"digest: {found.digest[:12]}…, and what it does is {made.digest[:12]}…"
        raise PlanError("cannot read", "a plan", said, "a plan as it was written", field="digest")
    return made


def check_graph(plan: Plan, graph: Graph) -> None:
    """:class:`PlanError` where a plan is of another graph."""
    found = graph_digest(graph)
    if plan.graph != found:
        missing = next((n for m in plan.chosen for n in m.nodes if n not in graph.node_by_name), "")
        said = f"it has no node {missing}" if missing else f"digest {found[:12]}…"
        raise PlanError(
            "cannot apply a plan", f"to {graph.name}", said, f"the graph that it was made for, {plan.graph[:12]}…",
            "Plan again", field="graph",
        )  # fmt: skip


def _plain(m: Match) -> dict[str, Any]:
    data = m.to_dict()
    return data | {"attributes": {k: _frozen(v) for k, v in data["attributes"].items()}}


def _frozen(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return {_FLOAT: repr(value)}
    return [_frozen(v) for v in value] if isinstance(value, list | tuple) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    return tuple(_thawed(v) for v in value) if isinstance(value, list | tuple) else value


# ---- text -----------------------------------------------------------------------------------------------------------


def describe(plan: Plan, losers: bool = True) -> str:
    """The plan as plain text."""
    s = plan.saved
    exact = "exact" if plan.exact else "approximate"
    fuel = "" if plan.fuel is None else f", fuel {plan.fuel}"
    lines = [
        f"plan {plan.digest[:12]} of graph {plan.graph[:12]}: {plan.policy} beside {plan.executor}, {exact}{fuel}",
        f"{len(plan.chosen)} sites save {_micro(s)} µs, {s.bytes} bytes, {s.launches} launches",
    ]
    if plan.moved:
        lines += [f"moved to channels last: {', '.join(plan.moved[:4])}{', …' if len(plan.moved) > 4 else ''}"]
    rows = [
        (m.fusion, m.root, str(len(m.nodes)), _micro(c), str(c.bytes), str(c.launches), *words, ", ".join(m.kept))
        for m, c, *words in zip(plan.chosen, plan.savings, *_words(plan), strict=True)
    ]
    head = ("fusion", "at", "nodes", "saves µs", "bytes", "launches", "by", "backward", "beside it")
    told = [k for k in range(len(head)) if k < 7 or any(row[k] for row in rows)]
    lines += _table(tuple(head[k] for k in told), [tuple(row[k] for k in told) for row in rows])
    if losers and plan.losers:
        lines += ["", "not taken"]
        lines += _table(("fusion", "at", "reason"), [(x.match.fusion, x.match.root, x.reason) for x in plan.losers])
    return "\n".join(lines)


def _words(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """For each site what its saving rests on, and how its gradients are computed."""
    none = ("",) * len(plan.chosen)
    return plan.basis or none, plan.backwards or none


def _micro(cost: Cost) -> str:
    return f"{cost.seconds * 1e6:.2f}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        return
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
