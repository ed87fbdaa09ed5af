"""The application that every command registers on, and what exit statuses mean."""

from __future__ import annotations

import typer

FAILED, USAGE, NOTHING = 1, 2, 5

app = typer.Typer(
    name="fusionreg",
    help="The plugin registry of fused CUDA kernels: find, prove and apply fusions.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 ok, 1 failure, 2 usage, 5 nothing matched.",
)
