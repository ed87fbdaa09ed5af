"""Maps with channels last: where a program convolves, its inputs may be moved so first, and all is planned so.

Kernels of convolutions, and those of normalisations of maps, read the channels of a pixel in one go. Inductor moves the
maps of a program by itself; a graph whose convolutions are fused calls has none left that it would move them for, and a
fused call between convolutions that it leaves to Inductor, which gives maps in the order that it gets them, has copies
around it unless that is channels last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fusionreg.core.errors import ModelError
from fusionreg.core.runtime.preview import COPIED, COPY

_ATEN = torch.ops.aten
_CONVOLUTIONS = frozenset((_ATEN.conv2d.default, _ATEN.conv2d.padding, _ATEN.convolution.default))
_LAST = torch.channels_last


def movable(module: torch.fx.GraphModule, values: Sequence[Any]) -> Mapping[int, torch.Tensor]:
    """Place among the inputs of a traced program → the same input with channels last, of all that may be moved; none
    where it does not convolve, where it does in groups of several channels, which libraries are slow at with channels
    last, and where extents are symbolic."""
    convolutions = [n for n in module.graph.nodes if n.target in _CONVOLUTIONS]
    if not convolutions or any(map(_grouped, convolutions)):
        return {}
    found = {i: v for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.dim() == 4}
    if not all(type(d) is int for v in found.values() for d in (*v.shape, *v.stride())):
        return {}
    return {i: _moved(v) for i, v in found.items() if not v.is_contiguous(memory_format=_LAST)}


def copied(module: torch.fx.GraphModule, values: Sequence[Any]) -> bool:
    """Whether a graph that autograd has made convolves maps that do not have channels last, as far as it knows."""
    targets = {n.target for n in module.graph.nodes}
    convolves = not targets.isdisjoint({*_CONVOLUTIONS, _ATEN.convolution_backward.default})
    maps = (v for v in values if isinstance(v, torch.Tensor) and v.dim() == 4)
    return convolves and not all(v.is_contiguous(memory_format=_LAST) for v in maps)


def _grouped(node: torch.fx.Node) -> bool:
    x, w = (n.meta.get("val") for n in node.args[:2])  # type: ignore[union-attr]
    return isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor) and 1 < w.shape[1] < x.shape[1]


def _moved(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = value.detach().contiguous(memory_format=_LAST)
    return made.requires_grad_(value.requires_grad)


def by_itself(module: torch.fx.GraphModule, moved: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
    """Those of ``moved`` from which no way leads to a convolution: the others Inductor moves itself, in the kernel that
    writes what the convolution reads, which takes it no less than moving them first."""
    places = module.graph.find_nodes(op="placeholder")
    leads = set[torch.fx.Node]()
    for node in reversed(module.graph.nodes):
        if any(user.target in _CONVOLUTIONS or user in leads for user in node.users):
            leads.add(node)
    return {i: v for i, v in moved.items() if places[i] not in leads}


def seconds(moved: Mapping[int, torch.Tensor]) -> float:
    """What it takes to move them, one by one."""
    return sum(COPY + 2 * v.numel() * v.element_size() / COPIED for v in moved.values())


def move(made: torch.fx.GraphModule, moved: Mapping[int, torch.Tensor], segment: torch.fx.GraphModule) -> int:
    """Has ``made``, which takes the place of ``segment``, move its inputs by itself: how many it reads. Results lie as
    they did there.

    :class:`ModelError` for a result that lay in another way than a contiguous call can give.
    """
    graph = made.graph
    places = graph.find_nodes(op="placeholder")
    used = [i for i in moved if places[i].users]
    with graph.inserting_after(places[-1]):
        for i in used:
            laid = graph.call_function(_ATEN.contiguous.default, (places[i],), {"memory_format": _LAST})
            places[i].replace_all_uses_with(laid, partial(_reads, places[i], laid))
    (end,), (before,) = graph.find_nodes(op="output"), segment.graph.find_nodes(op="output")
    with graph.inserting_before(end):
        end.args = (tuple(_as_before(graph, n, b) for n, b in zip(end.args[0], before.args[0], strict=True)),)
    made.recompile()
    return len(used)


def _reads(place: torch.fx.Node, laid: torch.fx.Node, user: torch.fx.Node) -> bool:
    """Whether a user of an input may have the moved one: not what moves it, nor what writes it back."""
    return user is not laid and not (user.target is _ATEN.copy_.default and user.args[0] is place)


def _recorded(node: Any) -> Any:
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, torch.fx.Node) else None


def _as_before(graph: torch.fx.Graph, node: Any, before: Any) -> Any:
    value, old = map(_recorded, (node, before))
    if not isinstance(value, torch.Tensor) or not isinstance(old, torch.Tensor) or value.stride() == old.stride():
        return node
    for layout in (torch.contiguous_format, _LAST):
        if old.is_contiguous(memory_format=layout):
            return graph.call_function(_ATEN.contiguous.default, (node,), {"memory_format": layout})
    raise ModelError("cannot move maps", before.name, f"a result of strides {tuple(old.stride())}", "one without gaps")
