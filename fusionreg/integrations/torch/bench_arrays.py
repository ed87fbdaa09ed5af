"""Random inputs of a workload on a device, and whether outputs agree with float64 there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fusionreg.core.bench import Check, Subject
from fusionreg.core.dtypes import dtype as dtype_row
from fusionreg.core.errors import LaunchError
from fusionreg.core.expressions import Expression
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, GraphBuilder
from fusionreg.core.ops import Vocabulary, default_vocabulary
from fusionreg.core.planner.costs import CostModel
from fusionreg.core.runtime import Runtime
from fusionreg.core.spec import Tolerance

from .bench_parts import evaluated
from .schemas import dtype_name, torch_dtype

if TYPE_CHECKING:
    from fusionreg.core.cache import Cache
    from fusionreg.core.registry.catalog import Catalog
    from fusionreg.core.registry.entries import KernelEntry
    from fusionreg.core.runtime.bound import Bound

#: Normal numbers that are drawn on a CPU, which takes its time; behind them they repeat.
DRAWN = 1 << 22


def arrays_of(subject: Subject, device: str, seed: int) -> dict[str, Any]:
    """Input name → random array: normal floats, integers as the workload says. The second operand of a product is
    divided by the root of the summed extent, so that results stay ordinary numbers, as they are in a model; what a
    gradient of a softmax takes as its result is one, as a kernel may leave out what is 0 there."""
    made = torch.Generator(device).manual_seed(seed)
    scales = _scales(subject)
    found = {}
    for name in subject.graph.inputs:
        value = subject.graph.values[name]
        shape = tuple(int(d) for d in value.shape or ())
        kind = torch_dtype(value.dtype)
        if dtype_row(value.dtype).floating:
            array = _normal(shape, made).mul_(scales.get(name, 1.0))
        else:
            array = _whole_numbers(subject, name, shape, made)
        array = array.to(kind)
        if subject.trial.layouts.get(name) == "channels_last" and array.ndim > 2:
            array = array.movedim(1, -1).contiguous().movedim(-1, 1)
        found[name] = array
    for name in subject.workload.products:  # a launch in front writes it
        value = subject.graph.values[name]
        shape = tuple(int(d) for d in value.shape or ())
        found[name] = torch.zeros(shape, dtype=torch_dtype(value.dtype), device=device)
    return found | _softmaxes(subject.graph, found) | _attentions(subject.graph, found)


def _normal(shape: tuple[int, ...], made: torch.Generator) -> Any:
    count = math.prod(shape)
    if made.device.type != "cpu" or count <= DRAWN:
        return torch.randn(shape, generator=made, device=made.device)
    return torch.randn(DRAWN, generator=made).repeat(-(-count // DRAWN))[:count].reshape(shape)


def _whole_numbers(subject: Subject, name: str, shape: tuple[int, ...], made: torch.Generator) -> Any:
    """See ``core.workload.WHOLE_NUMBERS``."""
    kind = subject.graph.values[name].dtype
    place: dict[str, Any] = {"generator": made, "device": made.device}
    if kind in ("int8", "uint8") and name not in subject.workload.values:
        return torch.randint(*((-128, 128) if kind == "int8" else (0, 256)), shape, **place)
    word, _, text = subject.workload.values.get(name, "below 2" if kind == "bool" else "below 5").partition(" ")
    number = int(Expression.parse(text)(subject.workload.axes))
    if word == "distinct":
        if math.prod(shape) <= number:
            return torch.randperm(number, **place)[: math.prod(shape)].reshape(shape)
        return torch.rand((*shape[:-1], number), **place).argsort(-1)[..., : shape[-1]]
    if word == "rising":
        ends = torch.arange(1, shape[-1] + 1, device=made.device) * number // shape[-1]
        return ends.expand(shape)
    return torch.randint(0, number, shape, **place)


def _softmaxes(graph: Graph, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``arrays`` that a gradient of the graph takes as results of its softmax, made from their scores."""
    found = {}
    for node in graph.nodes:
        function = _SOFTMAX_OF.get(node.op)
        if function is None or node.inputs[1] not in arrays:
            continue
        scores = arrays[node.inputs[1]]
        if node.op == "fusionreg::CausalSoftmaxGrad":
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(~seen.tril(node.attrs.get("diagonal", 0)), -math.inf)
        found[node.inputs[1]] = function(scores, dim=node.attrs.get("axis", -1))
    return found


