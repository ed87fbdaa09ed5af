"""The catalog of the shipped plugins, loaded once by each process that runs tests: it never changes."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from fusionreg.core.registry.catalog import Catalog, load

_PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
FAMILIES = tuple(sorted(_PROJECT["entry-points"]["fusionreg"]))


@cache
def shipped(*families: str) -> Catalog:
    """The catalog of these families, of all by default, whatever else is installed or asked for in the environment."""
    return load(allow=families or FAMILIES, deny=())
