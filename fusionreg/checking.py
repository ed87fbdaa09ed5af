"""Runs a model fused and holds the result against the *original* artefact, never against our own reading of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fusionreg.core.dtypes import DTYPES
from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.planner import Plan, Policy
from fusionreg.core.report import ModelRow, Status
from fusionreg.integrations import open_model
from fusionreg.model import FusedModel

if TYPE_CHECKING:
    from fusionreg.api import Registry
    from fusionreg.core.ir import Graph
    from fusionreg.core.matcher import FailedMatch
    from fusionreg.integrations import Opened

#: Largest deviation of an original from float64, relative to the largest output, that rounding explains, by the
#: narrowest float dtype in its graph: 16-bit dtypes round what is stored, float32 also the sums of long products.
#: Beyond it our reading of the model is wrong, not its arithmetic.
READING = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}


@dataclass(frozen=True)
class Checked:
    """What ``fusionreg run MODEL`` found out: the report's row, and what a reader wants to see beside it."""

    row: ModelRow
    graph: Graph
    plan: Plan
    failures: tuple[FailedMatch, ...] = ()


def check_model(
    registry: Registry,
    target: str,
    *,
    device: str = "sim",
    seed: int = 0,
    policy: Policy = "balanced",
    explain: bool = False,
) -> Checked:
    """Match → plan → run fused → compare with the original artefact on the same inputs.

    Args:
        target: a ``.onnx`` or ``.pt2`` path, or ``package.module:callable`` (which runs that callable).
        device: ``sim``, or ``cuda`` with torch installed.
        seed: of the random inputs.
        explain: also collect what nearly matched.

    Raises: the typed errors of opening a model; a wrong result is a status, not an error, and a missing reference is
    SKIPPED_UNSUPPORTED with its reason.
    """
    opened = open_model(target, ops=registry.catalog.ops)
    found = registry.match(opened.graph, explain=explain)
    plan = registry.plan(opened.graph, policy=policy, matches=found)
    model = FusedModel.build(opened.graph, plan, registry.catalog, registry.runtime)
    inputs = dict(opened.example(seed))
    outputs = {k: host(v) for k, v in model(**_placed(inputs, device)).items()}
    expected, reason = _expected(opened, inputs)
    if expected is None:
        verdict = Verdict(Status.SKIPPED_UNSUPPORTED, reason)
    else:
        exact = {k: host(v) for k, v in model.unfused(mode="exact", **inputs).items()}
        chain = {k: host(v) for k, v in model.unfused(**inputs).items()}
        verdict = compare(outputs, expected, exact, chain, _narrowest(opened.graph))
    row = ModelRow(
        target, len(opened.graph.nodes), tuple(asdict(site) for site in model.sites), verdict.status,
        verdict.max_abs, verdict.max_rel, verdict.reason, FrozenDict(device=device),
    )  # fmt: skip
    return Checked(row, opened.graph, plan, found.failures)


def _expected(opened: Opened, inputs: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The original's outputs; None and why where it has no reference, or one that fails on these inputs."""
    if opened.reference is None:
        return None, opened.reason or "there is no reference"
    try:
        return {k: host(v) for k, v in opened.reference(inputs).items()}, ""
    except ModelError as error:
        return None, error.found or str(error)


@dataclass(frozen=True)
class Verdict:
    """Fused outputs against the original's: the status, why, and the largest deviation; ``max_rel`` is relative to the
    largest magnitude of that output."""

    status: Status
    reason: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0


def compare(
    outputs: Mapping[str, Any],
    expected: Mapping[str, Any],
    exact: Mapping[str, Any],
    chain: Mapping[str, Any],
    narrowest: str,
) -> Verdict:
    """Holds ``outputs`` and the original's ``expected`` against float64 and each other.

    Two rules for every output: the original is as near to float64 as rounding explains (:data:`READING`), so that our
    reading of the model is right; and the fused model's error against float64 is at most twice that of the original or
    of the unfused ``chain``, whichever is larger, plus one ulp. ``narrowest``: the narrowest float dtype in the graph.
    """
    ulp, reading = 2.0 ** -DTYPES[narrowest].mantissa, READING.get(narrowest, 4e-2)
    worst_abs = worst_rel = 0.0
    status, reason = Status.PASSED, ""
    for name, want in expected.items():
        got = outputs[name]
        if got.shape != want.shape:
            return Verdict(Status.INCORRECT_SHAPE, f"{name}: {got.shape} — expected {want.shape}")
        if got.dtype != want.dtype:
            return Verdict(Status.INCORRECT_DTYPE, f"{name}: {got.dtype} — expected {want.dtype}")
        deviation, scale = _deviation(got, want)
        worst_abs, worst_rel = max(worst_abs, deviation), max(worst_rel, deviation / scale)
        ours, theirs, unfused = (_deviation(a[name], exact[name])[0] for a in (outputs, expected, chain))
        allowed = 2 * max(theirs, unfused) + ulp * scale
        found = ""
        if not theirs <= reading * scale:
            found = f"the original is {theirs:.3g} from float64 of the graph as read — at most {reading * scale:.3g}"
        elif not ours <= allowed:
            found = f"{ours:.3g} from float64 — at most {allowed:.3g}"
        if found:
            status, reason = Status.INCORRECT_NUMERICAL, f"{name}: {found}"
    return Verdict(status, reason, worst_abs, worst_rel)


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


def _narrowest(graph: Graph) -> str:
    """The float dtype of fewest mantissa bits that any value of the graph has."""
    floats = {v.dtype for v in graph.values.values() if DTYPES[v.dtype].floating}
    return min(floats, key=lambda name: DTYPES[name].mantissa, default="float64")


def _placed(inputs: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The inputs as NumPy for the simulator, as torch CUDA tensors for a GPU."""
    if device != "cuda":
        return {k: host(v) for k, v in inputs.items()}
    from fusionreg.integrations.torch.arrays import from_numpy

    return {k: from_numpy(host(v)).cuda() for k, v in inputs.items()}


def host(array: Any) -> Any:
    """``array`` as NumPy, whatever library and device it is of."""
    if type(array).__module__.startswith("torch"):
        from fusionreg.integrations.torch.arrays import to_numpy

        return to_numpy(array.detach().cpu())
    return array.get() if hasattr(array, "get") else np.asarray(array)
