"""Results as rows of text: what the command line and the documentation print. Floor 7."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .results import PEERS, Result, Run


def header(rows: Iterable[Result]) -> tuple[str, ...]:
    """Titles for :func:`line`, with a column for every peer that any row has."""
    return (
        "fusion", "workload", "mode", "kernel", "ours ms", "p20–p80", *peers_in(rows), "floor", "of floor", "÷ best",
        "goal", "÷ goal", "instr/elem", "issue",
    )  # fmt: skip


def peers_in(rows: Iterable[Result]) -> tuple[str, ...]:
    """Peers that some row was timed against."""
    timed = {c.name for r in rows for c in r.columns if c.time and not c.ours}
    return tuple(p for p in PEERS if p in timed)


def line(row: Result, peers: Iterable[str]) -> tuple[str, ...]:
    """One row: milliseconds, the floor and ratios; instructions for each element and the milliseconds that they take,
    marked where those are more than the floor; a refused row says why in place of the kernel's time."""
    ours = next((c for c in row.columns if c.ours and c.name == row.chosen), None)
    time = ours.time if ours else None
    said = number(row.ours_ms) if row.ours_ms else row.status if row.status != "measured" else "–"
    kernel = f"{row.chosen or 'unfused'}{' (pending)' if ours and ours.note else ''}"
    share = f"{row.of_floor:.0%}" if row.of_floor else "–"
    within = f"{number(time.p20)}–{number(time.p80)}" if time else "–"
    return (
        row.fusion, row.workload, row.mode, kernel, said, within,
        *(number(row.ms(p)) for p in peers), number(row.floor_ms), share, number(row.to_best), number(row.goal_ms),
        number(row.to_goal), number(row.per_element), f"{number(row.issue_ms)}{'*' if row.issue_binds else ''}",
    )  # fmt: skip


def remarks(rows: Iterable[Result]) -> list[str]:
    """Why rows were refused and competitors not timed, one line each."""
    found = []
    for row in rows:
        where = f"{row.fusion} {row.workload}"
        if row.issue_binds:
            found.append(
                f"{where}: {number(row.per_element)} instructions an element take {number(row.issue_ms)} ms to issue, "
                f"more than the floor of {number(row.floor_ms)} ms"
            )
        if row.reason:
            found.append(f"{where}: {row.reason}")
        for c in row.columns:
            if c.reason and row.status == "measured":
                found.append(f"{where}, {c.name}: {c.reason}")
    return found


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


CHANGED = "measured on other kernels or parameters than are installed now"
_PAGE = (
    "fusion", "workload", "kernel", "ours ms", "eager", "compile", "library", "floor", "of floor", "÷ best", "÷ goal",
    "instr/elem",
)  # fmt: skip


def markdown(rows: Iterable[Result], outdated: Collection[tuple[str, str]] = ()) -> str:
    """A table for a page of documentation: one line per workload that was measured, of libraries the fastest alone.
    Rows that are ``outdated`` carry a mark, which a line under the table explains."""
    rows = tuple(rows)
    lines = [f"| {' | '.join(_PAGE)} |", f"|{' --- |' * len(_PAGE)}"]
    for row in rows:
        if row.status != "measured":
            continue
        libraries = [(ms, c.name) for c in row.columns if not c.ours and (ms := row.ms(c.name))]
        best = min((x for x in libraries if x[1] not in ("eager", "compile")), default=None)
        library = f"{number(best[0])} {best[1]}" if best else "–"
        graph = f"{' (graph)' if row.mode == 'g' else ''}{' †' if row.key in outdated else ''}"
        cells = dict(zip(header((row,)), line(row, peers_in((row,))), strict=True))
        cells |= {"fusion": f"`{row.fusion}`", "workload": f"{row.workload}{graph}", "library": library}
        lines.append(f"| {' | '.join(cells.get(title, '–') for title in _PAGE)} |")
    if any(r.status == "measured" and r.key in outdated for r in rows):
        lines += ["", f"† {CHANGED}."]
    return "\n".join(lines) + "\n"


def ceilings(run: Run) -> str:
    """The ceilings of a run in one line."""
    c = run.ceilings
    memory = ", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in c.named().items())
    products = ", ".join(f"{name} matmul {rate / 1e12:.0f} TFLOP/s" for name, rate in c.matmul.items())
    issue = f"{c.issue_rate / 1e9:.0f} G warp instructions/s" if c.issue_rate else ""
    return f"ceilings {run.date}: {', '.join(part for part in (memory, products, issue) if part)}"
