"""Kernels with tensor maps in the simulator: the 128 bytes that its models read, and where they find the operand."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
from mapped import MAPPED, TILED, mapped
from plugin_kit import catalog as kit

from fusionreg.core import conformance
from fusionreg.core.errors import ArgumentError, SimulatorError
from fusionreg.core.problem import Launch, TensorMapLayout
from fusionreg.core.proof import repro
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime import Runtime
from fusionreg.core.simulator import Checks
from fusionreg.core.simulator.tensor_map import MapArgument, pack
from fusionreg.core.spec import TensorMap

NAME = "acme.add_relu"


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    return kit(tmp_path_factory.mktemp("kit"), {"k.cu.j2": MAPPED}, mapped(map_={"box": ("32", "16")}))


def test_every_field_stands_where_the_models_read_it():
    layout = TensorMapLayout("m", "x", "float32", (640, 33, 5), (4096, 1 << 33), (32, 8, 2), 64, fill="nan")
    raw = pack(layout, 0x7F0012345670)
    assert len(raw) == 128
    assert raw[:8] == (0x0050414D46524D54).to_bytes(8, "little") and raw[8:16] == (0x7F0012345670).to_bytes(8, "little")
    assert struct.unpack_from("<4I", raw, 16) == (3, 4, 2, 0)
    assert struct.unpack_from("<5Q", raw, 32) == (640, 33, 5, 0, 0)
    assert struct.unpack_from("<4Q", raw, 72) == (4096, 1 << 33, 0, 0)
    assert struct.unpack_from("<5H", raw, 104) == (32, 8, 2, 0, 0) and raw[114] == 1 and raw[115:] == bytes(13)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_swizzles_by_number(swizzle):
    raw = pack(TensorMapLayout("m", "x", "int8", (64,), (), (16,), swizzle), 16)
    assert struct.unpack_from("<3I", raw, 16) == (1, 1, (0, 32, 64, 128).index(swizzle)) and raw[114] == 0


def reference(x, bias):
    return np.maximum(x.astype(np.float64) + bias.astype(np.float64), 0).astype(x.dtype)


@pytest.mark.parametrize(
    "checks", [None, Checks.full(), Checks(guard=False)], ids=["default", "everything", "the caller's memory"]
)
def test_the_kernel_finds_its_operand(catalog, sim_cache, checks):
    runtime = Runtime(catalog, cache=sim_cache, checks=checks)
    rng = np.random.default_rng(0)
    for stride in (40, 48):
        x = rng.standard_normal((2, 3, stride)).astype(np.float32)[:, :, :40]
        bias = rng.standard_normal(40).astype(np.float32)
        assert np.array_equal(runtime.call(NAME, x, bias), reference(x, bias))
    assert runtime.kernels_used == {f"{NAME}/plain": 2}


def test_what_tma_cannot_address_runs_unfused_and_says_why(catalog, sim_cache):
    runtime = Runtime(catalog, cache=sim_cache)
    x, bias = np.ones((4, 33), np.float32), np.full(33, -2, np.float32)
    with pytest.warns(UserWarning, match="tensor map map_x of x: axis 1 has a stride of 132 bytes"):
        assert not runtime.call(NAME, x, bias).any()
    assert "multiples of 16" in runtime.fallbacks[NAME] and not runtime.kernels_used


def test_tiles_through_the_device_library(tmp_path, sim_cache):
    """A load and a store by TMA: conformance with every check, tails and strides included."""
    maps = tuple(TensorMap(name=f"map_{t}", operand=t, box=("16", "8")) for t in ("x", "y"))
    grid = ("ceildiv(N, 16)", "ceildiv(M, 8)")
    spec = mapped(kernel_tensor_maps=maps, kernel_grid=grid, kernel_block="128")
    catalog = kit(tmp_path, {"k.cu.j2": TILED}, spec)
    report = conformance.run(catalog, [NAME], device="sim", cases="quick", cache=sim_cache)
    passed = [e for e in report.evaluations if e.status is Status.PASSED]
    others = {e.reason.split(":")[0] for e in report.evaluations if e.status is not Status.PASSED}
    assert len(passed) >= 6 and others <= {"tensor map map_x of x", "requires N > 0 (N = 0)"}, others


def test_an_access_beyond_the_operand_is_caught(tmp_path, sim_cache):
    wrong = MAPPED.replace("row[n]", "row[n + 8]")
    runtime = Runtime(kit(tmp_path, {"k.cu.j2": wrong}, mapped()), cache=sim_cache, checks=Checks.full())
    with pytest.raises(SimulatorError, match="x"):
        runtime.call(NAME, np.ones((4, 64), np.float16), np.ones(64, np.float16))


@pytest.mark.skipif(shutil.which("g++") is None, reason="the sanitizers' libraries are looked up with g++")
def test_under_the_sanitizers(catalog, sim_cache):
    runtime = Runtime(catalog, cache=sim_cache, checks=Checks(sanitize=True))
    x, bias = np.linspace(-1, 1, 240, dtype=np.float32).reshape(6, 40), np.zeros(40, np.float32)
    assert np.array_equal(runtime.call(NAME, x, bias), reference(x, bias))


def test_a_repro_replays(catalog, tmp_path):
    folder = repro.write(catalog, NAME, "plain", "float32-base", folder=tmp_path / "case")
    (row,) = json.loads((folder / "case.json").read_text())["tensor_maps"]
    assert (row["name"], row["operand"], row["box"]) == ("map_x", "x", [32, 16])
    assert repro.replay(folder).status is Status.PASSED
    text = (folder / "kernel.cu").read_text()
    (folder / "kernel.cu").write_text(text.replace("map.strides[0]", "(map.strides[0] - 4)"))
    assert repro.replay(folder).status.failed


def test_arguments_that_do_not_fit(build):
    text = "namespace fr { struct TensorMap { char b[64]; }; }\n"
    text += 'extern "C" __global__ void k(const float* x, const __grid_constant__ fr::TensorMap m) {}'
    kernel = build(text)
    x = np.zeros((8, 8), np.float32)
    layout = TensorMapLayout("m", "x", "float32", (8, 8), (32,), (8, 8))
    launch = Launch((1, 1, 1), (1, 1, 1))
    with pytest.raises(ArgumentError, match="argument 1 is a tensor map"):
        kernel.launch([x, MapArgument(layout, x)], launch)
    wide = build(text.replace("64", "128"))
    with pytest.raises(ArgumentError, match="an array that is no argument itself"):
        wide.launch([x, MapArgument(layout, x.copy())], launch)
