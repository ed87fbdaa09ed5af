"""CUDA graphs: a call captured once and replayed at the price of one launch.

Importing this package imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from fusionreg.core.errors import ArgumentError
from fusionreg.core.frozen import EMPTY

from .captured import Captured, name_of
from .device import Gpu
from .graphed import Graphed, graphed
from .leaves import flatten, staying
from .report import GraphReport, PoolReport
from .shapes import Devices, GraphPool, Shaped, index_of

if TYPE_CHECKING:
    import torch


@overload
def capture(
    function: Callable[..., Any], *example: Any, shapes: GraphPool, kwargs: Mapping[str, Any] = ..., warmup: int = ...,
    generators: Sequence[torch.Generator] = ...,
) -> Shaped: ...  # fmt: skip
@overload
def capture(
    function: Callable[..., Any], *example: Any, kwargs: Mapping[str, Any] = ..., pool: Any = ..., clone: bool = ...,
    warmup: int = ..., generators: Sequence[torch.Generator] = ...,
) -> Captured: ...  # fmt: skip


def capture(
    function: Callable[..., Any],
    *example: Any,
    kwargs: Mapping[str, Any] = EMPTY,
    pool: Any = None,
    shapes: GraphPool | None = None,
    clone: bool = False,
    warmup: int = 3,
    generators: Sequence[torch.Generator] = (),
    devices: Devices = Gpu,
) -> Any:
    """Captures ``function(*example, **kwargs)`` into a CUDA graph, whose replays cost one launch.

    The function runs ``warmup`` times on a stream aside, then once more while the stream is recorded. It may be a fused
    model, a module, or a training step (forward, backward and an optimiser made with ``capturable=True``). It must not
    read results back (``.item()``), nor write its arguments. What it draws from torch's generator on the GPU, also with
    ``registry.rng``, is drawn anew at each replay.

    Args:
        function: what to capture; it is kept alive, and so are the tensors that it holds, which the graph reads where
            they are.
        example: its arguments: tensors on one GPU, constants, and lists, tuples, dictionaries or other pytrees of
            them. Parameters are read where they are; other tensors get a buffer each, which replays copy into.
        kwargs: its keyword arguments.
        pool: a capture, or a handle of ``torch.cuda.graph_pool_handle()``, whose memory this graph shares. Then a
            replay of either overwrites the results of both.
        shapes: keeps a graph for each signature instead, captured when a call first has it.
        clone: results are copies that later replays leave alone.
        warmup: calls before the capture. They are real calls: a training step trains. Generators are put back.
        generators: further generators that the function draws from.
        devices: what makes a device of a GPU's index.

    Returns: a :class:`Captured`, called like the function; with ``shapes`` a :class:`Shaped`.
    Raises:
        ArgumentError: arguments that no graph can take.
        LaunchError: the function did what a graph cannot hold. The stream is usable again.
    """
    whom = name_of(function)
    for holds, found, expected in (
        (callable(function), f"a {whom}", "a function"),
        (isinstance(kwargs, Mapping), f"kwargs {kwargs!r}", "a mapping"),
        (isinstance(warmup, int) and warmup >= 0, f"warmup {warmup!r}", "0 or more calls"),
        (shapes is None or isinstance(shapes, GraphPool), f"shapes {shapes!r}", "a GraphPool"),
        (_generators(generators), f"generators {generators!r}", "a sequence of torch.Generator"),
    ):
        if not holds:
            raise ArgumentError("cannot capture", whom, found, expected)
    structure, leaves = flatten(example, kwargs)
    if shapes is not None:
        if pool is not None:
            raise ArgumentError("cannot capture", whom, "pool beside shapes", "one of them")
        made = Shaped(function, shapes, devices, warmup=warmup, generators=tuple(generators))
        if leaves:
            made.prepare(structure, leaves)
        return made
    order = pool.order if isinstance(pool, Captured) else None
    handle = pool.pool if isinstance(pool, Captured) else pool
    return Captured(
        function, structure, leaves, devices(index_of(leaves, whom)), stays=staying(leaves), pool=handle, order=order,
        warmup=warmup, clone=clone, generators=tuple(generators),
    )  # fmt: skip


def _generators(given: Any) -> bool:
    from torch import Generator

    return isinstance(given, Sequence) and all(isinstance(g, Generator) for g in given)


__all__ = ["Captured", "GraphPool", "GraphReport", "Graphed", "PoolReport", "Shaped", "capture", "graphed"]
