"""The arguments of a captured call: flattened, described exactly, and held in buffers whose addresses a graph knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusionreg.core.errors import ArgumentError
from fusionreg.core.problem import Tensor as Layout
from fusionreg.core.runtime.libraries import self_overlapping

Structure = Any
"""A torch ``TreeSpec``; an int for that many positional arguments of which none is nested, as in most calls."""

_FLAT = (torch.Tensor, int, float, str, complex, type(None))


def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Structure, Sequence[Any]]:
    """The nesting of a call's arguments, and their leaves: tensors and constants."""
    if not kwargs and all(isinstance(a, _FLAT) for a in args):
        return len(args), args
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return structure, leaves


def unflatten(structure: Structure, leaves: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """``args, kwargs`` again."""
    return (leaves, {}) if isinstance(structure, int) else pytree.tree_unflatten(list(leaves), structure)


def layout(t: torch.Tensor) -> tuple[Any, ...]:
    """What a graph depends on beyond the values: dtype, shape, strides, device."""
    return t.dtype, t.shape, t.stride(), t.device


def is_array(value: Any) -> bool:
    """Whether a leaf is a tensor to a graph. A CPU tensor without axes is a number: so Dynamo passes floats."""
    return isinstance(value, torch.Tensor) and not (value.device.type == "cpu" and not value.dim())


def constant(value: Any) -> tuple[Any, ...]:
    """A leaf that is fixed at capture, as a key: 1, 1.0 and True differ, so do 0.0 and -0.0, and NaN equals itself."""
    kind = value.__class__
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, id(value) if is_array(value) else constant(value.item())
    if kind is float:
        return kind, value.hex()
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    try:
        hash(value)
    except TypeError:
        return kind, id(value)
    return kind, value


def signature(structure: Structure, leaves: Sequence[Any], stays: Collection[int] = ()) -> tuple[Any, ...]:
    """A call's exact key: nesting, layouts, constants, the addresses of leaves that are not copied, gradients."""
    recording = torch.is_grad_enabled()
    keys: list[tuple[Any, ...]] = []
    for i, x in enumerate(leaves):
        if not is_array(x):
            keys.append(constant(x))
        elif i in stays:
            keys.append((*layout(x), x.data_ptr()))
        else:
            keys.append((*layout(x), recording and x.requires_grad))
    return structure, *keys


def staying(leaves: Sequence[Any]) -> frozenset[int]:
    """Leaves that a graph reads where they are: parameters, and what Dynamo marked as having a static address."""
    return frozenset(
        i
        for i, x in enumerate(leaves)
        if isinstance(x, torch.nn.Parameter) or getattr(x, "_dynamo_static_input_type", None) is not None
    )


class Inputs:
    """Static buffers for the leaves of one signature.

    Args:
        whom: what is captured, for errors.
        structure, leaves: of the example call.
        stays: indices of leaves that are read where they are; every call must bring the same memory.

    Attributes:
        leaves: what the function is called with: a buffer for each tensor, constants as they are.
        bytes: of the buffers.

    Raises:
        ArgumentError: a tensor that is not on a GPU, carries a gradient, or overlaps itself.
    """

    def __init__(
        self, whom: str, structure: Structure, leaves: Sequence[Any], stays: Collection[int], device: torch.device
    ) -> None:
        self.whom, self.structure, self.stays = whom, structure, frozenset(stays)
        self.leaves: list[Any] = []
        self.bytes = 0
        self._keys: list[tuple[Any, ...]] = []
        self._fixed: set[int] = set()
        self._copied: list[tuple[int, torch.Tensor, tuple[Any, ...] | None]] = []
        for i, leaf in enumerate(leaves):
            if not is_array(leaf):
                self._keys.append(constant(leaf))
                self._fixed.add(i)
                self.leaves.append(leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf)
                continue
            refuse(whom, self.place(i), leaf, device, i in self.stays)
            self._keys.append(layout(leaf))
            self.leaves.append(leaf if i in self.stays else self._buffer(i, leaf))
        #: where a leaf that is read in place was at capture; its tensor may be given other memory since
        self._addresses = {i: leaves[i].data_ptr() for i in self.stays if i not in self._fixed}
        self.fill(leaves)

    def _buffer(self, i: int, leaf: torch.Tensor) -> torch.Tensor:
        """Memory for a leaf, with its strides; axes that are broadcast (stride 0) stay so, and are copied once."""
        axes = zip(leaf.shape, leaf.stride(), strict=True)
        once = tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in axes)
        narrow = once if any(s == slice(0, 1) for s in once) else None
        kept = leaf[narrow] if narrow else leaf
        if self_overlapping(Layout(_word(leaf.dtype), tuple(kept.shape), tuple(kept.stride()), 1)):
            raise ArgumentError(
                "cannot capture", self.whom, f"{self.place(i)} overlaps itself (strides {leaf.stride()})",
                "memory of its own for every element", "Pass its .contiguous()",
            )  # fmt: skip
        with torch.inference_mode(False):  # a buffer that is filled in any mode
            buffer = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        self.bytes += buffer.untyped_storage().nbytes()
        self._copied.append((i, buffer[narrow] if narrow else buffer, narrow))
        return buffer

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Those that calls are copied into."""
        return [self.leaves[i] for i, _, _ in self._copied]

    def versions(self) -> list[int]:
        """How often each buffer was written in place so far."""
        return [b._version for b in self.buffers]

    def written_since(self, versions: Sequence[int]) -> str:
        """The first buffer that was written since ``versions`` were taken, "" for none."""
        now = zip(self._copied, self.versions(), versions, strict=True)
        return next((self.place(i) for (i, _, _), new, old in now if new != old), "")

    def place(self, i: int) -> str:
        """A leaf as a reader finds it: ``argument 1`` or its path in nested arguments."""
        if isinstance(self.structure, int):
            return f"argument {i}"
        paths = [p for p, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten([0] * len(self), self.structure))[0]]
        return f"argument {pytree.keystr(paths[i][1:])}"

    def __len__(self) -> int:
        return self.structure if isinstance(self.structure, int) else self.structure.num_leaves

    def call(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """``args, kwargs`` of the buffers."""
        return unflatten(self.structure, self.leaves)

    def fits(self, structure: Structure, leaves: Sequence[Any]) -> bool:
        """Whether a call may be copied in; :meth:`explain` says why not."""
        if structure != self.structure:
            return False
        recording = torch.is_grad_enabled()
        for i, (leaf, key) in enumerate(zip(leaves, self._keys, strict=True)):
            if i in self._addresses:
                same = leaf is self.leaves[i] and leaf.shape == key[1]  # its data may have been exchanged
                if not (same or (isinstance(leaf, torch.Tensor) and layout(leaf) == key)):
                    return False
                if leaf.data_ptr() != self._addresses[i]:
                    return False
            elif i in self._fixed:
                if constant(leaf) != key:
                    return False
            elif not isinstance(leaf, torch.Tensor) or layout(leaf) != key or (recording and leaf.requires_grad):
                return False
        return True

    def fill(self, leaves: Sequence[Any]) -> None:
        """Copies the tensors of a call in, on the current stream; those that are the buffers themselves stay."""
        into, given = [], []
        for i, buffer, narrow in self._copied:
            leaf = leaves[i]
            if leaf is not self.leaves[i]:
                into.append(buffer)
                given.append(leaf[narrow] if narrow else leaf)
        if len(into) == 1:
            into[0].copy_(given[0], non_blocking=True)
        elif into:
            torch._foreach_copy_(into, given, non_blocking=True)

    def explain(self, structure: Structure, leaves: Sequence[Any]) -> ArgumentError:
        """The error of a call that does not fit."""
        if structure != self.structure:
            return self._misfit("arguments", _nesting(structure), _nesting(self.structure))
        for i, (leaf, key) in enumerate(zip(leaves, self._keys, strict=True)):
            where, fixed = self.place(i), self.leaves[i]
            if i in self._fixed or not isinstance(leaf, torch.Tensor):
                if i not in self._fixed or constant(leaf) != key:
                    return self._misfit(where, _brief(leaf), f"{_brief(fixed)}, fixed at capture")
                continue
            for what, found, wanted in zip(("dtype", "shape", "strides", "device"), layout(leaf), key, strict=True):
                if found != wanted:
                    return self._misfit(where, f"{what} {_plain(what, found)}", f"{_plain(what, wanted)}")
            if i in self._addresses and leaf.data_ptr() != self._addresses[i]:
                return self._misfit(where, "other memory", "the very tensor of the capture: it is read where it is")
            if i not in self.stays and leaf.requires_grad and torch.is_grad_enabled():
                return _carries(self.whom, where)
        return self._misfit("arguments", "they fit", "")

    def _misfit(self, where: str, found: str, expected: str) -> ArgumentError:
        return ArgumentError(
            "cannot replay", f"{self.whom}, {where}", found, expected,
            "Capture it again, or capture with shapes=fusionreg.GraphPool() to have one graph per signature",
        )  # fmt: skip


def refuse(whom: str, where: str, leaf: torch.Tensor, device: torch.device, stays: bool) -> None:
    """:class:`ArgumentError` for a tensor that cannot be an argument of a graph on ``device``."""
    if type(leaf).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        found, expected, step = f"{where} is a {type(leaf).__name__}", "a tensor with memory of its own", ""
    elif leaf.layout is not torch.strided:
        found, expected, step = f"{where} has layout {leaf.layout}", "a strided tensor", ""
    elif leaf.is_neg() or leaf.is_conj():
        found, expected, step = f"{where} is a lazy conjugate or negative", "its values in memory", "Resolve it first"
    elif leaf.device != device:
        found, expected = f"{where} is on {leaf.device}", f"a tensor on {device}"
        step = "A graph replays on one GPU: move the tensor there, or pass a number"
    elif leaf.requires_grad and torch.is_grad_enabled() and not stays:
        raise _carries(whom, where)
    else:
        return
    raise ArgumentError("cannot capture", whom, found, expected, step)


def _carries(whom: str, where: str) -> ArgumentError:
    return ArgumentError(
        "cannot capture", whom, f"{where} requires grad", "results of a replay, which have no history",
        "Capture the whole step (forward, backward, optimiser), or call it under torch.no_grad()",
    )  # fmt: skip


def _plain(what: str, value: Any) -> str:
    if what == "device":
        return str(value)
    return _word(value) if what == "dtype" else str(list(value))


def _nesting(structure: Structure) -> str:
    return f"{structure} that are not nested" if isinstance(structure, int) else f"nested as {structure}"


def _brief(value: Any) -> str:
    if is_array(value):
        return f"a tensor {_word(value.dtype)}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
