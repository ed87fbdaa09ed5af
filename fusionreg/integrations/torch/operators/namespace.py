"""Fusions as functions by family and name: what people call who write a model by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from fusionreg.core.errors import UnknownNameError
from fusionreg.core.registry.entries import FusionEntry
from fusionreg.core.runtime.seeds import LIMIT

from .direct import direct
from .docstring import docstring
from .registration import Operators
from .schema import keyword_arguments

if TYPE_CHECKING:
    from fusionreg.api import Registry

#: The input that holds seed and offset of a dropout.
RNG, RNG_TEXT = "rng", "int64[2]"


class UnknownFusionError(UnknownNameError, AttributeError):
    """No family or fusion has this name; the message offers the nearest ones."""


class Ops(ModuleType):  # as torch.ops: Dynamo looks names up in modules without tracing how
    """``ops.<family>.<fusion>(…)``: a function for every fusion of a registry, differentiable where it has gradients.

    Tensors are passed by position or name, in the order that ``fusionreg show`` prints, attributes and choices by name.
    A fusion that drops elements takes ``rng`` by name, seed and offset as int64[2]; where that is left out it is drawn
    from torch's generator, which ``torch.manual_seed`` sets. Backward fusions need the ``rng`` of the forward call.
    ``ops["norm.layernorm"]`` is the same as ``ops.norm.layernorm``, and finds derived fusions too.

    Args:
        load: gives the registry, at the first use of it.
    """

    def __init__(self, load: Callable[[], Registry]) -> None:
        super().__init__("fusionreg.torch.ops", self.__doc__)
        self._load = load
        self._operators: Operators | None = None
        self._functions: dict[str, Callable[..., Any]] = {}

    def use(self, registry: Registry) -> Ops:
        """The functions of another registry; these ones stay as they are."""
        return Ops(lambda: registry)

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = _member(self, "", name)
        return found

    def __getitem__(self, fusion: str) -> Callable[..., Any]:
        """The function of a fusion by its whole name; :class:`UnknownNameError` when there is none."""
        found = self._functions.get(fusion)
        if found is None:
            operators = self._made()
            found = self._functions[fusion] = function(operators, operators.registry.catalog[fusion])
        return found

    def __dir__(self) -> list[str]:
        return [*self._words(""), "use"]

    def __repr__(self) -> str:
        return f"<ops: {', '.join(self._words(''))}>"

    def _made(self) -> Operators:
        if self._operators is None:
            self._operators = Operators.of(self._load())
        return self._operators

    def _names(self) -> Iterator[str]:
        for entry in self._made().registry.catalog.fusions.values():
            if not entry.spec.open:
                yield entry.name
            yield from (m.name for m in entry.members)

    def _words(self, prefix: str) -> list[str]:
        """The words that follow a prefix in the names of fusions."""
        return sorted({n.removeprefix(prefix).split(".")[0] for n in self._names() if n.startswith(prefix)})


class Family(ModuleType):
    """The fusions whose names begin alike."""

    def __init__(self, ops: Ops, prefix: str) -> None:
        super().__init__(f"fusionreg.torch.ops.{prefix.rstrip('.')}", self.__doc__)
        self._ops, self._prefix = ops, prefix

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = _member(self._ops, self._prefix, name)
        return found

    def __dir__(self) -> list[str]:
        return self._ops._words(self._prefix)

    def __repr__(self) -> str:
        return f"<{self._prefix.rstrip('.')}: {', '.join(dir(self))}>"


def _member(ops: Ops, prefix: str, name: str) -> Any:
    """What ``name`` after ``prefix`` is: a fusion's function, or a family; :class:`UnknownFusionError` for nothing."""
    if name.startswith("_"):
        raise AttributeError(name)
    whole, words, catalog = f"{prefix}{name}", ops._words(prefix), ops._made().registry.catalog
    if name not in words:
        kind = f"fusion of {prefix.rstrip('.')}" if prefix else "family of fusions"
        raise UnknownFusionError.among(kind, name, words, catalog.lost(whole))
    entry = catalog.get(whole)
    return Family(ops, f"{whole}.") if entry is None or entry.spec.open else ops[whole]


def function(operators: Operators, entry: FusionEntry) -> Callable[..., Any]:
    """A fusion as a function, with its signature and a docstring."""
    op = operators[entry.name]
    drawn = draws(operators, entry)

    at_once = direct(op, entry.inputs)
    call = _drawing(at_once, entry) if drawn else at_once
    call.__name__ = entry.name.rpartition(".")[2]
    call.__qualname__ = entry.name
    call.__module__ = "fusionreg.torch.ops"
    call.__doc__ = docstring(entry, drawn)
    call.__signature__ = signature(entry, drawn)  # type: ignore[attr-defined]
    return call


def _drawing(op: Any, entry: FusionEntry) -> Callable[..., Any]:
    at, first = list(entry.inputs).index(RNG), next(n for n in entry.inputs if n != RNG)

    def call(*tensors: Any, rng: torch.Tensor | None = None, **named: Any) -> Any:
        if rng is None:
            like = tensors[0] if tensors else named[first]
            # torch's own operator, which no tracer takes for another call of it
            rng = torch.randint(LIMIT, (2,), dtype=torch.int64, device=like.device)
        if len(tensors) < at:
            return op(*tensors, rng=rng, **named)
        return op(*tensors[:at], rng, *tensors[at:], **named)

    return call


def draws(operators: Operators, entry: FusionEntry) -> bool:
    """Whether a call without ``rng`` draws one: not where it must be that of another call, the forward one."""
    if RNG not in entry.inputs or str(entry.inputs[RNG]) != RNG_TEXT:
        return False
    fusions = operators.registry.catalog.fusions.values()
    of_gradients = {f.spec.backward.fusion for f in fusions if f.spec.backward is not None}
    return entry.name not in of_gradients and "backward" not in entry.spec.tags


def signature(entry: FusionEntry, drawn: bool) -> Signature:
    """The signature of the function: tensors, then attributes by name."""
    tensors: list[Parameter] = []
    trailing = True
    for name in reversed(tuple(entry.inputs)):
        if drawn and name == RNG:
            continue
        trailing &= name in entry.optional
        kind = "Tensor | None" if name in entry.optional else "Tensor"
        default = None if trailing else Parameter.empty
        tensors.insert(0, Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind, default=default))
    keywords = [Parameter(RNG, Parameter.KEYWORD_ONLY, annotation="Tensor | None", default=None)] if drawn else []
    for k in keyword_arguments(entry):
        kind = k.type.replace("?", " | None")
        default = Parameter.empty if k.required else k.default
        keywords.append(Parameter(k.name, Parameter.KEYWORD_ONLY, annotation=kind, default=default))
    returns = "Tensor" if len(entry.outputs) == 1 else f"tuple[{', '.join(['Tensor'] * len(entry.outputs))}]"
    return Signature([*tensors, *keywords], return_annotation=returns)
