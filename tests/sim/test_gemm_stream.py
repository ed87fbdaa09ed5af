"""The kernel whose blocks have channels of their own, in the simulator: tiles, rounds, what it must not lack."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gemm_trials import CATALOG, made

from fusionreg.core.cache import Cache
from fusionreg.core.conformance import run
from fusionreg.core.conformance.execute import Job, empty_outputs, execute
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime.launch import argument_values
from fusionreg.core.simulator import Checks


def job(fusion: str, name: str, axes: dict[str, int], blocks: int = 0) -> Job:
    """The trial of that name on other extents, scale and bias by channel, with as many blocks."""
    forms = {operand: 1 for operand in ("scale", "bias") if operand in CATALOG[fusion].inputs}
    found = made(fusion, "stream", name, axes, 1, forms, BM=8 if axes["M"] <= 8 else 16)
    launch = found.candidate.launch
    if not blocks:
        return found
    return replace(found, candidate=replace(found.candidate, launch=replace(launch, grid=(blocks, 1, 1))))


def test_conforms():
    report = run(CATALOG, ["gemm.scale_bias"], kernels=["stream"], device="sim", cases="quick", cache=Cache())
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] >= 30


@pytest.mark.parametrize(
    ("fusion", "name", "axes", "blocks"),
    [
        ("gemm.scale_bias", "bfloat16-base", {"M": 16, "K": 2056, "N": 280}, 5),  # four tiles to a block, tails
        ("gemm.scale_bias", "float16-base", {"M": 3, "K": 1000, "N": 331}, 1),  # three rounds, the last one shorter
        ("gemm.scale_bias", "float16-base", {"M": 37, "K": 3080, "N": 40}, 2),  # the weight three times
        ("gemm.cast_scale", "float16,int8-base", {"M": 7, "K": 3328, "N": 40}, 0),
        ("gemm.dequantize", "bfloat16,float8_e4m3fn-base", {"M": 16, "K": 1040, "N": 200}, 3),
        ("gemm.bias.residual", "bfloat16-base", {"M": 13, "K": 1328, "N": 272}, 4),
    ],
)
def test_tiles_and_rounds(fusion, name, axes, blocks):
    result = execute(job(fusion, name, axes, blocks), SimExecutor(Cache()), CATALOG.ops)
    assert result.status is Status.PASSED, result


@pytest.mark.parametrize("kinds", ["float16", "float16,int8"])
def test_shared_memory_has_no_bank_conflicts(kinds):
    fusion = "gemm.cast_scale" if "," in kinds else "gemm.scale_bias"
    executor, found = SimExecutor(Cache()), job(fusion, f"{kinds}-base", {"M": 16, "K": 1024, "N": 64}, 1)
    arrays = {**found.arrays, **empty_outputs(found, 0.0)}
    values = argument_values(found.problem, found.source.arguments)
    arguments = [arrays[a.name] if a.pointer else values[a.parameter] for a in found.source.arguments]
    report = executor.compile(found.source).launch(arguments, found.candidate.launch, checks=Checks.full(banks=True))
    assert not report.bank_conflicts, [str(b) for b in report.bank_conflicts]


#: Two tiles or more to a block, and tails; one tile, and more tiles along k than the ring has.
_WIDE, _DEEP = {"M": 19, "K": 2312, "N": 200}, {"M": 16, "K": 9224, "N": 24}
_ROUNDS = {"M": 16, "K": 264, "N": 600}  # of several rounds


@pytest.mark.parametrize(
    ("text", "other", "name", "axes"),
    [
        ("fr::mbarrier_wait(full + stage, parity);", "", "cancel-x", _WIDE),
        ("fr::mbarrier_wait(empty + stage, parity ^ 1);", "", "cancel-x", _WIDE),
        ("if (before >= 0 && lane == 0) fr::mbarrier_arrive(empty + before);", "", "cancel-x", _DEEP),
        ("round ^= 1;", "", "base", _ROUNDS),
        ("if (phase + 1 < phases) fetch(m0, rows, phase + 1);", "", "cancel-x", _DEEP),
        ("(phase + turned < phases ? 0 : phases)", "0", "cancel-x", _DEEP),
        ("fr::barrier_sync(1, 32 * WARPS);", "", "cancel-x", _WIDE),
        ("half ^= 1;", "", "cancel-x", _WIDE),
        ("k < depth && g", "g", "special-w", _WIDE),  # times 0, what was in the stage before is NaN
        ("v += parts[", "v = parts[", "cancel-x", _WIDE),  # the last warp's sum alone
    ],
)
def test_what_the_kernel_must_not_lack(text, other, name, axes):
    found = job("gemm.scale_bias", f"bfloat16-{name}", axes, 2)
    source = found.source.text
    assert source.count(text) >= 1
    broken = replace(found, source=changed(found.source, source.replace(text, other, 1)))
    assert execute(broken, SimExecutor(Cache()), CATALOG.ops).status.failed
