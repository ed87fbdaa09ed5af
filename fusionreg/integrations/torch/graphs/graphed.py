"""A compiled inference graph behind CUDA graphs: for ``torch.compile(…, options={"cuda_graph": True})``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusionreg.core.errors import ArgumentError

from .captured import Captured, name_of
from .device import Gpu
from .leaves import is_array, signature, staying
from .outputs import shares_memory
from .report import PoolReport
from .shapes import Devices, GraphPool, index_of, modes

#: Signatures remembered beyond those that have a graph.
_REMEMBERED = 256


class Graphed:
    """A function of flat inputs that runs as a CUDA graph wherever that is safe, and as it is elsewhere.

    The first call of a signature runs the function itself, the second captures, later ones replay. The very first is
    watched: what it writes, and whether its results are new.
    Results are new tensors at every call.

    Attributes:
        function: what runs without a graph.
        reason: why it will never run as a graph, "" while it may.
        pool: where its graphs are.
    """

    def __init__(
        self, function: Callable[..., Any], pool: GraphPool, example_inputs: Sequence[Any], *, mutated: Collection[int],
        kind: str, devices: Devices,
    ) -> None:  # fmt: skip
        self.function, self.pool = function, pool
        self.reason = against(example_inputs, kind)
        self._stays, self._kind, self._devices = staying(example_inputs), kind, devices
        self._warmup = 2  # the call that is watched has compiled all; these are for the report
        for i in sorted(mutated):
            self._written(i)
        self._capturing: Callable[[], bool] = bool
        if not self.reason:
            try:
                self._capturing = devices(index_of(example_inputs, name_of(function))).capturing
            except ArgumentError as error:
                self.reason = str(error)
        self._looked = False
        self._last: Captured | None = None
        self._last_modes: Any = None
        self._seen: dict[Any, str] = {}  # signature → why it must run as it is, "" where a graph may be tried

    def __call__(self, *inputs: Any) -> Any:
        if self.reason:
            return self._as_it_is(inputs, self.reason)
        if self._capturing():  # the caller captures the whole: let it be a part of that
            return self.function(*inputs)
        last = self._last
        if last is not None and self._last_modes == modes() and last.fits(len(inputs), inputs):
            return last.run(inputs)
        key = (self, modes(), *signature(len(inputs), inputs, self._stays))
        found = self.pool.find(key)
        if found is None:
            known = self._seen.get(key)
            if known is None:
                return self._first(key, inputs)
            if known:
                return self._as_it_is(inputs, known)
            found = self._capture(key, inputs)
            if found is None:
                return self._as_it_is(inputs, self.reason or self._seen[key])
        self._last, self._last_modes = found, key[1]
        return found.run(inputs)

    def _as_it_is(self, inputs: Sequence[Any], reason: str) -> Any:
        self.pool.refuse(reason)
        return self.function(*inputs)

    def _first(self, key: Any, inputs: Sequence[Any]) -> Any:
        """The first call of a signature is the function's own: what is called once is not worth a capture."""
        why = against(inputs, self._kind)
        self._remember(key, why)
        if why:
            return self._as_it_is(inputs, why)
        if self._looked:
            return self.function(*inputs)
        self._looked = True
        return self._watched(inputs)

    def _watched(self, inputs: Sequence[Any]) -> Any:
        """A call with a look at whether a graph could take its place."""
        tensors = [(i, x) for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        try:
            before = [(_version(x), _copy(x)) for _, x in tensors]
        except torch.OutOfMemoryError:
            self.reason = "there is no memory to see what it writes"
            return self._as_it_is(inputs, self.reason)
        result = self.function(*inputs)
        for (i, x), (version, copy) in zip(tensors, before, strict=True):
            if _version(x) != version or (copy is not None and not _same_bits(x, copy)):
                self._written(i)
        if not self.reason and shares_memory(pytree.tree_leaves(result), inputs):
            self.reason = "a result is an input or a view of one"
        return result

    def _written(self, i: int) -> None:
        """An input that is read where it is may be written there, but then nothing may run twice for a capture."""
        if i in self._stays:
            self._warmup = 0
        else:
            self.reason = self.reason or f"it writes input {i} in place"

    def _remember(self, key: Any, why: str) -> None:
        while len(self._seen) >= _REMEMBERED:
            self._seen.pop(next(iter(self._seen)))
        self._seen[key] = why

    def _capture(self, key: Any, inputs: Sequence[Any]) -> Captured | None:
        try:
            device = self._devices(index_of(inputs, name_of(self.function)))
            options = {"stays": self._stays, "warmup": self._warmup}
            return self.pool.capture(key, self.function, len(inputs), inputs, device, **options)
        except ArgumentError as error:
            self._remember(key, str(error))
        except RuntimeError as error:  # the call itself works: it ran before
            self.reason = str(error).strip().splitlines()[0]
        return None

    @property
    def report(self) -> PoolReport:
        """Its graphs, and why calls ran without one."""
        return self.pool.report


def graphed(
    function: Callable[..., Any],
    example_inputs: Sequence[Any],
    *,
    pool: GraphPool | None = None,
    mutated: Collection[int] = (),
    kind: str = "cuda",
    devices: Devices = Gpu,
) -> Graphed:
    """``function`` behind CUDA graphs, one for each signature of its inputs.

    Args:
        function: a compiled graph without gradients: flat inputs, tensors and numbers, in; results out.
        example_inputs: as Dynamo hands them over. Parameters and what Dynamo marked as static are read where they
            are: other memory at such a place means another graph.
        pool: where graphs are kept; by default a new one of 8.
        mutated: indices of inputs that are known to be written; what is written is also found by watching. It may be
            what is read in place (a cache), nothing else.
        kind: the type of device whose calls are captured.
        devices: what makes a device of a GPU's index.

    Returns: a callable that never fails for want of a graph: where none is possible it calls ``function``, and its
    report tells why.
    """
    kept = GraphPool() if pool is None else pool
    return Graphed(function, kept, example_inputs, mutated=mutated, kind=kind, devices=devices)


def against(inputs: Sequence[Any], kind: str = "cuda") -> str:
    """Why a graph cannot stand for a call with these inputs, "" where it may."""
    tensors = [x for x in inputs if is_array(x)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "an input requires grad: a replay has no backward"
    devices = sorted({str(x.device) for x in tensors})
    if len(devices) != 1 or tensors[0].device.type != kind:
        return f"inputs are on {' and '.join(devices) or 'no device'}: a graph needs all of them on one GPU"
    return ""


def _copy(t: torch.Tensor) -> torch.Tensor | None:
    return None if isinstance(t, torch.nn.Parameter) else t.detach().clone()


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, and NaN equals itself."""
    if not a.numel():
        return True
    one, two = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(one, two)
