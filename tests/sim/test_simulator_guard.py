"""Guarded copies, plain runs that fault, thread orders, aliasing and strides, sanitizers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fusionreg.core.errors import SimulatorError
from fusionreg.core.simulator import Checks

GUARDED = Checks.guarded()
FULL = Checks.full()

OFFSET = """
extern "C" __global__ void k(const float* x, float* y, int read, int write) {
  const int t = threadIdx.x;
  y[t] = x[t];
  if (t == 5) y[t + write] = x[t + read];  // HERE
}
"""


@pytest.mark.parametrize(
    ("read", "write", "size", "tensor", "detector"),
    [
        (27, 0, 32, "x", "bounds"),  # just past the end: the guard page
        (1 << 20, 0, 32, "x", "bounds"),
        (-(1 << 20), 0, 32, "x", "bounds"),
        (0, 27, 32, "y", "bounds"),
        (0, -6, 32, "y", "guard"),  # just before the start: a canary
        (
            0,
            28,
            33,
            "y",
            "guard",
        ),  # between 132 bytes and the page lie 12 of canary: copies keep their address modulo 16
    ],
)
def test_guard_zones(build, geometry, read, write, size, tensor, detector):
    """The uninstrumented build on guarded copies: faults on pages, canaries on stores beside the tensor."""
    x, y = (np.zeros(64 + size, np.float32) for _ in range(2))
    at = (-x.ctypes.data % 16) // 4, (-y.ctypes.data % 16) // 4
    x, y = x[at[0] : at[0] + size], y[at[1] : at[1] + size]
    with pytest.raises(SimulatorError) as caught:
        build(OFFSET).launch([x, y, read, write], geometry(), checks=GUARDED, names=["x", "y", "read", "write"])
    assert (caught.value.facts["detector"], caught.value.facts["tensor"]) == (detector, tensor), str(caught.value)
    if detector == "bounds":
        assert caught.value.facts["line"] == 5


def test_the_callers_arrays_are_untouched_by_a_fault(build, geometry):
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    with pytest.raises(SimulatorError):
        build(OFFSET).launch([x, y, 0, 1000], geometry(), checks=GUARDED)
    assert not y.any()
    build(OFFSET).launch([x, y, 0, 0], geometry(), checks=GUARDED)  # and the process goes on
    assert y.all()


#: Offsets that reach where nothing is mapped, however much a process has mapped.
FAR = OFFSET.replace("int read, int write", "long long read, long long write")


def test_a_plain_run_reports_a_segmentation_fault(build, geometry):
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    for _ in range(3):
        with pytest.raises(SimulatorError) as caught:
            build(FAR).launch([x, y, -(1 << 43), 0], geometry())
        assert caught.value.facts["detector"] == "bounds"
        assert caught.value.facts["thread"] == (5, 0, 0)


STRIDED = """
extern "C" __global__ void k(const float* x, float* y, long long xs, long long ys) {
  const int t = threadIdx.x;
  y[t * ys] = x[t * xs + WRONG] * 2;
}
"""


@pytest.mark.parametrize("step", [2, -3])
def test_strided_tensors(build, geometry, step):
    store, out = np.arange(200, dtype=np.float32), np.full(200, -1, np.float32)
    x, y = store[::step][:32], out[1::3][:32]
    args = [x, y, step, 3]
    build("#define WRONG 0\n" + STRIDED).launch(args, geometry(), checks=FULL)
    np.testing.assert_array_equal(y, x * 2)
    assert (out[0], out[2], out[200 - 1]) == (-1, -1, -1)
    with pytest.raises(SimulatorError) as caught:  # it reads between the elements, or past the last
        build("#define WRONG 1\n" + STRIDED).launch(args, geometry(), checks=FULL)
    assert caught.value.facts["detector"] == "bounds"


def test_stores_between_elements_show_in_guarded_runs(build, geometry):
    out = np.zeros(64, np.float32)
    kernel = build('extern "C" __global__ void k(float* y) { y[threadIdx.x] = 1; }')
    with pytest.raises(SimulatorError) as caught:
        kernel.launch([out[::2]], geometry(), checks=GUARDED, names=["y"])
    assert (caught.value.facts["detector"], caught.value.facts["offset"] // 4) == ("guard", 1)


def test_misaligned_tensors_stay_as_misaligned(build, geometry):
    """A copy has the same address modulo 16: a kernel that tests for vector accesses takes the same path."""
    kernel = build("""extern "C" __global__ void k(const float* x, int* y) {
      y[threadIdx.x] = static_cast<int>(reinterpret_cast<unsigned long long>(x) % 16);
    }""")
    store, y = np.zeros(200, np.float32), np.zeros(32, np.int32)
    for offset in (0, 1, 5, 37):
        x = store[offset : offset + 32]
        for checks in (Checks(), GUARDED, FULL):
            kernel.launch([x, y], geometry(), checks=checks)
            assert (y == x.ctypes.data % 16).all()


def test_aliased_tensors_stay_aliased(build, geometry):
    kernel = build('extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] + 1; }')
    for checks in (Checks(), GUARDED, FULL):
        a = np.arange(32, dtype=np.float32)
        kernel.launch([a, a], geometry(), checks=checks, inout=("argument 1",))
        np.testing.assert_array_equal(a, np.arange(32) + 1)


def test_poison_reaches_what_is_not_written(build, geometry):
    kernel = build('extern "C" __global__ void k(float* y) { if (threadIdx.x) y[threadIdx.x] = 1; }')
    y = np.zeros(32, np.float32)
    kernel.launch([y], geometry(), checks=GUARDED)
    assert np.isnan(y[0]) and (y[1:] == 1).all()


def test_order_dependence(build, geometry):
    """The last block to write wins: no race detector runs here, the orders disagree."""
    text = """extern "C" __global__ void k(int* y) {
      if (threadIdx.x == 0) y[0] = blockIdx.x * FAULT;
      y[1 + threadIdx.x] = 0;
    }"""
    y = np.zeros(33, np.int32)
    with pytest.raises(SimulatorError) as caught:
        build("#define FAULT 1\n" + text).launch([y], geometry(grid=(3, 1, 1)), checks=GUARDED, names=["y"])
    assert (caught.value.facts["detector"], caught.value.facts["tensor"]) == ("order", "y")
    build("#define FAULT 0\n" + text).launch([y], geometry(grid=(3, 1, 1)), checks=GUARDED)
    loose = Checks(guard=True, orders=("forward", "reverse"), deterministic=False)
    build("#define FAULT 1\n" + text).launch([y], geometry(grid=(3, 1, 1)), checks=loose)


def test_hang_in_a_plain_run(build, geometry):
    kernel = build('extern "C" __global__ void k(volatile int* y) { while (y[0] == 0) {} }')
    with pytest.raises(SimulatorError) as caught:
        kernel.launch([np.zeros(1, np.int32)], geometry(), checks=Checks(timeout=0.2))
    assert caught.value.facts["detector"] == "timeout"


def test_launches_from_several_threads(build, geometry):
    kernel = build("""extern "C" __global__ void k(int* y, int v) {
      __shared__ int s[64];
      for (int i = 0; i < 200; ++i) {
        s[threadIdx.x] = v;
        __syncthreads();
        y[threadIdx.x] = s[63 - threadIdx.x];
        __syncthreads();
      }
    }""")
    results = [np.zeros(64, np.int32) for _ in range(4)]
    threads = [
        threading.Thread(target=kernel.launch, args=([y, i + 1], geometry(block=(64, 1, 1))))
        for i, y in enumerate(results)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [set(y) for y in results] == [{1}, {2}, {3}, {4}]


SANITIZED = 'extern "C" __global__ void k(const float* x, float* y) {\n const int t = threadIdx.x;\n BODY;\n}\n'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("__shared__ float s[64]; s[t] = x[t]; __syncthreads(); y[t] = s[63 - t]", ""),
        ("y[t] = x[t + 1]", "heap-buffer-overflow, READ of size 4, at unit.cu:3"),
        ("y[t - 1] = x[t]", "heap-buffer-overflow, WRITE of size 4, at unit.cu:3"),
        ("extern __shared__ float s[]; s[t] = x[t]; __syncthreads(); y[t] = s[t + 1]", "use-after-poison"),
        ("y[t] = (2147483647 - 62) + t", "signed integer overflow"),
        ("y[t] = 1 << t", "shift exponent 32"),
        ("__syncthreads(); if (t) __syncthreads()", "cannot go on"),
    ],
)
def test_sanitizers(build, geometry, body, says):
    kernel = build(SANITIZED.replace("BODY", body))
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    launch, checks = (
        geometry(block=(64, 1, 1), shared_memory=256),
        Checks(sanitize=True, orders=("forward", "reverse"), timeout=120),
    )
    if not says:
        kernel.launch([x, y], launch, checks=checks)
        np.testing.assert_array_equal(y, x[::-1])
        return
    with pytest.raises(SimulatorError, match=says):
        kernel.launch([x, y], launch, checks=checks)
