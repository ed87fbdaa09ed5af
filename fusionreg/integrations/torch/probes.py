"""Kernels that do nothing but move bytes or issue instructions: what the ceilings of a device are measured with."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fusionreg.core.bench import Ceilings
from fusionreg.core.cache import Cache
from fusionreg.core.compiler import compile_all as compile_units
from fusionreg.core.compiler import compile_source
from fusionreg.core.frozen import EMPTY, FrozenDict
from fusionreg.core.render.source import OPTIONS, KernelSource
from fusionreg.core.runtime.driver import config, driver
from fusionreg.core.runtime.kernels import load

from .schemas import torch_dtype
from .timing import fastest

#: Bytes that all streams of one probe move together, at most.
MOVED = 3 << 30
_THREADS, _VECTOR = 512, 16

_MIX = """
struct alignas(16) Vector { unsigned a, b, c, d; };
// READS streams are read, WRITES streams are written, each of n vectors of 16 bytes; every thread moves DEPTH of each.
extern "C" __global__ void __launch_bounds__(512) {entry}(const Vector* source, Vector* target, long long n) {
  const long long at = (blockIdx.x * (long long)DEPTH) * 512 + threadIdx.x;
  Vector v[DEPTH][READS ? READS : 1];
#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
#pragma unroll
    for (int r = 0; r < READS; ++r) {
      const long long i = at + d * 512LL;
      v[d][r] = i < n ? LOAD(source + r * n + i) : Vector{1, 0, 0, 0};
    }
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    Vector s = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < READS; ++r) {
      s.a += v[d][r].a; s.b += v[d][r].b; s.c += v[d][r].c; s.d += v[d][r].d;
    }
    const long long i = at + d * 512LL;
#pragma unroll
    for (int w = 0; w < WRITES; ++w)
      if (i < n) STORE(target + w * n + i, s);
    if (!WRITES && s.a == 0x9e3779b9u && s.b == 0x7f4a7c15u && s.c == 77u && s.d == 99u) target[0] = s;  // never
  }
}
"""
_PLAIN = "#define LOAD(p) (*(p))\n#define STORE(p, x) (*(p) = (x))\n"
_STREAMED = """
#define LOAD(p) load_once(p)
#define STORE(p, x) store_once(p, x)
template <class V> __device__ V load_once(const V* p) {
  V x;
  asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.a), "=r"(x.b), "=r"(x.c), "=r"(x.d) : "l"(p));
  return x;
}
template <class V> __device__ void store_once(V* p, V x) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(x.a), "r"(x.b), "r"(x.c), "r"(x.d) : "memory");
}
"""

#: Multiply-adds of one thread, in chains that do not wait for each other.
CHAINS, UNROLLED, TURNS = 8, 32, 400
_ISSUE = """
// CHAINS * UNROLLED * TURNS multiply-adds a thread; nothing else is in the loop but its counter.
extern "C" __global__ void __launch_bounds__(1024, 2) {entry}(float* out, float a, float b) {
  float x[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) x[c] = threadIdx.x + c;
#pragma unroll 1
  for (int t = 0; t < TURNS; ++t)
#pragma unroll
    for (int u = 0; u < UNROLLED; ++u)
#pragma unroll
      for (int c = 0; c < CHAINS; ++c) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[c]) : "f"(a), "f"(b));
  float s = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) s += x[c];
  if (s == 1.2345f) *out = s;
}
"""


def source(name: str, text: str, target: str, defines: Mapping[str, int], head: str = "") -> KernelSource:
    """A probe as a unit of its own."""
    entry = f"fr_probe_{name}"
    lines = "".join(f"#define {k} {v}\n" for k, v in defines.items())
    unit = lines + head + text.replace("{entry}", entry)
    digest = hashlib.sha256(unit.encode()).hexdigest()
    return KernelSource(unit, entry, "probe", f"probe/{name}", target, OPTIONS, (), EMPTY, (), digest)


def mixes(target: str, reads: int, writes: int) -> Iterator[tuple[KernelSource, int]]:
    """(unit, vectors of one stream that a block moves): shapes that are the fastest on one device or another."""
    for depth in (2, 8):
        if depth * max(1, reads) <= 16:
            for head in (_PLAIN, _STREAMED):
                defines = {"READS": reads, "WRITES": writes, "DEPTH": depth}
                yield source("mix", _MIX, target, defines, head), depth * _THREADS


class Probe:
    """A loaded probe that is launched on torch's current stream."""

    def __init__(self, unit: KernelSource, device: int, cache: Cache | None) -> None:
        self._module, self._function = load(compile_source(unit, cache), device)
        self._unit, self._device = unit, device

    def call(self, grid: int, block: int, arguments: Sequence[Any]) -> Callable[[], None]:
        """A function that launches it; ``arguments``: ctypes values, kept alive."""
        packed = config((grid, 1, 1), (block, 1, 1), 0, None, False, False)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        held, cuda = (packed, pointers, arguments, self._module), driver()

        def launch() -> None:
            packed.stream = torch.cuda.current_stream(self._device).cuda_stream
            code = cuda.launch(ctypes.addressof(held[0]), self._function, ctypes.addressof(held[1]), None)
            cuda.check(code, self._unit.kernel)

        return launch


