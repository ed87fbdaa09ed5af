"""Fills the generated parts of ``docs/`` from the code: ``python tools/docs.py [--check]``.

A generated part stands between ``<!-- begin NAME -->`` and ``<!-- end -->``. With ``--check`` nothing is written and a
part that is out of date is an error; a test runs it so.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from inspect import getdoc, signature
from pathlib import Path
from typing import Any

import typer.main

from fusionreg import hookspecs
from fusionreg.benching import as_installed
from fusionreg.cli import commands  # noqa: F401  registers the commands
from fusionreg.cli.app import app
from fusionreg.core.bench import listing, results, summary
from fusionreg.core.expressions import FUNCTIONS, PREDICATES
from fusionreg.core.planner.executor import EXECUTORS
from fusionreg.core.proof import evidence
from fusionreg.core.registry.catalog import load
from fusionreg.core.spec import (
    ITERATION,
    AttributeSpec,
    Case,
    FusionSpec,
    KernelSpec,
    OpSpec,
    Region,
    Tolerance,
    Workload,
)
from fusionreg.core.targets import SHIPPED, accepts, target

ROOT = Path(__file__).parents[1]
ACME = ROOT / "tests" / "third_party" / "acme"
PART = re.compile(r"(<!-- begin (?P<name>[^>]*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.S)
LANGUAGES = {".toml": "toml", ".py": "python", ".j2": "cuda"}


def file(name: str) -> str:
    path = ACME / name
    return f"`{path.relative_to(ACME.parent)}`\n\n```{LANGUAGES[path.suffix]}\n{path.read_text().rstrip()}\n```\n"


def hooks() -> str:
    """Every hook with its signature and the first paragraph of its contract."""
    rows = []
    for name, function in vars(hookspecs).items():
        if hasattr(function, "fusionreg_spec"):
            parameters = ", ".join(signature(function).parameters)
            rows.append(f"| `{name}({parameters})` | {_line(getdoc(function))} |")
    return "\n".join(["| hook | contract |", "| --- | --- |", *rows, ""])


def fields() -> str:
    """Every field of every record."""
    lines = []
    for record in (FusionSpec, KernelSpec, AttributeSpec, Case, Workload, Tolerance, Region, OpSpec):
        lines += [
            f"### {record.__name__}",
            "",
            _line(getdoc(record)),
            "",
            "| field | default | meaning |",
            "| --- | --- | --- |",
        ]
        for name, info in record.model_fields.items():
            default = "required" if info.is_required() else f"`{_plain(info.default)}`"
            lines.append(f"| `{name}` | {default} | {_line(info.description)} |")
        lines.append("")
    return "\n".join(lines)


def expressions() -> str:
    """Every function of the expression language."""
    rows = ["| function | meaning |", "| --- | --- |"]
    rows += [f"| `{name}({', '.join('abc'[:least])}{', …' if most > least else ''})` | {MEANING[name]} |"
             for name, (_, least, most) in FUNCTIONS.items()]  # fmt: skip
    rows += [f"| `{name}({', '.join(('tensor', 'n')[:count]) if name != 'has' else 'feature'})` | {MEANING[name]} |"
             for name, count in PREDICATES.items()]  # fmt: skip
    return "\n".join([*rows, ""])


def iteration() -> str:
    """What a point-wise kernel's expressions may read."""
    rows = ["| name | value |", "| --- | --- |", *(f"| `{name}` | {meaning} |" for name, meaning in ITERATION.items())]
    return "\n".join([*rows, ""])


MEANING = {
    "ceildiv": "the quotient rounded up",
    "min": "the least of several",
    "max": "the largest of several",
    "align": "the least multiple of `b` that is not below `a`",
    "log2": "the logarithm; an integer of a power of two",
    "abs": "the absolute value",
    "sqrt": "the square root",
    "next_pow2": "the least power of two that is not below `a`",
    "gcd": "the greatest common divisor",
    "bits": "storage width of a dtype",
    "contiguous": "whether it is row-major without gaps; true of an absent one",
    "aligned": "whether its address is a multiple of `n` bytes; true of an absent one",
    "rank": "number of axes; -1 of an absent one",
    "form": "which of its declared forms it takes, from 0; -1 of an absent one",
    "present": "whether an optional input is given",
    "stride": "stride of axis `n` in elements",
    "shape": "extent of axis `n`",
    "has": "whether the architecture has a feature, such as `tma` or `wgmma`",
}


def cli() -> str:
    """Every command with its arguments and options."""
    lines = []

    def tell(command: object, path: str) -> None:
        for name, sub in sorted(getattr(command, "commands", {}).items()):
            if hasattr(sub, "commands"):
                tell(sub, f"{path} {name}")
                continue
            lines.extend([f"## {path} {name}", "", _line(sub.help), "", "| parameter | meaning |", "| --- | --- |"])
            for p in sub.params:
                text = getattr(p, "help", "") or ""
                lines.append(f"| `{' '.join(p.opts) if p.param_type_name == 'option' else p.name}` | {_line(text)} |")
            lines.append("")

    tell(typer.main.get_command(app), "fusionreg")
    return "\n".join(lines)


