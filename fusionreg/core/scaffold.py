"""``fusionreg new``: a plugin distribution with one working fusion, made from the folder ``scaffold`` beside this file.

Floor 7. The generated project is the tutorial's, with the names exchanged.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from .errors import ArgumentError
from .registry.catalog import load

FILES = ("pyproject.toml", "{package}.py", "{stem}.cu.j2", "test_{stem}.py")


def create(name: str, directory: Path | None = None) -> Path:
    """Writes the distribution and returns its folder.

    Args:
        name: ``family.words``, the first fusion's name.
        directory: where; ``./family`` by default. It must not exist yet, or be empty.

    Raises: :class:`ArgumentError` for a bad name or a folder that holds something.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*", name):
        raise ArgumentError("cannot make a plugin", repr(name), "a bad name", "family.words in lower case", name=name)
    family, stem = name.split(".")
    folder = (directory or Path(family)).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError(
            "cannot make a plugin", str(folder), "the folder is not empty", "a new or empty folder", "Pass --dir"
        )
    words = {"family": family, "stem": stem, "name": name, "package": f"fusionreg_{family}", "constant": stem.upper()}
    source = files(__package__) / "scaffold_files"
    texts = {}
    for pattern in FILES:
        text = (source / f"{pattern.translate(_PLAIN)}.txt").read_text("utf-8")
        for word, value in words.items():
            text = text.replace(f"@{word}@", value)
        texts[pattern.format(**words)] = text
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        target = folder / words["package"] / file if file.endswith(".j2") else folder / file
        if file.endswith(".py") and not file.startswith("test_"):
            target = folder / words["package"] / "__init__.py"
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, "utf-8")
    return folder


def prefix_owner(name: str) -> str:
    """The installed plugin that owns the first word of ``name``, or ""."""
    prefix = name.partition(".")[0]
    return next((p.name for p in load().plugins if prefix in (p.name.replace("-", "_"), *p.prefixes)), "")


_PLAIN = str.maketrans("", "", "{}")
