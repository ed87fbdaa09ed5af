"""A device for the bench that is none: it keeps a clock and a log of what it was asked."""

from __future__ import annotations

from contextlib import contextmanager

from fusionreg.core.bench import Ceilings, Check, Entrant, Subject
from fusionreg.core.bench.measure import Prepared

CEILINGS = Ceilings(copy_rate=4e12, read_rate=4e12, write_rate=3e12, matmul={})


class FakeBench:
    """Every workload takes a second of the fake clock; kernels take one millisecond, eager two."""

    gpu, target, peers = "NVIDIA Fake 9", "sm_90a", ("eager",)

    def __init__(self, **environment: str) -> None:
        self.environment = {"driver": "1", **environment}
        self.log: list[str] = []
        self.now = 0.0
        self.errors: dict[str, float] = {}
        self.fail: dict[str, Exception] = {}
        self.counts: dict[str, int] = {}
        self.dead = ""
        self.deadly = ""
        self.remarks: dict[str, tuple[str, ...]] = {}
        self.compiled: list[list[str]] = []

    def clock(self) -> float:
        return self.now

    def ceilings(self) -> Ceilings:
        self.log.append("ceilings")
        return CEILINGS

    @contextmanager
    def prepare(self, subject: Subject):
        name = subject.workload.name
        if name in self.fail:
            raise self.fail[name]
        self.log.append(name)
        kernels = [c.kernel.name for c in subject.selection.accepted]
        yield Prepared((*(self.entrant(k, True, 1.0) for k in kernels), self.entrant("eager", False, 2.0)), "x")
        self.now += 1.0

    def ready(self, subject: Subject) -> tuple[str, ...]:
        self.log.append(f"ready {subject.workload.name}")
        self.now += 1.0
        return tuple(self.remarks.get(subject.workload.name, ()))

    def compile(self, subjects) -> tuple[str, ...]:
        self.compiled.append([s.workload.name for s in subjects])
        return ()

    def lost(self) -> str:
        return self.dead

    def executed(self, subjects) -> list[int | None]:
        self.log.append(f"count {' '.join(s.workload.name for s in subjects)}")
        return [self.counts.get(s.workload.name) for s in subjects]

    def entrant(self, name: str, ours: bool, ms: float) -> Entrant:
        def check() -> Check:
            self.log.append(f"check {name}")
            if self.deadly == name or self.dead:
                self.dead = "an illegal memory access"
                raise RuntimeError(f"CUDA error: {self.dead}")
            return Check(self.errors.get(name, 1e-3), 2e-3)

        def sample() -> list[float]:
            self.log.append(f"time {name}")
            return [ms, ms + 0.1, ms + 0.2]

        def glance() -> list[float]:
            self.log.append(f"glance {name}")
            return [ms]

        return Entrant(name, ours, check=check, sample=sample, glance=glance)
