"""Finding installed plugins, and importing one so that nothing it does can stop another. Floor 3.

pluggy's own loader stops at the first entry point that fails and drops a second one of the same name, so plugins are
found with :mod:`importlib.metadata`, and each is registered with a plugin manager of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigError
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pluggy import PluginManager

GROUP = "fusionreg"
ALLOW, DENY = "FUSIONREG_LOAD_PLUGINS", "FUSIONREG_DISABLE_PLUGINS"


@dataclass(frozen=True, slots=True)
class Found:
    """One entry point, not imported.

    Attributes:
        name: what the plugin is called; it owns fusion names that start with it.
        value: ``module`` or ``module:attribute``.
        distribution, version: where it comes from; "" for none.
    """

    name: str
    value: str
    distribution: str = ""
    version: str = ""

    @classmethod
    def of(cls, entry_point: EntryPoint) -> Found:
        dist = entry_point.dist
        name, version = _identity(dist) if dist is not None else ("", "")
        return cls(entry_point.name, entry_point.value, name, version)


def words(text: str) -> frozenset[str]:
    """The exact names of a comma-separated list."""
    return frozenset(filter(None, (w.strip() for w in text.split(","))))


def chosen(env: Mapping[str, str]) -> tuple[frozenset[str] | None, frozenset[str]]:
    """What the environment allows (None: everything) and denies."""
    allow = env.get(ALLOW)
    return (None if allow is None else words(allow)), words(env.get(DENY, ""))


def find() -> tuple[list[Found], list[tuple[str, str]]]:
    """Every entry point of the group, ordered by (name, distribution), and (distribution, reason) of those unreadable.

    A distribution that stands twice on the path counts once, as at import. One whose metadata is missing or broken
    costs nobody else anything, and counts as a failure only if it has entry points for us.
    """
    found: list[Found] = []
    broken: list[tuple[str, str]] = []
    seen: set[str] = set()
    for dist in distributions():
        try:
            text = dist.read_text("entry_points.txt")
        except Exception:  # an unreadable folder on the path is nobody's plugin
            continue
        if not text or GROUP not in text:
            continue
        name, version = _identity(dist)
        key = name.lower().replace("-", "_").replace(".", "_")
        if key in seen:
            continue
        seen.add(key)
        try:
            found += [Found(n, v, name, version) for n, v in parse_entry_points(text)]
        except (ConfigError, ValueError) as error:
            broken.append((name, f"its entry_points.txt cannot be read: {' '.join(str(error).split())}"))
    return sorted(found, key=lambda f: (f.name, f.distribution, f.value)), broken


class _Sections(ConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr  # names keep their case


def parse_entry_points(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of our group in the text of an ``entry_points.txt``."""
    parser = _Sections(delimiters=("=",), interpolation=None, strict=False)
    parser.read_string(text)
    if parser.has_section(GROUP):
        yield from ((name.strip(), value.strip()) for name, value in parser.items(GROUP))


def _identity(dist: Distribution) -> tuple[str, str]:
    """Name and version; the folder's name where the metadata is missing."""
    try:
        name, version = str(dist.metadata["Name"] or ""), str(dist.metadata["Version"] or "")
    except Exception:
        name = version = ""
    if name:
        return name, version
    stem = Path(str(getattr(dist, "_path", "unknown"))).stem.partition("-")
    return stem[0] or "unknown", stem[2]


@dataclass(frozen=True, slots=True, eq=False)
class Plugin:
    """An imported plugin: its object, and a plugin manager that knows it alone."""

    found: Found
    object: Any
    manager: PluginManager

    def implements(self, hook: str) -> bool:
        return bool(getattr(self.manager.hook, hook).get_hookimpls())

    def ask(self, hook: str, **arguments: Any) -> list[Any]:
        """The answers to one hook: none or one. Whatever the plugin raises passes, ``SystemExit`` too."""
        return list(getattr(self.manager.hook, hook)(**arguments))


def import_plugin(found: Found) -> Any:
    """The object an entry point names. Runs the plugin's module; whatever that raises passes."""
    module, _, attribute = found.value.partition(":")
    target: Any = import_module(module.strip())
    for part in filter(None, attribute.split("[")[0].strip().split(".")):
        target = getattr(target, part)
    return target


def register(found: Found, target: Any) -> Plugin:
    """Registers with pluggy and checks every hook against its contract.

    Raises: TypeError for None; ``pluggy.PluginValidationError`` for a hook that is unknown or has wrong arguments.
    """
    import pluggy

    from fusionreg import hookspecs

    if target is None:
        raise TypeError(f"{found.value!r} is None, not a module or object with hooks")
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(target, name=found.name)
    manager.check_pending()
    if not manager.get_hookcallers(target):
        raise TypeError(f"{found.value!r} implements no hook: is every function marked with fusionreg.hookimpl?")
    return Plugin(found, target, manager)


def prefixes(found: Found, target: Any) -> tuple[str, ...]:
    """The first words of fusion names that the plugin claims beside its own name."""
    declared: Any = getattr(target, "FUSIONREG_PREFIXES", ())
    texts: Sequence[Any] = (declared,) if isinstance(declared, str) else tuple(declared)
    return tuple(dict.fromkeys(str(t) for t in texts))


def package_root(target: Any) -> Path | None:
    """The folder of the outermost package that a plugin's code is in; None when it is no package on disk."""
    name = target.__name__ if isinstance(target, ModuleType) else getattr(target, "__module__", type(target).__module__)
    parts = str(name).split(".")
    for i in range(1, len(parts) + 1):
        module = sys.modules.get(".".join(parts[:i]))
        file = getattr(module, "__file__", None)
        if file and hasattr(module, "__path__"):
            return Path(file).resolve().parent
    return None


def blocked(name: str, allow: Collection[str] | None, deny: Collection[str]) -> bool:
    return name in deny or (allow is not None and name not in allow)
