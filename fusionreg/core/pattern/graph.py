"""The parsed form of pattern text. Floor 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..frozen import EMPTY, FrozenDict

#: The key of a choice whose optional step is left out.
NONE = "none"


@dataclass(frozen=True, slots=True)
class Input:
    """An operand that is an input of the fusion; ``optional``: one that the operator can do without."""

    name: str
    optional: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Output:
    """An operand that is an output of an earlier step. When that (optional) step is skipped, it is that step's first
    operand instead."""

    step: int
    index: int = 0

    def __str__(self) -> str:
        return f"%{self.step}" + (f".{self.index}" if self.index else "")


@dataclass(frozen=True, slots=True)
class Literal:
    """An operand that must be a constant equal to ``value``: a number, or a tuple of numbers for a 1-D tensor.

    A float is compared after rounding to the tensor's dtype. A number matches a constant whose elements all equal it.
    A name within a tuple is bound: whatever a site has there is the fusion's attribute of that name. The target of a
    Reshape is compared as ONNX means it: 0 is the extent that the operand has there, -1 whatever is left; in the sizes
    of a Split -1 is an equal share of what is left.
    """

    value: bool | int | float | tuple[Any, ...]

    def __str__(self) -> str:
        return _shown(self.value)


Operand = Input | Output | Literal | None
"""None: an optional operand that is left out."""


@dataclass(frozen=True, slots=True)
class AttributeName:
    """An attribute value that is bound: whatever a site has is the fusion's attribute ``name``."""

    name: str

    def __str__(self) -> str:
        return self.name


def attribute_names(value: Any) -> Iterator[str]:
    """The attributes of the fusion that an operator attribute binds: its own name, or those within a tuple."""
    for v in value if isinstance(value, tuple) else (value,):
        if isinstance(v, AttributeName):
            yield v.name


def resolved(value: Any, names: Mapping[str, Any]) -> Any:
    """What an operator attribute is where the names that it binds have these values."""
    if isinstance(value, tuple):
        return tuple(resolved(v, names) for v in value)
    return names[value.name] if isinstance(value, AttributeName) else value


@dataclass(frozen=True, slots=True)
class Alternative:
    """One operator that a step may be.

    Attributes:
        key: its key in the step's choice.
        op: operator name in the vocabulary.
        attributes: operator attribute → the literal it must equal, :class:`AttributeName`, or a tuple of both. An
            attribute that is not here must have the operator's default.
    """

    key: str
    op: str
    attributes: FrozenDict[str, Any] = EMPTY

    def __str__(self) -> str:
        shown = [f"{k}={_shown(v)}" for k, v in self.attributes.items()]
        return f"{self.op}({', '.join(shown)})" if shown else self.op


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and any(True for _ in attribute_names(value)):
        return f"({', '.join(map(_shown, value))})"
    return str(value) if isinstance(value, AttributeName) else repr(value)


@dataclass(frozen=True, slots=True)
class Step:
    """One operator application of the pattern.

    Attributes:
        index: its place in ``PatternGraph.steps``.
        outputs: assigned names, one per operator output; ``""`` for one that the pattern does not name (it must have
            no reader). Shorter than the operator's outputs when the rest is not named either.
        alternatives: the operators it may be; one unless ``any_of``.
        operands: in the operator's order.
        optional: whether it may be missing; then its (only) output is its first operand.
        choice: the choice variable that says which alternative it is, or that it is missing; ``""`` where there is
            nothing to say, or where the presence of ``gates`` says it.
        gates: optional inputs that only optional steps read, of this step: it is skipped exactly when they are absent.
        line: 1-based line of the pattern text.
    """

    index: int
    outputs: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    operands: tuple[Operand, ...]
    optional: bool = False
    choice: str = ""
    gates: tuple[str, ...] = ()
    line: int = 1

    @property
    def ops(self) -> tuple[str, ...]:
        """Operator names of the alternatives."""
        return tuple(a.op for a in self.alternatives)

    @property
    def reads(self) -> tuple[Output, ...]:
        """Operands that are outputs of earlier steps."""
        return tuple(o for o in self.operands if isinstance(o, Output))

    def __str__(self) -> str:
        ops = " | ".join(map(str, self.alternatives))
        operands = ", ".join("None" if o is None else str(o) for o in self.operands)
        return f"%{self.index} = {'optional ' if self.optional else ''}[{ops}]({operands})"


@dataclass(frozen=True)
class PatternGraph:
    """A parsed pattern; equal when its text is.

    Attributes:
        text: as written.
        steps: in program order: operands stand before their readers.
        inputs: names read but not assigned, in order of first reading.
        outputs: the fusion's output names → where each comes from.
        choices: choice variable → its keys in declared order, ``"none"`` last when the step may be missing.
        attributes: fusion attributes that it binds.
        optional: inputs that may be absent: only optional steps read them, or operators that can do without.
    """

    text: str
    steps: tuple[Step, ...] = field(compare=False)
    inputs: tuple[str, ...] = field(compare=False)
    outputs: FrozenDict[str, Output] = field(compare=False)
    choices: FrozenDict[str, tuple[str, ...]] = field(compare=False, default=EMPTY)
    attributes: frozenset[str] = field(compare=False, default=frozenset())
    optional: frozenset[str] = field(compare=False, default=frozenset())

    @cached_property
    def readers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(step, output index) → indices of the steps that read it."""
        found: dict[tuple[int, int], list[int]] = {}
        for step in self.steps:
            for read in step.reads:
                readers = found.setdefault((read.step, read.index), [])
                if step.index not in readers:
                    readers.append(step.index)
        return {k: tuple(v) for k, v in found.items()}

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) + f"\nreturn {', '.join(f'{n}={o}' for n, o in self.outputs.items())}"
