"""A device that "captures" without a GPU: recording runs a call, replaying runs it again into the recorded tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusionreg.core.errors import LaunchError
from fusionreg.integrations.torch.graphs.device import Recording
from fusionreg.integrations.torch.graphs.nodes import Nodes


@dataclass
class FakeDevice:
    """CPU tensors; it keeps a log of what was asked of it.

    Attributes:
        fails: what the next recording raises.
        untouched: tensors that a recording leaves as they are, although it runs the call: a GPU's computes nothing.
        under_way: whether the current stream is being captured, as far as anybody asks.
        current: the current stream.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    log: list[Any] = field(default_factory=list)
    pools: list[Any] = field(default_factory=list)
    fails: BaseException | None = None
    untouched: list[torch.Tensor] = field(default_factory=list)
    under_way: bool = False
    current: str = "stream 0"

    @contextmanager
    def aside(self) -> Iterator[str]:
        self.log.append("aside")
        yield "side"
        self.log.append("back")

    @contextmanager
    def keeping(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        kept = [*generators, torch.default_generator]
        states = [g.get_state() for g in kept]
        try:
            yield
        finally:
            for generator, state in zip(kept, states, strict=True):
                generator.set_state(state)

    def record(
        self, whom: str, run: Callable[[], Any], stream: Any, pool: Any, generators: Sequence[torch.Generator]
    ) -> Recording:
        self.log.append("record")
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.under_way = True
        before = [t.clone() for t in self.untouched]
        try:
            result = run()
        finally:
            self.under_way = False
        for tensor, value in zip(self.untouched, before, strict=True):
            tensor.copy_(value)
        held = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]

        def replay() -> None:
            self.log.append("replay")
            again = [x for x in pytree.tree_leaves(run()) if isinstance(x, torch.Tensor)]
            with torch.no_grad():
                for into, value in zip(held, again, strict=True):
                    into.copy_(value)

        self.pools.append(pool)
        return Recording(replay, result, Nodes(kernels=2, copies=1, programmatic=1), pool or f"pool {id(self)}", 2**21)

    def stream(self) -> str:
        return self.current

    def order(self, before: str, buffers: Sequence[torch.Tensor]) -> None:
        self.log.append(("order", before, self.current, len(buffers)))

    def capturing(self) -> bool:
        return self.under_way

    def synchronize(self) -> None:
        self.log.append("synchronize")


@dataclass
class FakeDevices:
    """Stands where a class of devices would: every GPU is the same fake one."""

    one: FakeDevice = field(default_factory=FakeDevice)

    def __call__(self, index: int | None) -> FakeDevice:
        return self.one


REFUSED = LaunchError("cannot capture", "it", "the driver says no", "work that stays on the device")
