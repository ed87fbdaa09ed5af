"""Which fused site changes a model's result: ``bisect``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fusionreg.cli.app import FAILED, NOTHING, app
from fusionreg.cli.choices import INPUT_HELP, MODEL_HELP, Device, Policy, declared
from fusionreg.cli.commands.models import tell_nothing
from fusionreg.cli.output import JSON_HELP, print_json, progress

#: The result is wrong without any fusion.
UNFUSED = 4


@app.command()
def bisect(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    input: Annotated[list[str] | None, typer.Option(help=INPUT_HELP)] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Deviation from the original that is allowed, over the largest magnitude of an "
                     "output; by default the numeric contract decides."),
    ] = None,
    policy: Annotated[Policy, typer.Option(help="off, conservative, balanced or aggressive")] = Policy.BALANCED,
    device: Annotated[Device, typer.Option(help="sim, cuda, or auto: a GPU where there is one")] = Device.AUTO,
    seed: Annotated[int, typer.Option(help="Of the inputs; 0: those that the model brings, if it brings any.")] = 0,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:  # fmt: skip
    """Finds the first fused site that changes a model's result, by fusing the first N sites of its plan.

    Exit status: 0 where the result is right with all sites, 1 where a site is to blame, 4 where the result is wrong
    without any fusion, 5 where nothing is fused.
    """
    from fusionreg.api import load_registry
    from fusionreg.bisecting import bisect_model

    types = declared(input)
    registry = load_registry(device=device.value)
    with progress(f"bisecting {Path(model).name}", quiet=json) as tell:
        found = bisect_model(
            registry, model, device=device.value, seed=seed, policy=policy.value, tolerance=tolerance, declared=types,
            progress=tell,
        )  # fmt: skip
    if json:
        print_json(asdict(found))
    else:
        typer.echo(str(found))
    if found.unfused:
        raise typer.Exit(UNFUSED)
    if found.index is not None:
        raise typer.Exit(FAILED)
    if not found.sites:
        tell_nothing(model, policy)
        raise typer.Exit(NOTHING)
