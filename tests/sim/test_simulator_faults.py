"""Every detector finds its planted fault, names thread and line, and is silent on the same kernel without the fault."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fusionreg.core.errors import SimulatorError
from fusionreg.core.simulator import Checks

CHECKED = Checks(accesses=True, timeout=60.0)


@dataclass(frozen=True)
class Fault:
    """A kernel with ``FAULT`` defined as 1 or 0. The line marked ``// HERE`` is where the report must point."""

    name: str
    detector: str
    body: str
    tensor: str = ""
    says: str = ""
    block: int = 64
    grid: int = 1
    shared: int = 0

    def text(self, fault: bool) -> str:
        return f"""#define FAULT {int(fault)}
extern "C" __global__ void k(const float* __restrict__ x, float* __restrict__ y, long long n) {{
  const int t = threadIdx.x;
  const long long i = blockIdx.x * (long long)blockDim.x + t;
{self.body}
}}
"""

    @property
    def line(self) -> int:
        lines = self.text(True).splitlines()
        return next((n for n, line in enumerate(lines, 1) if "// HERE" in line), 0)


FAULTS = [
    Fault(
        "read past the end", "bounds", tensor="x", says="load",
        body="""\
  y[i] = x[i + FAULT];  // HERE""",
    ),
    Fault(
        "read before the start", "bounds", tensor="x", says="load",
        body="""\
  y[i] = x[i - FAULT];  // HERE""",
    ),
    Fault(
        "write past the end", "bounds", tensor="y", says="store",
        body="""\
  y[i] = 1;
  y[i + (i == n - 1) * FAULT * 3] = 1;  // HERE""",
    ),
    Fault(
        "far outside", "bounds", tensor="x", says="load",
        body="""\
  y[i] = x[i + FAULT * 1000000];  // HERE""",
    ),
    Fault(
        "null pointer", "bounds", says="null",
        body="""\
  const float* p = FAULT ? nullptr : x;
  y[i] = p[i];  // HERE""",
    ),
    Fault(
        "write to const", "bounds", tensor="x", says="const",
        body="""\
  y[i] = x[i];
  if (FAULT) const_cast<float*>(x)[i] = 0;  // HERE""",
    ),
    Fault(
        "static shared memory overrun", "bounds", says="index 64",
        body="""\
  __shared__ float s[64];
  s[t] = 1;
  __syncthreads();
  y[i] = s[t + FAULT];  // HERE""",
    ),
    Fault(
        "dynamic shared memory overrun", "bounds", tensor="shared memory", says="256 bytes", shared=256,
        body="""\
  extern __shared__ float s[];
  s[t] = 1;
  if (t == 63) s[t + FAULT] = 2;  // HERE
  y[i] = s[t];""",
    ),
    Fault(
        "local array overrun", "bounds", says="index 4",
        body="""\
  float v[4] = {1, 2, 3, 4};
  y[i] = v[(t & 3) + FAULT];  // HERE""",
    ),
    Fault(
        "shared memory by an instruction for global memory", "space", says="in shared memory",
        body="""\
  __shared__ float s[64];
  s[t] = 1;
  y[i] = *fr_sim::global(FAULT ? s + t : x + i);  // HERE""",
    ),
    Fault(
        "local memory by an instruction for global memory", "space", says="in local memory",
        body="""\
  float v[4] = {1, 2, 3, 4};
  y[i] = *fr_sim::global(FAULT ? v + (t & 3) : x + i);  // HERE""",
    ),
    Fault(
        "asynchronous copy out of shared memory", "space", says="cp.async takes",
        body="""\
  __shared__ __align__(16) float s[128];
  s[t] = 1;
  __syncthreads();
  fr_sim::cp_async(s + 64 + t, FAULT ? s + t : x + i, 4, 4);  // HERE
  fr_sim::cp_async_wait_all();
  y[i] = s[64 + t];""",
    ),
    Fault(
        "another thread's local memory", "bounds", says="local memory of another thread",
        body="""\
  __shared__ float* s;
  float mine = 1;
  if (t == 0) s = &mine;
  __syncthreads();
  y[i] = FAULT ? *s : mine;  // HERE
  __syncthreads();""",
    ),
    Fault(
        "misaligned vector load", "misaligned", says="16 bytes",
        body="""\
  const float4 v = *reinterpret_cast<const float4*>(x + FAULT);  // HERE
  y[i] = v.x;""",
    ),
    Fault(
        "uninitialised shared memory", "uninitialised", tensor="shared memory",
        body="""\
  __shared__ float s[64];
  if (t || !FAULT) s[t] = 1;
  __syncthreads();
  y[i] = s[t];  // HERE""",
    ),
    Fault(
        "shared memory that nobody writes", "uninitialised", tensor="shared memory",
        body="""\
  __shared__ float s[64];
  if (!FAULT) s[t] = 1;
  y[i] = s[t];  // HERE""",
    ),
    Fault(
        "uninitialised output", "uninitialised", tensor="y",
        body="""\
  if (!FAULT) y[i] = 0;
  y[i] += x[i];  // HERE""",
    ),
    Fault(
        "unwritten output", "unwritten", tensor="y", says="4 of 256 bytes",
        body="""\
  if (!FAULT || i != 5) y[i] = x[i];""",
    ),
    Fault(
        "missing barrier", "race", tensor="shared memory", says="store",
        body="""\
  __shared__ float s[64];
  s[t] = 0;
  __syncthreads();
  s[t] = x[i];
  if (!FAULT) __syncthreads();
  y[i] = s[63 - t];  // HERE""",
    ),
    Fault(
        "missing barrier before reuse", "race", tensor="shared memory",
        body="""\
  __shared__ float s[64];
  float sum = 0;
  for (int j = 0; j < 2; ++j) {
    s[t] = x[i];
    __syncthreads();
    sum += s[63 - t];  // HERE
    if (!FAULT) __syncthreads();
  }
  y[i] = sum;""",
    ),
    Fault(
        "missing __syncwarp", "race", block=32,
        body="""\
  __shared__ float s[32];
  s[t] = 0;
  __syncthreads();
  s[t] = x[i];
  if (!FAULT) __syncwarp();
  y[i] = s[31 - t];  // HERE""",
    ),
    Fault(
        "shuffles order no memory", "race", block=32,
        body="""\
  __shared__ float s[32];
  s[t] = x[i];
  if (!FAULT) __syncwarp();
  y[i] = __shfl_xor_sync(0xffffffffu, 1.0f, 1) * 0;
  y[i] += s[31 - t];  // HERE""",
    ),
    Fault(
        "warps write one word", "race",
        body="""\
  __shared__ float s;
  if (t == 0 || (FAULT && t == 32)) s = 1;  // HERE
  __syncthreads();
  y[i] = s;""",
    ),
    Fault(
        "blocks write one element", "race", tensor="y", grid=2,
        body="""\
  y[i] = 0;
  if (FAULT && t == 0) y[0] = 1;  // HERE""",
    ),
    Fault(
        "block reads what another wrote", "race", tensor="y", grid=2,
        body="""\
  y[i] = x[i];
  if (FAULT && i > 64) y[i] += y[0] * 0;  // HERE""",
    ),
    Fault(
        "plain store beside atomics", "race",
        body="""\
  y[i] = 0;
  __shared__ float s;
  if (t == 0) s = 0;
  if (!FAULT) __syncthreads();
  atomicAdd(&s, 1.0f);  // HERE
  __syncthreads();
  y[i] = s;""",
    ),
    Fault(
        "last block without a fence", "race", tensor="y", grid=2,
        body="""\
  y[i] = x[i];
  if (!FAULT) __threadfence();
  __syncthreads();
  __shared__ bool last;
  if (t == 0) last = atomicAdd(reinterpret_cast<unsigned*>(y + n), 1u) == gridDim.x - 1;
  __syncthreads();
  if (last) y[i] += y[i >= 64 ? i - 64 : i] * 0;  // HERE""",
    ),
    Fault(
        "thread leaves before the barrier", "deadlock", says="1 thread exited",
        body="""\
  y[i] = 1;
  if (FAULT && t == 7) return;
  __syncthreads();  // HERE""",
    ),
    Fault(
        "different barriers", "divergent-barrier", says="different barriers",
        body="""\
  y[i] = 1;
  if (FAULT && t >= 32) {
    __syncthreads();  // HERE
  } else {
    __syncthreads();
  }
  if (!FAULT) return;""",
    ),
    Fault(
        "lanes miss a collective", "deadlock", says="mask 0xffffffff",
        body="""\
  y[i] = 1;
  if (!FAULT || t % 32 < 16) y[i] = __shfl_sync(0xffffffffu, y[i], 0);  // HERE
  __syncthreads();""",
    ),
    Fault(
        "different collectives", "divergent-warp", says="__ballot_sync",
        body="""\
  unsigned v = 0;
  if (FAULT && t % 2) v = __ballot_sync(~0u, 1);  // HERE
  else v = __shfl_sync(~0u, 1, 0);
  y[i] = v;
  if (!FAULT && v == 99) __ballot_sync(~0u, 1);""",
    ),
    Fault(
        "lane not in its mask", "warp", says="lacks the calling lane",
        body="""\
  y[i] = __shfl_sync(FAULT ? 1u : ~0u, 1.0f, 0);  // HERE""",
    ),
    Fault(
        "shuffle from a lane outside the mask", "warp", says="reads lane 20",
        body="""\
  y[i] = 1;
  if (t % 32 < 16) y[i] = __shfl_sync(0xffffu, 1.0f, FAULT ? 20 : 3);  // HERE""",
    ),
    Fault(
        "order of threads", "order", tensor="y",
        body="""\
  y[i] = atomicAdd(reinterpret_cast<int*>(y + n), FAULT);""",
    ),
    Fault(
        "division by zero", "arithmetic",
        body="""\
  const int d = FAULT ? t : t + 1;
  y[i] = 100 / d;  // HERE""",
    ),
    Fault(
        "trap", "trap",
        body="""\
  y[i] = 1;
  if (FAULT) __trap();  // HERE""",
    ),
    Fault(
        "assertion", "trap", says="t != 3",
        body="""\
  y[i] = 1;
  assert(!FAULT || t != 3);  // HERE""",
    ),
    Fault(
        "endless loop", "timeout", says="did not end",
        body="""\
  y[i] = 1;
  volatile int go = 1;
  while (FAULT && go) {}""",
    ),
    Fault(
        "lock never released", "deadlock", says="1 thread spinning",
        body="""\
  __shared__ int lock;
  if (t == 0) lock = FAULT;
  __syncthreads();
  if (t == 1) while (atomicCAS(&lock, 0, 1) != 0) {}  // HERE
  y[i] = 1;""",
    ),
    Fault(
        "too much local memory", "stack",
        body="""\
  volatile char big[FAULT ? 400000 : 16];
  big[0] = 1;
  y[i] = big[0];""",
    ),
]  # fmt: skip


