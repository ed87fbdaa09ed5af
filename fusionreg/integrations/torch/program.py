"""The neutral form of an exported program: what the fx reader and the ``.pt2`` reader both produce.

A :class:`Program` is a list of :class:`Call` records over named values. Nothing in it is executable: an operator is
a name, and only the emitter table (to build IR) and the reference interpreter (to run torch) give it a meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import EMPTY, FrozenDict
from fusionreg.core.ir import Dim, Shape

if TYPE_CHECKING:
    import torch

    from .structure import Structure

#: The operator names that a program may hold: overloads of torch's namespaces (torch_attn: attention of sequences of
#: several lengths), and arithmetic on symbolic numbers.
OVERLOAD = re.compile(r"^(aten|prims|torch_attn)\.[A-Za-z_]\w*\.[A-Za-z_]\w*$")
#: Names that arguments of symbolic arithmetic go by, which has no schema.
POSITIONS = ("a", "b", "c")

_OPERATORS = (
    "eq", "ne", "le", "ge", "lt", "gt", "neg", "pos", "mul", "add", "sub", "floordiv", "mod", "pow", "truediv",
    "and_", "or_", "lshift", "rshift",
)  # fmt: skip
_FUNCTIONS = (
    "math.trunc", "math.ceil", "math.floor", "torch.sym_not", "torch.sym_int", "torch.sym_float", "torch.sym_ite",
    "torch.sym_max", "torch.sym_min", "torch.sym_sqrt",
)  # fmt: skip
SYMBOLIC = frozenset((*(f"_operator.{name}" for name in _OPERATORS), *_FUNCTIONS))


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the program: a tensor, or a symbolic number."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is known of a tensor: dtype by name, extents, strides in elements (None where not recorded)."""

    dtype: str
    shape: Shape
    strides: tuple[Dim, ...] | None = None


@dataclass(frozen=True, slots=True)
class NumberMeta:
    """A symbolic number: its type, and its value as an int, float, or the text of its expression."""

    kind: Literal["int", "float", "bool"]
    value: int | float | str


Meta = TensorMeta | NumberMeta


@dataclass(frozen=True)
class Call:
    """One operator call.

    Attributes:
        target: ``aten.add.Tensor`` or one of :data:`SYMBOLIC`.
        args: by the schema's argument names; defaults that the caller left out are absent.
        outputs: names of the results in order, ``""`` for one that nothing reads.
        source: ``file:line`` in the model, or its module path.
    """

    target: str
    args: FrozenDict[str, Any]
    outputs: tuple[str, ...]
    source: str = ""

    def refs(self) -> Iterator[str]:
        """Names of the values it reads, repeated ones repeated."""
        for value in self.args.values():
            yield from refs(value)

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v.name if isinstance(v, Ref) else v!r}" for k, v in self.args.items())
        return f"{', '.join(self.outputs)} = {self.target}({inner})"


def refs(value: Any) -> Iterator[str]:
    """Names of the values that an argument holds, lists included."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, list | tuple):
        for item in value:
            yield from refs(item)


def substitute(value: Any, names: Mapping[str, str]) -> Any:
    """The argument with every reference renamed by ``names`` where it has an entry."""
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    if isinstance(value, list | tuple):
        return tuple(substitute(item, names) for item in value)
    return value


@dataclass(frozen=True)
class InputSpec:
    """One placeholder: a weight by its name in the module, an argument of the call, or a number fixed at export."""

    name: str
    kind: Literal["parameter", "buffer", "constant", "user", "literal"]
    target: str = ""
    value: Any = None


@dataclass(frozen=True)
class OutputSpec:
    """One result: returned to the caller, or the new content of a buffer or of an argument (``target``)."""

    kind: Literal["user", "buffer", "input"]
    value: Any
    target: str = ""


@dataclass(frozen=True, eq=False)
class Program:
    """An exported program.

    Attributes:
        name: for people.
        inputs: placeholders in order.
        outputs: results in order.
        calls: in execution order; in-place operators are possible until ``functionalize`` has run.
        metas: by value name.
        weights: parameters, buffers and constants by their name in the module; never written.
        call_structure: how ``(args, kwargs)`` flatten to the user inputs.
        result_structure: how the user outputs unflatten.
        argument_names: names of the positional parameters of ``forward``, where recorded.
        ranges: least and largest extent of a symbolic axis, None where unbounded.
    """

    name: str
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    calls: tuple[Call, ...]
    metas: FrozenDict[str, Meta]
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    call_structure: Structure
    result_structure: Structure
    argument_names: tuple[str, ...] = ()
    ranges: FrozenDict[str, tuple[int, int | None]] = EMPTY

    def with_(self, **changes: Any) -> Program:
        """A copy with the given fields replaced."""
        return replace(self, **changes)

    def check(self) -> Program:
        """Itself, when every value is described, written once and read only afterwards.

        Raises:
            ModelError: names the value; a damaged file is the only cause.
        """
        defined: set[str] = set()
        for spec in self.inputs:
            if not isinstance(spec.name, str) or not isinstance(spec.target, str):
                raise ModelError("malformed program", self.name, f"an input named {spec.name!r}", "a text")
            self._define(spec.name if spec.kind != "literal" else "", defined)
        for call in self.calls:
            self._read(call.refs(), defined, call.target)
            for name in call.outputs:
                self._define(name, defined)
        self._read((n for o in self.outputs for n in refs(o.value)), defined, "the results")
        return self

    def _define(self, name: str, defined: set[str]) -> None:
        known = isinstance(name, str) and (not name or name in self.metas)
        if name and (not known or name in defined):
            found = "is written twice" if known else "is not described"
            raise ModelError("malformed program", self.name, f"value {name!r} {found}", "one description, one writer")
        if name:
            defined.add(name)

    def _read(self, names: Iterable[str], defined: set[str], reader: str) -> None:
        for name in names:
            if not isinstance(name, str) or name not in defined:
                raise ModelError(
                    "malformed program", self.name, f"{reader} reads {name!r}", "a value written before it"
                )

    @property
    def user_inputs(self) -> tuple[InputSpec, ...]:
        """The placeholders that a caller's arguments flatten to, fixed numbers included."""
        return tuple(i for i in self.inputs if i.kind in ("user", "literal"))


def check_target(target: str, whom: str) -> str:
    """``target`` itself when a program may hold it; :class:`ModelError` otherwise."""
    if OVERLOAD.match(target) or target in SYMBOLIC:
        return target
    raise ModelError(
        "unsupported operator in", whom, repr(target), "an overload of aten or prims, or arithmetic on sizes",
        "Export a model without custom or higher-order operators", operator=target,
    )  # fmt: skip
