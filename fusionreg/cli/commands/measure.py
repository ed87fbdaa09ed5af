"""Speed: ``bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusionreg.cli.main import FAILED, app
from fusionreg.cli.output import JSON_HELP, print_json, progress, table

if TYPE_CHECKING:
    from fusionreg.core.bench import Result, Results


@app.command()
def bench(
    fusions: Annotated[list[str] | None, typer.Argument(help="fusions; all by default")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only workloads whose name or row is like this.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of result files, one per GPU.")] = Path("benchmarks/results"),
    again: Annotated[bool, typer.Option("--again", help="Measure also what the file has figures for.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no further workload is begun.")
    ] = None,
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
    from fusionreg.benching import bench as measure
    from fusionreg.core.bench.results import read

    if html is not None:
        from fusionreg.core.bench.page import require

        require()
    if results is not None:
        found = read(results)
        rows, ok, said = found.rows, True, ""
    else:
        with progress("measuring", quiet=json) as tell:
            outcome = measure(
                fusions or (), only=only or (), out=out, again=again, time_limit=time_limit, progress=tell
            )
        found, rows, ok = outcome.results, outcome.rows, outcome.ok
        left = f", {outcome.left} left for lack of time" if outcome.left else ""
        said = f"{outcome.measured} measured, {outcome.kept} kept{left}: {outcome.path}"
    if html is not None:
        from fusionreg.core.bench.page import write

        write(found, html)
    if json:
        print_json(found.model_copy(update={"rows": rows}))
    else:
        show_results(found, rows)
        typer.echo(said or f"{len(rows)} rows: {results}")
    if not ok:
        raise typer.Exit(FAILED)


def show_results(found: Results, rows: tuple[Result, ...]) -> None:
    """One line per workload, the ceilings of the runs they were measured in, and what was refused."""
    from fusionreg.core.bench.listing import ceilings, header, line, peers_in, remarks

    peers = peers_in(rows)
    table(found.gpu, header(rows), [line(r, peers) for r in rows])
    for run in sorted({r.run for r in rows}):
        typer.echo(ceilings(found.runs[run]))
    for remark in remarks(rows):
        typer.echo(remark)
