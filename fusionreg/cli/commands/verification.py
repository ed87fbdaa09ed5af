"""A model's fused sites against the operators they replaced: ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusionreg.cli.app import FAILED, NOTHING, app
from fusionreg.cli.choices import INPUT_HELP, MODEL_HELP, Device, Policy, declared
from fusionreg.cli.commands.models import tell_nothing
from fusionreg.cli.output import JSON_HELP, foreign_code, near, number, print_json, progress, short, table

if TYPE_CHECKING:
    from fusionreg.verifying import Verification


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    input: Annotated[list[str] | None, typer.Option(help=INPUT_HELP)] = None,
    runs: Annotated[
        int | None,
        typer.Option(min=0, help="Runs on inputs made from --seed, the next seed …; 1 without --data, else 0."),
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="A run on the inputs in this .npz, arrays by input name; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs; 0: those that the model brings, if it brings any.")] = 0,
    policy: Annotated[Policy, typer.Option(help="off, conservative, balanced or aggressive")] = Policy.BALANCED,
    device: Annotated[Device, typer.Option(help="sim, cuda, or auto: a GPU where there is one")] = Device.AUTO,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Runs a model fused, and at each fused site the unfused operators on the very values that reach it.

    Both are held against float64: the kernel must be as near as twice the operators' own error and one ulp. Then the
    whole is compared with its original artefact. Exit status: 0, 5 where nothing is fused, 1 where anything is wrong.
    """
    from fusionreg.api import load_registry
    from fusionreg.integrations import open_model
    from fusionreg.verifying import verify_opened

    types = declared(input)
    registry = load_registry(device=device.value)
    opened = open_model(model, ops=registry.catalog.ops, declared=types)
    plan = registry.plan(opened, policy=policy.value)
    with progress(f"verifying {Path(model).name}", quiet=json) as tell, foreign_code():
        found = verify_opened(
            registry, opened, plan, name=model, runs=runs, seed=seed, data=data or (), device=device.value,
            progress=tell,
        )  # fmt: skip
    if json:
        print_json(found.to_dict())
    else:
        show_verification(found)
    if not found.ok:
        raise typer.Exit(FAILED)
    if not found.sites:
        tell_nothing(model, policy)
        raise typer.Exit(NOTHING)


def show_verification(found: Verification) -> None:
    """One line per site with its errors beside those of the unfused operators, what was wrong, then the whole."""

    def said(run: int, reason: str) -> str:
        return short(f"{found.runs[run]}: {reason}" if run >= 0 and len(found.runs) > 1 else reason)

    if found.sites:
        table(
            "sites, errors against float64",
            ("fusion", "kernel", "status", "at", "max abs", "unfused", "max rel", "unfused"),
            [
                (
                    s.fusion, s.kernel.rpartition("/")[2] or "none", s.status, near(s.source),
                    number(s.max_abs if s.compared else None), number(s.unfused_abs),
                    number(s.max_rel if s.compared else None), number(s.unfused_rel),
                )
                for s in found.sites
            ],
            status=2,
        )  # fmt: skip
    if told := [s for s in found.sites if s.reason]:
        table(
            "\nreasons",
            ("fusion", "status", "at", "reason"),
            [(s.fusion, s.status, near(s.source), said(s.run, s.reason)) for s in told],
            status=1,
        )
    d = found.drift
    table(
        "\nthe whole against the original",
        ("status", "max abs", "max rel", "fused", "original", "unfused", "reason"),
        [(d.status, *map(number, (d.max_abs, d.max_rel, d.fused, d.original, d.unfused)), said(d.run, d.reason))],
        status=0,
    )
    typer.echo(f"\n{found.summary}")
