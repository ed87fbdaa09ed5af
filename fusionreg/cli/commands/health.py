"""The machine and the cache: ``doctor``, ``cache``."""

from __future__ import annotations

from typing import Annotated

import typer

from fusionreg.cli.main import FAILED, app
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

    facts = Cache.default().status()
    print_json(facts) if json else table("", ("what", "value"), facts.items())


@cache_app.command("clear")
def clear() -> None:
    """Deletes every entry."""
    from fusionreg.core.cache import Cache

    typer.echo(f"removed {Cache.default().clear()} entries")


@cache_app.command("why")
def why(name: Annotated[str, typer.Argument(help="a fusion, or fusion/kernel")], json: Json = False) -> None:
    """Why the last look-up of a kernel missed: which part of its key differs from the nearest entry."""
    from fusionreg.core.cache import Cache

    facts = Cache.default().why(name)
    print_json(facts) if json else table(
        "", ("part of the key", "was", "is"), [(f["part"], f["was"], f["is"]) for f in facts]
    )
