"""Everything that must hold of a KernelSpec before it is loaded. Floor 3."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice, product
from math import isnan
from pathlib import Path
from typing import Any

from ..errors import SpecError, UnknownNameError
from ..expressions import PREDICATES, ExpressionSet
from ..frozen import EMPTY, FrozenDict
from ..intervals import Interval, conditions, evaluate
from ..registry.entries import FusionEntry, KernelEntry
from ..registry.library_calls import LibraryCall
from ..spec import ITERATION, STRUCTURAL, WHOLE, KernelSpec, TensorMap
from ..targets import SHIPPED, TARGETS, THREADS_BLOCK, Target, accepts
from ..tensors import HOST
from .library import check_library
from .names import Problems, Scope, check_names
from .scopes import environments, fusion_scope
from .tensor_maps import check_tensor_maps

SUFFIX = ".cu.j2"
#: Predicates whose answer is a switch, so that a kernel may be compiled for each.
SWITCHES = frozenset(PREDICATES) - {"shape", "stride"}
#: Combinations of params looked at for one that is valid; further ones are left to the tuner.
MOST_COMBINATIONS = 4096

_INCLUDE = re.compile(r"""include\(\s*["']([^"']+)["']\s*\)""")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\{#.*?#\}", re.S)
_WAITS = re.compile(r"\bgrid_dependency_wait\s*\(")


def check_kernel(
    spec: KernelSpec,
    fusion: FusionEntry,
    plugin: str,
    root: Path | None,
    distribution: str = "",
    version: str = "",
    library_calls: Mapping[str, LibraryCall] = EMPTY,
    templates: dict[tuple[Path, str], Template] | None = None,
) -> tuple[KernelEntry | None, list[SpecError]]:
    """The entry, or None with everything that is wrong.

    Args:
        root: the folder of the plugin's package.
        templates: those that are read already, and where those that this reads go: many kernels share one.
    """
    problems = Problems(plugin, fusion.name, spec.name)
    read = None if spec.library else _template(problems, spec, root, {} if templates is None else templates)
    library = check_library(problems, spec, library_calls) if spec.library else None
    targets = _targets(problems, spec)
    check_names(problems, _kinds(spec, fusion))
    _check_shape(problems, spec, fusion)
    check_tensor_maps(problems, spec, fusion)
    parsed = _Expressions(problems, spec, fusion)
    if problems.found:
        return None, problems.found
    if read is not None:
        _check_read(problems, spec, parsed, read)
    problems.found += _unreached(_Asked(problems.plugin, spec, fusion, targets))
    if problems.found:
        return None, problems.found
    assert root is not None and (read is None) == (library is not None)
    path = read.path if read is not None else None
    return KernelEntry(
        spec, plugin, distribution, version, root, path, parsed.requires, parsed.valid, parsed.constants,
        parsed.geometry, parsed.estimate, parsed.tensor_maps, library,
    ), []  # fmt: skip


def find_template(root: Path, name: str) -> Path | None:
    """The template's file below ``root`` or its ``templates`` folder; None where there is none inside ``root``."""
    for candidate in (root / name, root / "templates" / name):
        if candidate.is_file() and (path := candidate.resolve()).is_relative_to(root.resolve()):
            return path
    return None


@dataclass(frozen=True, slots=True)
class Template:
    """A template's file, all text that it includes from the same package, and the words of that."""

    path: Path
    text: str
    words: frozenset[str]


def _template(
    problems: Problems, spec: KernelSpec, root: Path | None, known: dict[tuple[Path, str], Template]
) -> Template | None:
    name = spec.template
    if root is None:
        problems.add("template", "the plugin is no package", "a folder with __init__.py, which holds the template")
        return None
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or ".." in parts or "" in parts or not name.endswith(SUFFIX):
        problems.add("template", repr(name), f"a relative path below the plugin's package that ends in {SUFFIX}")
        return None
    if (root, name) in known:
        return known[root, name]
    path = find_template(root, name)
    if path is None:
        found = sorted(p.relative_to(root).as_posix() for p in root.rglob(f"*{SUFFIX}"))
        hint = UnknownNameError.among("template", name, found).expected if found else "there is none"
        problems.add("template", f"no file {name!r} in {root} or its templates folder", hint)
        return None
    try:
        text = _with_includes(path, root)
    except (OSError, UnicodeDecodeError) as error:
        problems.add("template", f"{name!r} cannot be read: {error}", "a readable UTF-8 file")
        return None
    return known.setdefault((root, name), Template(path, text, frozenset(re.findall(r"[A-Za-z_]\w*", text))))


