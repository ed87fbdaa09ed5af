"""If, Loop and Scan: operators that run sub-graphs, as ONNX defines them. Floor 1; used by ``evaluate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..ir import Graph, Node, Value

if TYPE_CHECKING:
    from .evaluator import Run


def run_if(run: Run, node: Node, scope: Mapping[str, Any]) -> Sequence[Any]:
    """The outputs of the branch that the condition picks."""
    taken = run.native.scalar(scope[node.inputs[0]])
    return run.graph(node.graphs["then_branch" if taken else "else_branch"], {}, scope)


def run_loop(run: Run, node: Node, scope: Mapping[str, Any]) -> Sequence[Any]:
    """Final loop values, then every scan output stacked along a new first axis."""
    import numpy as np

    body = node.graphs["body"]
    limit, condition, *state = [
        scope[name] if name else None for name in (*node.inputs, "", "")[: max(2, len(node.inputs))]
    ]
    trips = None if limit is None else int(run.native.scalar(limit))
    going = condition is None or bool(run.native.scalar(condition))
    collected: list[list[Any]] = [[] for _ in body.outputs[1 + len(state) :]]
    i = 0
    while going and (trips is None or i < trips):
        arrays = [np.asarray(i, dtype=np.int64), np.asarray(True), *state]
        going_now, *results = run.graph(body, dict(zip(body.inputs, arrays, strict=True)), scope)
        state = results[: len(state)]
        for store, x in zip(collected, results[len(state) :], strict=True):
            store.append(x)
        going, i = bool(run.native.scalar(going_now)), i + 1
    stacks = [
        _stack(run, xs, body, name, 0) for xs, name in zip(collected, body.outputs[1 + len(state) :], strict=True)
    ]
    return [*state, *stacks]


def run_scan(run: Run, node: Node, scope: Mapping[str, Any]) -> Sequence[Any]:
    """Final state values, then every scan output stacked along its axis."""
    body, count = node.graphs["body"], int(node.attrs["num_scan_inputs"])
    operands = [run.to_device(scope[name]) for name in node.inputs]
    state, scanned = operands[: len(operands) - count], operands[len(operands) - count :]
    outs = body.outputs[len(state) :]
    in_axes = node.attrs.get("scan_input_axes") or (0,) * count
    in_back = node.attrs.get("scan_input_directions") or (0,) * count
    out_axes = node.attrs.get("scan_output_axes") or (0,) * len(outs)
    out_back = node.attrs.get("scan_output_directions") or (0,) * len(outs)
    length = scanned[0].shape[in_axes[0]]
    collected: list[list[Any]] = [[] for _ in outs]
    for i in range(length):
        slices = [
            _at(x, axis, length - 1 - i if back else i) for x, axis, back in zip(scanned, in_axes, in_back, strict=True)
        ]
        results = run.graph(body, dict(zip(body.inputs, [*state, *slices], strict=True)), scope)
        state = results[: len(state)]
        for store, x in zip(collected, results[len(state) :], strict=True):
            store.append(x)
    stacks = [
        _stack(run, xs[::-1] if back else xs, body, name, axis)
        for xs, name, axis, back in zip(collected, outs, out_axes, out_back, strict=True)
    ]
    return [*state, *stacks]


def _at(x: Any, axis: int, i: int) -> Any:
    return x[(slice(None),) * (axis % x.ndim) + (i,)]


def _stack(run: Run, arrays: Sequence[Any], body: Graph, name: str, axis: int) -> Any:
    if arrays:
        return run.native.ns.stack([run.to_device(x) for x in arrays], axis=axis)
    return _nothing(run, body.values[name], axis)


def _nothing(run: Run, value: Value, axis: int) -> Any:
    """What no iteration at all gives: extent 0 along the new axis, unknown extents 0 too."""
    shape = [d if isinstance(d, int) else 0 for d in value.shape or ()]
    shape.insert(axis % (len(shape) + 1), 0)
    dtype = run.compute.compute_name(value.dtype) if run.owner.mode == "exact" else value.dtype
    return run.native.ns.empty(tuple(shape), dtype=run.native.storage(dtype), device=run.native.device)
