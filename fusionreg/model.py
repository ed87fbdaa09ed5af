"""A model with its chosen fusions applied: what ``fusionreg.fuse`` returns and ``fusionreg run`` executes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fusionreg.core import rewrite
from fusionreg.core.errors import ArgumentError, MisfitError, ModelError
from fusionreg.core.evaluate.evaluator import Evaluator, Mode, evaluate
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import FUSED, Graph, Node
from fusionreg.core.ops import backend_of, numpy_backend
from fusionreg.core.planner.maps import LAST
from fusionreg.core.runtime import FallbackWarning

if TYPE_CHECKING:
    from fusionreg.core.planner.plan import Plan
    from fusionreg.core.registry.catalog import Catalog
    from fusionreg.core.runtime import Runtime


@dataclass(frozen=True)
class Site:
    """One place where a fusion was applied, and what happened there the last time the model ran.

    Attributes:
        fusion: name of the fusion.
        nodes: names of the nodes it replaced, in order.
        source: where the last of them stands in the model.
        kernel: the kernel that ran; "" before the first run and after a fallback.
        status: ``planned``, ``fused``, or ``fallback`` when no kernel, or not the fusion itself, took the extents of a
            call and the nodes ran unfused.
        reason: why it fell back.
    """

    fusion: str
    nodes: tuple[str, ...]
    source: str = ""
    kernel: str = ""
    status: str = "planned"
    reason: str = ""


#: See :meth:`FusedModel.watched`.
Watch = Callable[
    [Node, Sequence[Any], Callable[[], tuple[Sequence[Any] | None, Site]]], Sequence[Any] | None
]


@dataclass(eq=False)
class FusedModel:
    """A runnable graph. Call it with arrays by input name (or in input order); it returns arrays by output name.

    Arrays may be NumPy (the fused kernels then run in the simulator), CuPy, or torch on the CPU or the GPU; all of one
    call live in one place. The unfused rest runs in the same library.

    Attributes:
        lifted: the graph before fusion, after lifting.
        graph: the graph with ``fused::`` nodes.
        plan: what was chosen, and what lost and why.
        original: the artefact it was made from, for :meth:`save`.
    """

    lifted: Graph
    graph: Graph
    plan: Plan
    catalog: Catalog
    runtime: Runtime
    original: Any = None
    saver: Callable[[FusedModel, Any], None] | None = None
    _ran: dict[str, Site] = field(default_factory=dict, repr=False)
    _warned: set[str] = field(default_factory=set, repr=False)

    @classmethod
    def build(cls, graph: Graph, plan: Plan, catalog: Catalog, runtime: Runtime, **extra: Any) -> FusedModel:
        """Applies ``plan`` to ``graph``."""
        made = rewrite.apply(graph, plan.chosen, catalog)
        filters = {n: numpy_backend().ordered(a, LAST) for n, a in made.constants.items() if n in plan.moved}
        if filters:
            made = replace(made, constants=FrozenDict({**made.constants, **filters}))
        return cls(graph, made, plan, catalog, runtime, **extra)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every fused site in execution order, with its last outcome."""
        return tuple(self._ran.get(n.name) or _site(n) for n in self.graph.nodes if n.op.startswith(FUSED))

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.graph, ops=self.catalog.ops, fused=self._fused)

    def __call__(self, *args: Any, trace: dict[str, Any] | None = None, **named: Any) -> dict[str, Any]:
        """Runs the fused graph.

        Args:
            args: arrays in the order of ``graph.inputs``.
            named: arrays by input name; inputs with a default (overridable initialisers) may be left out.
            trace: when given, receives intermediate values by name.

        Returns: output name → array, in the library of the inputs.
        Raises: :class:`ArgumentError` for a missing, surplus or unknown input.
        """
        return self._run(self._evaluator, args, named, trace)

    def watched(self, watch: Watch, *args: Any, **named: Any) -> dict[str, Any]:
        """Runs the fused graph with ``watch`` between it and its sites.

        Args:
            watch: ``watch(node, operands, run) -> results`` at each site: the ``fused::`` node, its operands with None
                where one is absent, and what executes it and gives (results, what happened). The model goes on with
                what it returns; where that is None, with what the unfused operators give.
            args, named: as of a call.
        """

        def between(node: Node, operands: Sequence[Any]) -> Sequence[Any] | None:
            return watch(node, operands, lambda: (self._fused(node, operands), self._ran[node.name]))

        return self._run(Evaluator(self.graph, ops=self.catalog.ops, fused=between), args, named)

    def _run(
        self, evaluator: Evaluator, args: tuple[Any, ...], named: Mapping[str, Any], trace: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """With maps moved as the plan has it; results are row by row then, where those were so that it got."""
        inputs = self._bind(args, named)
        if not self.plan.moved:
            return evaluator.run(inputs, trace)
        maps = {n: x for n in self.plan.moved if len(getattr(x := inputs.get(n), "shape", ())) == len(LAST)}
        found = evaluator.run(inputs | {n: backend_of(x).ordered(x, LAST) for n, x in maps.items()}, trace)
        if not maps:
            return found
        return {n: backend_of(x).ordered(x, tuple(range(len(x.shape)))) for n, x in found.items()}

    def unfused(self, *args: Any, mode: Mode = "step", **named: Any) -> dict[str, Any]:
        """Runs the lifted graph operator by operator; ``mode`` as in ``core.evaluate``."""
        return evaluate(self.lifted, self._bind(args, named), ops=self.catalog.ops, mode=mode)

    def save(self, path: Any) -> None:
        """Writes the fused model in the format of its original; :class:`ModelError` where that has no such form."""
        if self.saver is None:
            raise ModelError("cannot save", str(path), "the model was not read from ONNX", "an ONNX model")
        self.saver(self, path)

    def _bind(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        names = self.graph.inputs
        if len(args) > len(names):
            raise ArgumentError("cannot run", self.graph.name, f"{len(args)} inputs", f"{len(names)}: {list(names)}")
        inputs = dict(zip(names, args, strict=False))
        unknown = [n for n in named if n not in names]
        twice = [n for n in named if n in inputs]
        if unknown or twice:
            found = f"unknown input {unknown[0]!r}" if unknown else f"{twice[0]!r} given twice"
            raise ArgumentError("cannot run", self.graph.name, found, f"the inputs {list(names)}")
        inputs.update(named)
        missing = [n for n in names if n not in inputs and n not in self.graph.overridable]
        if missing:
            raise ArgumentError("cannot run", self.graph.name, f"no value for {missing}", f"the inputs {list(names)}")
        return inputs

    def _fused(self, node: Node, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """One site: the fusion's kernel; None, for the nodes it replaced to run, where these extents are none of its.

        Symbolic extents match on a guard, which a call may fail. Concrete ones were decided when the model was matched:
        there a misfit is an error.
        """
        try:
            outcome = self.runtime.execute(node.op.removeprefix(FUSED), args, node.attrs)
        except MisfitError as error:
            if not self._open(node):
                raise
            reason = " — ".join(filter(None, (error.found, error.expected)))
            self._ran[node.name] = _site(node, "", "fallback", reason)
            if node.name not in self._warned:
                self._warned.add(node.name)
                where = f" at {node.source}" if node.source else ""
                warnings.warn(f"{error.whom} runs unfused{where}: {reason}", FallbackWarning, stacklevel=2)
            return None
        self._ran[node.name] = _site(node, outcome.kernel, "fused" if outcome.kernel else "fallback", outcome.reason)
        return outcome.outputs

    def _open(self, node: Node) -> bool:
        """Whether any extent of the node's operands and results is decided by the call alone."""
        shapes = [self.graph.values[name].shape for name in (*node.inputs, *node.outputs) if name]
        return any(shape is None or not all(isinstance(d, int) for d in shape) for shape in shapes)


def _site(node: Node, kernel: str = "", status: str = "planned", reason: str = "") -> Site:
    names = tuple(b.name for b in node.graphs["body"].nodes)
    return Site(node.op.removeprefix(FUSED), names, node.source, kernel, status, reason)
