"""A bound call: the same arrays again and again, at the price of one driver call. Floor 6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .launch import Prepared


class Bound:
    """``bound()`` launches again on the arrays it was made with and returns the same outputs, filled anew.

    Attributes:
        fusion: its name.
        kernel: ``fusion/kernel``; "" when the operators run unfused.
        reason: why they do, "" otherwise.
        outputs: arrays in the spec's order.
        inputs: the arrays it reads, kept alive.
    """

    __slots__ = ("_again", "_result", "fusion", "inputs", "kernel", "outputs", "reason")

    def __init__(self, fusion: str, prepared: Prepared, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> None:
        self.fusion, self.kernel, self.reason = fusion, prepared.kernel, prepared.reason
        self.inputs, self.outputs = tuple(inputs), outputs
        self._again = prepared.binder(inputs, outputs)
        self._result = outputs[0] if len(outputs) == 1 else outputs

    def __call__(self) -> Any:
        """Launches on the caller's current stream; the output, or a tuple of several, whose values it overwrites."""
        self._again()
        return self._result

    def __repr__(self) -> str:
        return f"<bound {self.kernel or self.fusion + ' (unfused)'}>"
