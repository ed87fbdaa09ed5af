"""How results are printed: JSON or a rich table, nothing computed."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

JSON_HELP = "Print JSON instead of a table."

STYLES = {
    "PASSED": "green",
    "fused": "green",
    "ok": "green",
    "SKIPPED": "yellow",
    "SKIPPED_UNSUPPORTED": "yellow",
    "fallback": "yellow",
    "pending": "yellow",
}


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 160  # a pipe gets whole lines, not 80 columns
    return Console(stderr=stderr, width=wide, highlight=False)


def print_json(value: Any) -> None:
    """``value`` on stdout. A record is printed in its own JSON, which it reads back; elsewhere a number that JSON lacks
    is printed as its name."""
    if hasattr(value, "model_dump_json"):
        text = value.model_dump_json(indent=2)
    else:
        text = json.dumps(_finite(value), indent=2, default=str, allow_nan=False)
    sys.stdout.write(f"{text}\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], status: int | None = None) -> None:
    """Prints rows; column number ``status`` is coloured by its word. A pipe gets each row as one line, however long."""
    if not sys.stdout.isatty():
        lines = [title] if title else []
        sys.stdout.writelines(f"{line}\n" for line in lines + _aligned([columns, *([str(c) for c in r] for r in rows)]))
        return
    from rich.table import Table
    from rich.text import Text

    view = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        view.add_column(column, overflow="fold", no_wrap=i == 0)
    for row in rows:
        words = [str(c) for c in row]
        view.add_row(*(Text(w, STYLES.get(w, "red") if i == status else "") for i, w in enumerate(words)))
    console().print(view)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Words below one another; a word of several lines takes as many."""
    lines = [line for row in rows for line in zip_longest(*(word.split("\n") for word in row), fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(w.ljust(n) for w, n in zip(line, widths, strict=True)).rstrip() for line in lines]


@contextmanager
def progress(description: str, quiet: bool = False) -> Iterator[Any]:
    """A progress bar on stderr; yields ``tell(done, total, what)``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
        console=console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task(description, total=None, what="")

        def tell(done: int, total: int, what: str = "") -> None:
            bar.update(task, completed=done, total=total, what=what)

        yield tell


def writable(path: Path) -> None:
    """Told before the work: :class:`OSError` where a file could not be written at ``path``; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    there = path.exists()
    with path.open("ab"):
        pass
    if not there:
        path.unlink()


def foreign_code() -> redirect_stdout[Any]:
    """While a model's own code runs: what it prints is none of our output."""
    return redirect_stdout(sys.stderr)


def near(source: str) -> str:
    """``file:line (module)`` with the file as seen from the current folder, or from where packages are installed."""
    return source.removeprefix(f"{Path.cwd()}{os.sep}").rpartition(f"site-packages{os.sep}")[2]


def short(reason: str, limit: int = 400) -> str:
    """One line of at most so many characters."""
    text = " ".join(reason.split())
    return text if len(text) <= limit else f"{text[:limit]} …"


def code_at(source: str) -> str:
    """The line of code that ``file:line`` or ``file:line (module)`` names; "" where there is none."""
    import linecache

    file, _, rest = source.partition(" ")[0].rpartition(":")
    return linecache.getline(file, int(rest)).strip() if file and rest.isdecimal() else ""


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
