"""The machine and the cache: ``doctor``, ``cache``."""

from __future__ import annotations

from typing import Annotated

import typer

from fusionreg.cli.app import FAILED, app
from fusionreg.cli.output import JSON_HELP, print_json, table

cache_app = typer.Typer(help="The disk cache of compiled kernels.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]


@app.command()
def doctor(json: Json = False) -> None:
    """What this machine can do: compilers, headers, GPU, cache; and what to install for the rest."""
    from fusionreg.core import doctor as core

    checks = core.examine()
    if json:
        print_json([c.to_dict() for c in checks])
    else:
        table(
            "", ("check", "status", "found", "to do"), [(c.name, c.status, c.found, c.advice) for c in checks], status=1
        )
    if any(c.status == "missing" and c.required for c in checks):
        raise typer.Exit(FAILED)


@cache_app.command("status")
def status(json: Json = False) -> None:
    """Where the cache is, and how much of what it holds."""
    from fusionreg.core.cache import Cache

    found = Cache().status()
    facts = {
        "path": found.path or f"memory alone: {found.reason}",
        "entries": found.entries,
        "bytes": found.bytes,
        "limit": found.limit,
        **{f"{kind} entries": count for kind, (count, _) in found.kinds.items()},
    }
    print_json(facts) if json else table("", ("what", "value"), facts.items())


@cache_app.command("clear")
def clear(kind: Annotated[str, typer.Option(help="only entries of this kind, as `status` names them")] = "") -> None:
    """Deletes every entry."""
    from fusionreg.core.cache import Cache

    removed, freed = Cache().clear(kind=kind or None)
    typer.echo(f"removed {removed} entries, {freed} bytes")


@cache_app.command("why")
def why(
    name: Annotated[str, typer.Argument(help="a fusion")],
    arch: Annotated[str, typer.Option(help="the architecture, e.g. sm_90a")] = "sm_90a",
    json: Json = False,
) -> None:
    """Why kernels of a fusion would be compiled anew: which part of the key differs from the nearest cached entry."""
    from fusionreg.core.cache import Cache
    from fusionreg.core.proof.units import cache_misses
    from fusionreg.core.registry.catalog import load

    rows = cache_misses(load()[name], arch, Cache())
    if json:
        return print_json([{"kernel": k, "dtypes": d, "reason": r} for k, d, r in rows])
    table("", ("kernel", "dtypes", "why it would miss"), [(k, d, r or "it would hit") for k, d, r in rows])
