"""The model of throughput against numbers worked out by hand."""

from __future__ import annotations

import graphs as kit
import plugin_kit
import pytest

from fusionreg.core.bench import Subject
from fusionreg.core.bench.model import ALPHA, BARRIER_CYCLES, agreement, predict, resident
from fusionreg.core.compiler import compile_source, instructions
from fusionreg.core.problem import combinations
from fusionreg.core.render import render
from fusionreg.core.spec import Workload
from fusionreg.core.targets import target

OPS, DEVICE = kit.vocabulary(), target("sm_90a")
TEXT = plugin_kit.ADD_RELU.replace("256LL", "(long long)BLOCK")


def candidates(folder, blocks, rows: int, text: str = TEXT, **changes):
    spec = plugin_kit.add_relu(
        kernel_params={"BLOCK": blocks}, kernel_block="BLOCK", kernel_grid="ceildiv(M * N, BLOCK)", **changes
    )
    entry = plugin_kit.catalog(folder, {"k.cu.j2": text}, spec)["acme.add_relu"]
    workload = Workload(name="w", axes={"M": rows, "N": 1024}, dtypes={"T": "float32"})
    subject = Subject.of(entry, workload, "sm_90a", OPS)
    kernel = entry.kernels[0]
    found = {c.params["BLOCK"]: c for c in combinations(kernel, subject.problem)}
    codes = {b: compile_source(render(entry, kernel, subject.problem, c.params)) for b, c in found.items()}
    return found, codes


def test_waves(tmp_path) -> None:
    """Blocks of 32 warps, two to a multiprocessor: 264 at once, which take twice as long as 132 do."""
    for rows, work, time in ((132, 1, 1), (66, 0.5, 1), (264, 2, 2), (265, 265 / 132, 3), (16, 16 / 132, 1)):
        found, _ = candidates(tmp_path / str(rows), (1024,), rows)
        seen = predict(found[1024], DEVICE, 132)
        assert seen.share == pytest.approx(work / time) and seen.warps == pytest.approx(32 * work / time)
        assert seen.throughput == pytest.approx(seen.share * 4 * 132 * 1e9) and seen.sync == 0.0
    assert predict(found[1024], DEVICE, 132, clock=2e9).throughput == pytest.approx(2 * seen.throughput)


def test_too_few_warps(tmp_path) -> None:
    """One block of two warps fits by its shared memory: 2 of the 32 that keep four schedulers busy."""
    found, _ = candidates(tmp_path, (64,), 1320, kernel_shared_memory="200000")
    assert resident(found[64], DEVICE) == 1
    assert predict(found[64], DEVICE, 132).share == pytest.approx(2 / 32, rel=0.01)


def test_residents(tmp_path) -> None:
    found, codes = candidates(tmp_path, (32, 96, 256, 1024), 64)
    assert {b: resident(c, DEVICE) for b, c in found.items()} == {32: 32, 96: 21, 256: 8, 1024: 2}
    assert resident(found[256], DEVICE, codes[256]) == 8
    bounded, _ = candidates(tmp_path / "b", (256,), 64, kernel_max_registers=128)
    assert resident(bounded[256], DEVICE) == 2  # 65536 / (128 * 256)
    odd, _ = candidates(tmp_path / "c", (256,), 64, kernel_max_registers=72)
    assert resident(odd[256], DEVICE) == 3  # 72 * 32 registers of a warp: 9 units of 256


def test_barriers_cost(tmp_path) -> None:
    with_barrier = TEXT.replace("if (i >= M * N) return;", "__syncthreads(); if (i >= M * N) return; __syncwarp();")
    plain, plain_codes = candidates(tmp_path / "a", (256,), 4096)
    found, codes = candidates(tmp_path / "b", (256,), 4096, with_barrier)
    size, barriers = instructions(codes[256].cubin, codes[256].entry)
    assert barriers == 1 and instructions(plain_codes[256].cubin, plain_codes[256].entry)[1] == 0
    a = predict(plain[256], DEVICE, 132, plain_codes[256])
    b = predict(found[256], DEVICE, 132, codes[256])
    assert a.sync == 0.0 and b.sync == pytest.approx(BARRIER_CYCLES / (size * 64 / 4))
    assert b.share == pytest.approx(a.share / (1 + ALPHA * b.sync)) and b.share < a.share


def test_seconds_count_what_all_warps_issue(tmp_path) -> None:
    found, codes = candidates(tmp_path, (256, 1024), 132)
    for block, code in codes.items():
        seen = predict(found[block], DEVICE, 132, code)
        warps = 132 * 1024 // 32
        assert seen.seconds == pytest.approx(instructions(code.cubin, code.entry)[0] * warps / seen.throughput)
        assert predict(found[block], DEVICE, 132).seconds == 0.0


def test_nothing_to_do(tmp_path) -> None:
    found, _ = candidates(tmp_path, (256,), 0)
    assert predict(found[256], DEVICE, 132).share == 0.0


def test_agreement() -> None:
    assert agreement([3.0, 2.0, 1.0], [1.0, 2.0, 3.0]) == pytest.approx(1.0)
    assert agreement([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(-1.0)
    assert agreement([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None and agreement([1.0], [1.0]) is None
    # ranks 0 1 2 3 against 1 0 3 2: 1 - 6 * 4 / (4 * 15)
    assert agreement([4.0, 3.0, 2.0, 1.0], [2.0, 1.0, 4.0, 3.0]) == pytest.approx(0.6)
