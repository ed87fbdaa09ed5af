"""How the derivative of an operator is written down: its value by calls of torch, and a formula for each gradient.

A formula is a function whose parameters say what it reads, as in torch's own table of derivatives: an input or an
output of the operator by its name, or the gradient of an output as ``d<output>``. Keyword-only parameters are
attributes of the operator, or facts of the call, :data:`FACTS`::

    "Div": rule(lambda a, b: a / b, a=lambda dy, b: dy / b, b=lambda dy, a, b: -dy * (a / b / b))

So it is known without calling it what has to be saved, or computed again. Operands that are constants of a graph come
as numbers, those of whole numbers as tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from fusionreg.core.frozen import FrozenDict

#: What a formula may ask for by keyword beside attributes: shape and dtype of the input that its gradient is of (of the
#: first input, for a value), shape of the first output, and which of the gradients that it gives are wanted.
FACTS = frozenset({"shape", "dtype", "result", "wanted"})


@dataclass(frozen=True)
class Formula:
    """One way to compute gradients.

    Attributes:
        call: the function.
        reads: its positional parameters.
        keywords: its keyword-only ones.
        gives: the inputs whose gradients it returns, a tuple where there are several.
    """

    call: Callable[..., Any]
    reads: tuple[str, ...]
    keywords: tuple[str, ...]
    gives: tuple[str, ...] = ()

    @classmethod
    def of(cls, call: Callable[..., Any], gives: tuple[str, ...] = ()) -> Formula:
        parameters = signature(call).parameters.values()
        return cls(
            call,
            tuple(p.name for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)),
            tuple(p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY),
            gives,
        )


@dataclass(frozen=True)
class Rule:
    """The derivative of an operator.

    Attributes:
        value: the operator itself; a tuple where it has several outputs.
        gradients: input → the formulas for its gradient, any of which will do: the one that needs least is used. An
            input that is not there has gradient zero.
        constant: outputs that are no function to differentiate, as running statistics are.
    """

    value: Formula
    gradients: Mapping[str, tuple[Formula, ...]]
    constant: frozenset[str] = frozenset()


def rule(value: Callable[..., Any], constant: tuple[str, ...] = (), **gradients: Any) -> Rule:
    """A rule; a gradient is a function, or a tuple of several that give the same. A keyword ``a_b`` is a function that
    gives the gradients of the inputs ``a`` and ``b`` together."""
    found: dict[str, tuple[Formula, ...]] = {}
    for names, given in gradients.items():
        gives = tuple(names.split("_"))
        formulas = tuple(Formula.of(f, gives) for f in (given if isinstance(given, tuple) else (given,)))
        found.update(dict.fromkeys(gives, formulas))
    return Rule(Formula.of(value), FrozenDict(found), frozenset(constant))
