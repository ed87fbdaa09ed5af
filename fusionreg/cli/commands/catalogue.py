"""What there is: ``list``, ``show``, ``plugins``, ``schema``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fusionreg.cli.app import FAILED, NOTHING, app
from fusionreg.cli.output import JSON_HELP, print_json, table

Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


@app.command("list")
def list_(
    json: Json = False,
    tag: Annotated[str, typer.Option(help="Only fusions with this tag.")] = "",
    plugin: Annotated[str, typer.Option(help="Only fusions of this plugin.")] = "",
) -> None:
    """Every fusion installed, from a cached manifest: no plugin is imported when nothing changed."""
    from fusionreg.core import manifest

    known = manifest.read()
    rows = [r for r in known if (not tag or tag in r["tags"]) and (not plugin or plugin == r["plugin"])]
    if json:
        print_json(rows)
    else:
        show_rows(rows)
    if not rows and (tag or plugin):
        tags, plugins = sorted({t for r in known for t in r["tags"]}), sorted({r["plugin"] for r in known})
        typer.echo(f"nothing matches; tags: {', '.join(tags)}; plugins: {', '.join(plugins)}", err=True)
        raise typer.Exit(NOTHING)


def show_rows(rows: list[dict[str, Any]]) -> None:
    table(
        "",
        ("fusion", "plugin", "version", "kernels", "evidence", "summary"),
        [
            (
                r["name"],
                r["plugin"],
                r["version"],
                ", ".join(k["name"] for k in r["kernels"]),
                "yes" if r["evidence"] else "no",
                r["summary"],
            )
            for r in rows
        ],
    )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a fusion")],
    json: Json = False,
    source: Annotated[bool, typer.Option("--source", help="Print the rendered CUDA of each kernel.")] = False,
    arch: Annotated[str, typer.Option(help="Architecture to render for (default: sm_90a); of --source.")] = "",
    kernel: Annotated[str, typer.Option(help="Only this kernel; of --source.")] = "",
    dtype: Annotated[str, typer.Option(help="Of every dtype variable (default: its first); of --source.")] = "",
) -> None:
    """One fusion: its pattern, tensors, constraints and kernels; with --source the CUDA that would be compiled."""
    from fusionreg.core import describe
    from fusionreg.core.errors import ArgumentError
    from fusionreg.core.registry.catalog import load

    given = [f"--{k}" for k, v in (("arch", arch), ("kernel", kernel), ("dtype", dtype)) if v]
    if given and not source:
        raise ArgumentError("cannot show", name, f"{' and '.join(given)} without --source", "--source with these")
    catalog = load()
    entry = catalog[name]
    if source and not entry.spec.open and not entry.kernels:
        raise ArgumentError("cannot show", name, "no kernel", "a fusion with a kernel", catalog.lost(name))
    if source:
        units = list(describe.sources(entry, arch=arch or "sm_90a", kernel=kernel, dtype=dtype))
        if json:
            return print_json(
                [
                    {"kernel": u.kernel, "target": u.target, "options": u.options, "entry": u.entry, "text": u.text}
                    for u in units
                ]
            )
        for unit in units:
            typer.echo(f"// {unit.kernel} for {unit.target}: {' '.join(unit.options)}\n{unit.text}")
    elif json:
        print_json(entry.spec)
    else:
        typer.echo(describe.text(entry))


@app.command()
def plugins(
    json: Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when a plugin failed.")] = False,
) -> None:
    """Every plugin found, and why those that failed did."""
    from fusionreg.core.registry.catalog import load

    catalog = load()
    rows: list[dict[str, Any]] = catalog.plugin_rows()
    if json:
        print_json(rows)
    else:
        table(
            "",
            ("plugin", "distribution", "version", "status", "fusions", "reason"),
            [(r["name"], r["distribution"], r["version"], r["status"], len(r["fusions"]), r["reason"]) for r in rows],
            status=3,
        )
    if strict and catalog.failures:
        raise typer.Exit(FAILED)


@app.command()
def schema(record: Annotated[str, typer.Argument(help="fusion or kernel")] = "fusion") -> None:
    """The JSON schema of a spec record."""
    from fusionreg.core.errors import UnknownNameError
    from fusionreg.core.spec import FusionSpec, KernelSpec, Record

    records: dict[str, type[Record]] = {"fusion": FusionSpec, "kernel": KernelSpec}
    if record not in records:
        raise UnknownNameError.among("record", record, records)
    print_json(records[record].model_json_schema())
