"""Occupancy against NVIDIA's own calculator, a header of the CUDA runtime, compiled by the host's compiler."""

from __future__ import annotations

import ctypes
import subprocess
from itertools import product
from pathlib import Path

import pytest

from fusionreg.core import headers
from fusionreg.core.errors import FusionregError
from fusionreg.core.occupancy import occupancy
from fusionreg.core.simulator import host_compiler
from fusionreg.core.targets import REGISTERS_SM, TARGETS, target

CALCULATOR = """
#include <limits.h>
#include <string.h>
#include "cuda_occupancy.h"
extern "C" int blocks(const long long* device, int threads, int registers, int fixed, int dynamic, int barriers,
                      int* limits) {
  cudaOccDeviceProp p;
  memset(&p, 0, sizeof p);
  p.computeMajor = int(device[0] / 10), p.computeMinor = int(device[0] % 10);
  p.maxThreadsPerBlock = 1024, p.maxThreadsPerMultiprocessor = int(device[1]), p.warpSize = 32, p.numSms = 1;
  p.regsPerBlock = p.regsPerMultiprocessor = int(device[2]);
  p.sharedMemPerBlock = 49152, p.sharedMemPerBlockOptin = size_t(device[3]);
  p.sharedMemPerMultiprocessor = size_t(device[4]), p.reservedSharedMemPerBlock = 1024;
  cudaOccFuncAttributes f;
  memset(&f, 0, sizeof f);
  f.maxThreadsPerBlock = 1024, f.numRegs = registers, f.sharedSizeBytes = size_t(fixed);
  f.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, f.maxDynamicSharedSizeBytes = size_t(device[3] - fixed);
  f.numBlockBarriers = barriers;
  cudaOccDeviceState state;
  memset(&state, 0, sizeof state);
  state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  cudaOccResult r;
  const cudaOccError e = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &f, &state, threads, size_t(dynamic));
  if (e != CUDA_OCC_SUCCESS) return -int(e);
  limits[0] = r.blockLimitRegs, limits[1] = r.blockLimitSharedMem, limits[2] = r.blockLimitWarps;
  limits[3] = r.blockLimitBlocks, limits[4] = r.blockLimitBarriers;
  return r.activeBlocksPerMultiprocessor;
}
"""


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("occupancy")
    try:
        found = [d for d in headers.include_directories() if (Path(d) / "cuda_occupancy.h").exists()]
    except FusionregError as e:
        pytest.skip(str(e))
    if not found:
        pytest.skip("the CUDA runtime's headers come without cuda_occupancy.h")
    (folder / "calculator.cpp").write_text(CALCULATOR)
    made = folder / "calculator.so"
    command = [host_compiler().path, "-shared", "-fPIC", "-w", f"-I{found[0]}", str(folder / "calculator.cpp")]
    subprocess.run([*command, "-o", str(made)], check=True)
    return ctypes.CDLL(str(made)).blocks


@pytest.mark.parametrize("name", TARGETS)
def test_as_the_calculator_has_it(calculator, name) -> None:
    device = target(name)
    facts = (ctypes.c_longlong * 5)(device.capability, device.threads_sm, REGISTERS_SM, device.shared_memory,
                                    device.shared_memory_sm)  # fmt: skip
    limits = (ctypes.c_int * 5)()
    names = ("registers", "shared memory", "threads", "blocks", "barriers")
    seen = set()
    for threads, registers, fixed, dynamic, barriers in product(
        (32, 96, 128, 160, 256, 288, 384, 512, 1024), (16, 24, 32, 40, 48, 64, 72, 96, 128, 168, 255),
        (0, 512, 9000, 40000), (0, 1, 16384, 33000, 60000), (1, 2, 16),
    ):  # fmt: skip
        wanted = calculator(facts, threads, registers, fixed, dynamic, barriers, limits)
        found = occupancy(device, threads, registers=registers, shared=fixed + dynamic, barriers=barriers)
        assert found.blocks == wanted, (threads, registers, fixed, dynamic, barriers, found, list(limits))
        told = dict(zip(names, limits, strict=True))
        assert {n: told[n] for n in found.limits} == dict(found.limits)
        assert set(found.limiting) == {n for n in found.limits if told[n] == wanted}
        assert found.warps == wanted * -(-threads // 32) and found.most == device.threads_sm // 32
        seen |= set(found.limiting)
    assert seen >= {"registers", "shared memory", "threads", "blocks"}
    assert ("barriers" in seen) == (device.capability >= 90)


def test_what_the_device_cannot_hold() -> None:
    device = target("sm_90a")
    assert occupancy(device, 1024, registers=65).blocks == 0
    assert occupancy(device, 32, shared=device.shared_memory).blocks == 1
    assert occupancy(device, 32, shared=device.shared_memory + 1).limiting == ("shared memory",)


def test_from_48_to_32_registers() -> None:
    """Blocks of 256 threads: 48 registers a thread leave room for five, 32 for all eight."""
    device = target("sm_90a")
    many, few = (occupancy(device, 256, registers=n) for n in (48, 32))
    assert (many.blocks, many.warps, many.limiting) == (5, 40, ("registers",))
    assert (few.blocks, few.warps, few.share) == (8, 64, 1.0) and "threads" in few.limiting
