"""The command line: parse, one call into the core, print. Heavy imports wait until a command runs."""

from __future__ import annotations

import os
import sys

import typer

from fusionreg import __version__
from fusionreg.cli.app import FAILED, USAGE, app


def _version(value: bool) -> None:
    if value:
        typer.echo(f"fusionreg {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """The plugin registry of fused CUDA kernels: find, prove and apply fusions."""


def main(argv: list[str] | None = None) -> None:
    """Entry point. Typed errors and unusable files become one line on stderr; anything else is a bug: a traceback."""
    from fusionreg.cli import commands  # noqa: F401  registers every command on `app`
    from fusionreg.core.errors import FusionregError, UnknownNameError

    args = sys.argv[1:] if argv is None else argv
    _plugin_commands(args)
    try:
        app(args)
    except UnknownNameError as error:
        _complain(error)
        sys.exit(USAGE)
    except FusionregError as error:
        _complain(error)
        sys.exit(FAILED)
    except BrokenPipeError:  # `fusionreg list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except OSError as error:  # a file that the command line names
        if error.filename is None:
            raise
        _complain(f"cannot use {error.filename}: {error.strerror}.")
        sys.exit(FAILED)


def _complain(error: Exception | str) -> None:
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(str(error), err=True)
    for note in getattr(error, "__notes__", ()):
        typer.echo(note, err=True)


def _plugin_commands(args: list[str]) -> None:
    """Adds commands of plugins, loading them only when the word typed is none of ours."""
    word = next((a for a in args if not a.startswith("-")), None)
    if word is None or word in _own_words():
        return
    from fusionreg.core.registry.catalog import load

    for plugin, commands in load().hook("register_commands"):
        for name, sub in commands.items():
            if name not in _own_words():
                sub.info.help = sub.info.help or f"Command of the plugin {plugin}."
                app.add_typer(sub, name=name)


def _own_words() -> set[str]:
    commands = {c.name or (c.callback.__name__ if c.callback else "") for c in app.registered_commands}
    return commands | {g.name or "" for g in app.registered_groups}
