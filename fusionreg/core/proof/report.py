"""What a run found: evaluations of kernels and of models, as JSON and as JUnit XML. Floor 7."""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..frozen import EMPTY, FrozenDict


class Status(StrEnum):
    """Outcome of one evaluation; the words are flashinfer-bench's, with SKIPPED_UNSUPPORTED added."""

    PASSED = "PASSED"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    COMPILE_ERROR = "COMPILE_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    TIMEOUT = "TIMEOUT"
    SKIPPED_UNSUPPORTED = "SKIPPED_UNSUPPORTED"

    @property
    def failed(self) -> bool:
        return self not in (Status.PASSED, Status.SKIPPED_UNSUPPORTED)


@dataclass(frozen=True)
class Evaluation:
    """One kernel on one case.

    Attributes:
        fusion, kernel, case: names; ``kernel`` is the name within the fusion.
        dtype: dtype variables of the case, e.g. ``float16``; joined by ``,`` where there are several.
        status: see :class:`Status`.
        max_abs, max_rel: largest error against float64; 0 where nothing was compared.
        device: ``sim``, or the GPU's name.
        target: architecture the kernel was built for.
        reason: why, for every status but PASSED.
        seconds: wall time of the evaluation; never a kernel's time.
        digest: of the unit that ran, "" where none did.
    """

    fusion: str
    kernel: str
    case: str
    dtype: str
    status: Status
    max_abs: float = 0.0
    max_rel: float = 0.0
    device: str = "sim"
    target: str = ""
    reason: str = ""
    seconds: float = 0.0
    digest: str = ""

    @property
    def key(self) -> str:
        return f"{self.fusion}/{self.kernel}[{self.case}]"

    def __str__(self) -> str:
        return f"{self.key} {self.status}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True)
class ModelRow:
    """One model: its fused sites and the deviation from the original artefact.

    Attributes:
        sites: one mapping each with at least fusion, nodes, kernel and status.
        status: PASSED, INCORRECT_NUMERICAL, RUNTIME_ERROR, or SKIPPED_UNSUPPORTED where there is no reference.
    """

    model: str
    nodes: int
    sites: tuple[Mapping[str, Any], ...]
    status: Status
    max_abs: float = 0.0
    max_rel: float = 0.0
    reason: str = ""
    facts: FrozenDict[str, Any] = EMPTY


@dataclass(frozen=True)
class Report:
    """All of a run. Reports add up with ``+``."""

    evaluations: tuple[Evaluation, ...] = ()
    models: tuple[ModelRow, ...] = ()
    environment: FrozenDict[str, Any] = field(default_factory=lambda: FrozenDict(environment()))

    @property
    def counts(self) -> dict[str, int]:
        """Status → number of evaluations, statuses in declared order."""
        found = Counter(e.status for e in self.evaluations)
        return {s.value: found[s] for s in Status if found[s]}

    @property
    def failures(self) -> tuple[Evaluation, ...]:
        return tuple(e for e in self.evaluations if e.status.failed)

    @property
    def unproven(self) -> tuple[str, ...]:
        """``fusion/kernel`` of kernels of which nothing passed and nothing failed: everything was skipped."""
        found: dict[str, set[Status]] = {}
        for e in self.evaluations:
            found.setdefault(f"{e.fusion}/{e.kernel}", set()).add(e.status)
        return tuple(kernel for kernel, statuses in found.items() if statuses == {Status.SKIPPED_UNSUPPORTED})

    @property
    def ok(self) -> bool:
        """Whether nothing failed, and something of every kernel passed."""
        wrong = bool(self.failures) or any(m.status.failed for m in self.models)
        return not wrong and not self.unproven

    def __add__(self, other: Report) -> Report:
        return replace(
            self,
            evaluations=self.evaluations + other.evaluations,
            models=self.models + other.models,
            environment=self.environment | other.environment,
        )

    def to_json(self) -> dict[str, Any]:
        """``environment``, ``counts``, ``unproven``, ``evaluations``, ``models``, ready for :func:`json.dumps`."""
        return _plain(
            {
                "environment": self.environment,
                "counts": self.counts,
                "unproven": self.unproven,
                "evaluations": [asdict(e) for e in self.evaluations],
                "models": [{**{k: v for k, v in vars(m).items() if k != "facts"}, **m.facts} for m in self.models],
            }
        )

    def write_json(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def write_junit(self, path: Path) -> None:
        """One test suite per kernel, one test case per evaluation; models are a suite of their own."""
        root = ElementTree.Element("testsuites", name="fusionreg")
        suites: dict[str, list[Evaluation]] = {}
        for e in self.evaluations:
            suites.setdefault(f"{e.fusion}/{e.kernel}", []).append(e)
        for name, rows in suites.items():
            _suite(root, name, [(f"{e.case}", e.status, e.reason, e.seconds) for e in rows])
        if self.models:
            _suite(root, "models", [(m.model, m.status, m.reason, 0.0) for m in self.models])
        path.parent.mkdir(parents=True, exist_ok=True)
        ElementTree.indent(root)
        ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _suite(root: ElementTree.Element, name: str, rows: Iterable[tuple[str, Status, str, float]]) -> None:
    rows = list(rows)
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=name,
        tests=str(len(rows)),
        failures=str(sum(s.failed for _, s, _, _ in rows)),
        skipped=str(sum(s is Status.SKIPPED_UNSUPPORTED for _, s, _, _ in rows)),
        time=f"{sum(t for *_, t in rows):.3f}",
    )
    for case, status, reason, seconds in rows:
        element = ElementTree.SubElement(suite, "testcase", classname=name, name=case, time=f"{seconds:.3f}")
        if status.failed:
            ElementTree.SubElement(element, "failure", type=status.value, message=_text(reason)).text = _text(reason)
        elif status is Status.SKIPPED_UNSUPPORTED:
            ElementTree.SubElement(element, "skipped", message=_text(reason))


def _text(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(c if c in "\t\n" or c >= " " else "?" for c in text)


def _plain(value: Any) -> Any:
    """Tuples, frozen mappings and enums as JSON has them; a number that JSON lacks becomes its name."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def environment() -> dict[str, Any]:
    """Versions and machine of this process: what a reader needs to repeat a run."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
    }
    for name in ("fusionreg", "numpy", "torch", "onnx", "onnxruntime", "cupy-cuda13x", "nvidia-cuda-nvrtc"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
