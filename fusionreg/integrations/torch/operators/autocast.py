"""What autocast does to an operator's inputs, by the rule of its spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from fusionreg.core.registry.entries import FusionEntry

#: Autocast's dispatch keys, and the device each is for.
KEYS = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}

AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def rule(op: Any, entry: FusionEntry, device: str) -> Callable[..., Any]:
    """What the operator does under autocast for a device: inputs are cast, the rest runs outside of autocast.

    ``lower``: floating inputs to the autocast dtype, float64 left alone, as torch does with matrix products; and those
    whose first dtype is float32, as torch does with the parameters of a normalisation.
    ``float32``: those of lower precision to float32. ``promote``: those of one dtype variable to the widest of them.
    Inputs of a dtype that the spec fixes stay as they are, as do those that the fusion has no such dtype for.
    """
    variables = tuple(t.dtype if t.dtype in entry.spec.dtypes else "" for t in entry.inputs.values())
    allowed = {v: {getattr(torch, d) for d in names} for v, names in entry.spec.dtypes.items()}
    kind = entry.spec.autocast
    if kind == "lower":
        variables = tuple("" if v and entry.spec.dtypes[v][0] == "float32" else v for v in variables)

    def on(*tensors: Any, **attributes: Any) -> Any:
        wanted = _wanted(kind, device, variables, tensors)
        cast = [
            t.to(wanted[v]) if v in wanted and _floating(t) and wanted[v] in allowed[v] else t
            for v, t in zip(variables, tensors, strict=False)
        ]
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return op(*cast, **attributes)

    return on


def _floating(tensor: Any) -> bool:
    return tensor is not None and tensor.is_floating_point()


def _wanted(kind: str, device: str, variables: Sequence[str], tensors: Sequence[Any]) -> dict[str, torch.dtype]:
    """The dtype that each dtype variable is to have."""
    found: dict[str, list[torch.dtype]] = {}
    for variable, tensor in zip(variables, tensors, strict=False):
        if variable and _floating(tensor):
            found.setdefault(variable, []).append(tensor.dtype)
    if kind == "promote":
        return {v: reduce(torch.promote_types, dtypes) for v, dtypes in found.items()}
    target = torch.float32 if kind == "float32" else torch.get_autocast_dtype(device)
    return {v: target for v, dtypes in found.items() if torch.float64 not in dtypes}
