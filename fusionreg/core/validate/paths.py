"""``fusionreg validate PATH``: everything the registry would say about a plugin that is not installed. Floor 3.

A ``.json`` file is read and checked; nothing of it is executed. A package, module or project with ``pyproject.toml``
is *imported*, which runs its code, as installing and loading it would. Neither compiles anything.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..ops import Vocabulary, default_vocabulary
from ..registry.catalog import Catalog, load
from ..registry.discovery import GROUP
from ..registry.entries import FusionEntry, PluginFailure
from ..registry.loading import reason_of, validation_lines
from ..spec import FusionSpec
from .fusion import check_fusion
from .kernel import check_kernel
from .reference import check_reference


@dataclass(frozen=True, slots=True)
class Result:
    """What was found about one fusion, kernel or plugin.

    Attributes:
        name: a fusion, a ``fusion/kernel``, or a plugin.
        status: ``ok`` or ``failed``.
        reason: what is wrong, "" when nothing is.
        plugin, field: where it stands.
    """

    name: str
    status: str
    reason: str = ""
    plugin: str = ""
    field: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def validate_path(path: Path | str) -> list[Result]:
    """A result for every fusion and kernel that passes, and for everything that is wrong.

    Args:
        path: a ``.json`` file with one FusionSpec or a list of them (templates beside it), a module or package of a
            plugin, or a project folder whose ``pyproject.toml`` declares entry points in group ``fusionreg``.

    Raises: :class:`SpecError` when there is nothing at ``path`` that could be validated.
    """
    path = Path(path)
    if not path.exists():
        raise SpecError(
            "cannot validate", str(path), "there is no such file or folder", "a spec, a package or a project"
        )
    if path.suffix == ".json":
        return _json(path)
    return _plugins(path.resolve())


# --- JSON ------------------------------------------------------------------------------------------------------


def _json(path: Path) -> list[Result]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SpecError("cannot read", str(path), reason_of(error), "a FusionSpec or a list of them, in JSON") from None
    results: list[Result] = []
    ops = default_vocabulary()
    for i, item in enumerate(data if isinstance(data, list) else [data]):
        name = str(item.get("name", f"spec {i}")) if isinstance(item, dict) else f"spec {i}"
        spec = _spec(item, name, results)
        if spec is None:
            continue
        entry, errors = check_fusion(spec, ops, path.name)
        results += _errors(errors, spec.name, path.name)
        if entry is None:
            continue
        results += _reference_results(entry, ops, path.name)
        for kernel in spec.kernels:
            filled = kernel.model_copy(update={"fusion": kernel.fusion or spec.name})
            _, errors = check_kernel(filled, entry, path.name, path.resolve().parent)
            key = f"{filled.fusion}/{filled.name}"
            results += _errors(errors, key, path.name) or [Result(key, "ok", plugin=path.name)]
    return results or [Result(path.name, "failed", "it holds no spec", path.name)]


def _spec(item: Any, name: str, results: list[Result]) -> FusionSpec | None:
    from pydantic import ValidationError

    try:
        return FusionSpec.model_validate(item)
    except ValidationError as error:
        results += [Result(name, "failed", line, field=at) for at, line in validation_lines(error).items()]
        return None


def _errors(errors: list[SpecError], name: str, plugin: str) -> list[Result]:
    return [Result(name, "failed", str(e), plugin, str(e.facts.get("field", ""))) for e in errors]


# --- plugins ---------------------------------------------------------------------------------------------------


def _plugins(path: Path) -> list[Result]:
    results: list[Result] = []
    found = dict(_entry_points(path))
    roots = _roots(path, found.values())
    extras = []
    with _importing(roots, found.values()):
        for name, value in found.items():
            module, _, attribute = value.partition(":")
            try:
                target: Any = import_module(module)
                for part in filter(None, attribute.split(".")):
                    target = getattr(target, part)
                extras.append((name, target))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                results.append(Result(name, "failed", f"import: {reason_of(error)}", name))
        catalog = load(deny=tuple(found), extra_plugins=extras)
    return results + _catalog_results(catalog, {n for n, _ in extras})


def _catalog_results(catalog: Catalog, names: set[str]) -> list[Result]:
    """The rows of some plugins of a catalog."""
    mine = [f for f in catalog.failures if f.plugin in names]
    results = [_failure(f) for f in mine]
    for entry in catalog.fusions.values():
        if entry.plugin in names:
            results += _reference_results(entry, catalog.ops, entry.plugin)
        results += [Result(k.key, "ok", plugin=k.plugin) for k in entry.kernels if k.plugin in names]
    for row in catalog.plugins:
        if row.name in names and not (row.fusions or row.kernels or row.ops) and not mine:
            results.append(Result(row.name, "failed", "it registers nothing that is valid", row.name))
    return results


def _failure(failure: PluginFailure) -> Result:
    name = failure.fusion or failure.plugin
    return Result(name, "failed", f"{failure.stage}: {failure.reason}", failure.plugin, failure.field)


def _entry_points(path: Path) -> Iterator[tuple[str, str]]:
    """(plugin, module) of what stands at ``path``."""
    project = path / "pyproject.toml"
    if project.is_file():
        try:
            data = tomllib.loads(project.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SpecError("cannot read", str(project), reason_of(error), "a project file in TOML") from None
        entries = data.get("project", {}).get("entry-points", {}).get(GROUP, {})
        if not entries:
            example = f'[project.entry-points.{GROUP}]\nacme = "fusionreg_acme"'
            raise SpecError("cannot validate", str(project), f"no entry point in group {GROUP!r}", example)
        yield from sorted(entries.items())
    elif path.is_file() and path.suffix == ".py":
        yield _plugin_name(path.stem), path.stem
    elif (path / "__init__.py").is_file():
        yield _plugin_name(path.name), path.name
    else:
        raise SpecError("cannot validate", str(path), "neither a spec, a package nor a project", "one of these")


def _plugin_name(module: str) -> str:
    return module.removeprefix("fusionreg_")


def _roots(path: Path, modules: Any) -> list[Path]:
    """Folders to import from so that each module comes from ``path`` and not from what is installed."""
    if not (path / "pyproject.toml").is_file():
        return [path.parent]
    roots = []
    for value in modules:
        top = value.partition(":")[0].split(".")[0]
        found = [p.parent for d in ("", "src") for p in (path / d / top, path / d / f"{top}.py") if p.exists()]
        found += [p.parent.parent for p in sorted(path.glob(f"*/*/{top}/__init__.py"))]
        if not found:
            raise SpecError("cannot validate", str(path), f"no module {top!r}", "the module that the entry point names")
        roots.append(found[0])
    return list(dict.fromkeys(roots))


@contextmanager
def _importing(roots: list[Path], modules: Any) -> Iterator[None]:
    """Imports from ``roots`` first; afterwards ``sys.path`` and ``sys.modules`` are as they were."""
    tops = {m.partition(":")[0].split(".")[0] for m in modules}
    before = list(sys.path)
    hidden = {n: m for n, m in sys.modules.items() if n.split(".")[0] in tops}
    for name in hidden:
        del sys.modules[name]
    sys.path[:0] = [str(r) for r in roots]
    invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        for name in [n for n in sys.modules if n.split(".")[0] in tops]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _reference_results(entry: FusionEntry, ops: Vocabulary, plugin: str) -> list[Result]:
    return _errors(check_reference(entry, ops), entry.name, plugin) or [Result(entry.name, "ok", plugin=plugin)]
