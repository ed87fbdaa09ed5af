"""One site at work: its kernel, and the operators it replaced, on the very activations that reach it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from fusionreg.checking import host
from fusionreg.core.conformance.compare import Comparison, compare, pooled
from fusionreg.core.conformance.reference import DISPLACED, REPLICAS, in_order, where_overflowed
from fusionreg.core.dtypes import DTYPES, dtype
from fusionreg.core.errors import CompileError, FusionregError, LaunchError, MissingDependencyError, RenderError
from fusionreg.core.evaluate.evaluator import Evaluator
from fusionreg.core.ir import FUSED, Node
from fusionreg.core.ops import Backend, numpy_backend
from fusionreg.core.proof.report import Status
from fusionreg.core.registry.entries import FusionEntry
from fusionreg.model import FusedModel, Site

from .records import SiteCheck

Arrays = Mapping[str, Any]

#: Multiply-adds of one product that are summed in order, one by one; longer products are summed in blocks.
IN_ORDER = 1 << 26

#: A site of fewer results says too little about the chain's error: its inputs are moved by up to so much of themselves,
#: again and again, until there are as many, or so many numbers were read.
SAMPLES, MOVED, READ = 512, 1 / 64, 1 << 22


def empty(node: Node) -> SiteCheck:
    """A ``fused::`` node of which nothing is known yet."""
    body = node.graphs["body"].nodes
    operators = tuple(n.op for n in body)
    return SiteCheck(node.op.removeprefix(FUSED), tuple(n.name for n in body), operators, node.source)


@dataclass
class Observer:
    """Goes between a model and its sites (:meth:`FusedModel.watched`); ``found``: by node name, what one run showed."""

    model: FusedModel
    found: dict[str, SiteCheck] = field(default_factory=dict)
    _evaluators: dict[tuple[str, str], Evaluator] = field(default_factory=dict)

    def __call__(
        self, node: Node, operands: Sequence[Any], run: Callable[[], tuple[Sequence[Any] | None, Site]]
    ) -> Sequence[Any] | None:
        body = node.graphs["body"]
        given = dict(zip(body.inputs, [a for a in operands if a is not None], strict=True))
        before = {name: host(a).tobytes() for name, a in given.items()}
        fusion = node.op.removeprefix(FUSED)
        entry = self.model.catalog[fusion]
        wanted = self._wanted(node, given, entry)  # before the kernel, which may do anything to its inputs
        own_abs, own_rel = wanted.unfused
        seen = replace(empty(node), unfused_abs=own_abs, unfused_rel=own_rel)
        try:
            results, site = run()
            kept = None if results is None else {o: host(r) for o, r in zip(node.outputs, results, strict=False) if o}
        except MissingDependencyError:
            raise
        except FusionregError as error:
            self.found[node.name] = replace(seen, status=_status(error), reason=str(error))
            return None
        except RuntimeError as error:  # the device's own, which may be lost
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise LaunchError("cannot run", f"{fusion} at {node.source or node.name}", first) from error
        seen = replace(seen, kernel=site.kernel)
        changed = [name for name, a in given.items() if host(a).tobytes() != before[name]]
        if not site.kernel or kept is None:
            verdict = replace(
                seen, status=Status.SKIPPED_UNSUPPORTED, reason=site.reason,
                max_abs=seen.unfused_abs, max_rel=seen.unfused_rel,
            )  # fmt: skip
        elif changed:
            verdict = replace(seen, status=Status.RUNTIME_ERROR, reason=f"the kernel changed its input {changed[0]}")
        else:
            verdict = _judged(seen, kept, wanted, entry)
        self.found[node.name] = verdict
        return results

    def _wanted(self, node: Node, given: Arrays, entry: FusionEntry) -> Wanted:
        """The reference of a site on its operands: as conformance makes it for a trial."""
        exact, chain = self._run(node, given, "exact"), self._run(node, given, "step")
        exacts = {name: [value] for name, value in exact.items()}
        errors = {name: [_error(chain[name], exact[name])] for name in exact}
        here = {name: host(a) for name, a in given.items()}
        rng = np.random.default_rng(zlib.crc32(node.name.encode()))
        smallest = min((e[0].size for e in errors.values() if e[0].size), default=SAMPLES)
        most = max(REPLICAS, READ // max(1, sum(a.size for a in here.values())))
        for _ in range(1, min(most, math.ceil(SAMPLES / smallest))):
            moved = self._like(given, {name: _moved(a, dict.fromkeys(DTYPES, MOVED), rng) for name, a in here.items()})
            again, rounded = self._run(node, moved, "exact"), self._run(node, moved, "step")
            for name in errors:
                exacts[name].append(again[name])
                errors[name].append(_error(rounded[name], again[name]))
        steps = {t.dtype: t.inputs * 2.0 ** -(dtype(t.dtype).mantissa + 1) for t in entry.spec.tolerances if t.inputs}
        if any(a.dtype.name in steps for a in here.values()):
            for _ in range(DISPLACED):
                moved = self._like(given, {name: _moved(a, steps, rng) for name, a in here.items()})
                rounded = self._run(node, moved, "step")
                for name in errors:
                    errors[name][0] = np.fmax(errors[name][0], _error(rounded[name], exact[name]))
        allowed = {name: pooled(found, exacts[name]) for name, found in errors.items()}
        allowed = where_overflowed(node.graphs["body"], here, self.model.catalog.ops, exact, chain, allowed)
        return Wanted(exact, chain, allowed)

    def _run(self, node: Node, given: Arrays, mode: Any) -> dict[str, np.ndarray]:
        """The replaced operators on ``given``, where that is; results on the host."""
        on_host = all(type(a).__module__ == "numpy" for a in given.values())
        key = (node.name, mode)
        if key not in self._evaluators:
            backend = (summing() if mode == "step" else numpy_backend()) if on_host else None
            body, ops = node.graphs["body"], self.model.catalog.ops
            self._evaluators[key] = Evaluator(body, ops=ops, backend=backend, mode=mode)
        return {name: np.asarray(host(a)) for name, a in self._evaluators[key].run(given).items()}

    @staticmethod
    def _like(given: Arrays, values: Mapping[str, np.ndarray]) -> Arrays:
        """``values`` in the library and on the device of ``given``."""
        if all(type(a).__module__ == "numpy" for a in given.values()):
            return values
        from fusionreg.core.ops import backend_of

        backend = backend_of(*given.values())
        return {name: backend.asarray(a) for name, a in values.items()}


@dataclass(frozen=True, eq=False)
class Wanted:
    """Outputs by name: in float64, of the unfused operators, and the error that the contract allows them."""

    exact: Mapping[str, np.ndarray]
    chain: Mapping[str, np.ndarray]
    allowed: Mapping[str, np.ndarray]

    @property
    def unfused(self) -> tuple[float, float]:
        """The largest error of the unfused operators, absolute and relative."""
        own = [compare(self.chain[n], e, self.chain[n], rounding="per_op") for n, e in self.exact.items()]
        return max((c.max_abs for c in own), default=0.0), max((c.max_rel for c in own), default=0.0)


def _judged(seen: SiteCheck, got: Mapping[str, np.ndarray], wanted: Wanted, entry: FusionEntry) -> SiteCheck:
    """The contract on every output of a kernel."""
    rounding = entry.kernel(seen.kernel.rpartition("/")[2]).spec.rounding
    slack = {t.dtype: t for t in entry.spec.tolerances}
    found: list[Comparison] = []
    for name, exact in wanted.exact.items():
        array = got.get(name)
        if array is None:
            found.append(Comparison("INCORRECT_SHAPE", reason=f"{name}: missing"))
            continue
        verdict = compare(
            array, exact, wanted.chain[name], rounding=rounding, allowed=wanted.allowed[name],
            slack=slack.get(array.dtype.name),
        )  # fmt: skip
        found.append(replace(verdict, reason=f"{name}: {verdict.reason}" if verdict.reason else ""))
    first = next((c for c in found if not c.passed), Comparison("PASSED"))
    return replace(
        seen, status=Status(first.status), reason=first.reason,
        max_abs=max((c.max_abs for c in found), default=0.0), max_rel=max((c.max_rel for c in found), default=0.0),
    )  # fmt: skip


def summing() -> Backend:
    """NumPy, but float32 products are summed as a plain kernel does it: the order of BLAS is the machine's secret."""
    backend = numpy_backend()
    return replace(backend, table={**backend.table, "matmul": _summed})