def _with_includes(path: Path, root: Path) -> str:
    texts, todo, seen = [], [path], set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        texts.append(current.read_text("utf-8"))
        for name in _INCLUDE.findall(texts[-1]):
            found = find_template(root, name) or find_template(root, f"{name}.j2")
            if found:
                todo.append(found)
    return "\n".join(texts)


def _targets(problems: Problems, spec: KernelSpec) -> tuple[Target, ...]:
    found: list[Target] = []
    for declared in spec.targets:
        fitting = problems.attempt("targets", partial(_accepting, declared))
        if fitting == []:
            hint = UnknownNameError.among("architecture", declared.rstrip("+"), TARGETS).expected
            problems.add("targets", f"{declared!r} matches no known architecture", hint)
        found += fitting or []
    if not spec.targets:
        problems.add("targets", "it is empty", f"at least one, e.g. sm_80+ ({', '.join(SHIPPED)} are shipped)")
    for field, feature in (("cluster", "cluster"), ("programmatic", "pdl"), ("tensor_maps", "tma")):
        if getattr(spec, field) and found and not any(feature in t.features for t in found):
            problems.add(field, f"no target of {', '.join(spec.targets)} has {feature}", "a target of sm_90+")
    return tuple(dict.fromkeys(found))


def _accepting(declared: str) -> list[Target]:
    return [t for t in TARGETS.values() if accepts(declared, t)]


def _kinds(spec: KernelSpec, fusion: FusionEntry) -> dict[str, tuple[str, ...]]:
    keys = (f"{choice}_{key}" for choice, keys in fusion.choices.items() for key in keys)
    declared = (*fusion.tensors, *fusion.axes, *fusion.spec.attributes, *fusion.spec.dtypes, *fusion.choices, *keys)
    return {
        "the fusion": tuple(dict.fromkeys(declared)),
        "its iteration": tuple(ITERATION) if WHOLE in spec.regions else (),
        "params": tuple(spec.params),
        "constants": tuple(spec.constants),
        "tensor_maps": tuple(m.name for m in spec.tensor_maps),
    }


def _check_shape(problems: Problems, spec: KernelSpec, fusion: FusionEntry) -> None:
    least_extents = 0 if spec.library else 1
    for field, least in (("grid", least_extents), ("block", least_extents), ("cluster", 0)):
        count = len(getattr(spec, field))
        if not least <= count <= 3:
            problems.add(field, f"{count} expressions", f"{least} to 3")
    for name in spec.regions:
        if name == WHOLE and len(spec.regions) > 1:
            problems.add("regions", f"{WHOLE!r} beside others", f"{WHOLE!r} alone, or names of tensors")
        if name != WHOLE and name not in fusion.tensors:
            known = UnknownNameError.among("tensor", name, fusion.tensors).expected
            problems.add("regions", f"unknown tensor {name!r}", f"{WHOLE!r}: the whole pattern, or {known}")
    for name in spec.keeps:
        if name not in spec.regions or name not in fusion.inputs:
            problems.add("keeps", f"{name!r} is no input with a slot", "inputs among `regions`")
    for name in spec.strides:
        if name == WHOLE and WHOLE not in spec.regions:
            problems.add("strides", f"{WHOLE!r} without a region", f"regions = {WHOLE!r}, or tensors by name")
        elif name != WHOLE and name not in fusion.tensors:
            problems.add(
                "strides", f"unknown tensor {name!r}", UnknownNameError.among("t", name, fusion.tensors).expected
            )
    for name, spaces in spec.spaces.items():
        if name not in fusion.inputs:
            problems.add(f"spaces.{name}", "it is no input", UnknownNameError.among("t", name, fusion.inputs).expected)
        if not spaces or not set(spaces) <= {HOST} or len(set(spaces)) < len(spaces):
            problems.add(f"spaces.{name}", f"{', '.join(spaces) or 'nothing'}", f"{HOST}; all read device and managed")
    for name in spec.specialize:
        if name not in fusion.axes:
            problems.add(
                "specialize", f"unknown axis {name!r}", UnknownNameError.among("axis", name, fusion.axes).expected
            )
    for field in ("strides", "specialize", "targets", "requires", "valid"):
        values = getattr(spec, field)
        if len(set(values)) < len(values):
            problems.add(field, "an entry stands twice", "each once")
    for name, values in spec.params.items():
        if not values or len(set(values)) < len(values):
            problems.add(f"params.{name}", f"{values}", "at least one value, none twice")
        if len({type(v) for v in values}) > 1 or any(isinstance(v, float) and isnan(v) for v in values):
            problems.add(f"params.{name}", f"{values}", "values of one type, and no NaN")
        if any(isinstance(v, str) and not re.fullmatch(r"[A-Za-z_]\w*", v, re.ASCII) for v in values):
            problems.add(f"params.{name}", f"{values}", "words of letters, digits and underscores")


