"""Results as they might have been measured: synthetic, for tables and pages."""

from __future__ import annotations

import pytest

from fusionreg.core.bench import Ceilings, Spread
from fusionreg.core.bench.results import Column, Result, Results, Run


def spread(ms: float) -> Spread:
    return Spread(median=ms, min=ms * 0.97, p20=ms * 0.99, p80=ms * 1.02, n=40)


def row(workload: str, mode: str, flops: int, read: int, written: int, times: dict[str, float], **fields) -> Result:
    computes = {"product": "x @ w alone", "epilogue": "gelu_tanh(x @ w + bias)"}
    columns = tuple(
        Column(name=n, ours=n in ("tensor_core", "plain"), computes=computes.get(n, ""), time=spread(ms), error=2e-3)
        for n, ms in times.items()
    )
    facts = {
        "fusion": "gemm.scale_bias", "workload": workload, "row": "S15", "mode": mode, "problem": f"problem {workload}",
        "digest": "0" * 64, "run": 0, "status": "measured", "read": read, "written": written, "flops": flops,
        "floor_ms": 1.38, "bound": "matmul", "chosen": "tensor_core", "columns": columns,
        "goal": "min(product, epilogue)", "goal_ms": 1.5, "peer": "def forward(self, x, w): ...",
    }  # fmt: skip
    return Result(**{**facts, **fields})


@pytest.fixture
def found() -> Results:
    rates = Ceilings(copy_rate=4.26e12, read_rate=4.39e12, write_rate=3.4e12,
                     matmul={"bfloat16": 7.88e14, "float16": 7.6e14, "float32": 5.1e13})  # fmt: skip
    run = Run(date="2026-01-02T03:04:05+00:00", environment={"gpu": "NVIDIA <Fake>", "torch": "2.11"}, ceilings=rates)
    missing = Column(name="compile", reason="RuntimeError: no <kernel> & no cry")
    big = {"tensor_core": 2.0, "plain": 44.8, "eager": 2.5, "compile": 1.6, "product": 1.6, "epilogue": 1.5}
    rows = (
        row("8192x8192x8192-bf16", "b", 2 * 8192**3, 268468224, 134217728, big),
        row("16x14336x4096-bf16", "g", 1879277568, 117571584, 458752,
            {"tensor_core": 0.04, "plain": 0.06, "eager": 0.05}, floor_ms=0.027, bound="memory", goal_ms=None,
            goal="floor / 0.88"),
        row("wrong", "b", 10, 10, 10, {}, status="differs", reason="tensor_core differs: error 0.3", goal_ms=None),
        row("no-peer", "b", 2 * 4096**3, 67108864, 33554432, {"tensor_core": 0.4}, floor_ms=0.18, goal_ms=None),
    )  # fmt: skip
    last = rows[3].model_copy(update={"columns": (*rows[3].columns, missing)})
    return Results(gpu="NVIDIA <Fake>", runs=(run,), rows=(*rows[:3], last))
