"""The backend on the CPU: fused kernels run in the simulator, on tiny shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusionreg
from fusionreg.torch import Report, backend


@pytest.fixture(scope="session")
def registry() -> Any:
    return fusionreg.load_registry(device="sim")


@pytest.fixture
def reports() -> list[Report]:
    return []


@pytest.fixture
def compiled(registry: Any, reports: list[Report]) -> Callable[..., Any]:
    """``compiled(f, **options)``: f through the backend, every site taken; what could not be rewritten is an error."""

    def compile_one(function: Any, *, dynamic: bool | None = False, **options: Any) -> Any:
        torch._dynamo.reset()
        given = {"registry": registry, "device": "sim", "report": reports.append, "policy": "aggressive"}
        given |= {"inner": "eager", "strict": True}
        return torch.compile(function, backend=backend, options={**given, **options}, dynamic=dynamic)

    return compile_one


def fused(reports: list[Report], stage: str = "captured") -> list[str]:
    """Names of the fused sites of a stage; point-wise regions without their digest."""
    found = [s.fusion for r in reports if r.stage == stage for s in r.fused]
    return ["pointwise.region" if n.startswith("pointwise.region") else n for n in found]


def same(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    """Values, dtype and shape; errors are relative to the largest value."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if not expected.numel():
        return
    scale = max(1.0, float(expected.detach().abs().max()))
    assert float((got - expected).detach().abs().max()) <= tolerance * scale