def patterns() -> str:
    """One table per fusion family: operators, dtypes, architectures, training, evidence."""
    lines = []
    catalog = load()
    for family in sorted({name.split(".")[0] for name in catalog.fusions}):
        lines += [f"## {family}", "", "| fusion | replaces | dtypes | kernel | architectures | proven on a GPU |"]
        lines.append("| --- | --- | --- | --- | --- | --- |")
        for entry in (e for n, e in sorted(catalog.fusions.items()) if n.startswith(f"{family}.")):
            replaces = "<br>".join(f"`{_line(x)}`" for x in entry.spec.pattern[0].splitlines())
            dtypes = " ".join(next(iter(entry.spec.dtypes.values()), ["any"]))
            for i, kernel in enumerate(entry.kernels):
                targets = " ".join(t for t in SHIPPED if any(accepts(d, target(t)) for d in kernel.spec.targets))
                head = (f"`{entry.name}`", replaces, dtypes) if i == 0 else ("", "", "")
                row = (*head, kernel.name, targets, evidence.state(entry, kernel))
                lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def measured() -> str:
    """What `fusionreg bench` wrote into benchmarks/results, one table per GPU."""
    lines = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        if "fusionreg-bench/" not in path.read_text(encoding="utf-8")[:200]:
            continue  # figures of another program
        found, outdated = as_installed(results.read(path))
        lines += [f"### {found.gpu}", "", f"| {' | '.join(summary.TITLES)} |", f"|{' --- |' * len(summary.TITLES)}"]
        lines += [f"| {' | '.join(group.cells())} |" for group in summary.groups(found, outdated)]
        lines += ["", listing.markdown(found.rows, outdated)]
        lines += [f"{listing.ceilings(run)[0].upper()}{listing.ceilings(run)[1:]}." for run in found.runs]
        lines.append("")
    return "\n".join(lines)


#: Of a row of whole models: fused calls, and Inductor in the mode that its competitor has.
TUNED = "fused, rest by Inductor, max-autotune"


def whole_models() -> str:
    """What `python -m whole_models` wrote into benchmarks/results, one table per file."""
    lines = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        if "fusionreg-whole-models/" not in (text := path.read_text(encoding="utf-8"))[:200]:
            continue
        rows = json.loads(text)["rows"]
        head = ["model", "step", "eager", "torch.compile", "max-autotune", "fused"]
        head += ["fused, max-autotune", "fused/best", "sites", "deepest", "kept", "masks", "error", "host"]
        lines += [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |", *map(_whole_model, rows)]
        where = sorted({f"{r['gpu']}, driver {r['driver']}, torch {r['torch']}" for r in rows})
        dates = sorted({r["date"][:10] for r in rows})
        lines += ["", f"{'; '.join(where)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.", ""]
    return "\n".join(lines)


def _whole_model(row: dict[str, Any]) -> str:
    def ms(way: str) -> float | None:
        found = row["times"].get(way, {})
        return found.get("graph_ms", found.get("ms"))

    others, ways = ("eager", "compile", "compile, max-autotune"), ("fused, rest by Inductor", TUNED)
    times = {w: t for w in (*others, *ways) if (t := ms(w)) is not None}
    best = min((times[w] for w in others if w in times), default=None)
    way = min((w for w in ways if w in times), key=times.__getitem__, default=ways[0])
    ratio = f"{times[way] / best:.2f}" if way in times and best else ""
    fused = row["fused"].get(way, {"sites": 0, "deepest": {}})
    depths, kept, host = fused["deepest"], row["saved"].get(way), row["times"].get(way, {})
    deepest = [max((d for stage, d in depths.items() if stage != "backward"), default=0)]
    deepest += [depths["backward"]] if row["step"] == "train" and "backward" in depths else []
    errors = [e.get("gradients", e.get("output")) for e in map(row["errors"].get, ("eager", way)) if e]
    given = [row["mode"], *([] if row["policy"] == "balanced" else [row["policy"]])]
    name = f"{row['model']} ({', '.join(filter(None, given))})" if any(given) else row["model"]
    cells = [name, row["step"], *(f"{times[w]:.3f}" if w in times else "" for w in (*others, *ways))]
    cells += [ratio, str(fused["sites"]), " / ".join(map(str, deepest))]
    cells += [f"{kept['mb']:.0f} MB", str(kept["masks"])] if kept else ["", ""]
    cells += [" / ".join(f"{e:.1e}" for e in errors if e is not None)]
    cells += [" / ".join(f"{host[k]:.2f}" for k in ("host_ms", "graph_host_ms") if k in host)]
    return f"| {' | '.join(cells)} |"


def executors() -> str:
    """Who may run the rest, and what is modelled of it."""
    rows = ["| executor | what is modelled | measured as |", "| --- | --- | --- |"]
    rows += [f"| `{e.name}` | {e.summary} | {', '.join(e.columns) or 'nothing'} |" for e in EXECUTORS.values()]
    return "\n".join([*rows, ""])


PARTS: dict[str, Callable[[], str]] = {
    "hooks": hooks,
    "fields": fields,
    "cli": cli,
    "expressions": expressions,
    "iteration": iteration,
    "patterns": patterns,
    "measured": measured,
    "executors": executors,
    "whole-models": whole_models,
}


def _line(text: str | None) -> str:
    """The first paragraph on one line, safe in a table."""
    return " ".join((text or "").split("\n\n")[0].split()).replace("|", "\\|").replace("``", "`")


def _plain(value: object) -> str:
    text = repr(dict(value)) if hasattr(value, "items") else repr(value)
    return text.replace("|", "\\|")


def filled(text: str) -> str:
    """``text`` with every generated part made anew."""

    def part(found: re.Match[str]) -> str:
        name = found["name"]
        body = file(name.removeprefix("file ")) if name.startswith("file ") else PARTS[name]()
        return f"{found[1]}{body}{found[4]}"

    return PART.sub(part, text)


def main() -> int:
    stale = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text()
        new = filled(text)
        if new != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new)
    print(f"{'out of date' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
