"""For kernel authors: ``validate``, ``new``, ``repro``."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from fusionreg.cli.app import FAILED, app
from fusionreg.cli.choices import Device
from fusionreg.cli.output import JSON_HELP, print_json, table


@app.command()
def validate(
    path: Annotated[Path, typer.Argument(help="a spec in JSON, or a plugin's package or project folder")],
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Checks every spec of a plugin. Nothing is compiled; validating a package imports it, a JSON file runs nothing."""
    from fusionreg.core.validate.paths import validate_path

    results = validate_path(path)
    if json:
        print_json([r.to_dict() for r in results])
    else:
        table("", ("spec", "status", "problem"), [(r.name, r.status, r.reason) for r in results], status=1)
    if any(r.status != "ok" for r in results):
        raise typer.Exit(FAILED)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="family.words of the first fusion, e.g. acme.bias_relu2")],
    directory: Annotated[Path | None, typer.Option("--dir", help="Where to put it (default: ./NAME).")] = None,
) -> None:
    """Makes a plugin distribution with one working fusion, its kernel and its test."""
    from fusionreg.core.scaffold import create, prefix_owner

    made = create(name, directory)
    if owner := prefix_owner(name):
        typer.echo(
            f"warning: the prefix {name.split('.')[0]} is that of the installed plugin {owner}: beside it, this one "
            "will not load; choose another first word",
            err=True,
        )
    typer.echo(f"made {made}\nnext:\n  pip install -e {quote(str(made))}\n  fusionreg run {name}")


@app.command()
def repro(
    fusion: Annotated[str, typer.Argument(help="its name")],
    kernel: Annotated[str, typer.Option(help="the kernel")],
    case: Annotated[str, typer.Option(help="the case, as `fusionreg run` prints it")],
    device: Annotated[Device, typer.Option(help="sim, cuda, or auto: a GPU where there is one")] = Device.SIM,
    out: Annotated[Path, typer.Option(help="the folder to write")] = Path("repro"),
) -> None:
    """Writes a stand-alone folder for one conformance case: rendered CUDA, inputs, reference, a script that runs it."""
    from fusionreg.api import load_registry
    from fusionreg.core.proof.repro import write

    made = write(load_registry().catalog, fusion, kernel, case, device=device.value, folder=out)
    typer.echo(f"wrote {made}\nnext:\n  python {quote(str(made / 'run.py'))}")
