"""Runs a model fused and holds the result against the *original* artefact, never against our own reading of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fusionreg.core.dtypes import DTYPES
from fusionreg.core.errors import FusionregError, ModelError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.planner.plan import Plan, Policy
from fusionreg.core.proof.report import ModelRow, Status
from fusionreg.core.runtime.driver import driver
from fusionreg.integrations import open_model
from fusionreg.model import FusedModel

if TYPE_CHECKING:
    from fusionreg.api import Registry
    from fusionreg.core.ir import Graph
    from fusionreg.core.matcher.find import FailedMatch
    from fusionreg.integrations import Declared, Opened

#: Largest deviation of an original from float64, relative to the largest output, that rounding explains, by the
#: narrowest float dtype in its graph: 16-bit dtypes round what is stored, float32 also the sums of long products.
#: Beyond it our reading of the model is wrong, not its arithmetic.
READING = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}


#: Functions into [-1, 1].
BOUNDED = frozenset({"Erf", "Sigmoid", "Softmax", "Tanh"})


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
    declared: Sequence[Declared] = (),
) -> Checked:
    """Match → plan → run fused → compare with the original artefact on the same inputs.

    Args:
        target: a ``.onnx`` or ``.pt2`` path, or ``package.module:factory`` (which runs that module's code).
        device: ``sim``, ``cuda`` with torch installed, or ``auto``: ``cuda`` where there is a GPU.
        seed: of the random inputs; at 0 a model that brings inputs is run on those.
        explain: also collect what nearly matched.
        declared: types of the inputs of a live module that brings none.

    Raises: the typed errors of opening a model; a wrong result is a status, not an error, and a missing reference is
    SKIPPED_UNSUPPORTED with its reason.
    """
    device = chosen_device(device)
    opened = open_model(target, ops=registry.catalog.ops, declared=declared)
    found = registry.match(opened.graph, explain=explain)
    plan = registry.plan(opened.graph, policy=policy, matches=found)
    model = FusedModel.build(opened.graph, plan, registry.catalog, registry.runtime)
    inputs = dict(opened.example(seed))
    outputs = model(**placed(inputs, device))
    verdict = against_original(opened, model, inputs, outputs)
    row = ModelRow(
        target, len(opened.graph.nodes), tuple(asdict(site) for site in model.sites), verdict.status,
        verdict.max_abs, verdict.max_rel, verdict.reason, FrozenDict(device=device),
    )  # fmt: skip
    return Checked(row, opened.graph, plan, found.failures)


def against_original(
    opened: Opened,
    model: FusedModel,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    on: Mapping[str, Any] | None = None,
) -> Verdict:
    """What ``model`` gave for ``inputs`` against the original artefact; SKIPPED_UNSUPPORTED with the reason where that
    has no answer. ``on``: the same inputs where float64 and the unfused chain are to be computed."""
    expected, reason = _expected(opened, inputs)
    if expected is None:
        return Verdict(Status.SKIPPED_UNSUPPORTED, reason)
    return Reference.of(opened, model, inputs if on is None else on, expected).judge(outputs)


@dataclass(frozen=True)
class Reference:
    """What a model is held against on one set of inputs, whatever is fused in it.

    Attributes:
        expected: outputs of the original artefact by name; None where it has no answer.
        exact, chain: outputs of the graph as read, in float64 and operator by operator.
        narrowest, bounded: as for :func:`compare`.
    """

    expected: Mapping[str, Any] | None
    exact: Mapping[str, Any]
    chain: Mapping[str, Any]
    narrowest: str
    bounded: frozenset[str]

    @classmethod
    def of(
        cls, opened: Opened, model: FusedModel, inputs: Mapping[str, Any], expected: Mapping[str, Any] | None = None
    ) -> Reference:
        """Computed on ``inputs``; ``expected``, the original's outputs, by running it where they are not given."""
        wanted = _expected(opened, inputs)[0] if expected is None else expected
        exact = {k: host(v) for k, v in model.unfused(mode="exact", **inputs).items()}
        chain = {k: host(v) for k, v in model.unfused(**inputs).items()}
        return cls(wanted, exact, chain, _narrowest(opened.graph), _bounded(opened.graph))

    def judge(self, outputs: Mapping[str, Any]) -> Verdict:
        """``outputs`` against the original, or against the unfused chain where that has no answer."""
        got = {k: host(v) for k, v in outputs.items()}
        expected = self.chain if self.expected is None else self.expected
        return compare(got, expected, self.exact, self.chain, self.narrowest, self.bounded)


def chosen_device(word: str) -> str:
    """``sim`` or ``cuda`` for a device word; ``auto`` is ``cuda`` where torch is installed and the driver finds a
    GPU."""
    if word != "auto":
        return word
    try:
        return "cuda" if find_spec("torch") is not None and driver().device_count() else "sim"
    except FusionregError:
        return "sim"


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
    largest magnitude of that output. ``ours``, ``theirs`` and ``unfused`` are the largest errors against float64 of the
    fused model, the original and the unfused chain."""

    status: Status
    reason: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    ours: float = 0.0
    theirs: float = 0.0
    unfused: float = 0.0


def compare(
    outputs: Mapping[str, Any],
    expected: Mapping[str, Any],
    exact: Mapping[str, Any],
    chain: Mapping[str, Any],
    narrowest: str,
    bounded: Collection[str] = (),
) -> Verdict:
    """Holds ``outputs`` and the original's ``expected`` against float64 and each other.

    Two rules for every output. The original is as near to float64 as rounding explains (:data:`READING`), so that our
    reading of the model is right; or as near to the ``chain``: where a model quantises, one rounding that goes the
    other way is a whole step. And the fused model's error against float64 is at most twice that of the original or of
    the unfused chain, whichever is larger, plus one ulp.

    ``narrowest``: the narrowest float dtype in the graph. ``bounded``: outputs of functions into [-1, 1], which
    libraries compute to one ulp of 1, however small the result.
    """
    ulp, reading = 2.0 ** -DTYPES[narrowest].mantissa, READING.get(narrowest, 4e-2)
    worst_abs = worst_rel = ours = theirs = unfused = 0.0
    status, reason = Status.PASSED, ""
    for name, want in expected.items():
        got = outputs.get(name)
        if got is None:
            return Verdict(Status.INCORRECT_SHAPE, f"{name}: missing — an output as the original has")
        if got.shape != want.shape:
            return Verdict(Status.INCORRECT_SHAPE, f"{name}: {got.shape} — expected {want.shape}")
        if got.dtype != want.dtype:
            return Verdict(Status.INCORRECT_DTYPE, f"{name}: {got.dtype} — expected {want.dtype}")
        found = _distances(got, want, exact[name], chain[name])
        worst_abs, worst_rel = max(worst_abs, found.apart), max(worst_rel, found.apart / found.scale)
        ours, theirs = max(ours, found.ours), max(theirs, found.theirs)
        unfused = max(unfused, found.unfused)
        allowed = 2 * max(found.theirs, found.unfused) + ulp * found.scale
        limit = reading * found.scale + (ulp if name in bounded else 0.0)
        if not min(found.theirs, found.read) <= limit:
            status = Status.INCORRECT_NUMERICAL
            reason = (
                f"{name}: the original is {found.theirs:.3g} from float64 of the graph as read — at most {limit:.3g}"
            )
        elif not found.ours <= allowed:
            status, reason = (
                Status.INCORRECT_NUMERICAL,
                f"{name}: {found.ours:.3g} from float64 — at most {allowed:.3g}",
            )
    return Verdict(status, reason, worst_abs, worst_rel, ours, theirs, unfused)


class _Distances(NamedTuple):
    """Largest differences over an output: of the fused model, the original and the chain from float64, of the first two
    from each other, and of the original from the chain (``read``); ``scale`` is the largest magnitude. Infinite where
    special values differ."""

    ours: float
    theirs: float
    unfused: float
    apart: float
    read: float
    scale: float


def _distances(got: Any, want: Any, exact: Any, chain: Any) -> _Distances:
    """Special values, and all that is no float: the original's are those of float64 or, where a smaller float
    overflowed or rounded on the way, those of the chain; the fused model's are those of the original or of float64.
    Where the original overflowed and the fused model did not, it is held to float64."""
    if exact.dtype.kind in "biuOSU":
        number, scale = np.zeros(exact.shape, bool), 1.0
    else:
        got, want, exact, chain = (_floats(a) for a in (got, want, exact, chain))
        number = np.isfinite(exact)
        scale = float(np.max(np.abs(exact), where=number, initial=0.0)) or 1.0
    strange = ~(number & _finite(want)) & ~_same(want, exact) & ~_same(want, chain)
    wrong = ~(number & _finite(got)) & ~_same(got, want) & ~_same(got, exact)
    return _Distances(
        math.inf if wrong.any() else _apart(got, exact, number),
        math.inf if strange.any() else _apart(want, exact, number),
        _apart(chain, exact, number),
        math.inf if wrong.any() else _apart(got, want, number),
        math.inf if strange.any() else _apart(want, chain, number),
        scale,
    )


def _apart(a: Any, b: Any, number: Any) -> float:
    """Largest difference among the elements that are numbers in both."""
    both = number & _finite(a) & _finite(b)
    return float(np.max(np.abs(a[both] - b[both]))) if both.any() else 0.0


def _finite(a: Any) -> Any:
    return np.isfinite(a) if a.dtype.kind == "f" else np.True_


def _same(a: Any, b: Any) -> Any:
    return np.asarray((a == b) | ((a != a) & (b != b)))


def _floats(a: Any) -> Any:
    """As float64, a complex number as two."""
    return np.stack([a.real, a.imag], -1).astype(np.float64) if a.dtype.kind == "c" else a.astype(np.float64)


def _bounded(graph: Graph) -> frozenset[str]:
    """Outputs that come straight from a function into [-1, 1]."""
    return frozenset(name for name in graph.outputs if (n := graph.producers.get(name)) and n.op in BOUNDED)


def _narrowest(graph: Graph) -> str:
    """The float dtype of fewest mantissa bits that any value of the graph has."""
    floats = {v.dtype for v in graph.values.values() if DTYPES[v.dtype].floating}
    return min(floats, key=lambda name: DTYPES[name].mantissa, default="float64")


def placed(inputs: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The inputs as NumPy for the simulator, as torch CUDA tensors for a GPU."""
    if device != "cuda":
        return {k: host(v) for k, v in inputs.items()}
    from fusionreg.integrations.torch.arrays import from_numpy, on_gpu

    return {k: on_gpu(from_numpy(host(v))) for k, v in inputs.items()}


def host(array: Any) -> Any:
    """``array`` as NumPy, whatever library and device it is of."""
    if type(array).__module__.startswith("torch"):
        from fusionreg.integrations.torch.arrays import to_numpy

        return to_numpy(array.detach().cpu())
    return array.get() if hasattr(array, "get") else np.asarray(array)
