"""The steps of loading: who owns which name, what each plugin answers, what of it is valid. Floor 3."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import FusionregError, SpecError, UnknownNameError
from ..ops import Vocabulary, check_cuda
from ..spec import API, Case, FusionSpec, KernelSpec, OpSpec
from ..validate.cases import check_case
from ..validate.fusion import check_fusion
from ..validate.gradients import check_backward
from ..validate.kernel import Template, check_kernel
from ..validate.names import Problems
from . import discovery
from .discovery import Found, Plugin
from .entries import FusionEntry, KernelEntry, PluginFailure, PluginRow
from .library_calls import LibraryCall, wrong_name
from .regions import derive

_PREFIX = re.compile(r"[a-z][a-z0-9_]*\Z")


def reason_of(error: BaseException) -> str:
    """An exception as one line."""
    if isinstance(error, FusionregError):
        return " ".join(str(error).split())
    if type(error).__module__.startswith("pydantic"):
        return "; ".join(validation_lines(error).values())
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def validation_lines(error: Any) -> dict[str, str]:
    """What pydantic found wrong: field → a line; of a spec for another version that alone."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        where = ".".join(str(p) for p in problem["loc"] if not str(p).startswith(("function-", "tuple[")))
        given = problem.get("input")
        if where == "api" and problem["type"] == "literal_error":
            other = f"{given!r} — this version reads {API}. Upgrade fusionreg or the plugin"
            return {where: f"{error.title} field api: {other}"}
        shown = f", not {given!r}" if isinstance(given, str | int | float) and len(repr(given)) < 60 else ""
        line = f"{error.title} field {where or '(whole)'}: {problem['msg'].lower()}{shown}"
        lines[where] = f"{lines[where]}; {line}" if where in lines else line
    return lines


class Loader:
    """Collects plugins, then what they register. One per :func:`~fusionreg.core.registry.catalog.load`."""

    def __init__(self) -> None:
        self.failures: list[PluginFailure] = []
        self.fusions: dict[str, FusionEntry] = {}
        self.ops = Vocabulary()
        self._plugins: dict[str, Plugin] = {}
        self._owners: dict[str, str] = {}
        self._claimed: dict[str, Found] = {}
        self._kernels: dict[str, KernelEntry] = {}
        self._library_calls: dict[str, LibraryCall] = {}
        self._templates: dict[tuple[Path, str], Template] = {}
        self._cases: dict[str, list[Case]] = {}
        self._new_ops: dict[str, list[str]] = {}

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Registered plugins, by name."""
        return tuple(self._plugins[n] for n in sorted(self._plugins))

    def fail(self, found: Found, stage: str, error: BaseException | str, fusion: str = "", field: str = "") -> None:
        reason = error if isinstance(error, str) else reason_of(error)
        cause = None if isinstance(error, str) else error
        self.failures.append(PluginFailure(found.name, found.distribution, stage, reason, fusion, field, cause))

    # --- plugins -----------------------------------------------------------------------------------------------

    def claim(self, found: Found) -> None:
        """An entry point's name belongs to the first distribution that has it, loaded or not."""
        first = self._claimed.setdefault(found.name, found)
        if first is found:
            prefix = found.name.replace("-", "_")
            if _PREFIX.match(prefix):
                self._owners.setdefault(prefix, found.name)

    def load(self, found: Found) -> None:
        """Imports and registers an entry point; every failure but KeyboardInterrupt becomes a row."""
        try:
            if self._claimed[found.name] is not found:
                first = self._claimed[found.name]
                owner = first.distribution or first.value
                self.fail(
                    found, "claim", f"the plugin name {found.name!r} is taken by {owner}; {found.value} is not loaded"
                )
                return
            target = discovery.import_plugin(found)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, SyntaxError: whatever a module may raise
            self.fail(found, "import", error)
            return
        self.add(found, target)

    def add(self, found: Found, target: Any) -> None:
        """Registers an imported plugin."""
        try:
            if found.name in self._plugins:
                raise SpecError("cannot register", f"plugin {found.name}", "the name is taken", "a name of its own")
            twin = next((n for n, p in self._plugins.items() if p.object is target), None)
            if twin is not None:
                raise SpecError(
                    "cannot register", f"plugin {found.name}", f"{twin} is the same object", "one entry point"
                )
            plugin = discovery.register(found, target)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.fail(found, "register", error)
            return
        self._plugins[found.name] = plugin

    def rows(self) -> tuple[PluginRow, ...]:
        """A row for every registered plugin."""
        return tuple(self._row(p) for p in self.plugins)

    def _row(self, plugin: Plugin) -> PluginRow:
        found = plugin.found
        doc = str(getattr(plugin.object, "__doc__", None) or "").strip()
        return PluginRow(
            found.name,
            found.distribution,
            found.version,
            found.value,
            discovery.package_root(plugin.object),
            tuple(sorted(p for p, owner in self._owners.items() if owner == found.name)),
            tuple(f.name for f in self.fusions.values() if f.plugin == found.name),
            tuple(k.key for f in self.fusions.values() for k in f.kernels if k.plugin == found.name),
            tuple(self._new_ops.get(found.name, ())),
            doc.splitlines()[0] if doc else "",
        )

    # --- what they register ------------------------------------------------------------------------------------

    def collect(self, ops: Vocabulary) -> None:
        """Asks every plugin for operators, fusions, kernels and cases, in this order, and validates the answers."""
        self.ops = ops
        for plugin in self.plugins:
            self._claim_prefixes(plugin)
        for plugin in self.plugins:
            for op in self._ask(plugin, "register_ops", OpSpec):
                self._add_op(plugin, op)
        for plugin in self.plugins:
            for call in self._ask(plugin, "register_library_calls", LibraryCall):
                self._add_library_call(plugin, call)
        offered: list[tuple[Plugin, KernelSpec]] = []
        for plugin in self.plugins:
            for spec in sorted(self._ask(plugin, "register_fusions", FusionSpec), key=lambda s: s.name):
                if self._add_fusion(plugin, spec):
                    offered += [(plugin, k.model_copy(update={"fusion": k.fusion or spec.name})) for k in spec.kernels]
        dropped = self._check_backwards()
        offered = [(plugin, k) for plugin, k in offered if k.fusion not in dropped]
        for plugin in self.plugins:
            offered += [(plugin, k) for k in self._ask(plugin, "register_kernels", KernelSpec)]
        for plugin, kernel in sorted(offered, key=lambda o: (o[0].found.name, str(o[1].fusion), o[1].name)):
            self._add_kernel(plugin, kernel)
        for plugin in self.plugins:
            if plugin.implements("conformance_cases"):
                for entry in self.fusions.values():
                    for case in self._ask(plugin, "conformance_cases", Case, fusion=entry.spec):
                        self._add_case(plugin, entry, case)
        self._finish()

    def _ask(self, plugin: Plugin, hook: str, kind: type, **arguments: Any) -> list[Any]:
        """The records that a plugin answers with; what is no such record is a failure of its own."""
        if not plugin.implements(hook):
            return []
        try:
            answers = [a for a in plugin.ask(hook, **arguments) if a is not None]
            items: list[Any] = []
            for answer in answers:
                if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
                    raise TypeError(f"{hook} answered with {type(answer).__name__}, not with a list of {kind.__name__}")
                items += answer
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.fail(plugin.found, hook, error)
            return []
        for item in items:
            if not isinstance(item, kind):
                self.fail(plugin.found, hook, f"{hook} answered with a {type(item).__name__}, not a {kind.__name__}")
        return [i for i in items if isinstance(i, kind)]

    def _claim_prefixes(self, plugin: Plugin) -> None:
        try:
            declared = discovery.prefixes(plugin.found, plugin.object)
        except Exception as error:
            self.fail(plugin.found, "claim", error, field="FUSIONREG_PREFIXES")
            return
        for prefix in declared:
            owner = self._owners.get(prefix, plugin.found.name)
            if not _PREFIX.match(prefix) or owner != plugin.found.name or prefix == "fusionreg":
                why = (
                    f"plugin {owner} owns it"
                    if owner != plugin.found.name
                    else "it is no word of a-z, 0-9 and _, or ours"
                )
                self.fail(
                    plugin.found, "claim", f"the prefix {prefix!r} cannot be claimed: {why}", field="FUSIONREG_PREFIXES"
                )
            else:
                self._owners[prefix] = plugin.found.name

    def _owns(self, plugin: Plugin, prefix: str, name: str, field: str) -> bool:
        owner = self._owners.get(prefix)
        if owner == plugin.found.name:
            return True
        mine = ", ".join(p for p, o in sorted(self._owners.items()) if o == plugin.found.name) or "none"
        whose = f"plugin {owner} owns it" if owner else "nobody owns it"
        reason = f"{name} starts with {prefix!r}: {whose} — this plugin owns {mine}. Declare FUSIONREG_PREFIXES"
        self.fail(plugin.found, "claim", reason if not owner else reason.rpartition(". ")[0], name, field)
        return False

    def _add_op(self, plugin: Plugin, op: OpSpec) -> None:
        domain, _, _ = op.name.rpartition("::")
        if not domain:
            self.fail(
                plugin.found, "validate", f"operator {op.name!r} has no domain — write {plugin.found.name}::{op.name}"
            )
        elif self._owns(plugin, domain.split(".")[0], op.name, "name"):
            if op.name in self.ops:
                self.fail(plugin.found, "claim", f"operator {op.name!r} is there already", op.name, "name")
                return
            try:
                check_cuda(op)
            except SpecError as error:
                self.fail(plugin.found, "validate", error, op.name, "cuda")
                return
            self.ops = self.ops.with_ops([op])
            self._new_ops.setdefault(plugin.found.name, []).append(op.name)

    def _add_library_call(self, plugin: Plugin, call: LibraryCall) -> None:
        wrong, name = wrong_name(call), str(getattr(call, "name", ""))
        if wrong:
            self.fail(plugin.found, "validate", wrong, name, "name")
        elif name in self._library_calls:
            self.fail(plugin.found, "claim", f"the library call {name} is registered twice", name, "name")
        else:
            self._library_calls[name] = call

    def _add_fusion(self, plugin: Plugin, spec: FusionSpec) -> bool:
        found = plugin.found
        if not self._owns(plugin, spec.name.split(".")[0], spec.name, "name"):
            return False
        if spec.name in self.fusions:
            self.fail(found, "claim", f"the fusion {spec.name} is registered twice", spec.name, "name")
            return False
        entry, errors = check_fusion(spec, self.ops, found.name, found.distribution, found.version)
        self._note(plugin, errors, spec.name)
        if entry is not None:
            self.fusions[spec.name] = entry
        return entry is not None

    def _check_backwards(self) -> set[str]:
        """Drops fusions whose gradients are not what they say, and those that count on them; returns their names."""
        dropped: set[str] = set()
        while True:
            checked = {name: check_backward(entry, self.fusions) for name, entry in self.fusions.items()}
            wrong = {name: errors for name, errors in checked.items() if errors}
            if not wrong:
                return dropped
            for name, errors in wrong.items():
                self._note(self._plugins[self.fusions.pop(name).plugin], errors, name)
            dropped |= wrong.keys()

    def _add_kernel(self, plugin: Plugin, spec: KernelSpec) -> None:
        found, key = plugin.found, f"{spec.fusion}/{spec.name}"
        if spec.fusion is None:
            self.fail(found, "validate", f"kernel {spec.name!r} names no fusion", spec.name, "fusion")
            return
        fusion = self.fusions.get(spec.fusion)
        if fusion is None:
            hint = UnknownNameError.among("fusion", spec.fusion, self.fusions).expected
            self.fail(found, "validate", f"kernel {key} is for an unknown fusion — {hint}", key, "fusion")
            return
        if key in self._kernels:
            owner = self._kernels[key].plugin
            self.fail(found, "claim", f"the kernel {key} is registered twice: first by plugin {owner}", key, "name")
            return
        root = discovery.package_root(plugin.object)
        calls = self._library_calls
        entry, errors = check_kernel(
            spec, fusion, found.name, root, found.distribution, found.version, calls, self._templates
        )
        self._note(plugin, errors, key)
        if entry is not None:
            self._kernels[key] = entry

    def _add_case(self, plugin: Plugin, entry: FusionEntry, case: Case) -> None:
        problems = Problems(plugin.found.name, entry.name)
        taken = {c.name for c in (*entry.cases, *self._cases.get(entry.name, ()))}
        if case.name in taken:
            problems.add("cases", f"a case is named {case.name!r} already", "unique names")
        check_case(problems, f"case {case.name}", case, entry)
        self._note(plugin, problems.found, entry.name)
        if not problems.found:
            self._cases.setdefault(entry.name, []).append(case)

    def _note(self, plugin: Plugin, errors: Sequence[SpecError], what: str) -> None:
        for error in errors:
            self.fail(plugin.found, "validate", error, what, str(error.facts.get("field", "")))

    def _finish(self) -> None:
        """Gives every fusion its kernels and cases."""
        for name, entry in self.fusions.items():
            kernels = tuple(k for k in self._kernels.values() if k.spec.fusion == name)
            whole = replace(entry, kernels=kernels, cases=(*entry.cases, *self._cases.get(name, ())))
            self.fusions[name] = replace(whole, members=tuple(self._members(whole)))

    def _members(self, entry: FusionEntry) -> Iterator[FusionEntry]:
        """The fusions that an open fusion's own regions make; one that is wrong is a failure row."""
        for region in entry.spec.regions:
            try:
                yield derive(entry, region, self.ops)
            except SpecError as error:
                self._note(self._plugins[entry.plugin], [error], f"{entry.name}.{region.name}")
