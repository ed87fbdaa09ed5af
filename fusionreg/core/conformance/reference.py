"""The two references of a trial: the pattern in float64, and the unfused chain at the trial's dtypes. Floor 7.

The chain's products are summed in index order, one rounding per term (:func:`in_order`): NumPy leaves the order to the
machine's BLAS, and the same kernel would pass on one machine and fail on another.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..dtypes import dtype
from ..evaluate.evaluator import evaluate
from ..frozen import EMPTY, FrozenDict
from ..ops import Vocabulary, numpy_backend
from ..pattern.instantiate import instantiate
from ..spec import OpSpec
from .compare import OVERFLOWED_CAST, POOL, pooled, rounded
from .trial import Trial

if TYPE_CHECKING:
    from ..ir import Graph
    from ..registry.entries import FusionEntry

#: Bytes of references that are kept.
KEPT = 1 << 30

#: Equal runs with other random values, at most, from which the chain's error is pooled.
REPLICAS = 8


#: Runs with displaced inputs.
DISPLACED = 2

#: A cast that rounds although floats are float64: what stands for the graph's own casts in :func:`_overflowed_casts`.
ROUNDED = OpSpec(
    name="conformance::Rounded", inputs=("x",), attributes={"to": "float32"}, pointwise=True,
    meaning=lambda xp, x, *, to: rounded(x, dtype(to)),
    infer=lambda inputs, attributes, constants: [(attributes["to"], inputs[0].shape)],
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reference:
    """Outputs by name: ``exact`` in float64, ``chain`` as the unfused operators give them, ``allowed`` the pooled
    error of the chain."""

    exact: Mapping[str, np.ndarray]
    chain: Mapping[str, np.ndarray]
    allowed: Mapping[str, np.ndarray]

    @property
    def bytes(self) -> int:
        return sum(a.nbytes for part in (self.exact, self.chain, self.allowed) for a in part.values())


class References:
    """References of trials, kept: the kernels of a fusion are tried on the same values."""

    def __init__(self, ops: Vocabulary) -> None:
        self._ops, self._kept, self._bytes = ops, dict[object, Reference](), 0

    def of(self, entry: FusionEntry, trial: Trial, arrays: Mapping[str, np.ndarray]) -> Reference:
        """The reference of ``trial`` on its own ``arrays``; those that were used longest ago make room."""
        key = entry.name, replace(trial, name=trial.stem or trial.name, params=EMPTY, exactly=False, stem="")
        found = self._kept.pop(key, None)
        if found is None:
            found = reference(entry, trial, arrays, self._ops)
            self._bytes += found.bytes
        self._kept[key] = found
        while self._bytes > KEPT and len(self._kept) > 1:
            self._bytes -= self._kept.pop(next(iter(self._kept))).bytes
        return found


def graph_of(entry: FusionEntry, trial: Trial, ops: Vocabulary) -> Graph:
    """The concrete graph that the fusion's first spelling stands for in this trial."""
    return instantiate(
        entry.patterns[0],
        entry.spec,
        dtypes=trial.dtypes,
        shapes=trial.shapes(entry),
        ops=ops,
        choices=trial.choices,
        attributes=trial.attributes,
        absent=trial.absent,
    )