def run(build, geometry, fault: Fault, planted: bool, checks: Checks):
    kernel = build(fault.text(planted))
    n = fault.block * fault.grid
    x = np.arange(n, dtype=np.float32)
    y = np.zeros(n + 1, np.float32)  # one spare word, for counters
    spare = "y + n" in fault.body
    launch = geometry(grid=(fault.grid, 1, 1), block=(fault.block, 1, 1), shared_memory=fault.shared)
    report = kernel.launch(
        [x, y if spare else y[:n], n], launch, checks=checks, names=["x", "y", "n"], inout=("y",) if spare else ()
    )
    return report, y


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name.replace(" ", "-"))
def test_planted_fault(build, geometry, fault):
    checks = CHECKED
    if fault.detector in ("order", "divergent-barrier"):
        checks = Checks(accesses=True, orders=("forward", "reverse"), timeout=60.0)
    if fault.detector == "timeout":
        checks = Checks(accesses=True, timeout=0.3)
    with pytest.raises(SimulatorError) as caught:
        run(build, geometry, fault, True, checks)
    error = caught.value
    assert error.facts["detector"] == fault.detector, str(error)
    if fault.line:  # a race has two ends, and either may be met second
        places = [(f["file"], f["line"]) for f in (error.facts, error.facts.get("other")) if f]
        assert ("unit.cu", fault.line) in places, str(error)
    if fault.tensor:
        assert error.facts["tensor"] == fault.tensor, str(error)
    assert fault.says in str(error)


SILENT = [f for f in FAULTS if f.detector not in ("timeout",)]


@pytest.mark.parametrize("fault", SILENT, ids=lambda f: f.name.replace(" ", "-"))
def test_silent_without_the_fault(build, geometry, fault):
    report, _ = run(
        build, geometry, fault, False, Checks(accesses=True, orders=("forward", "reverse", "random:3"), timeout=60.0)
    )
    assert report.counters["writes"] > 0