def moving_rate(target: str, reads: int, writes: int, cache: Cache | None, moved: int = MOVED) -> float:
    """Bytes per second, of the fastest probe, that streams in the mix ``reads`` : ``writes`` move."""
    device = torch.cuda.current_device()
    vectors = moved // (_VECTOR * (reads + writes))
    a = torch.empty(max(1, reads) * vectors * _VECTOR // 4, dtype=torch.int32, device="cuda").random_()
    b = torch.empty(max(1, writes) * vectors * _VECTOR, dtype=torch.int8, device="cuda")
    seconds = []
    for unit, block in mixes(target, reads, writes):
        arguments = (ctypes.c_uint64(a.data_ptr()), ctypes.c_uint64(b.data_ptr()), ctypes.c_longlong(vectors))
        seconds.append(fastest(Probe(unit, device, cache).call(-(-vectors // block), _THREADS, arguments), 6))
    return (reads + writes) * vectors * _VECTOR / min(seconds)


def _issue(target: str) -> KernelSource:
    return source("issue", _ISSUE, target, {"CHAINS": CHAINS, "UNROLLED": UNROLLED, "TURNS": TURNS})


def issue_rate(target: str, multiprocessors: int, cache: Cache | None) -> float:
    """Instructions per second that all warps together issue, of a loop of multiply-adds."""
    probe = Probe(_issue(target), torch.cuda.current_device(), cache)
    out = torch.zeros(1, device="cuda")
    arguments = (ctypes.c_uint64(out.data_ptr()), ctypes.c_float(0.5), ctypes.c_float(0.25))
    blocks = 2 * multiprocessors
    issued = blocks * 1024 // 32 * CHAINS * UNROLLED * TURNS
    return issued / fastest(partial(probe.call(blocks, 1024, arguments)), 6)


#: Mixes beside reading, writing and copying: bytes read to bytes written.
MIXES = ((3, 1), (2, 1), (1, 2))
_PURE = {"copy": (1, 1), "read": (1, 0), "write": (0, 1)}
_MATMULS = {"bfloat16": 8192, "float16": 8192, "float32": 4096}


def ceilings(target: str, multiprocessors: int, cache: Cache | None) -> Ceilings:
    """The best of torch's own kernels and of the probes here, on buffers of gigabytes (less on a small device)."""
    units = [unit for r, w in (*_PURE.values(), *MIXES) for unit, _ in mixes(target, r, w)]
    compile_units([*units, _issue(target)], cache, workers=len(units))
    free, _ = torch.cuda.mem_get_info()
    size = min(1 << 31, free // 4) // 4
    a = torch.randn(size, device="cuda")
    b = torch.empty_like(a)
    moved = 4 * size
    found = {
        "copy": 2 * moved / fastest(partial(b.copy_, a)),
        "read": moved / fastest(partial(torch.sum, a)),
        "write": moved / fastest(partial(b.fill_, 1.0)),
    }
    del a, b  # what follows needs the room on a small device
    moved = min(MOVED, free // 2)
    for name, (reads, writes) in _PURE.items():
        found[name] = max(found[name], moving_rate(target, reads, writes, cache, moved))
    mixed = {f"{r}:{w}": moving_rate(target, r, w, cache, moved) for r, w in MIXES}
    rates = {}
    for name, n in _MATMULS.items():
        x, y = (torch.randn(n, n, device="cuda", dtype=torch_dtype(name)) for _ in range(2))
        rates[name] = 2.0 * n**3 / fastest(partial(torch.matmul, x, y))
    return Ceilings(
        copy_rate=found["copy"], read_rate=found["read"], write_rate=found["write"], mixes=FrozenDict(mixed),
        matmul=FrozenDict(rates), issue_rate=issue_rate(target, multiprocessors, cache),
    )  # fmt: skip
