"""Stacks of simulated threads: kept between launches, and bounded in number."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

GRID = """
#include <cooperative_groups.h>
extern "C" __global__ void k(const int* x, int* part, int* y) {
  part[blockIdx.x * blockDim.x + threadIdx.x] = x[0] + threadIdx.x;
  cooperative_groups::this_grid().sync();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (unsigned t = 0; t < blockDim.x; ++t) sum += part[(gridDim.x - 1 - blockIdx.x) * blockDim.x + t];
    y[blockIdx.x] = sum;
  }
}
"""

#: A process may have 65,530 mappings; loading a library takes some.
MAPPINGS = 50_000


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def units() -> int:
    """Loaded copies of units: by the files that are mapped, whatever else the process maps meanwhile."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split(maxsplit=5)[5] for line in mapped if re.search(r"fusionreg-so-|/memfd:", line)})


def test_launches_of_other_sizes_use_the_stacks_that_are_there(build, geometry):
    """Each new size made its own ones: thousands of system calls a launch, until the process had no mappings left."""
    kernel = build(GRID)
    seen = []
    for blocks in (130, 7, 129, 64, 128, 100, 33):
        x, part, y = np.array([5], np.int32), np.zeros(blocks * 96, np.int32), np.zeros(blocks, np.int32)
        kernel.launch([x, part, y], geometry(grid=(blocks, 1, 1), block=(96, 1, 1), cooperative=True))
        assert (y == 96 * 5 + sum(range(96))).all()
        seen.append(mappings())
    assert max(seen) - seen[0] < 4 * 130, "one loaded copy of the unit a block, and no more stacks"


def test_very_many_threads_leave_room_for_other_mappings(build, geometry):
    blocks, threads = 40, 1024
    x, part, y = np.array([1], np.int32), np.zeros(blocks * threads, np.int32), np.zeros(blocks, np.int32)
    kernel = build(GRID)
    for _ in range(2):
        kernel.launch([x, part, y], geometry(grid=(blocks, 1, 1), block=(threads, 1, 1), cooperative=True))
        assert (y == threads + threads * (threads - 1) // 2).all()
        assert mappings() < MAPPINGS


def test_kernels_make_room_for_each_other(build, geometry, monkeypatch):
    """All fusions in one process loaded more copies of units than a process may have mappings."""
    from fusionreg.core.simulator import build as module

    monkeypatch.setattr(module, "MOST_COPIES", 40)
    kernels = [build(GRID + f"// number {i}\n") for i in range(3)]
    x, blocks = np.array([2], np.int32), 30
    for turn in range(2):
        before = units()
        for kernel in kernels:
            part, y = np.zeros(blocks * 32, np.int32), np.zeros(blocks, np.int32)
            kernel.launch([x, part, y], geometry(grid=(blocks, 1, 1), block=(32, 1, 1), cooperative=True))
            assert (y == 64 + 31 * 16).all()
        if turn:
            assert units() == before, "what was loaded again was unloaded before"
    assert sum(len(units) for k in kernels for _, units in k._loaded.values()) <= 40
