"""What a launch refuses: arguments, geometries and code that no device takes; and launches of nothing."""

from __future__ import annotations

import numpy as np
import pytest

from fusionreg.core.errors import ArgumentError, CompileError, LaunchError
from fusionreg.core.simulator import Checks

FULL = Checks(accesses=True, orders=("forward", "reverse", "random:7"), timeout=60.0)


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        (lambda x, y: [x], ArgumentError, "1 arguments"),
        (lambda x, y: [x.astype(np.float64), y, 4], ArgumentError, "float64"),
        (lambda x, y: [x, 3, 4], ArgumentError, "NumPy array"),
        (lambda x, y: [x, np.frombuffer(bytes(16), np.float32), 4], ArgumentError, "read-only"),
        (lambda x, y: [x, y, x], ArgumentError, "a number"),
        (lambda x, y: [x, y, 2**40], ArgumentError, "4 bytes"),
    ],
)
def test_arguments_that_do_not_fit(build, geometry, args, error, says):
    kernel = build('extern "C" __global__ void k(const float* x, float* y, int n) { y[threadIdx.x % n] = x[0]; }')
    with pytest.raises(error, match=says):
        kernel.launch(args(np.zeros(4, np.float32), np.zeros(4, np.float32)), geometry())


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"block": (2048, 1, 1)}, "1024 threads"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "whole clusters"),
        ({"shared_memory": 300_000}, "at most 49152 and 232448"),
    ],
)
def test_launches_that_no_device_takes(build, geometry, launch, says):
    with pytest.raises(LaunchError, match=says):
        build('extern "C" __global__ void k(int n) {}').launch([1], geometry(**launch))


def test_inline_ptx_is_refused_with_advice(build):
    with pytest.raises(CompileError, match="FUSIONREG_SIM") as caught:
        build('extern "C" __global__ void k(int* y) { asm volatile("mov.u32 %0, %laneid;" : "=r"(*y)); }').prepare(
            "fast"
        )
    assert "log" in caught.value.facts


def test_compile_errors_keep_their_lines(build):
    with pytest.raises(CompileError) as caught:
        build('#line 40 "bad.cu.j2"\nextern "C" __global__ void k(int* y) {\n  *y = nonsense;\n}').prepare("fast")
    assert "bad.cu.j2:41" in str(caught.value)


def test_empty_grid_and_empty_tensors(build, geometry):
    kernel = build('extern "C" __global__ void k(const float* x, float* y) { y[blockIdx.x] = x[blockIdx.x]; }')
    empty = np.zeros(0, np.float32)
    assert kernel.launch([empty, empty], geometry(grid=(0, 1, 1)), checks=FULL).counters["writes"] == 0