class _Expressions:
    """All expressions of a kernel, parsed in the scope that each may read."""

    def __init__(self, problems: Problems, spec: KernelSpec, fusion: FusionEntry) -> None:
        base = fusion_scope(fusion)  # launches and choices may depend on the device's size, what is compiled may not
        texts = {n: tuple(map(str, v)) for n, v in spec.params.items() if v and isinstance(v[0], str)}
        words = {**base.words, **texts}
        space = frozenset(ITERATION) if WHOLE in spec.regions else frozenset()
        problem = Scope(base.names | space | {"multiprocessors"}, base.tensors, words=words)
        tuned = problem.plus(*spec.params)
        whole = tuned.plus(*spec.constants)
        loose = {n for n, a in fusion.spec.attributes.items() if not a.static} | (
            set(fusion.axes) - set(spec.specialize)
        )
        # what is known when the kernel is compiled
        fixed = Scope(tuned.names - loose - (space - STRUCTURAL) - {"multiprocessors"}, base.tensors, SWITCHES, words)

        def many(field: str, scope: Scope) -> tuple[Any, ...]:
            return tuple(problems.expression(f"{field}[{i}]", t, scope) for i, t in enumerate(getattr(spec, field)))

        self.requires = many("requires", problem)
        self.valid = many("valid", tuned)
        constants = []
        for name, text in spec.constants.items():
            constants.append(problems.expression(f"constants.{name}", text, fixed))
            fixed = fixed.plus(name)
        self.constants = ExpressionSet({}) if None in constants else ExpressionSet(spec.constants)
        items = {f"{f}{i}": t for f in ("grid", "block", "cluster") for i, t in enumerate(getattr(spec, f))}
        items |= {"shared_memory": spec.shared_memory, "workspace": spec.workspace}
        checked = {k: problems.expression(k, t, fixed if k.startswith("block") else whole) for k, t in items.items()}
        whom = f"{fusion.name}/{spec.name}"
        self.geometry = ExpressionSet({}) if None in checked.values() else ExpressionSet(items, whom=whom)
        maps = {m.name: self._map(problems, m, i, whole) for i, m in enumerate(spec.tensor_maps)}
        self.tensor_maps: FrozenDict[str, ExpressionSet] = FrozenDict(maps)
        self.estimate = problems.expression("estimate", spec.estimate, tuned) if spec.estimate.strip() else None

    @staticmethod
    def _map(problems: Problems, spec: TensorMap, index: int, scope: Scope) -> ExpressionSet:
        items = {f"{f}{i}": t for f in ("dims", "strides", "box") for i, t in enumerate(getattr(spec, f))}
        items["swizzle"] = spec.swizzle
        return problems.expressions(f"tensor_maps[{index}].", items, scope) or ExpressionSet({})

    @property
    def names(self) -> frozenset[str]:
        """Every variable that some expression reads."""
        single = (*self.requires, *self.valid, *((self.estimate,) if self.estimate else ()))
        maps = (m.names for m in self.tensor_maps.values())
        return frozenset().union(self.constants.names, self.geometry.names, *maps, *(e.names for e in single))


def _check_read(problems: Problems, spec: KernelSpec, parsed: _Expressions, template: Template) -> None:
    text, words = template.text, template.words
    for field in ("params", "constants", "specialize"):
        for name in getattr(spec, field):
            if name not in parsed.names and name not in words:
                problems.add(field, f"nobody reads {name!r}", "every name used in the template or in an expression")
    for name in spec.regions:
        if name != WHOLE and f'slot("{name}")' not in text:
            problems.add("regions", f"the template has no slot for {name!r}", f'{{{{ slot("{name}") }}}}')
    for name in spec.keeps:
        if f'kept("{name}")' not in text or "keep" not in words:
            problems.add("keeps", f"the template never keeps {name!r}", f'`keep` of its slot where kept("{name}")')
    if WHOLE in spec.regions and "region" not in words:
        problems.add("regions", "the template never reads `region`", "the iteration and its device function used")
    mapped = {m.operand for m in spec.tensor_maps}  # whose strides the map holds
    for name in spec.strides:
        if name == WHOLE or name in mapped or "_stride_" in text:
            continue
        if not any(w.startswith(f"{name}_stride") for w in words):
            problems.add("strides", f"the template never reads {name}_stride_0 …", "every declared stride used")
    for m in spec.tensor_maps:
        if m.name not in words:
            problems.add("tensor_maps", f"the template never reads {m.name!r}", "every declared tensor map used")
    if spec.workspace.strip() != "0" and "workspace" not in words:
        problems.add("workspace", "the template never reads it", "`workspace`, the kernel's last pointer, used")
    if spec.programmatic and not _WAITS.search(_COMMENT.sub("", text)):
        problems.add(
            "programmatic", "the template never calls fr::grid_dependency_wait()",
            'the call before the first access to a tensor, from {{ include("programmatic.cuh") }}',
        )  # fmt: skip


