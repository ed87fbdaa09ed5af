"""If, Loop and Scan: their bodies as graphs, and the types that pass through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...core.ir import Graph, GraphBuilder, Shape, Value
from .adapters import Call
from .scope import Scope

if TYPE_CHECKING:
    from .load import Importer


#: Types of a node's outputs, and its bodies by attribute name.
Typed = tuple[list[Value], dict[str, Graph]]


def build(importer: Importer, scope: Scope, call: Call, graphs: Mapping[str, Any], names: Sequence[str]) -> Typed:
    """(types of the node's outputs, its bodies by attribute name)."""
    how = {"If": _if, "Loop": _loop, "Scan": _scan}.get(call.op)
    if how is None:
        raise call.error(f"sub-graphs {sorted(graphs)}", "If, Loop or Scan")
    types, built = how(importer, scope, call, graphs)
    if len(types) < call.outputs:
        raise call.error(f"{call.outputs} outputs", f"at most {len(types)}")
    typed = [importer.typed(n or "_", t.dtype, t.shape) for n, t in zip(names, types, strict=False)]
    return typed, built


def _body(importer: Importer, scope: Scope, graph: Any, given: Sequence[Value | None]) -> Graph:
    inner = Scope(GraphBuilder(graph.name or "body", importer.names.taken), scope.opsets, scope, {}, scope.arguments,
                  scope.prefix, scope.hinted)  # fmt: skip
    importer.interface(inner, graph, given)
    outputs = importer.body(inner, graph)
    importer.names.taken |= inner.builder.taken
    return inner.builder.build(outputs, outer=scope.visible)


def _type(graph: Graph, importer: Importer, index: int) -> Value:
    name = graph.outputs[index]
    return graph.values.get(name) or importer.types[name]


def _meet(a: Value, b: Value) -> Value:
    """What holds of both: extents that differ are unknown."""
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return Value(a.name, a.dtype, None)
    dims = tuple(x if x == y else None for x, y in zip(a.shape, b.shape, strict=True))
    return Value(a.name, a.dtype, dims)  # type: ignore[arg-type]


def _if(importer: Importer, scope: Scope, call: Call, graphs: Mapping[str, Any]) -> Typed:
    built = {name: _body(importer, scope, graphs[name], ()) for name in ("then_branch", "else_branch")}
    one, other = built.values()
    if len(one.outputs) != len(other.outputs):
        raise call.error(f"branches with {len(one.outputs)} and {len(other.outputs)} outputs", "as many in both")
    pairs = [(_type(one, importer, i), _type(other, importer, i)) for i in range(len(one.outputs))]
    for a, b in pairs:
        if a.dtype != b.dtype:
            raise call.error(f"branches that give {a.dtype} and {b.dtype}", "one type")
    return [_meet(a, b) for a, b in pairs], built


def _loop(importer: Importer, scope: Scope, call: Call, graphs: Mapping[str, Any]) -> Typed:
    carried = [importer.types[n] for n in call.inputs[2:]]
    head = [Value("", "int64", ()), Value("", "bool", ())]
    body, states = _stable(importer, scope, graphs["body"], head, carried, [], skip=1)
    scans = [_type(body, importer, 1 + i) for i in range(len(carried), len(body.outputs) - 1)]
    return states + [Value(s.name, s.dtype, _stacked(s.shape, 0)) for s in scans], {"body": body}


def _scan(importer: Importer, scope: Scope, call: Call, graphs: Mapping[str, Any]) -> Typed:
    count = int(call.attrs["num_scan_inputs"])
    values = [importer.types[n] for n in call.inputs]
    carried, scanned = values[: len(values) - count], values[len(values) - count :]
    axes = call.attrs.get("scan_input_axes", (0,) * count)
    slices = [
        Value("", v.dtype, None if v.shape is None else _without(v.shape, axis))
        for v, axis in zip(scanned, axes, strict=True)
    ]
    body, states = _stable(importer, scope, graphs["body"], [], carried, slices, skip=0)
    outs = [_type(body, importer, i) for i in range(len(carried), len(body.outputs))]
    out_axes = call.attrs.get("scan_output_axes", (0,) * len(outs))
    length = next((v.shape[a] for v, a in zip(scanned, axes, strict=True) if v.shape is not None), None)
    return states + [
        Value(o.name, o.dtype, _stacked(o.shape, axis, length)) for o, axis in zip(outs, out_axes, strict=True)
    ], {"body": body}


def _stable(
    importer: Importer, scope: Scope, graph: Any, head: list[Value], carried: list[Value], tail: list[Value], skip: int
) -> tuple[Graph, list[Value]]:
    """The body typed for every iteration: a carried shape that an iteration changes is unknown."""
    for _ in range(3):
        body = _body(importer, scope, graph, [*head, *carried, *tail])
        after = [_meet(c, _type(body, importer, skip + i)) for i, c in enumerate(carried)]
        changed = [a.shape != c.shape for a, c in zip(after, carried, strict=True)]
        if not any(changed):
            break
        # an extent that the body renames each time would never settle: give up its name, then its rank
        carried = [
            Value(c.name, c.dtype, None if a.shape is None or None in c.shape else a.shape)  # type: ignore[operator]
            if differs else c
            for a, c, differs in zip(after, carried, changed, strict=True)
        ]  # fmt: skip
    return body, carried


def _without(shape: Shape, axis: int) -> Shape:
    axis %= len(shape)
    return (*shape[:axis], *shape[axis + 1 :])


def _stacked(shape: Shape | None, axis: int, length: Any = None) -> Any:
    if shape is None:
        return None
    axis %= len(shape) + 1
    return (*shape[:axis], length, *shape[axis:])
