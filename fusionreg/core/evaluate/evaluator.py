"""Running a graph operator by operator: the reference of every fusion, and the unfused rest of a model. Floor 1.

Two modes. ``step`` is the unfused chain: an operator computes in float32 what the model holds in a smaller float, and
its result is rounded once to the dtype the graph declares. ``exact`` is the reference: every float is float64 and casts
among floats are the identity; casts to integers and bool happen.

On a GPU small integer tensors (shapes and what is computed from them) stay on the host, so that shape arithmetic
does not stall the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

from ..dtypes import dtype
from ..errors import ArgumentError, FusionregError, GraphError
from ..ir import FUSED, Graph, Node, Value
from ..ops import (
    CONTROL_FLOW,
    UNDEFINED,
    Backend,
    Vocabulary,
    backend_of,
    check_inputs,
    complete,
    native,
    numpy_backend,
)
from ..spec import OpSpec
from .subgraphs import run_if, run_loop, run_scan

Mode = Literal["step", "exact"]
Fused = Callable[[Node, Sequence[Any]], Sequence[Any] | None]

_HOST_ELEMENTS = 1024  # an integer tensor up to this size is worth keeping off the GPU
_SHAPE_READERS = frozenset({"Shape", "Size"})
_ADD = "Add it with the register_ops hook"


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Any],
    *,
    ops: Vocabulary,
    backend: Backend | None = None,
    mode: Mode = "step",
    fused: Fused | None = None,
    trace: MutableMapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The graph's outputs by name.

    Args:
        graph: checked; symbolic extents take whatever the inputs have.
        inputs: arrays by input name, with the declared dtypes (``exact``: any float for a float); those that override
            a constant may be left out.
        ops: the operators.
        backend: library and device to run on; by default that of the inputs.
        mode: ``step`` or ``exact``.
        fused: ``f(node, args) -> results`` executes ``fused::`` nodes, omitted operands being None; where it gives
            None, without it, and in ``exact`` mode, the sub-graph that such a node replaced is evaluated.
        trace: gets every value by name as it is computed, those inside fused nodes included.

    Raises:
        ArgumentError: missing, unknown or unfitting inputs, or arrays of two libraries.
        GraphError: an unknown operator, or an operator that fails on its operands; names node and source line.
    """
    return Evaluator(graph, ops=ops, backend=backend, mode=mode, fused=fused).run(inputs, trace)


