"""How an operator is written down: the decorator :func:`operator` over its meaning. Floor 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..frozen import FrozenDict
from ..spec import OpSpec
from .inference import Infer, elementwise


def operator(
    name: str,
    inputs: str,
    outputs: str = "y",
    infer: Infer = elementwise,
    attributes: Mapping[str, Any] | None = None,
    **flags: Any,
) -> Callable[[Callable[..., Any]], OpSpec]:
    """Turns a meaning ``f(xp, *arrays, **attributes)`` into the :class:`OpSpec` ``name``.

    ``inputs`` and ``outputs`` are names separated by blanks; the summary is the docstring, else a citation of ONNX.
    """

    def define(meaning: Callable[..., Any]) -> OpSpec:
        summary = " ".join((meaning.__doc__ or f"As ONNX {name}.").split())
        return OpSpec(
            name=name,
            inputs=tuple(inputs.split()),
            outputs=tuple(outputs.split()),
            attributes=FrozenDict(attributes or {}),
            meaning=meaning,
            infer=infer,
            summary=summary,
            **flags,
        )

    return define


def specs_in(namespace: Mapping[str, Any]) -> tuple[OpSpec, ...]:
    """The operators among a module's names, in order of definition."""
    return tuple({v.name: v for v in namespace.values() if isinstance(v, OpSpec)}.values())
