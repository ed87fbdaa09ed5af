"""Discover → import → register → validate: the :class:`Catalog` of everything installed. Floor 3.

Every plugin stands alone: one that cannot be imported, breaks a hook's contract, claims a name that is not its own, or
ships an invalid spec becomes a :class:`PluginFailure` and takes nothing of another plugin with it. The order in which
plugins are installed or imported never matters: plugins are sorted by name, fusions and kernels by (plugin, name).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ..errors import ArgumentError, PluginError, UnknownNameError
from ..frozen import FrozenDict
from ..ops import Vocabulary, default_vocabulary
from ..spec import Region
from . import discovery
from .discovery import Found, Plugin
from .entries import FusionEntry, KernelEntry, PluginFailure, PluginRow, row_of
from .loading import Loader, reason_of
from .regions import derive

__all__ = ["Catalog", "FusionEntry", "HookWarning", "KernelEntry", "PluginFailure", "PluginRow", "load"]


class HookWarning(UserWarning):
    """A plugin's answer to a hook was lost because the plugin raised."""


@dataclass(frozen=True, eq=False)
class Catalog:
    """Everything that is installed and valid, and what is not and why.

    Attributes:
        plugins: those that loaded, by name.
        failures: what did not, by plugin.
        fusions: by name, ordered by (plugin, name).
        ops: the operator vocabulary, with what plugins added.
        blocked: entry points that the allow or deny list kept out; they are nowhere else.

    An open fusion, or one with slots, becomes a fusion of its own with every region that it is derived for; those are
    found by name too, but they are not among ``fusions``.
    """

    plugins: tuple[PluginRow, ...]
    failures: tuple[PluginFailure, ...]
    fusions: Mapping[str, FusionEntry]
    ops: Vocabulary
    blocked: tuple[str, ...] = ()
    _loaded: tuple[Plugin, ...] = field(default=(), repr=False)
    _derived: dict[str, FusionEntry] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> FusionEntry:
        try:
            return self.fusions[name]
        except KeyError:
            found = self._derived.get(name) or self._member(name)
            if found is not None:
                return found
            raise UnknownNameError.among("fusion", name, self.fusions, self.lost(name)) from None

    def get(self, name: str, default: Any = None) -> Any:
        """The fusion, or ``default`` where nothing has that name."""
        try:
            return self[name]
        except UnknownNameError:
            return default

    def __contains__(self, name: object) -> bool:
        return name in self.fusions or name in self._derived or self._member(str(name)) is not None

    def _member(self, name: str) -> FusionEntry | None:
        base = self.fusions.get(name.rpartition(".")[0])
        return next((m for m in base.members if m.name == name), None) if base is not None else None

    def derive(self, base: FusionEntry, region: Region) -> FusionEntry:
        """The fusion with ``region`` in it; the same one each time. :class:`SpecError` if the region is wrong."""
        name = f"{base.name}.{region.name}"
        return self._derived.get(name) or self._derived.setdefault(name, derive(base, region, self.ops))

    def entries(self, names: Collection[str] = ()) -> list[FusionEntry]:
        """Fusions by name, all by default, each with its members: what can be proven, measured and mutated."""
        found = [self[name] for name in names] if names else list(self.fusions.values())
        return [one for entry in found for one in (*(() if entry.spec.open else (entry,)), *entry.members)]

    def lost(self, name: str) -> str:
        """What the plugin of a fusion failed at, so that it or its kernels are not here, as a sentence; else ""."""
        of_it = [f for f in self.failures if f.fusion == name or f.fusion.startswith(f"{name}/")]
        family = str(name).partition(".")[0]
        of_plugin = [f for f in self.failures if f.plugin.replace("-", "_") == family]
        for failure in (*of_it, *of_plugin):
            what = " to load it" if failure in of_it else f" in {failure.stage}"
            return f"Plugin {failure.plugin} failed{what}: {failure.reason.rstrip('.')}"
        return ""

    @property
    def kernels(self) -> tuple[KernelEntry, ...]:
        """Every kernel of every fusion."""
        return tuple(k for f in self.fusions.values() for k in f.kernels)

    def kernel(self, key: str) -> KernelEntry:
        """The kernel ``fusion/name``; :class:`UnknownNameError` when there is none."""
        for kernel in self.kernels:
            if kernel.key == key:
                return kernel
        raise UnknownNameError.among("kernel", key, [k.key for k in self.kernels])

    def hook(self, name: str, **arguments: Any) -> list[tuple[str, Any]]:
        """(plugin, answer) of every plugin that implements the hook and answers with something but None.

        A plugin that raises loses its own answer: a :class:`HookWarning` says so, and the others are asked.
        """
        answers, failures = self.ask(name, **arguments)
        for failure in failures:
            warnings.warn(str(failure), HookWarning, stacklevel=2)
        return answers

    def ask(self, name: str, **arguments: Any) -> tuple[list[tuple[str, Any]], list[PluginFailure]]:
        """Like :meth:`hook`, with the failures as values."""
        answers: list[tuple[str, Any]] = []
        failures: list[PluginFailure] = []
        for plugin in self._loaded:
            if not plugin.implements(name):
                continue
            found = plugin.found
            try:
                answers += [(found.name, a) for a in plugin.ask(name, **arguments) if a is not None]
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failures.append(PluginFailure(found.name, found.distribution, name, reason_of(error), error=error))
        return answers, failures

    def implements(self, name: str) -> bool:
        """Whether any plugin implements the hook."""
        return any(plugin.implements(name) for plugin in self._loaded)

    def estimate(self, entry: FusionEntry, problem: Any, target: Any) -> float | None:
        """Expected seconds of a fusion by the ``estimate`` hook: the owner's answer, else the first of another plugin.

        None where no plugin has one; an answer that is no time (negative, NaN, not a number) counts as none.
        """
        answers = self.hook("estimate", fusion=entry.spec, problem=problem, target=target)
        times = [(plugin, s) for plugin, s in answers if isinstance(s, int | float) and 0 <= s < inf]
        return min(times, key=lambda t: t[0] != entry.plugin, default=("", None))[1]

    def plugin_rows(self) -> list[dict[str, Any]]:
        """Every plugin and every failure, as ``fusionreg plugins --json`` prints them, by plugin."""
        rows = [dict(row_of(p)) for p in self.plugins] + [dict(row_of(f)) for f in self.failures]
        return sorted(rows, key=lambda r: (r["name"], r["status"] == "failed", r["reason"]))

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failures" if self.failures else ""
        return f"<Catalog: {len(self.fusions)} fusions of {len(self.plugins)} plugins{failed}>"


