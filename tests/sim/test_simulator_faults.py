"""Every detector finds its planted fault, names thread and line, and is silent on the same kernel without the fault."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    extra: str = ""
    launch: dict = field(default_factory=dict)

    def text(self, fault: bool) -> str:
        return f"""#define FAULT {int(fault)}
{self.extra}
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
    Fault("read past the end", "bounds", "  y[i] = x[i + FAULT];  // HERE", "x", "load"),
    Fault("read before the start", "bounds", "  y[i] = x[i - FAULT];  // HERE", "x", "load"),
    Fault("write past the end", "bounds", "  y[i] = 1;\n  y[i + (i == n - 1) * FAULT * 3] = 1;  // HERE", "y", "store"),
    Fault("far outside", "bounds", "  y[i] = x[i + FAULT * 1000000];  // HERE", "x", "load"),
    Fault("null pointer", "bounds", "  const float* p = FAULT ? nullptr : x;\n  y[i] = p[i];  // HERE", says="null"),
    Fault("write to const", "bounds", "  y[i] = x[i];\n  if (FAULT) const_cast<float*>(x)[i] = 0;  // HERE", "x", "const"),
    Fault(
        "static shared memory overrun", "bounds",
        "  __shared__ float s[64];\n  s[t] = 1;\n  __syncthreads();\n  y[i] = s[t + FAULT];  // HERE", says="index 64"),
    Fault(
        "dynamic shared memory overrun", "bounds",
        "  extern __shared__ float s[];\n  s[t] = 1;\n  if (t == 63) s[t + FAULT] = 2;  // HERE\n  y[i] = s[t];", "shared memory",
        "256 bytes", shared=256),
    Fault(
        "local array overrun", "bounds",
        "  float v[4] = {1, 2, 3, 4};\n  y[i] = v[(t & 3) + FAULT];  // HERE", says="index 4"),
    Fault(
        "another thread's local memory", "bounds",
        """  __shared__ float* s;
  float mine = 1;
  if (t == 0) s = &mine;
  __syncthreads();
  y[i] = FAULT ? *s : mine;  // HERE
  __syncthreads();""", says="local memory of another thread"),
    Fault(
        "misaligned vector load", "misaligned",
        "  const float4 v = *reinterpret_cast<const float4*>(x + FAULT);  // HERE\n  y[i] = v.x;", says="16 bytes"),
    Fault(
        "uninitialised shared memory", "uninitialised",
        "  __shared__ float s[64];\n  if (t || !FAULT) s[t] = 1;\n  __syncthreads();\n  y[i] = s[t];  // HERE", "shared memory"),
    Fault("uninitialised output", "uninitialised", "  if (!FAULT) y[i] = 0;\n  y[i] += x[i];  // HERE", "y"),
    Fault("unwritten output", "unwritten", "  if (!FAULT || i != 5) y[i] = x[i];", "y", "4 of 256 bytes"),
    Fault(
        "missing barrier", "race",
        "  __shared__ float s[64];\n  s[t] = 0;\n  __syncthreads();\n  s[t] = x[i];\n  if (!FAULT) __syncthreads();\n  y[i] = s[63 - t];  // HERE", "shared memory", "store"),
    Fault(
        "missing barrier before reuse", "race",
        """  __shared__ float s[64];
  float sum = 0;
  for (int j = 0; j < 2; ++j) {
    s[t] = x[i];
    __syncthreads();
    sum += s[63 - t];  // HERE
    if (!FAULT) __syncthreads();
  }
  y[i] = sum;""", "shared memory"),
    Fault(
        "missing __syncwarp", "race",
        "  __shared__ float s[32];\n  s[t] = 0;\n  __syncthreads();\n  s[t] = x[i];\n  if (!FAULT) __syncwarp();\n  y[i] = s[31 - t];  // HERE", block=32),
    Fault(
        "shuffles order no memory", "race",
        """  __shared__ float s[32];
  s[t] = x[i];
  if (!FAULT) __syncwarp();
  y[i] = __shfl_xor_sync(0xffffffffu, 1.0f, 1) * 0;
  y[i] += s[31 - t];  // HERE""", block=32),
    Fault(
        "warps write one word", "race",
        "  __shared__ float s;\n  if (t == 0 || (FAULT && t == 32)) s = 1;  // HERE\n  __syncthreads();\n  y[i] = s;"),
    Fault("blocks write one element", "race", "  y[i] = 0;\n  if (FAULT && t == 0) y[0] = 1;  // HERE", "y", grid=2),
    Fault(
        "block reads what another wrote", "race",
        "  y[i] = x[i];\n  if (FAULT && i > 64) y[i] += y[0] * 0;  // HERE", "y", grid=2),
    Fault(
        "plain store beside atomics", "race",
        "  y[i] = 0;\n  __shared__ float s;\n  if (t == 0) s = 0;\n  if (!FAULT) __syncthreads();\n  atomicAdd(&s, 1.0f);  // HERE\n"
        "  __syncthreads();\n  y[i] = s;"),
    Fault(
        "last block without a fence", "race",
        """  y[i] = x[i];
  if (!FAULT) __threadfence();
  __syncthreads();
  __shared__ bool last;
  if (t == 0) last = atomicAdd(reinterpret_cast<unsigned*>(y + n), 1u) == gridDim.x - 1;
  __syncthreads();
  if (last) y[i] += y[i >= 64 ? i - 64 : i] * 0;  // HERE""", "y", grid=2),
    Fault(
        "thread leaves before the barrier", "deadlock",
        "  y[i] = 1;\n  if (FAULT && t == 7) return;\n  __syncthreads();  // HERE", says="1 thread exited"),
    Fault(
        "different barriers", "divergent-barrier",
        "  y[i] = 1;\n  if (FAULT && t >= 32) {\n    __syncthreads();  // HERE\n  } else {\n    __syncthreads();\n  }\n"
        "  if (!FAULT) return;", says="different barriers"),
    Fault(
        "lanes miss a collective", "deadlock",
        "  y[i] = 1;\n  if (!FAULT || t % 32 < 16) y[i] = __shfl_sync(0xffffffffu, y[i], 0);  // HERE\n  __syncthreads();",
        says="mask 0xffffffff"),
    Fault(
        "different collectives", "divergent-warp",
        "  unsigned v = 0;\n  if (FAULT && t % 2) v = __ballot_sync(~0u, 1);  // HERE\n  else v = __shfl_sync(~0u, 1, 0);\n  y[i] = v;\n"
        "  if (!FAULT && v == 99) __ballot_sync(~0u, 1);", says="__ballot_sync"),
    Fault("lane not in its mask", "warp", "  y[i] = __shfl_sync(FAULT ? 1u : ~0u, 1.0f, 0);  // HERE", says="lacks the calling lane"),
    Fault(
        "shuffle from a lane outside the mask", "warp",
        "  y[i] = 1;\n  if (t % 32 < 16) y[i] = __shfl_sync(0xffffu, 1.0f, FAULT ? 20 : 3);  // HERE", says="reads lane 20"),
    Fault("order of threads", "order", "  y[i] = atomicAdd(reinterpret_cast<int*>(y + n), FAULT);", "y"),
    Fault("division by zero", "arithmetic", "  const int d = FAULT ? t : t + 1;\n  y[i] = 100 / d;  // HERE"),
    Fault("trap", "trap", "  y[i] = 1;\n  if (FAULT) __trap();  // HERE"),
    Fault("assertion", "trap", "  y[i] = 1;\n  assert(!FAULT || t != 3);  // HERE", says="t != 3"),
    Fault("endless loop", "timeout", "  y[i] = 1;\n  volatile int go = 1;\n  while (FAULT && go) {}", says="did not end"),
    Fault(
        "lock never released", "deadlock",
        """  __shared__ int lock;
  if (t == 0) lock = FAULT;
  __syncthreads();
  if (t == 1) while (atomicCAS(&lock, 0, 1) != 0) {}  // HERE
  y[i] = 1;""", says="1 thread spinning"),
    Fault("too much local memory", "stack", "  volatile char big[FAULT ? 400000 : 16];\n  big[0] = 1;\n  y[i] = big[0];"),
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