def reference(entry: FusionEntry, trial: Trial, arrays: Mapping[str, np.ndarray], ops: Vocabulary) -> Reference:
    """Evaluates the pattern on ``arrays``, and on further random values where the outputs have too few elements."""
    graph = graph_of(entry, trial, ops)
    exact, chain = _both(graph, arrays, ops)
    exacts = {name: [value] for name, value in exact.items()}
    errors = {name: [_error(chain[name], exact[name])] for name in exact}
    smallest = min((e[0].size for e in errors.values() if e[0].size), default=POOL)
    for replica in range(1, min(REPLICAS, -(-POOL // smallest))):
        again, rounded = _both(graph, trial.arrays(entry, replica), ops)
        for name in errors:
            exacts[name].append(again[name])
            errors[name].append(_error(rounded[name], again[name]))
    for off in _displaced(entry, trial, arrays):
        again = _both(graph, off, ops)[1]
        for name in errors:
            errors[name][0] = np.fmax(errors[name][0], _error(again[name], exact[name]))
    swept = "sweep" in trial.values.values()
    allowed = {name: pooled(found, exacts[name], alone=swept) for name, found in errors.items()}
    return Reference(exact, chain, where_overflowed(graph, arrays, ops, exact, chain, allowed))


def where_overflowed(
    graph: Graph, arrays: Mapping[str, np.ndarray], ops: Vocabulary, exact: Mapping[str, np.ndarray],
    chain: Mapping[str, np.ndarray], allowed: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:  # fmt: skip
    """``allowed`` with what ``compare`` reads of it where the chain overflowed and the exact result did not."""
    masks = {
        name: ~np.isfinite(chain[name].astype(np.float64)) & np.isfinite(exact[name])
        for name in exact
        if chain[name].dtype.kind not in "iubc"
    }
    if not any(m.any() for m in masks.values()):
        return allowed
    casts = _overflowed_casts(graph, arrays, ops)
    floats = [dtype(v.dtype).bits for v in graph.values.values() if dtype(v.dtype).floating]
    for name, mask in masks.items():
        wider = dtype(chain[name].dtype.name).bits > min(floats)
        kept = allowed[name] if wider else np.where(mask, 0.0, allowed[name])
        allowed[name] = np.where(mask & casts[name], OVERFLOWED_CAST, kept) if name in casts else kept
    return allowed


def _overflowed_casts(graph: Graph, arrays: Mapping[str, np.ndarray], ops: Vocabulary) -> dict[str, np.ndarray]:
    """By output, which elements are not finite because a cast inside of the graph overflowed; of float outputs alone,
    and empty where no cast narrows a float."""

    def narrows(node) -> bool:
        source, to = (dtype(graph.values[v].dtype) for v in (node.inputs[0], node.outputs[0]))
        return node.op in ("Cast", "CastLike") and source.floating and to.floating and to.bits < source.bits

    inner = [n for n in graph.nodes if n.inputs and n.inputs[0] and narrows(n) and n.outputs[0] not in graph.outputs]
    if not inner:
        return {}
    of = {n.name: replace(n, op=ROUNDED.name, inputs=n.inputs[:1],
                          attrs=FrozenDict({"to": graph.values[n.outputs[0]].dtype})) for n in inner}  # fmt: skip
    rounding = replace(graph, nodes=tuple(of.get(n.name, n) for n in graph.nodes))
    given = {name: arrays[name] for name in graph.inputs}
    found = evaluate(rounding, given, ops=ops.with_ops([ROUNDED]), backend=numpy_backend(), mode="exact")
    return {k: ~np.isfinite(np.asarray(v)) for k, v in found.items() if np.asarray(v).dtype.kind == "f"}


def _displaced(entry: FusionEntry, trial: Trial, arrays: Mapping[str, np.ndarray]) -> list[Mapping[str, np.ndarray]]:
    """The inputs, twice, each element off by up to what the spec's tolerances say."""
    allowed = {t.dtype: t.inputs for t in entry.spec.tolerances if t.inputs}
    if not any(a.dtype.name in allowed for a in arrays.values()):
        return []
    rng = np.random.default_rng(zlib.crc32((trial.stem or trial.name).encode()))

    def off(a: np.ndarray) -> np.ndarray:
        kind = dtype(a.dtype.name)  # NumPy calls bfloat16 no float
        step = allowed.get(kind.name, 0.0) * 2.0 ** -(kind.mantissa + 1) if kind.kind == "f" else 0.0
        return (a.astype(np.float64) * (1.0 + step * rng.uniform(-1.0, 1.0, a.shape))).astype(a.dtype) if step else a

    with np.errstate(all="ignore"):
        return [{name: off(a) for name, a in arrays.items()} for _ in range(DISPLACED)]


def _both(graph: Graph, arrays: Mapping[str, np.ndarray], ops: Vocabulary):
    given = {name: np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape) for name in graph.inputs}
    backend = numpy_backend()
    ordered = replace(backend, table={**backend.table, "matmul": in_order})
    exact = evaluate(graph, given, ops=ops, backend=backend, mode="exact")
    chain = evaluate(graph, given, ops=ops, backend=ordered, mode="step")
    return {k: np.asarray(v) for k, v in exact.items()}, {k: np.asarray(v) for k, v in chain.items()}


def in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a @ b``; float32 sums run over k in order, each step one fused multiply-add, as a plain CUDA loop does it."""
    if a.dtype != np.float32 or b.dtype != np.float32 or a.ndim < 2 or b.ndim < 2:
        return np.matmul(a, b)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)  # products of two float32 are exact
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = np.zeros((*shape, a.shape[-2], b.shape[-1]), np.float32)
    for k in range(a.shape[-1]):
        total = (wide_a[..., :, k, None] * wide_b[..., k, None, :] + total).astype(np.float32)
    return total


def _error(chain: np.ndarray, exact: np.ndarray) -> np.ndarray:
    if chain.dtype.kind in "iub":
        return np.zeros(chain.shape)
    wide = np.complex128 if chain.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(chain.astype(wide) - exact.astype(wide))
