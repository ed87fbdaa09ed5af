"""Results as one static page: ceilings, a roofline, and bars for every workload. Floor 7.

The roofline is drawn by matplotlib (extra ``bench``) and stands in the page as SVG; bars and tables are plain HTML. The
page loads nothing and runs nothing.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..errors import MissingDependencyError
from .listing import CHANGED, ceilings, number
from .results import Column, Result, Results, Run
from .summary import TITLES, groups

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6772; --page: #fff; --line: #d9dee3; --ours: #1a7f4b;
  --peer: #7d8ea1; --anchor: #c2ccd6; --floor: #c2410c; --goal: #7c3aed; --issue: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa5b1; --page: #14181d; --line: #2c343d;
  --ours: #3fb977; --peer: #6b7c8f; --anchor: #45525f; --floor: #fb923c; --goal: #a78bfa; --issue: #22d3ee; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
p, li, figcaption { color: var(--soft) } figure { margin: 1rem 0; background: #fff; border-radius: 6px; padding: .5rem }
figcaption { color: #5d6772; font-size: .85rem } svg { width: 100%; height: auto }
section.workload { border-top: 1px solid var(--line); padding: .8rem 0 }
section.workload h3 { font-size: 1rem; margin: 0; display: flex; gap: 1rem; flex-wrap: wrap; align-items: baseline }
section.workload h3 small { font-weight: 400; color: var(--soft) }
.bars { display: grid; grid-template-columns: 11rem 1fr 6rem; gap: .25rem .7rem; margin: .5rem 0; font-size: .88rem;
  position: relative }
.bars .name { text-align: right; overflow-wrap: anywhere } .bars .ms { font-variant-numeric: tabular-nums }
.track { position: relative; height: 1.15rem } .bar { height: 100%; border-radius: 2px; background: var(--peer) }
.ours .bar, .bar.ours { background: var(--ours) } .bar.anchor { background: var(--anchor) }
.bar.cut { clip-path: polygon(0 0, 100% 0, calc(100% - .5rem) 50%, 100% 100%, 0 100%) }
.mark { position: absolute; top: -2px; bottom: -2px; width: 2px } .mark.floor { background: var(--floor) }
.mark.goal { background: var(--goal) } .mark.issue { background: var(--issue) }
.key span { margin-right: 1.2rem; white-space: nowrap } .key i { display: inline-block; width: .8rem; height: .8rem;
  margin-right: .35rem; vertical-align: -1px; border-radius: 2px }
pre { background: color-mix(in srgb, var(--line) 40%, transparent); padding: .6rem; overflow-x: auto; font-size: .8rem }
table { border-collapse: collapse; font-size: .8rem; display: block; overflow-x: auto }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere }
th { min-width: 4rem; overflow-wrap: normal }
details summary { cursor: pointer; color: var(--soft); font-size: .85rem } .why { color: var(--floor) }
"""