class _Asked:
    """A kernel of which it is asked what problems it can run; equal where everything is that the answer depends on."""

    def __init__(self, plugin: str, spec: KernelSpec, fusion: FusionEntry, targets: tuple[Target, ...]) -> None:
        self.plugin, self.spec, self.fusion, self.targets = plugin, spec, fusion, targets
        own = (spec.name, spec.requires, spec.valid, spec.params, spec.constants, spec.block)
        attributes = [(name, a.type, a.choices) for name, a in fusion.spec.attributes.items()]
        of_fusion = (fusion.name, fusion.spec.constraints, fusion.spec.dtypes, fusion.choices, attributes, fusion.axes)
        self._key = repr((plugin, own, of_fusion, [t.name for t in targets]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=1024)
def _unreached(asked: _Asked) -> tuple[SpecError, ...]:
    """What :func:`_check_reachable` finds, found once: a process may load the same plugins many times."""
    problems = Problems(asked.plugin, asked.fusion.name, asked.spec.name)
    _check_reachable(problems, asked.spec, asked.fusion, asked.targets)
    return tuple(problems.found)


def _check_reachable(problems: Problems, spec: KernelSpec, fusion: FusionEntry, targets: tuple[Target, ...]) -> None:
    """Notes when no problem on any target can choose the kernel, or no combination of params is valid."""
    met = conditions((*fusion.spec.constraints, *spec.requires))
    valid = conditions(spec.valid)
    wrong = ""
    worlds: dict[tuple[Any, ...], dict[str, Any]] = {}  # the reachable ones, one for each that `valid` can tell apart
    told = [n for n in (*fusion.spec.dtypes, *fusion.choices, *fusion.spec.attributes) if n in valid.names]
    for target, env in _worlds(fusion, targets, met.names | valid.names | {*fusion.spec.dtypes}):
        apart = (target.features if "has" in valid.names else "", *(env[n] for n in told if n in env))
        if apart in worlds:
            continue
        found = met.impossible(env)
        if found is None:
            worlds[apart] = env
        wrong = found or wrong
    if not worlds:
        field = f"requires[{spec.requires.index(wrong)}]" if wrong in spec.requires else "requires"
        problems.add(field, f"{wrong!r} holds for no problem: the kernel is unreachable", "a condition that can be met")
        return
    unseen = {(name, value) for name, values in spec.params.items() for value in values}
    some = False
    combinations = list(islice(_combinations(spec), MOST_COMBINATIONS + 1))
    for params in combinations[:MOST_COMBINATIONS]:
        world = next((env for env in worlds.values() if not valid.impossible({**env, **params})), None)
        if world is not None:
            some = True
            _check_block(problems, spec, {**world, **params})
            unseen -= set(params.items())
            if problems.found or not unseen:
                return
    if not some:
        problems.add("valid", f"no combination of {', '.join(spec.params) or 'no params'} is valid", "at least one")
    elif len(combinations) <= MOST_COMBINATIONS:
        for name, value in sorted(unseen, key=str):
            problems.add(f"params.{name}", f"{value!r} is valid in no combination", "values that can be chosen")


def _worlds(
    fusion: FusionEntry, targets: tuple[Target, ...], names: frozenset[str]
) -> Iterator[tuple[Target, dict[str, Any]]]:
    for target in targets if "has" in names else targets[:1]:
        for env in environments(fusion, names):
            yield target, {**env, "has": target.features.__contains__}


def _combinations(spec: KernelSpec) -> Iterator[Mapping[str, Any]]:
    for values in product(*spec.params.values()):
        yield dict(zip(spec.params, values, strict=True))


def _check_block(problems: Problems, spec: KernelSpec, env: dict[str, Any]) -> None:
    for name, text in spec.constants.items():
        env[name] = evaluate(text, env)
    threads: Any = 1
    for i, text in enumerate(spec.block):
        value = evaluate(text, env)
        exact = isinstance(value, int | float) and not isinstance(value, bool)
        if (exact and value < 1) or (isinstance(value, Interval) and value.hi < 1):
            problems.add(f"block{i}", f"{text!r} is {value}", "a positive number of threads")
        threads = threads * value if exact and threads is not None else None
    if threads is not None and threads > THREADS_BLOCK:
        problems.add("block", f"{threads} threads", f"at most {THREADS_BLOCK}")
