"""``render``: a kernel on a problem as one self-contained unit of CUDA C++. Floor 4.

Jinja binds, C++ computes: a template sets types, constants and the entry's name; everything else is C++.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import RenderError
from ..frozen import EMPTY, FrozenDict
from ..problem import Problem
from ..problem.geometry import environment, launch_geometry
from ..problem.iteration import iteration
from ..spec import WHOLE
from . import lines, prelude, regions, slots
from .environment import Environment, shared_library
from .environment import environment as jinja_environment
from .prelude import Argument
from .values import Code

if TYPE_CHECKING:
    from ..registry.catalog import FusionEntry, KernelEntry

#: Options of every unit beside ``-arch`` and ``-I``. Nothing is left to a default: subnormals are kept, division and
#: square root are correctly rounded, and products may contract into fused multiply-adds.
OPTIONS = (
    "--std=c++17", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=true",
    "--device-as-default-execution-space", "--generate-line-info", "--ptxas-options=-v",
)  # fmt: skip

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>", re.M)

#: The device library that stands in front of every unit.
LIBRARY = "fusionreg.cuh"


@dataclass(frozen=True)
class KernelSource:
    """One rendered unit.

    Attributes:
        text: the whole unit; it includes nothing but CUDA's own headers.
        entry: C symbol of the kernel.
        fusion, kernel: names; ``kernel`` is ``fusion/name``.
        target: architecture by name.
        options: compiler options beside ``-arch`` and ``-I``.
        arguments: the kernel's parameters in order.
        params: the tunable parameters it was rendered with.
        headers: names that it includes with angle brackets, in branches not taken too.
        digest: SHA-256 over text, options and target.
        library: the library call that stands in place of a unit: there is nothing to compile, and ``text`` only says
            what is called with what.
    """

    text: str = field(repr=False)
    entry: str
    fusion: str
    kernel: str
    target: str
    options: tuple[str, ...]
    arguments: tuple[Argument, ...]
    params: FrozenDict[str, Any]
    headers: tuple[str, ...]
    digest: str
    library: str = ""


def variant(entry: FusionEntry, kernel: KernelEntry, problem: Problem, params: Mapping[str, Any]) -> tuple[Any, ...]:
    """Everything of a problem that the rendered unit depends on, hashable: equal variants share one cubin."""
    _, constants = environment(kernel, problem, params)
    threads = launch_geometry(kernel, problem, params)
    whole = (iteration(problem), tuple(problem.attributes.items())) if WHOLE in kernel.spec.regions else ()
    return (
        kernel.key, problem.target, tuple(params.items()), tuple(constants.items()), tuple(problem.choices.items()),
        tuple((n, v) for n, v in problem.attributes.items() if entry.spec.attributes[n].static),
        tuple(problem.dtypes.items()), tuple(t and (t.dtype, len(t.shape)) for t in problem.tensors.values()),
        tuple(problem.forms.items()), tuple((a, problem.axes.get(a)) for a in kernel.spec.specialize),
        prelude.axes(entry, problem), threads.threads, threads.workspace > 0,
        *whole,
    )  # fmt: skip


def render(
    entry: FusionEntry, kernel: KernelEntry, problem: Problem, params: Mapping[str, Any], target: str | None = None,
    *, located: bool = True,
) -> KernelSource:  # fmt: skip
    """The unit of ``kernel`` on ``problem`` with ``params``, for ``target`` (default: the problem's).

    ``located``: with the directives by which a compiler tells lines of templates; it takes them a third of the time.

    :class:`RenderError` (``facts``: template, line, variable) when the template is wrong;
    :class:`ExpressionError` when a constant or the geometry cannot be evaluated.
    """
    if target is not None and target != problem.target:
        problem = problem.with_target(target)
    whom, spec = kernel.key, kernel.spec
    _, constants = environment(kernel, problem, params)
    launch = launch_geometry(kernel, problem, params)
    if kernel.library is not None:
        return _library_source(entry, kernel, problem, launch.workspace > 0)
    whole = WHOLE in spec.regions
    list_arguments = regions.arguments if whole else prelude.arguments
    found = list_arguments(entry, kernel, problem, launch.workspace > 0)
    values = prelude.variables(entry, kernel, problem, params, constants)
    region: dict[str, Any] = {
        "slotted": lambda tensor: str(tensor) in entry.slots,
        "kept": lambda tensor: str(tensor) in entry.slots and str(tensor) in entry.slots[str(tensor)].outputs,
    }
    if whole:
        region["region"] = regions.region(entry, problem, whom)
    elif spec.regions:
        found_slots = slots.slots(entry, kernel, problem)
        region |= {"slots": found_slots.code(), "slots_along": found_slots.code, "slot": found_slots.make}
    name = symbol(entry, kernel, variant(entry, kernel, problem, params))
    jinja = jinja_environment(kernel.root, shared_library())
    text = _unit(
        jinja,
        entry,
        kernel,
        problem,
        values,
        name,
        prelude.signature(name, found, launch.threads, spec.min_blocks, whom),
        region,
        lines.resolve if located else lines.strip,
    )
    if name not in text:
        raise RenderError(
            "cannot render",
            whom,
            f"{spec.template} defines no kernel",
            "{{ signature }} { … }",
            template=spec.template,
            line=1,
        )
    options = (*OPTIONS, f"--maxrregcount={spec.max_registers}") if spec.max_registers else OPTIONS
    digest = hashlib.sha256("\0".join((text, *options, problem.target)).encode()).hexdigest()
    return KernelSource(
        text, name, entry.spec.name, kernel.key, problem.target, options, found, FrozenDict(params),
        tuple(dict.fromkeys(_INCLUDE.findall(text))), digest,
    )  # fmt: skip


def _library_source(entry: FusionEntry, kernel: KernelEntry, problem: Problem, workspace: bool) -> KernelSource:
    """What a library is called with, in words: evidence covers it as it covers a unit."""
    call = kernel.library
    assert call is not None, "the kernel calls a library"
    found = prelude.pointers(problem, workspace)
    rows = [f"call {call.name} {call.digest}", f"target {problem.target}"]
    rows += [f"{a.kind} {a.name} {a.dtype}".rstrip() for a in found]
    rows += [f"{name} = {value}" for name, value in (*problem.attributes.items(), *problem.choices.items())]
    text = "\n".join((*rows, ""))
    digest = hashlib.sha256(f"{text}\0{problem.target}".encode()).hexdigest()
    return KernelSource(
        text, "", entry.spec.name, kernel.key, problem.target, (), found, EMPTY, (), digest, call.name
    )


def symbol(entry: FusionEntry, kernel: KernelEntry, key: tuple[Any, ...]) -> str:
    """The C name of the kernel of a variant."""
    stable = json.dumps(key, default=str, sort_keys=False)
    words = entry.spec.name.replace(".", "_")
    return f"fr_{words}__{kernel.spec.name}_{hashlib.sha256(stable.encode()).hexdigest()[:8]}"


def _unit(
    jinja: Environment,
    entry: FusionEntry,
    kernel: KernelEntry,
    problem: Problem,
    values: Mapping[str, Any],
    name: str,
    signature: Code,
    region: Mapping[str, Any],
    resolve: Callable[[str], str],
) -> str:
    whom, spec = kernel.key, kernel.spec
    included: set[str] = set()
    hints = prelude.hints(entry, kernel)

    def include(template: str) -> Code:
        """The text of a header of the plugin or of the shared library; once per unit, like ``#pragma once``."""
        template = str(template)
        path = str(jinja.loader.find(template)[0])  # type: ignore[union-attr]
        if path in included:
            return Code("")
        included.add(path)
        return Code(jinja.expand(template, scope, hints, whom))

    none = slots.Slots(FrozenDict(), FrozenDict(), FrozenDict())  # of a template that kernels with slots use too
    blank = {"slots": none.code(), "slots_along": none.code, "slot": none.make}
    scope: dict[str, Any] = {**blank, **values, **region}
    scope |= {"entry": Code(name), "signature": signature, "include": include}
    scope["given"] = lambda constant, otherwise: values.get(str(constant), otherwise)
    head = [f"// {entry.spec.name} {entry.spec.version}, kernel {spec.name}, for {problem.target}"]
    head += [f"#include <{h}>" for h in prelude.headers(problem)]
    library = include(LIBRARY)
    if "slots" in region:
        slots_library = include(slots.LIBRARY)
        scope["slots"] = Code(slots_library + scope["slots"])
        scope["slots_along"] = lambda axis: Code(slots_library + region["slots_along"](axis))
    middle = prelude.definitions(entry, problem, values, whom)
    body = jinja.expand(spec.template, scope, hints, whom)
    label = f"prelude of {entry.spec.name}/{spec.name}"
    parts = [
        "\n".join(head), resolve(library).rstrip("\n"),
        lines.directive(1, label), "\n".join(middle), resolve(body).rstrip("\n"), "",
    ]  # fmt: skip
    return "\n".join(p for p in parts if p) + ("\n" if not parts[-1] else "")
