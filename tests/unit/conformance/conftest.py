"""An executor without a device: it computes what a perfect kernel would, and can be told to go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from catalogs import shipped

from fusionreg.core.conformance.compare import rounded
from fusionreg.core.conformance.execute import Job, Outputs
from fusionreg.core.conformance.reference import reference
from fusionreg.core.dtypes import dtype
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.render import KernelSource


@dataclass
class Fake:
    """Rounds the float64 reference once; ``wrong(outputs, job, poison)`` may change the result or raise."""

    wrong: Callable[[Outputs, Job, float], Outputs] | None = None
    refuses: str = ""
    compiles: Callable[[KernelSource], Any] | None = None
    device: str = "fake"
    target: str = "sm_90a"
    multiprocessors: int | None = None
    compiled: list[str] = field(default_factory=list)
    alone: set[str] = field(default_factory=set)

    def refusal(self, kernel) -> str:
        return self.refuses

    def compile(self, source: KernelSource, *, stressed: bool = False, alone: bool = False) -> Any:
        self.compiled.append(source.digest)
        if alone:
            assert stressed
            self.alone.add(source.digest)
        return self.compiles(source) if self.compiles else source

    def launch(self, code: Any, job: Job, poison: float) -> Outputs:
        exact = reference(job.entry, job.trial, job.arrays, default_vocabulary()).exact
        found: Outputs = {}
        for name, value in exact.items():
            kind = dtype(job.problem.tensors[name].dtype)
            found[name] = rounded(value, kind).astype(kind.numpy)
        return self.wrong(found, job, poison) if self.wrong else found

    def stress(self, code: Any, job: Job, expected: Outputs) -> str:
        return ""

    def lost(self) -> str:
        return ""


@pytest.fixture(scope="session")
def catalog():
    return shipped("gemm")


@pytest.fixture
def fake() -> type[Fake]:
    return Fake
