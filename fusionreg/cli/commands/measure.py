"""Speed: ``bench``, ``tune``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusionreg.cli.app import FAILED, USAGE, app
from fusionreg.cli.choices import EXECUTOR_HELP
from fusionreg.cli.output import JSON_HELP, print_json, progress, table

if TYPE_CHECKING:
    from fusionreg.core.bench import Preparation, Result, Results


@app.command()
def bench(
    fusions: Annotated[list[str] | None, typer.Argument(help="fusions; all by default")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only workloads whose name or row is like this.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of result files, one per GPU.")] = Path("benchmarks/results"),
    again: Annotated[bool, typer.Option("--again", help="Measure also what the file has figures for.")] = False,
    frozen: Annotated[bool, typer.Option("--frozen", help="Parameters as shipped, not as tuned here.")] = False,
    peers: Annotated[
        list[str] | None, typer.Option(help="Only these competitors; `none` for our kernels alone.")
    ] = None,
    count: Annotated[
        bool, typer.Option(help="Count the instructions of kernels (with ncu, else a disassembler).")
    ] = True,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no further workload is begun.")
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only compile what the workloads need, for a run that follows.")
    ] = False,
    executor: Annotated[str, typer.Option(help=EXECUTOR_HELP)] = "",
    ship: Annotated[
        bool, typer.Option("--ship", help="Write the times into the plugins' packages: planning then goes by them.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with a roofline and bars (extra: bench).")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Show a file of results instead of measuring; needs no GPU.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Measures kernels against torch eager, torch.compile and bare libraries on a GPU, after checking their numbers.

    Workloads stand in the specs. Every row is written as soon as it is measured; a later run goes on where this one
    stopped, and measures again what changed.
    """
    from fusionreg.benching import as_installed
    from fusionreg.core.bench.results import PEERS, read

    if html is not None:
        from fusionreg.core.bench.page import require

        require()
    chosen = tuple(p for p in peers if p != "none") if peers else PEERS
    if prepare:
        with progress("compiling", quiet=json) as tell:
            ready = _spread("prepare", executor, time_limit)(
                fusions or (), only=only or (), out=out, again=again, frozen=frozen, progress=tell, peers=chosen
            )
        return print_json(vars(ready)) if json else typer.echo("\n".join((*ready.remarks, _said(ready))))
    old: Collection[tuple[str, str]] = ()
    if results is not None:
        found = read(results)
        found, old = as_installed(found)
        rows, ok, said = found.rows, True, ""
    else:
        with progress("measuring", quiet=json) as tell:
            outcome = _spread("bench", executor, time_limit)(
                fusions or (), only=only or (), out=out, again=again, frozen=frozen, progress=tell, count=count,
                peers=chosen,
            )  # fmt: skip
        found, rows, ok = outcome.results, outcome.rows, outcome.ok
        why = f"the device is lost: {outcome.lost}" if outcome.lost else "for lack of time"
        left = f", {outcome.left} left ({why})" if outcome.left or outcome.lost else ""
        said = f"{outcome.measured} measured, {outcome.kept} kept{left}: {outcome.path}"
    if ship:
        from fusionreg.benching import ship as shipping

        files = shipping(found)
        said = "\n".join(filter(None, (said, *(f"shipped: {path}" for path in files))))
    if html is not None:
        from fusionreg.core.bench.page import write

        write(found, html, old)
    if json:
        print_json(found.model_copy(update={"rows": rows}))
    else:
        show_results(found, rows, old)
        typer.echo(said or f"{len(rows)} rows: {results}")
    if not ok:
        raise typer.Exit(FAILED)


def _said(ready: Preparation) -> str:
    left = f", {ready.left} left" if ready.left else ""
    return f"{ready.ready} ready, {ready.kept} have figures{left}"


def _spread(command: str, executor: str, time_limit: float | None) -> Callable[..., Any]:
    """``bench``, its preparation or ``tune``, here or on workers."""
    if not executor:
        from fusionreg import benching

        return partial(getattr(benching, command), time_limit=time_limit)
    if time_limit is not None:
        typer.echo("error: --time-limit is kept by one process: leave out --executor", err=True)
        raise typer.Exit(USAGE)
    from fusionreg import spreading

    return partial(getattr(spreading, command), spreading.workers(executor))


def show_results(
    found: Results, rows: tuple[Result, ...], old: Collection[tuple[str, str]] = ()
) -> None:
    """One line per workload, the ceilings of the runs they were measured in, and what was refused."""
    from fusionreg.core.bench.listing import CHANGED, ceilings, header, line, peers_in, remarks
    from fusionreg.core.bench.summary import TITLES, groups

    peers = peers_in(rows)
    table(found.gpu, header(rows), [line(r, peers) for r in rows])
    table("Together", TITLES, [g.cells() for g in groups(found.model_copy(update={"rows": rows}), old)])
    for run in sorted({r.run for r in rows}):
        typer.echo(ceilings(found.runs[run]))
    for remark in remarks(rows):
        typer.echo(remark)
    for row in rows:
        if row.key in old:
            typer.echo(f"{row.fusion} {row.workload}: {CHANGED}")


@app.command()
def tune(
    fusions: Annotated[list[str] | None, typer.Argument(help="fusions; all by default")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only workloads whose name or row is like this.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Try also what the cache knows.")] = False,
    ship: Annotated[
        bool, typer.Option("--ship", help="Write the best into the plugins' packages: every machine then uses them.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no further kernel is begun.")
    ] = None,
    executor: Annotated[str, typer.Option(help=EXECUTOR_HELP)] = "",
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Tries the parameters of kernels on a GPU, after checking their numbers; later calls use the best.

    Results are kept in the cache for this GPU, driver and compiler, by class of problem: extents of one power of two
    share one. What is tuned here is not used where `--frozen` is given; what a plugin ships (`--ship`) is.
    """
    from fusionreg.core.bench.listing import number

    with progress("tuning", quiet=json) as tell:
        search = _spread("tune", executor, time_limit)
        found = search(fusions or (), only=only or (), again=again, ship=ship, progress=tell)
    if json:
        plain = [{k: v for k, v in vars(t).items() if k not in ("subject", "entry")} for t in found]
        return print_json([{**row, "trials": [vars(t) for t in row["trials"]]} for row in plain])
    rows = [
        (t.kernel, t.workload, " ".join(f"{k}={v}" for k, v in t.params.items()), number(t.ms), number(t.default_ms),
         "kept" if t.kept else t.tried, number(t.model), number(t.agreement), t.reason)
        for t in found
    ]  # fmt: skip
    table("", ("kernel", "workload", "best", "ms", "before", "tried", "model", "agrees", "remark"), rows)
