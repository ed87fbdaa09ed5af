"""What rows say together: our times over the goals, as a mean and at worst; how slowly large tensors move. Floor 7."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from statistics import geometric_mean

from .listing import number
from .results import Result, Results

#: Bytes of inputs, or of outputs, from which on a row shows what memory can do and no launch's fixed cost.
LARGE = 64_000_000
TITLES = ("row", "workloads", "÷ goal, mean", "÷ goal, worst", "÷ best, worst", "of floor, least", "of a copy, least")


@dataclass(frozen=True)
class Group:
    """The workloads of one row of a table of goals, as they were measured.

    Attributes:
        row: its name.
        rows: those that have a figure of ours.
        mean: geometric mean of ours over goal; None where none has a goal.
        goal, best: the one farthest above its goal, and above its best competitor.
        floor: the one farthest from its floor.
        copy: of rows that are bound by moving :data:`LARGE` tensors, the one with the least share of a copy's rate,
            and that share.
    """

    row: str
    rows: tuple[Result, ...]
    mean: float | None
    goal: Result | None
    best: Result | None
    floor: Result | None
    copy: tuple[Result, float] | None

    def cells(self) -> tuple[str, ...]:
        """As :data:`TITLES`; the worst with their names."""

        def named(row: Result | None, text: Callable[[Result], str]) -> str:
            return f"{text(row)} ({row.fusion} {row.workload})" if row is not None else "–"

        copy = self.copy
        return (
            self.row or "–", str(len(self.rows)), number(self.mean), named(self.goal, lambda r: number(r.to_goal)),
            named(self.best, lambda r: number(r.to_best)), named(self.floor, lambda r: f"{r.of_floor:.0%}"),
            named(copy[0], lambda _: f"{copy[1]:.0%}") if copy else "–",
        )  # fmt: skip


def groups(results: Results, outdated: Collection[tuple[str, str]] = ()) -> tuple[Group, ...]:
    """One for each row name, in the order of their numbers; rows of kernels that changed since are left out."""
    found: dict[str, list[Result]] = {}
    for row in results.rows:
        if row.ours_ms is not None and row.key not in outdated:
            found.setdefault(row.row, []).append(row)
    return tuple(_group(name, found[name], results) for name in sorted(found, key=_order))


def _group(name: str, rows: list[Result], results: Results) -> Group:
    aimed = [r.to_goal for r in rows if r.to_goal]
    shares = [(r, share) for r in rows if (share := of_copy(r, results)) is not None]
    return Group(
        name, tuple(rows), geometric_mean(aimed) if aimed else None, _worst(rows, lambda r: r.to_goal),
        _worst(rows, lambda r: r.to_best), _worst(rows, lambda r: r.of_floor and 1 / r.of_floor),
        min(shares, key=lambda x: x[1], default=None),
    )  # fmt: skip


def of_copy(row: Result, results: Results) -> float | None:
    """Bytes per second over those of a copy in the same run; None for small tensors, products and replays of graphs."""
    if not row.ours_ms or row.mode == "g" or row.bound != "memory" or max(row.read, row.written) < LARGE:
        return None
    return (row.read + row.written) / row.ours_ms * 1e3 / results.runs[row.run].ceilings.copy_rate


def _worst(rows: Iterable[Result], ratio: Callable[[Result], float | None]) -> Result | None:
    return max((r for r in rows if ratio(r)), key=lambda r: ratio(r) or 0.0, default=None)


def _order(name: str) -> tuple[bool, int, str]:
    number = re.match(r"S(\d+)", name)
    return number is None, int(number[1]) if number else 0, name
