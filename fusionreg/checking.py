"""Runs a model fused and holds the result against the *original* artefact, never against our own reading of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fusionreg.core.dtypes import DTYPES
from fusionreg.core.planner import Plan
from fusionreg.integrations import Opened, open_model
from fusionreg.model import FusedModel, Site

if TYPE_CHECKING:
    from fusionreg.api import Registry
    from fusionreg.core.ir import Graph
    from fusionreg.core.matcher import FailedMatch

#: Largest deviation of an original artefact from float64, relative to the largest output, that is still rounding: a
#: multiple of half an ulp of the narrowest float dtype in the graph. Beyond it our reading of the model is wrong.
ROUNDINGS = 16


@dataclass(frozen=True)
class ModelEvaluation:
    """What ``fusionreg run MODEL`` found out.

    Attributes:
        model: as the caller named it.
        nodes: nodes of the lifted graph.
        sites: where fusions ran.
        status: ``PASSED``, ``INCORRECT_SHAPE``, ``INCORRECT_DTYPE``, ``INCORRECT_NUMERICAL``, or ``SKIPPED`` when
            there is no reference (``reason`` says why).
        max_abs, max_rel: largest deviation of the fused outputs from the original's; relative to the largest
            magnitude of that output. None when skipped.
        device: ``sim`` or ``cuda``.
    """

    model: str
    nodes: int
    sites: tuple[Site, ...]
    status: str
    reason: str
    max_abs: float | None
    max_rel: float | None
    device: str
    plan: Plan = field(repr=False)
    failures: tuple[FailedMatch, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        plain = {k: v for k, v in self.__dict__.items() if k not in ("plan", "failures")}
        return plain | {"sites": [asdict(site) for site in self.sites]}


def check_model(
    registry: Registry, target: str, *, device: str = "sim", seed: int = 0, policy: str = "balanced", explain: bool = False
) -> ModelEvaluation:
    """Match → plan → run fused → compare with the original artefact on the same inputs.

    Args:
        target: a ``.onnx`` or ``.pt2`` path, or ``package.module:callable`` (which runs that callable).
        device: ``sim``, or ``cuda`` with torch or CuPy installed.
        seed: of the random inputs.
        explain: also collect what nearly matched.

    Raises: the typed errors of opening a model; a wrong result is a status, not an error.
    """
    opened = open_model(target, ops=registry.catalog.ops)
    found = registry.match(opened.graph, explain=explain)
    plan = registry.plan(opened.graph, policy=policy, matches=found)
    model = FusedModel.build(opened.graph, plan, registry.catalog, registry.runtime)
    inputs = dict(opened.example(seed))
    outputs = {k: _host(v) for k, v in model(**_placed(inputs, device)).items()}

    def evaluation(status: str, reason: str, max_abs: float | None, max_rel: float | None) -> ModelEvaluation:
        return ModelEvaluation(
            target, len(opened.graph.nodes), model.sites, status, reason, max_abs, max_rel, device, plan, found.failures
        )

    if opened.reference is None:
        return evaluation("SKIPPED", opened.reason or "there is no reference", None, None)
    return evaluation(*_compare(opened, outputs, inputs, model))


def _compare(
    opened: Opened, outputs: dict[str, Any], inputs: dict[str, Any], model: FusedModel
) -> tuple[str, str, float | None, float | None]:
    assert opened.reference is not None
    expected = {k: _host(v) for k, v in opened.reference(inputs).items()}
    exact = {k: _host(v) for k, v in model.unfused(mode="exact", **inputs).items()}
    bound = ROUNDINGS * _half_ulp(opened.graph)
    worst_abs = worst_rel = 0.0
    problem = ("PASSED", "")
    for name, want in expected.items():
        got = outputs[name]
        if got.shape != want.shape:
            return "INCORRECT_SHAPE", f"{name}: {got.shape} — expected {want.shape}", None, None
        if got.dtype != want.dtype:
            return "INCORRECT_DTYPE", f"{name}: {got.dtype} — expected {want.dtype}", None, None
        deviation, scale = _deviation(got, want)
        worst_abs, worst_rel = max(worst_abs, deviation), max(worst_rel, deviation / scale if deviation else 0.0)
        ours, theirs = _deviation(got, exact[name])[0], _deviation(want, exact[name])[0]
        if not deviation <= bound * scale:
            problem = ("INCORRECT_NUMERICAL", f"{name}: {deviation:.3g} from the original — at most {bound * scale:.3g}")
        elif not ours <= 2 * theirs + _half_ulp(opened.graph) * 2 * scale:
            problem = (
                "INCORRECT_NUMERICAL",
                f"{name}: {ours:.3g} from float64 — at most twice the original's {theirs:.3g} and one ulp",
            )
    return (*problem, worst_abs, worst_rel)


def _deviation(a: Any, b: Any) -> tuple[float, float]:
    """Largest difference, and the largest finite magnitude of ``b``; infinite where special values differ."""
    if a.size == 0:
        return 0.0, 1.0
    if a.dtype.kind in "biuOSU" and b.dtype.kind in "biuOSU":
        return (0.0 if np.array_equal(a, b) else math.inf), 1.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    special = ~np.isfinite(b)
    scale = float(np.max(np.abs(b), where=~special, initial=0.0)) or 1.0
    if not np.array_equal(a[special], b[special], equal_nan=True) or not np.isfinite(a[~special]).all():
        return math.inf, scale
    return float(np.max(np.abs(a - b), where=~special, initial=0.0)), scale


def _half_ulp(graph: Graph) -> float:
    """2^-(p) of the narrowest float dtype any node of the graph writes."""
    widths = [DTYPES[v.dtype].mantissa for v in graph.values.values() if DTYPES[v.dtype].floating]
    return 2.0 ** -(min(widths, default=52) + 1)


def _host(array: Any) -> Any:
    """``array`` as NumPy, whatever library it belongs to."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "get"):  # CuPy
        return array.get()
    if hasattr(array, "detach"):  # torch
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":
            return array.view(array.dtype.to_real() if False else _int16(array)).numpy().view(DTYPES["bfloat16"].numpy)
        return array.numpy()
    return np.asarray(array)


def _int16(array: Any) -> Any:
    import sys

    return sys.modules["torch"].int16


def _placed(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """The inputs on the device: NumPy for the simulator, torch CUDA tensors otherwise."""
    if device != "cuda":
        return {k: _host(v) for k, v in inputs.items()}
    from fusionreg.integrations.torch import arrays

    return {k: arrays.to_cuda(v) for k, v in inputs.items()}
