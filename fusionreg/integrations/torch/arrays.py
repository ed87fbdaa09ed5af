"""torch tensors as NumPy arrays and back, sharing memory on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusionreg.core.dtypes import dtype as dtype_row
from fusionreg.core.errors import MissingDependencyError

from .schemas import dtype_name, torch_dtype

#: Types NumPy lacks: the same bits under an integer type of one width.
_CARRIER = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}


def to_numpy(tensor: torch.Tensor, writable: bool = True) -> np.ndarray:
    """The tensor's memory as an array, bfloat16 and float8 through ml_dtypes; a copy only from another device."""
    t = tensor.detach()
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    t = t.cpu()
    name = dtype_name(t.dtype)
    array = t.view(_CARRIER[name]).numpy().view(dtype_row(name).numpy) if name in _CARRIER else t.numpy()
    if not writable:
        array = array.view()
        array.flags.writeable = False
    return array


def from_numpy(array: Any) -> torch.Tensor:
    """The array's memory as a tensor; arrays that nobody may write are copied."""
    array = np.asarray(array)
    name = array.dtype.name
    if not array.flags.writeable or any(s < 0 for s in array.strides):
        array = array.copy()
    if name in _CARRIER:
        carrier = np.int16 if _CARRIER[name] == torch.int16 else np.uint8
        return torch.from_numpy(array.view(carrier)).view(torch_dtype(name))
    return torch.from_numpy(array)


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the current GPU; :class:`MissingDependencyError` where torch finds none."""
    if not torch.cuda.is_available():
        found = f"torch {torch.__version__} finds no CUDA device"
        raise MissingDependencyError("cannot use", "a GPU", found, "a GPU, and torch built for it", "Use --device sim")
    return tensor.cuda()


def memory_key(tensor: torch.Tensor, name: str) -> Any:
    """Equal for tensors that are the same view of the same memory."""
    storage = tensor.untyped_storage()
    pointer = storage.data_ptr()
    if pointer == 0:
        return name
    return (
        str(tensor.device),
        pointer,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        str(tensor.dtype),
    )
