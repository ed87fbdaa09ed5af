"""Graphs for several signatures: captured at first use, found by exact key, a bounded number of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusionreg.core.errors import ArgumentError

from .captured import Captured, Order, name_of
from .device import Device
from .leaves import Structure, flatten, is_array, signature, staying
from .report import PoolReport

#: Makes a device for the index of a GPU.
Devices = Callable[[int | None], Device]


class GraphPool:
    """Keeps graphs by exact signature (nesting, shapes, strides, dtypes, device, constants), those used last.

    Its graphs share one memory pool per device: what one holds in passing, another uses too. Their replays are put in
    order, and results are copied out, as the next replay of any of them may overwrite them.

    Args:
        limit: graphs kept; beyond it the one used longest ago goes, with its memory.
    """

    def __init__(self, limit: int = 8) -> None:
        if not isinstance(limit, int) or limit < 1:
            raise ArgumentError("cannot make", "a pool of graphs", f"limit {limit!r}", "a number, at least 1")
        self.limit = limit
        self.order = Order()
        self._graphs: OrderedDict[Any, tuple[str, Captured]] = OrderedDict()
        self._memory: dict[torch.device, Any] = {}
        self._captured = self._evicted = 0
        self._refused: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: Any) -> Captured | None:
        """The graph of a key, which is then the one used last."""
        with self.order.lock:
            found = self._graphs.get(key)
            if found is None:
                return None
            self._graphs.move_to_end(key)
            return found[1]

    def capture(
        self, key: Any, function: Callable[..., Any], structure: Structure, leaves: Sequence[Any], device: Device,
        **options: Any,
    ) -> Captured:  # fmt: skip
        """Captures a call under ``key``, unless another thread just did; see :class:`Captured` for the options."""
        with self.order.lock:
            if key in self._graphs:
                return self._graphs[key][1]
            while len(self._graphs) >= self.limit:
                device.synchronize()  # its last replay may still be under way
                self._graphs.popitem(last=False)
                self._evicted += 1
            made = Captured(
                function, structure, leaves, device, pool=self._memory.get(device.device), order=self.order, clone=True,
                **options,
            )  # fmt: skip
            self._memory[device.device] = made.pool
            self._graphs[key] = _layouts(leaves), made
            self._captured += 1
            return made

    def refuse(self, reason: str) -> None:
        """Counts a call that ran without a graph."""
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def clear(self) -> None:
        """Lets all graphs go."""
        with self.order.lock:
            self._graphs.clear()

    @property
    def report(self) -> PoolReport:
        """What it holds."""
        graphs = tuple((layouts, graph.report) for layouts, graph in self._graphs.values())
        return PoolReport(graphs, self.limit, self._captured, self._evicted, tuple(self._refused.items()))


class Shaped:
    """A function with a graph for each signature it is called with. Made by ``fusionreg.capture(…, shapes=pool)``.

    Attributes:
        function: it.
        pool: where its graphs are; several functions may share one.
    """

    def __init__(self, function: Callable[..., Any], pool: GraphPool, devices: Devices, **options: Any) -> None:
        self.function, self.name, self.pool = function, name_of(function), pool
        self._devices, self._options = devices, options

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`Captured.replay`, with a graph of this very signature; its first call captures it."""
        structure, leaves = flatten(args, kwargs)
        return self.prepare(structure, leaves).run(leaves)

    __call__ = replay

    def prepare(self, structure: Structure, leaves: Sequence[Any]) -> Captured:
        """The graph of a signature, captured if there is none yet."""
        stays = staying(leaves)
        key = (self, modes(), *signature(structure, leaves, stays))
        found = self.pool.find(key)
        if found is None:
            device = self._devices(index_of(leaves, self.name))
            return self.pool.capture(key, self.function, structure, leaves, device, stays=stays, **self._options)
        return found

    @property
    def report(self) -> PoolReport:
        """Of its pool."""
        return self.pool.report

    def __repr__(self) -> str:
        return f"<captured {self.name} in {len(self.pool)} shapes>"


def modes() -> tuple[Any, ...]:
    """What else than arguments decides what a function of torch computes."""
    cast = torch.is_autocast_enabled("cuda")
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast and torch.get_autocast_dtype("cuda"),
    )  # fmt: skip


def index_of(leaves: Sequence[Any], whom: str) -> int | None:
    """The GPU of the tensors; None where there is no tensor. :class:`ArgumentError` for tensors of several devices."""
    devices = {x.device for x in leaves if is_array(x)}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ArgumentError("cannot capture", whom, f"tensors on {found}", "tensors on one GPU")
    return next((d.index for d in devices), None)


def _layouts(leaves: Sequence[Any]) -> str:
    tensors = [x for x in leaves if is_array(x) and not isinstance(x, torch.nn.Parameter)]
    texts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:4]]
    return ", ".join(texts) + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "") or "no tensors"