def require() -> None:
    """:class:`MissingDependencyError` where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise MissingDependencyError(
            "cannot write", "a page of results", str(e), "matplotlib", "Install it with: pip install 'fusionreg[bench]'"
        ) from None


def write(results: Results, path: Path, outdated: Collection[tuple[str, str]] = ()) -> None:
    """Writes the page; rows that are ``outdated`` say so."""
    text = page(results, outdated)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def page(results: Results, outdated: Collection[tuple[str, str]] = ()) -> str:
    """The page as text; :class:`MissingDependencyError` without matplotlib."""
    require()
    fusions: dict[str, list[Result]] = {}
    for row in results.rows:
        fusions.setdefault(row.fusion, []).append(row)
    newest = sorted(results.runs, key=lambda run: run.date, reverse=True)
    body = [
        f"<h1>fusionreg on {escape(results.gpu)}</h1>",
        f"<p>{len(results.rows)} workloads. Medians of single launches with a flushed L2, or of CUDA-graph replays"
        " where a row says so. Every output was compared with float64 before it was timed.</p>",
        *(f"<p>{escape(_capital(ceilings(run)))}.</p>" for run in newest[:1]),
        _folded("ceilings of earlier runs", [ceilings(run) for run in newest[1:]]),
        _summary(results, outdated),
        f"<figure>{roofline(results)}<figcaption>Operations per second over operations per byte. Lines are ceilings"
        " measured in the same run; hollow marks are the best competitor.</figcaption></figure>",
        _key(),
    ]
    for fusion, rows in fusions.items():
        body.append(f"<h2>{escape(fusion)}</h2>")
        body += [_workload(row, results.runs[row.run], CHANGED if row.key in outdated else "") for row in rows]
    body += ["<h2>Environment</h2>", *(_environment(r) for r in newest)]
    title = f"fusionreg on {escape(results.gpu)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _key() -> str:
    marks = (
        ("ours", "our kernel that dispatch picks"), ("peer", "competitor, or another kernel of ours"),
        ("anchor", "library kernel for part of the work"), ("floor", "floor"), ("goal", "goal"),
        ("issue", "least time to issue the kernel's instructions, where that is more than the floor"),
    )  # fmt: skip
    spans = "".join(f'<span><i style="background: var(--{name})"></i>{text}</span>' for name, text in marks)
    return f'<p class="key">{spans}</p>'


def _workload(row: Result, run: Run, remark: str = "") -> str:
    timed = [c for c in row.columns if c.time]
    shown = [c.time.median for c in timed if c.time and (c.name == row.chosen or not c.ours)]  # slow siblings are cut
    longest = max([*shown, row.floor_ms, row.goal_ms or 0.0, row.issue_ms or 0.0]) or 1.0
    facts = [row.row, "CUDA graph" if row.mode == "g" else "", f"floor {number(row.floor_ms)} ms ({row.bound})"]
    facts += [f"{row.of_floor:.0%} of the floor's rate" if row.of_floor else ""]
    facts += [f"{number(row.to_best)} × the best competitor" if row.to_best else ""]
    facts += [f"{number(row.to_goal)} × the goal" if row.to_goal else ""]
    facts += [_moved(row, run), _issued(row)]
    small = " · ".join(escape(f) for f in facts if f)
    parts = [f'<section class="workload"><h3>{escape(row.workload)} <small>{small}</small></h3>']
    reasons = [f"{row.status}: {row.reason}" if row.reason else "", remark]
    parts += [f'<p class="why">{escape(why)}</p>' for why in reasons if why]
    if timed:
        marks = _mark("floor", row.floor_ms, longest) + _mark("goal", row.goal_ms, longest)
        marks += _mark("issue", row.issue_ms if row.issue_binds else None, longest)
        parts.append(f'<div class="bars">{"".join(_bar(c, row, longest, marks) for c in timed)}</div>')
    missing = [c for c in row.columns if c.reason and not row.reason]
    if missing:
        items = "".join(f"<li>{escape(c.name)}: {escape(c.reason)}</li>" for c in missing)
        parts.append(f"<ul>{items}</ul>")
    peer = f"<pre>{escape(row.peer)}</pre>" if row.peer else ""
    parts.append(f"<details><summary>problem</summary><p>{escape(row.problem)}</p>{peer}</details></section>")
    return "".join(parts)


def _moved(row: Result, run: Run) -> str:
    """Bytes per second against the ceiling of the row's read:write mix."""
    moved = row.read + row.written
    if not row.ours_ms or row.bound != "memory" or not moved:
        return ""
    ceiling = run.ceilings.rate(row.read, row.written)
    return f"{moved / row.ours_ms / 1e9:.2f} of {ceiling / 1e12:.2f} TB/s ({row.written / moved:.0%} written)"


def _issued(row: Result) -> str:
    """Instructions for each element, and the time that they take at least."""
    if not row.per_element:
        return ""
    most = "at most " if row.counted_by == "code" else ""
    time = f", {number(row.issue_ms)} ms to issue" if row.issue_ms else ""
    return f"{most}{number(row.per_element)} instructions an element{time}{' (binds)' if row.issue_binds else ''}"