class Evaluator:
    """:func:`evaluate` for repeated calls: constants go to the device once."""

    def __init__(
        self,
        graph: Graph,
        *,
        ops: Vocabulary,
        backend: Backend | None = None,
        mode: Mode = "step",
        fused: Fused | None = None,
    ) -> None:
        self.graph, self.ops, self.mode = graph, ops, mode
        self.fused = fused if mode == "step" else None
        self._backend = backend
        self._constants: dict[tuple[Any, int, str], Any] = {}
        self._calls: dict[int, tuple[OpSpec, dict[str, Any], frozenset[int]]] = {}
        self._plans: dict[int, tuple[tuple[str, ...], ...]] = {}

    def run(self, inputs: Mapping[str, Any], trace: MutableMapping[str, Any] | None = None) -> dict[str, Any]:
        """The outputs for ``inputs``; see :func:`evaluate`."""
        backend = self._backend or backend_of(*inputs.values())
        run = Run(self, backend, trace)
        with backend.quiet():
            given = {name: run.enter(self.graph.values[name], x) for name, x in self._checked(inputs).items()}
            self._check_axes(given)
            results = run.graph(self.graph, given, {})
            return {name: run.to_device(x) for name, x in zip(self.graph.outputs, results, strict=True)}

    def _checked(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        graph = self.graph
        known = set(graph.inputs) | graph.overridable
        missing = [n for n in graph.inputs if n not in inputs and n not in graph.constants]
        unknown = [n for n in inputs if n not in known]
        if missing or unknown:
            found = f"no array for {missing}" if missing else f"arrays for unknown inputs {unknown}"
            raise ArgumentError("wrong inputs", graph.name, found, f"inputs {list(graph.inputs)}")
        return dict(inputs)

    def _check_axes(self, given: Mapping[str, Any]) -> None:
        """:class:`ArgumentError` where a symbolic axis has one extent in one input and another in a second."""
        bound: dict[str, tuple[str, int]] = {}
        for name, x in given.items():
            for axis, extent in zip(self.graph.values[name].shape or (), x.shape, strict=False):
                if isinstance(axis, str):
                    first, expected = bound.setdefault(axis, (name, int(extent)))
                    if expected != extent:
                        found, wanted = f"{extent} in {name!r}", f"{expected}, as in {first!r}"
                        raise ArgumentError(
                            "inputs disagree", f"on axis {axis!r}", found, wanted, axis=axis, inputs=(first, name)
                        )

    def dead_after(self, graph: Graph) -> tuple[tuple[str, ...], ...]:
        """Per node, the values of this graph that nobody reads after it."""
        plan = self._plans.get(id(graph))
        if plan is None:
            last: dict[str, int] = {}
            for i, node in enumerate(graph.nodes):
                last.update((out, i) for out in node.outputs if out)
                last.update((name, i) for name in node.reads)
            dead: list[list[str]] = [[] for _ in graph.nodes]
            for name, i in last.items():
                if name not in graph.output_names:
                    dead[i].append(name)
            plan = self._plans[id(graph)] = tuple(map(tuple, dead))
        return plan

    def call(self, node: Node) -> tuple[OpSpec, dict[str, Any], frozenset[int]]:
        """The node's operator, all its attributes, and which operands the meaning takes as they are; looked up once."""
        found = self._calls.get(id(node))
        if found is None:
            if node.op not in self.ops:
                reason = UNDEFINED.get(node.op)
                told, step = (f"{node.op}: {reason}", "Replace it by an input") if reason else (node.op, _ADD)
                raise GraphError(
                    "unknown operator", _where(node), told, "an operator of the vocabulary", step,
                    node=node.name, op=node.op, source=node.source,
                )  # fmt: skip
            spec = self.ops[node.op]
            check_inputs(spec, [bool(name) for name in node.inputs], _where(node))
            as_is = frozenset(i for i, name in enumerate(spec.inputs) if name.rstrip("?*") in spec.host)
            found = self._calls[id(node)] = (spec, dict(complete(spec, node.attrs, _where(node))), as_is)
        return found

    def constant(self, graph: Graph, name: str, backend: Backend, on_device: bool) -> Any:
        """A constant of ``graph``, converted and uploaded once; on the host, exactly as the graph holds it."""
        array = graph.constants[name]
        row = dtype(graph.values[name].dtype)
        convert = self.mode == "exact" and row.kind == "f"
        if not on_device and not convert:
            return array
        key = (str(backend.device) if on_device else "", id(graph), name)  # CuPy gives its devices no hash
        found = self._constants.get(key)
        if found is None:
            found = array.astype("float64") if convert else array
            found = backend.asarray(found) if on_device else found
            self._constants[key] = found
        return found


class Run:
    """One call: where arrays live, and how a node is executed. Used by ``subgraphs`` too."""

    def __init__(self, owner: Evaluator, backend: Backend, trace: MutableMapping[str, Any] | None) -> None:
        self.owner, self.trace = owner, trace
        self.native = backend.with_floats("native")
        self.compute = backend.with_floats("exact" if owner.mode == "exact" else "wide")
        self.host = numpy_backend(self.compute.floats)
        self.offloaded = backend.name != "numpy"
        self.cuda = backend.name == "torch" and getattr(backend.device, "type", "") == "cuda"

    def enter(self, value: Value, x: Any) -> Any:
        """An input array in the dtype this run holds for ``value``; :class:`ArgumentError` when it does not fit."""
        x = self.native.asarray(x) if self.on_host(x) or not hasattr(x, "dtype") else x
        name = self.native.name_of(x)
        exact = self.owner.mode == "exact"
        if name != value.dtype and not (exact and dtype(name).floating and dtype(value.dtype).floating):
            raise ArgumentError("wrong dtype", f"of input {value.name!r}", name, value.dtype, dtype=name)
        shape = tuple(x.shape)
        if value.shape is not None and (
            len(shape) != len(value.shape)
            or any(isinstance(d, int) and d != s for d, s in zip(value.shape, shape, strict=True))
        ):
            raise ArgumentError("wrong shape", f"of input {value.name!r}", str(shape), str(value.shape), shape=shape)
        return self.native.cast(x, "float64") if exact and dtype(name).floating else x

    def on_host(self, x: Any) -> bool:
        return type(x).__module__.partition(".")[0] == "numpy"

    def to_device(self, x: Any) -> Any:
        """``x`` as an array of the backend's library."""
        return self.native.asarray(x) if self.on_host(x) else x

    def graph(self, graph: Graph, given: Mapping[str, Any], outer: Mapping[str, Any]) -> list[Any]:
        """The outputs of ``graph``; ``outer`` holds what it may capture."""
        scope = _Scope(self, graph, dict(given), outer)
        if self.trace is not None:
            self.trace.update(given)
        for node, dead in zip(graph.nodes, self.owner.dead_after(graph), strict=True):
            for name, x in zip(node.outputs, self.node(node, scope), strict=False):
                if name:
                    scope.own[name] = x
                    if self.trace is not None:
                        self.trace[name] = x
            for name in dead:
                scope.own.pop(name, None)
        return [scope[name] for name in graph.outputs]

    def node(self, node: Node, scope: _Scope) -> Sequence[Any]:
        """The outputs of one node, at least as many as it names."""
        try:
            if node.op.startswith(FUSED):
                results = self._fused(node, scope)
            elif node.op in CONTROL_FLOW:
                results = {"If": run_if, "Loop": run_loop, "Scan": run_scan}[node.op](self, node, scope)
            else:
                results = self._operator(node, scope)
        except FusionregError as error:
            if error.facts.get("node") or not isinstance(error, GraphError):
                raise
            raise self._failure(node, scope, error) from error
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise self._failure(node, scope, error) from error
        if len(results) < len(node.outputs):
            raise GraphError(
                "too many outputs", _where(node), f"{len(node.outputs)}", f"at most {len(results)}", node=node.name
            )
        return results

    def _operator(self, node: Node, scope: _Scope) -> list[Any]:
        spec, attributes, as_is = self.owner.call(node)
        args = [scope.operand(name) if name else None for name in node.inputs]
        given = [a for a in args if a is not None]
        on_host = self.offloaded and bool(given) and all(map(self._stays, given))
        if self.offloaded and not on_host:
            named_args = enumerate(zip(node.inputs, args, strict=True))
            args = [a if i in as_is else scope.device(n, a) for i, (n, a) in named_args]
        base = self.host if on_host or (self.offloaded and node.op in _SHAPE_READERS) else self.compute
        if self.cuda and base is self.compute and base.floats == "wide" and not any(node.outputs[1:]):
            found = native.run(node.op, args, attributes)
            if found is not None:
                return [self._rounded(base, scope.graph.values[node.outputs[0]], found)]
        if spec.moves or node.op in _SHAPE_READERS:
            xp = base.with_floats("native") if base.floats == "wide" else base
        else:
            xp = base
            args = [a if a is None or i in as_is else xp.widen(a) for i, a in enumerate(args)]
        results = spec.meaning(xp, *args, **attributes)
        results = results if isinstance(results, tuple) else (results,)
        named = zip(node.outputs, results, strict=False)
        return [self._rounded(base, scope.graph.values[name], x) if name else None for name, x in named]

    def _stays(self, x: Any) -> bool:
        return self.on_host(x) and x.dtype.kind in "iub" and x.size <= _HOST_ELEMENTS

    def _rounded(self, base: Backend, value: Value, x: Any) -> Any:
        """A result in the dtype the graph declares (``exact``: float64 for a float)."""
        if base.name == "numpy":
            x = base.asarray(x)
        name, row = base.name_of(x), dtype(value.dtype)
        if dtype(name).floating != row.floating or (dtype(name).kind == "b") != (row.kind == "b"):
            raise GraphError("wrong result", "", f"{value.name!r} computed as {name}", f"declared as {value.dtype}")
        if row.floating and base.floats == "exact":
            x = base.cast(x, "float64")
        elif name != value.dtype:
            x = base.cast(x, value.dtype)
        return x if base is not self.host or (x.size <= _HOST_ELEMENTS and not row.floating) else self.to_device(x)

    def _fused(self, node: Node, scope: _Scope) -> Sequence[Any]:
        if self.owner.fused is not None:
            args = [scope.device(name, scope.operand(name)) if name else None for name in node.inputs]
            results = self.owner.fused(node, args)
            if results is not None:
                return tuple(results)
        body = node.graphs["body"]
        given = [scope.operand(name) for name in node.inputs if name]
        values = self.graph(body, dict(zip(body.inputs, given, strict=True)), {})
        found = dict(zip(filter(None, node.outputs), values, strict=True))
        return [found.get(name) for name in node.outputs]

    def _failure(self, node: Node, scope: _Scope, error: Exception) -> GraphError:
        operands = ", ".join(scope.describe(name) for name in node.inputs)
        detail = error.found if isinstance(error, FusionregError) else f"{type(error).__name__}: {error}"
        expected = error.expected if isinstance(error, FusionregError) else f"operands that fit; got {operands}"
        return GraphError(
            "cannot evaluate", _where(node), detail, expected, node=node.name, op=node.op, source=node.source
        )


class _Scope(Mapping[str, Any]):
    """The values a graph sees: its own, its constants, and what it captures."""

    def __init__(self, run: Run, graph: Graph, own: dict[str, Any], outer: Mapping[str, Any]) -> None:
        self.run, self.graph, self.own, self.outer = run, graph, own, outer

    def operand(self, name: str) -> Any:
        """The array called ``name``, where it is."""
        if name in self.own:
            return self.own[name]
        if name in self.graph.constants:
            return self.run.owner.constant(self.graph, name, self.run.native, on_device=False)
        return self.outer[name]

    __getitem__ = operand

    def device(self, name: str, x: Any) -> Any:
        """``x``, the array called ``name``, on the backend's device."""
        if x is None or not self.run.offloaded or not self.run.on_host(x):
            return x
        if name not in self.own and name in self.graph.constants:
            return self.run.owner.constant(self.graph, name, self.run.native, on_device=True)
        return self.run.native.asarray(x)

    def describe(self, name: str) -> str:
        if not name:
            return "nothing"
        x = self.operand(name) if name in self else None
        return name if x is None else f"{name} {x.dtype}{list(x.shape)}"

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.graph.constants or name in self.outer

    def __iter__(self) -> Any:
        return iter({**self.outer, **self.graph.constants, **self.own})

    def __len__(self) -> int:
        return len({**self.outer, **self.graph.constants, **self.own})


def _where(node: Node) -> str:
    return f"node {node.name!r} ({node.op})" + (f" at {node.source}" if node.source else "")
