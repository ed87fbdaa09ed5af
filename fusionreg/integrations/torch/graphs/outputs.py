"""The results of a captured call: tensors that every replay writes, nested as the function returned them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Outputs:
    """What one recorded call returned.

    Tensors are without history: nothing can be differentiated through a replay.

    Attributes:
        value: the results; the same tensors at every replay.
        leaves: their leaves.
    """

    def __init__(self, result: Any) -> None:
        leaves, self._structure = pytree.tree_flatten(result)
        self.leaves = [x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in leaves]
        self.value = pytree.tree_unflatten(self.leaves, self._structure)
        self._sequence = result.__class__ if result.__class__ in (list, tuple) and len(result) == len(leaves) else None
        self._copies = _copies(self.leaves)

    def fresh(self) -> Any:
        """Copies that later replays leave alone, on the current stream; tensors that share memory share it again."""
        made = self._copies()
        if self._sequence is not None:
            return self._sequence(made)
        return pytree.tree_unflatten(made, self._structure)


def shares_memory(results: Sequence[Any], arguments: Sequence[Any]) -> bool:
    """Whether a tensor among ``results`` is one of ``arguments`` or a view of one."""
    return bool(_addresses(results) & _addresses(arguments))


def _addresses(leaves: Sequence[Any]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in leaves if isinstance(x, torch.Tensor)} - {0}


def _copies(leaves: list[Any]) -> Callable[[], list[Any]]:
    """A function that copies: one by one where each tensor has memory of its own, else storage by storage."""
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if len(_addresses(tensors)) == len([t for t in tensors if t.untyped_storage().nbytes()]):
        return lambda: [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]

    def by_storage() -> list[Any]:
        copied: dict[int, Any] = {}
        made: list[Any] = []
        for x in leaves:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage.data_ptr() not in copied:
                    raw = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
                    copied[storage.data_ptr()] = raw.clone().untyped_storage()
                into = torch.empty(0, dtype=x.dtype, device=x.device)
                made.append(into.set_(copied[storage.data_ptr()], x.storage_offset(), x.shape, x.stride()))
            else:
                made.append(x)
        return made

    return by_storage