def load(
    *,
    strict: bool = False,
    allow: Collection[str] | None = None,
    deny: Collection[str] | None = None,
    entry_points: Iterable[Any] | None = None,
    extra_plugins: Sequence[Any] = (),
) -> Catalog:
    """Everything that is installed, validated.

    Args:
        strict: raise :class:`PluginError` for the first failure (its cause is the original exception).
        allow, deny: exact names of entry points to load, or not to; None reads ``FUSIONREG_LOAD_PLUGINS`` and
            ``FUSIONREG_DISABLE_PLUGINS`` (comma-separated). A name that nobody has is harmless.
        entry_points: take these (``importlib.metadata.EntryPoint``) instead of what is installed.
        extra_plugins: further plugins, not installed: modules or objects, or (name, module or object). They are
            named after their module unless a name is given, and no list blocks them.
    """
    for word, given in (("allow", allow), ("deny", deny)):
        if isinstance(given, str):  # a collection of letters: it would block everything, or nothing, silently
            raise ArgumentError("cannot load", "plugins", f"{word} = {given!r}", "a collection of names")
    env_allow, env_deny = discovery.chosen(os.environ)
    allow = env_allow if allow is None else frozenset(allow)
    deny = env_deny if deny is None else frozenset(deny)
    loader = Loader()
    if entry_points is None:
        found, broken = discovery.find()
        for name, reason in broken:
            loader.fail(Found(name, "", name), "discover", reason)
    else:
        found = sorted((discovery.Found.of(e) for e in entry_points), key=lambda f: (f.name, f.distribution, f.value))
    names = [f.name for f in found if discovery.blocked(f.name, allow, deny)]
    for entry in found:
        loader.claim(entry)
    for entry in found:
        if entry.name not in names:
            loader.load(entry)
    for extra in extra_plugins:
        name, target = extra if isinstance(extra, tuple) else (_name_of(extra), extra)
        loader.claim(Found(name, name))
        loader.add(Found(name, name), target)
    loader.collect(default_vocabulary())
    failures = tuple(sorted(loader.failures, key=lambda f: (f.plugin, f.distribution, f.fusion, f.field, f.reason)))
    if strict and failures:
        first = failures[0]
        more = f"{len(failures) - 1} more in `fusionreg plugins`" if len(failures) > 1 else ""
        raise PluginError(
            "cannot load", f"plugin {first.plugin}", f"{first.stage}: {first.reason.rstrip('.')}", "", more,
            plugin=first.plugin, fusion=first.fusion, field=first.field, failures=failures,
        ) from first.error  # fmt: skip
    return Catalog(
        loader.rows(), failures, FrozenDict(loader.fusions), loader.ops, tuple(sorted(set(names))), loader.plugins
    )


def _name_of(target: Any) -> str:
    name = getattr(target, "__name__", None) or type(target).__name__
    return str(name).rsplit(".", 1)[-1].removeprefix("fusionreg_").lower()