_SOFTMAX_OF = {
    "fusionreg::SoftmaxGrad": torch.softmax, "fusionreg::CausalSoftmaxGrad": torch.softmax,
    "fusionreg::LogSoftmaxGrad": torch.log_softmax,
}  # fmt: skip


def _attentions(graph: Graph, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``arrays`` that a gradient of attention takes as its results, made from q, k and v."""
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op != "fusionreg::AttentionGrad" or not {*node.inputs} <= {*arrays, ""}:
            continue
        _, q, k, v, y, lse, *mask = node.inputs
        values, forward = graph.values, GraphBuilder("forward")
        for name in filter(None, (q, k, v, *mask)):
            forward.input(name, values[name].dtype, values[name].shape)
        between = (replace(values[n], name=forward.fresh(n)) for n in (k, v, q))
        forward.node("Attention", (q, k, v, *mask), (values[y], *between, values[lse]), attrs=node.attrs)
        made = forward.build((y, lse))
        found |= evaluated(made, {n: arrays[n] for n in made.inputs}, default_vocabulary(), "step")
    return found


def _scales(subject: Subject) -> dict[str, float]:
    graph, model = subject.graph, CostModel(subject.ops)
    found = {}
    for node in graph.nodes:
        if node.op in ("MatMul", "Conv", "Gemm") and node.inputs[1] in graph.inputs:
            size = model.elements(graph.values[node.outputs[0]])
            depth = model.flops(graph, node) / max(1, 2 * size)
            found[node.inputs[1]] = 1.0 / math.sqrt(max(1.0, depth))
    return found


def bound(
    subject: Subject,
    catalog: Catalog,
    kernel: KernelEntry,
    params: Mapping[str, Any],
    sets: Sequence[Mapping[str, Any]],
    cache: Cache | None,
) -> list[Bound]:
    """The kernel alone in its fusion, with these parameters, on each set of arrays; launched once for each.

    Raises: :class:`LaunchError` where it is not what runs.
    """
    entry = subject.entry
    alone = replace(kernel, spec=kernel.spec.model_copy(update={"pending": ""}))
    only = replace(catalog, fusions=FrozenDict({entry.name: replace(entry, kernels=(alone,))}))
    runtime = Runtime(only, "auto", cache, tuned={kernel.key: params})
    keywords = subject.trial.passed(entry)
    found = [runtime.bind(entry.name, *(arrays.get(n) for n in entry.inputs), **keywords) for arrays in sets]
    for one in found[:1]:
        if one.kernel != kernel.key:
            raise LaunchError("cannot time", kernel.key, one.reason, "a kernel that accepts the arrays")
    return found


@dataclass(frozen=True)
class Behind:
    """A bound kernel behind the products that make some of its inputs: both are launched."""

    bound: Bound
    products: tuple[Callable[[], Any], ...]

    @property
    def outputs(self) -> Any:
        return self.bound.outputs

    def __call__(self) -> Any:
        for product in self.products:
            product()
        return self.bound()


def behind(subject: Subject, found: Bound, arrays: Mapping[str, Any]) -> Bound | Behind:
    """``found``, bound to ``arrays``, behind the products that the workload names."""
    names = [(name, *map(str.strip, text.split("@"))) for name, text in subject.workload.products.items()]
    made = tuple(partial(torch.matmul, arrays[x], arrays[w].t(), out=arrays[name]) for name, x, w in names)
    return Behind(found, made) if made else found


class Verifier:
    """Holds outputs on one set of arrays against the pattern in float64.

    An error is ‖got − exact‖ / ‖exact‖, and the same of the largest element. Twice that of the unfused chain at the
    workload's dtypes plus one unit of the last place is allowed, and what the spec's tolerances add to that: the
    contract of conformance, for tensors that are too large to judge element by element.
    """

    def __init__(
        self, graph: Graph, ops: Vocabulary, arrays: Mapping[str, Any], tolerances: Sequence[Tolerance] = ()
    ) -> None:
        self.graph = graph
        extra = {t.dtype: t.ulp for t in tolerances}
        given = {name: arrays[name] for name in self.graph.inputs}
        self.exact = tuple(evaluated(self.graph, given, ops, "exact").values())
        chain = evaluated(self.graph, given, ops, "step")
        self.allowed = [
            self._allowed(self.graph.values[n].dtype, _distance(chain[n], exact), extra)
            for n, exact in zip(chain, self.exact, strict=True)
        ]

    @staticmethod
    def _allowed(kind: str, chain: tuple[float, float], extra: Mapping[str, float]) -> tuple[float, ...]:
        row = dtype_row(kind)
        if not row.floating:
            return 0.0, 0.0
        return tuple(2 * error + (1.0 + extra.get(kind, 0.0)) * 2.0**-row.mantissa for error in chain)

    def check(self, outputs: Sequence[Any], exact: Sequence[Any] | None = None) -> Check:
        """The worst output; ``exact`` for what computes something else than the workload."""
        wanted = tuple(self.exact if exact is None else exact)
        if len(outputs) < len(wanted):
            return Check(math.inf, 0.0, f"{len(outputs)} outputs, expected {len(wanted)}")
        worst = Check(0.0, math.inf)
        for name, got, want, allowed in zip(self.graph.outputs, outputs, wanted, self.allowed, strict=False):
            found = self._one(name, self.graph, got, want, allowed)
            if not found.ok:
                return found
            worst = max(worst, found, key=lambda c: c.error)
        return worst

    @staticmethod
    def _one(name: str, graph: Graph, got: Any, want: Any, allowed: tuple[float, ...]) -> Check:
        if tuple(got.shape) != tuple(want.shape):
            return Check(math.inf, 0.0, f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        declared = graph.values[name].dtype
        if dtype_name(got.dtype) != declared:
            return Check(math.inf, 0.0, f"{name} is {dtype_name(got.dtype)}, expected {declared}")
        if not got.is_floating_point():
            wrong = int((got != want).sum())
            return Check(float(wrong), 0.0, f"{name}: {wrong} elements differ" if wrong else "")
        odd = int((torch.isfinite(want) & ~torch.isfinite(got)).sum())
        if odd:
            return Check(math.inf, allowed[0], f"{name}: {odd} elements are not finite, where float64 is")
        error, largest = _distance(got, want)
        if not largest <= allowed[1]:
            said = f"{name}: an element is {largest:.3g} of the largest value from float64 — at most {allowed[1]:.3g}"
            return Check(error, allowed[0], said)
        return Check(error, allowed[0])


def _distance(got: Any, exact: Any) -> tuple[float, float]:
    """(of norms, of the largest element), relative to ``exact``; infinite where a number is missing."""
    if not got.numel():
        return 0.0, 0.0
    number = torch.isfinite(exact)
    want = torch.where(number, exact, 0.0).double()
    apart = torch.where(number, got.double(), 0.0) - want
    norm, top = float(torch.linalg.vector_norm(want)), float(want.abs().max())
    error, largest = float(torch.linalg.vector_norm(apart)), float(apart.abs().max())
    return _ratio(error, norm), _ratio(largest, top)


def _ratio(error: float, size: float) -> float:
    return error / size if size else (0.0 if error == 0 else math.inf)
