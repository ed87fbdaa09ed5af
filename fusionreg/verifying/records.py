"""What verification found, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fusionreg.core.proof.report import Status


@dataclass(frozen=True)
class SiteCheck:
    """One fused site over all runs.

    Attributes:
        fusion: name of the fusion.
        nodes, operators: the nodes that it replaced and what they compute, in order.
        source: where the last of them stands in the model.
        kernel: the kernel that ran; "" where none did.
        status: of the contract: PASSED or INCORRECT_…; COMPILE_ERROR or RUNTIME_ERROR where the kernel gave no result;
            SKIPPED_UNSUPPORTED where no kernel took a run, so that the operators themselves ran.
        reason: why, for every status but PASSED: of the first run that had it.
        run: that run; -1 where all passed.
        max_abs, max_rel: largest error of the kernel against float64, over all runs and outputs.
        unfused_abs, unfused_rel: the same of the unfused operators at the model's dtypes.
    """

    fusion: str
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    source: str
    kernel: str = ""
    status: Status = Status.PASSED
    reason: str = ""
    run: int = -1
    max_abs: float = 0.0
    max_rel: float = 0.0
    unfused_abs: float = 0.0
    unfused_rel: float = 0.0

    @property
    def compared(self) -> bool:
        """Whether anything was held against float64: a kernel's results, or the operators' own."""
        return bool(self.kernel) or not self.status.failed

    def merged(self, other: SiteCheck, run: int) -> SiteCheck:
        """Both runs as one: the first that failed decides, then the first that was skipped."""
        worse = _rank(other.status) > _rank(self.status)
        decides = other if worse else self
        errors = ("max_abs", "max_rel", "unfused_abs", "unfused_rel")
        return SiteCheck(
            self.fusion, self.nodes, self.operators, self.source, decides.kernel or self.kernel or other.kernel,
            decides.status, decides.reason, run if worse else self.run,
            *(max(getattr(self, e), getattr(other, e)) for e in errors),
        )  # fmt: skip

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.fusion}{where}: {self.status}{f': {self.reason}' if self.reason else ''}"


def _rank(status: Status) -> int:
    return 2 if status.failed else int(status is Status.SKIPPED_UNSUPPORTED)


@dataclass(frozen=True)
class Drift:
    """The whole fused model against its original artefact, over all runs.

    Attributes:
        status, reason: of the first run that did not pass; SKIPPED_UNSUPPORTED where the original gives nothing.
        run: that run; -1 where all passed.
        max_abs: largest difference from the original.
        max_rel: the same relative to the largest magnitude of the output.
        fused, original, unfused: largest error against float64 of the fused model, the original, and our unfused chain.
    """

    status: Status
    reason: str = ""
    run: int = -1
    max_abs: float = 0.0
    max_rel: float = 0.0
    fused: float = 0.0
    original: float = 0.0
    unfused: float = 0.0

    def merged(self, other: Drift, run: int) -> Drift:
        """Both runs as one."""
        worse = _rank(other.status) > _rank(self.status)
        decides = other if worse else self
        errors = ("max_abs", "max_rel", "fused", "original", "unfused")
        return Drift(
            decides.status, decides.reason, run if worse else self.run,
            *(max(getattr(self, e), getattr(other, e)) for e in errors),
        )  # fmt: skip


@dataclass(frozen=True)
class Verification:
    """A model's fused sites and its drift. ``print`` it, or ask :attr:`ok`.

    Attributes:
        model: its name or path.
        operators: how many nodes it has, unfused.
        device: ``sim`` or ``cuda``.
        policy: of the plan.
        runs: what it was run on, in words.
        sites: in execution order.
        drift: of the whole.
    """

    model: str
    operators: int
    device: str
    policy: str
    runs: tuple[str, ...]
    sites: tuple[SiteCheck, ...]
    drift: Drift

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. True of a model without sites too, and of one whose original is missing."""
        return not self.failures and not self.drift.status.failed

    @property
    def failures(self) -> tuple[SiteCheck, ...]:
        """Sites whose kernel is wrong, or gave nothing."""
        return tuple(s for s in self.sites if s.status.failed)

    @property
    def executed(self) -> int:
        """How many sites a kernel ran at."""
        return sum(bool(s.kernel) for s in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "model": self.model,
            "operators": self.operators,
            "device": self.device,
            "policy": self.policy,
            "runs": list(self.runs),
            "ok": self.ok,
            "executed": self.executed,
            "sites": [_plain(asdict(s)) for s in self.sites],
            "drift": _plain(asdict(self.drift)),
        }

    def __str__(self) -> str:
        lines = [self.summary]
        for s in self.sites:
            lines.append(f"  {s}; off by {s.max_abs:.3g}, unfused by {s.unfused_abs:.3g}; {s.kernel or 'no kernel'}")
        drift = f"{self.drift.status}{f': {self.drift.reason}' if self.drift.reason else ''}"
        return "\n".join([*lines, f"  against the original: {drift}; off by {self.drift.max_abs:.3g}"])

    @property
    def summary(self) -> str:
        """One line."""
        n = len(self.sites)
        runs = f"{len(self.runs)} run{'s' if len(self.runs) != 1 else ''}"
        wrong = f", {len(self.failures)} wrong" if self.failures else ""
        return f"{self.model}: kernels ran at {self.executed} of {n} sites on {self.device}, {runs}{wrong}"


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else str(v) if isinstance(v, Status) else v for k, v in row.items()}