def _bar(c: Column, row: Result, longest: float, marks: str) -> str:
    assert c.time is not None
    kind = "ours" if c.ours and c.name == row.chosen else "anchor" if c.computes else "peer"
    share = min(100.0, 100 * c.time.median / longest)
    kind += " cut" if c.time.median > longest else ""
    what = f"{c.computes or 'the whole workload'}{f' ({c.note})' if c.note else ''}"
    title = f"{what}; p20 {number(c.time.p20)}, p80 {number(c.time.p80)}, n {c.time.n}"
    name = f"{c.name} (pending)" if c.ours and c.note else c.name
    return (
        f'<div class="name">{escape(name)}</div><div class="track" title="{escape(title)}">'
        f'<div class="bar {kind}" style="width: {share:.2f}%"></div>{marks}</div>'
        f'<div class="ms">{number(c.time.median)} ms</div>'
    )


def _mark(kind: str, value: float | None, longest: float) -> str:
    return "" if value is None else f'<div class="mark {kind}" style="left: {100 * value / longest:.2f}%"></div>'


def _environment(run: Run) -> str:
    return _folded(f"versions and settings, {run.date}", [f"{k}: {v}" for k, v in run.environment.items()])


def _folded(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<details><summary>{escape(title)}</summary><ul>{items}</ul></details>" if lines else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _summary(results: Results, outdated: Collection[tuple[str, str]]) -> str:
    """A table of :func:`~.summary.groups`."""
    head = "".join(f"<th>{escape(title)}</th>" for title in TITLES)
    rows = [group.cells() for group in groups(results, outdated)]
    body = "".join(f"<tr>{''.join(f'<td>{escape(x)}</td>' for x in cells)}</tr>" for cells in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""


def roofline(results: Results) -> str:
    """The roofline of all measured rows as an SVG element."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusionreg", "font.size": 9}):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        _draw(figure.subplots(), results)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _draw(a: Any, results: Results) -> None:
    """Ceilings and one pair of marks a row, on matplotlib axes."""
    rows = [r for r in results.rows if r.ours_ms and r.flops]
    intensities = [r.flops / (r.read + r.written) for r in rows]
    low, high = min([0.1, *intensities]) / 2, max([1e3, *intensities]) * 2
    newest = max((run.date for run in results.runs), default="")
    for run in results.runs:
        c, faint = run.ceilings, 1.0 if run.date == newest else 0.3
        top = max([*c.matmul.values(), c.copy_rate * 10])
        a.plot([low, top / c.copy_rate], [low * c.copy_rate / 1e12, top / 1e12], color="#5d6772", lw=1, alpha=faint)
        names: dict[float, list[str]] = {}
        for name, rate in c.matmul.items():
            a.plot([rate / c.copy_rate, high], [rate / 1e12] * 2, color="#5d6772", lw=1, alpha=faint)
            near = next((r for r in names if 0.8 < r / rate < 1.25), rate)  # one label for neighbours
            names.setdefault(near, []).append(f"{name} {rate / 1e12:.0f}")
        labels = [(r / c.copy_rate, r, f"{', '.join(said)} TFLOP/s") for r, said in names.items()]
        labels.append((low * 8, low * 8 * c.copy_rate, f"copy {c.copy_rate / 1e12:.2f} TB/s"))
        for x, rate, text in labels if faint == 1.0 else ():  # beside the corner: nothing is above a roof
            a.annotate(f"{text} ", (x, rate / 1e12), ha="right", va="bottom", color="#5d6772")
    for row, x in zip(rows, intensities, strict=True):
        best = row.best
        if best and best.time:
            a.plot([x], [row.flops / best.time.median / 1e9], "o", mfc="none", mec="#7d8ea1", ms=6)
        a.plot([x], [row.flops / (row.ours_ms or 1.0) / 1e9], "o", color="#1a7f4b", ms=6)
    a.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    a.grid(True, which="major", color="#e5e9ed", lw=0.6)
