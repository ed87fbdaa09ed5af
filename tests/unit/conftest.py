"""Synthetic plugins: a folder on ``sys.path`` that holds packages and distributions, as pip would lay them out."""

from __future__ import annotations

import fcntl
import functools
import importlib
import json
import os
import sys
from pathlib import Path

import pytest
from catalogs import FAMILIES, shipped


class Site:
    """A site-packages folder of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")

    def dist(self, name: str, entry_points: str, version: str = "1.0", metadata: bool = True, folder: str = "") -> Path:
        """Distribution metadata; ``entry_points``: lines below ``[fusionreg]``."""
        info = self.folder / (folder or f"{name.replace('-', '_')}-{version}.dist-info")
        info.mkdir(parents=True)
        (info / "entry_points.txt").write_text(f"[fusionreg]\n{entry_points}\n", "utf-8")
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
        return info

    def plugin(self, name: str, code: str, templates: dict[str, str] | None = None) -> None:
        """A package ``fusionreg_NAME`` with its entry point ``NAME``."""
        package = f"fusionreg_{name}"
        self.write({f"{package}/__init__.py": code})
        self.write({f"{package}/{file}": text for file, text in (templates or {}).items()})
        self.dist(f"fusionreg-{name}", f"{name} = {package}")


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("FUSIONREG_LOAD_PLUGINS", raising=False)
    monkeypatch.delenv("FUSIONREG_DISABLE_PLUGINS", raising=False)
    importlib.invalidate_caches()
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="session")
def kernel_states(tmp_path_factory) -> dict[str, str]:
    """Kernel → its state of evidence, of all that ship: every unit of theirs is rendered, once for all workers. Those
    who wait for it render other families meanwhile."""
    from fusionreg.core.proof import evidence

    def states(family: str) -> dict[str, str]:
        own = [e for e in shipped().fusions.values() if e.plugin == family]
        entries = [*own, *(m for e in own for m in e.members)]
        with pytest.MonkeyPatch.context() as patch:  # a kernel of an open fusion is what its members' are
            patch.setattr(evidence, "digest", functools.cache(evidence.digest))
            return {k.key: evidence.state(e, k) for e in entries for k in e.kernels}

    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # shared by the workers
    found: dict[str, str] = {}
    for wait in (fcntl.LOCK_NB, 0):
        for family in FAMILIES:
            with (folder / f"kernel-states-{family}").open("a+", encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | wait)
                except BlockingIOError:
                    continue
                file.seek(0)
                text = file.read()
                if not text:
                    file.write(text := json.dumps(states(family)))
                found |= json.loads(text)
    return found
