"""What ``fusionreg list`` prints, kept on disk so that listing imports no plugin and no pydantic. Floor 3.

A row per fusion. The manifest is valid for exactly one state of the environment: the distributions with entry points in
our group, the files of their plugins' packages, this package's own files, and the allow and deny lists. Anything else,
a damaged file included, builds it anew; nothing is kept while a plugin fails, since what it lacks may come at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .places import cache_directory
from .registry import discovery

if TYPE_CHECKING:
    from .registry.catalog import Catalog
    from .registry.entries import FusionEntry, KernelEntry

FORMAT = 1
_SKIPPED = ("__pycache__", ".git")


def read() -> list[dict[str, Any]]:
    """The rows, ordered by (plugin, name): name, plugin, version, summary, tags, kernels, evidence.

    From disk when nothing changed, otherwise by loading the registry; a cache that cannot be written is no error.
    """
    key = environment_key()
    path = _path()
    rows = _stored(path, key)
    if rows is not None:
        return rows
    from .registry.catalog import load

    catalog = load()
    rows = list(entries(catalog))
    if path is not None and not catalog.failures:
        _store(path, key, rows)
    return rows


def entries(catalog: Catalog) -> Iterator[dict[str, Any]]:
    """A row for every fusion of a catalog."""
    proven = {row.name: proven_kernels(row.root) for row in catalog.plugins}
    for entry in catalog.fusions.values():
        spec = entry.spec
        ready = [k for k in entry.kernels if not k.spec.pending]
        yield {
            "name": spec.name,
            "plugin": entry.plugin,
            "version": spec.version,
            "summary": spec.summary,
            "tags": list(spec.tags),
            "kernels": [
                {"name": k.name, "targets": list(k.spec.targets), "plugin": k.plugin, "pending": k.spec.pending}
                for k in entry.kernels
            ],
            "evidence": bool(ready) and all(_keys(entry, k) <= proven.get(k.plugin, frozenset()) for k in ready),
        }


def _keys(entry: FusionEntry, kernel: KernelEntry) -> set[str]:
    """What a kernel is called in evidence: its key, and its keys in the fusion's members."""
    members = {k.key for m in entry.members for k in m.kernels if k.name == kernel.name and not k.spec.pending}
    return members if entry.spec.open else members | {kernel.key}


def proven_kernels(root: Path | None) -> frozenset[str]:
    """Keys of kernels for which the plugin ships evidence of a GPU run, in ``evidence`` in its package or beside it.

    Only whether it is there: whether it is of this very kernel is what the evidence test checks.
    """
    found: set[str] = set()
    for folder in (root / "evidence", root.parent / "evidence") if root else ():
        for path in sorted(folder.glob("*.json")):
            with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
                found.update(str(row["kernel"]) for row in json.loads(path.read_text("utf-8"))["kernels"])
    return frozenset(found)


# --- the key ---------------------------------------------------------------------------------------------------


def environment_key() -> str:
    """A digest of everything that decides what the rows are; imports nothing of any plugin."""
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update("\0".join(map(str, parts)).encode("utf-8", "surrogateescape") + b"\n")

    add(FORMAT, sys.version)
    allow, deny = discovery.chosen(os.environ)
    add("allow", *(sorted(allow) if allow is not None else ("*",)), "deny", *sorted(deny))
    found, broken = discovery.find()
    for reason in broken:
        add("broken", *reason)
    tops = {"fusionreg"}
    for entry in found:
        add("plugin", entry.name, entry.value, entry.distribution, entry.version)
        tops.add(entry.value.partition(":")[0].strip().split(".")[0])
    for top in sorted(tops):
        for file, stat in sorted(_files(top)):
            add(file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return digest.hexdigest()


def _files(top: str) -> Iterator[tuple[str, os.stat_result]]:
    """(path, stat) of every file of a top-level module or package, and of the evidence beside it."""
    spec = _find(top)
    if spec is None:
        return
    for folder in spec.submodule_search_locations or ():
        yield from _walk(folder)
        yield from _walk(os.path.join(os.path.dirname(folder), "evidence"))
    if not spec.submodule_search_locations and spec.origin:
        with suppress(OSError):
            yield spec.origin, os.stat(spec.origin)


def _find(top: str) -> ModuleSpec | None:
    """The spec that importing ``top`` would use, by the finders on the path."""
    finders: list[Any] = [*sys.meta_path, PathFinder]
    for finder in finders:
        with suppress(Exception):
            spec = finder.find_spec(top, None)
            if spec is not None:
                return spec
    return None


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with suppress(OSError), os.scandir(folder) as items:
        for item in items:
            if item.is_dir():
                if item.name not in _SKIPPED:
                    yield from _walk(item.path)
            elif not item.name.endswith(".pyc"):
                yield item.path, item.stat()


# --- the file --------------------------------------------------------------------------------------------------


def _path() -> Path | None:
    """One file per environment; None where there is no cache folder."""
    try:
        folder = cache_directory()
    except OSError:
        return None
    environment = hashlib.sha256(f"{sys.prefix}\0{os.path.dirname(__file__)}".encode()).hexdigest()[:16]
    return folder / "manifest" / f"{environment}.json"


def _stored(path: Path | None, key: str) -> list[dict[str, Any]] | None:
    """The rows on disk; None when there are none, or others than ``key`` speaks of, or they are damaged."""
    if path is None:
        return None
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.get("key") != key or not isinstance(data.get("rows"), list):
        return None
    return data["rows"] if data.get("digest") == _digest(data["rows"]) else None


def _store(path: Path, key: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Atomically, or not at all."""
    text = json.dumps({"key": key, "digest": _digest(rows), "rows": rows})
    name = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        if name:
            with suppress(OSError):
                os.unlink(name)


def _digest(rows: Any) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