def _summed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a @ b``, in order of the summed axis, or of blocks of it where that would take too long."""
    if a.dtype != np.float32 or b.dtype != np.float32 or min(a.ndim, b.ndim) < 2:
        return np.matmul(a, b)
    depth = a.shape[-1]
    size = math.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2])) * a.shape[-2] * b.shape[-1]
    if depth * size <= IN_ORDER:
        return in_order(a, b)
    parts = max(1, min(depth, IN_ORDER // max(1, size)))
    total: Any = np.float32(0)
    for low, high in pairwise(np.linspace(0, depth, parts + 1).astype(int)):
        total = total + np.matmul(a[..., low:high], b[..., low:high, :])
    return np.asarray(total, np.float32)


def _status(error: FusionregError) -> Status:
    if isinstance(error, CompileError | RenderError):
        return Status.COMPILE_ERROR
    return Status.TIMEOUT if error.facts.get("detector") == "timeout" else Status.RUNTIME_ERROR


def _moved(a: np.ndarray, steps: Mapping[str, float], rng: np.random.Generator) -> np.ndarray:
    """Each element off by up to its dtype's step, relative to itself."""
    step = steps.get(a.dtype.name, 0.0)
    if not step or not dtype(a.dtype.name).floating:
        return a
    with np.errstate(all="ignore"):
        return (a.astype(np.float64) * (1.0 + step * rng.uniform(-1.0, 1.0, a.shape))).astype(a.dtype)


def _wide(a: np.ndarray) -> np.ndarray:
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def _error(chain: np.ndarray, exact: np.ndarray) -> np.ndarray:
    if chain.dtype.kind in "iub":
        return np.zeros(chain.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(_wide(chain) - _wide(exact))
