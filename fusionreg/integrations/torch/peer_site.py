"""What an operator's writer gets: the node, its operands as torch expressions, attributes and types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusionreg.core.errors import MisfitError
from fusionreg.core.ir import Node, Value

from .schemas import torch_dtype


@dataclass(frozen=True)
class Site:
    """One operator to be written.

    Attributes:
        node: the operator.
        args: its operands (None for an omitted one): proxies of values, Python numbers for constants of one element.
        attributes: all of them.
        types: type of each operand, None for an omitted one.
        ints: operand index → its numbers, where it is an integer constant: shapes, axes.
        outputs: how many outputs are read.
    """

    node: Node
    args: tuple[Any, ...]
    attributes: Mapping[str, Any]
    types: tuple[Value | None, ...]
    ints: Mapping[int, tuple[int, ...]]
    outputs: int = 1

    def rank(self, index: int = 0) -> int:
        value = self.types[index]
        if value is None or value.shape is None:
            raise unwritten(self.node, "an operand of unknown rank")
        return len(value.shape)

    def extents(self, index: int = 0) -> tuple[int, ...]:
        value = self.types[index]
        if value is None or value.shape is None or not all(isinstance(d, int) for d in value.shape):
            raise unwritten(self.node, "an operand of unknown extents")
        return tuple(d for d in value.shape if isinstance(d, int))

    def numbers(self, index: int) -> tuple[int, ...]:
        """An operand that says which axes or what shape."""
        if index not in self.ints:
            raise unwritten(self.node, f"operand {index} is no constant")
        return self.ints[index]

    def dtype(self, index: int = 0) -> torch.dtype:
        value = self.types[index]
        assert value is not None
        return torch_dtype(value.dtype)

    def integers(self, index: int = 0) -> bool:
        """Whether an operand holds integers."""
        dtype = self.dtype(index)
        return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool

    def given(self, index: int) -> bool:
        return index < len(self.args) and self.args[index] is not None


Writer = Callable[[Site], Any]

def unwritten(node: Node, why: str) -> MisfitError:
    """The error for an operator that has no plain torch form here."""
    return MisfitError(
        "no torch peer", f"for {node.op}", why, "an operator of the table in peer_operators.py", op=node.op
    )
