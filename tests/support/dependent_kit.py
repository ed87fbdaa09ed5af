"""Small kernels that may start before their predecessor ends; chains of them show what such launches are worth.

``acme.shift``: y = x + bias, vectors of 16 bytes; ``acme.rows``: y = softmax(x), a block to a row. Each has one kernel
per way: ``plain``, an ordinary launch; ``waits``, programmatic, and it waits before its first access; ``early``, and it
lets its successor start right after that; ``late``, where only its stores are left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plugin_kit

from fusionreg.core.registry.catalog import Catalog
from fusionreg.core.spec import FusionSpec, KernelSpec

WAYS = ("plain", "waits", "early", "late")

SHIFT = """\
{{ include("programmatic.cuh") }}
{{ signature }} {
  const long long i = (blockIdx.x * 256LL + threadIdx.x) * W;  // i: [M N], row-major, one vector
  // begin
  if (i >= M * N) return;
  const fr::Vec<T, W> a = fr::load<W>(x + i), b = fr::load<W>(bias + i % N);
  // late
  fr::Vec<T, W> sum;
#pragma unroll
  for (int k = 0; k < W; ++k) sum[k] = fr::from_float<T>(fr::to_float(a[k]) + fr::to_float(b[k]));
  fr::store(y + i, sum);
}
"""

ROWS = """\
{{ include("programmatic.cuh") }}
{{ include("reduce.cuh") }}
{{ signature }} {
  __shared__ float scratch[32];
  const bool inside = threadIdx.x * W < N;
  const long long at = blockIdx.x * N + threadIdx.x * W;  // row blockIdx.x: [N], one vector to a thread
  // begin
  fr::Vec<T, W> a;
  float e[W], most = -fr::infinity(), sum = 0.0f;
  if (inside) a = fr::load<W>(x + at);
#pragma unroll
  for (int k = 0; k < W; ++k) most = fr::max(most, e[k] = inside ? fr::to_float(a[k]) : -fr::infinity());
  most = fr::block_max<256>(most, scratch);
#pragma unroll
  for (int k = 0; k < W; ++k) sum += e[k] = __expf(e[k] - most);
  sum = fr::block_sum<256>(sum, scratch);
  // late
  if (!inside) return;
#pragma unroll
  for (int k = 0; k < W; ++k) a[k] = fr::from_float<T>(e[k] / sum);
  fr::store(y + at, a);
}
"""

_WAIT, _LAUNCH = "fr::grid_dependency_wait();", "fr::grid_dependency_launch();"
_CALLS: dict[str, dict[str, str]] = {
    "plain": {},
    "waits": {"// begin": _WAIT},
    "early": {"// begin": f"{_WAIT}\n  {_LAUNCH}"},
    "late": {"// begin": _WAIT, "// late": _LAUNCH},
}


def template(text: str, way: str) -> str:
    """``text`` with the calls of one way."""
    for mark, calls in _CALLS[way].items():
        text = text.replace(mark, calls)
    return text


def chains(folder: Path, ways: tuple[str, ...] = WAYS) -> Catalog:
    """Both fusions with a kernel for each way; which one runs is the caller's choice (``measured`` of the runtime)."""

    def kernels(name: str, **options: Any) -> tuple[KernelSpec, ...]:
        return tuple(
            KernelSpec(
                name=way, template=f"{name}_{way}.cu.j2", block="256", constants={"W": "128 // bits(T)"},
                programmatic=way != "plain", **options,
            )
            for way in ways
        )  # fmt: skip

    whole = ("N % (128 // bits(T)) == 0",)
    common: dict[str, Any] = {"api": 1, "dtypes": {"T": ("bfloat16", "float32")}, "outputs": {"y": "T[M N]"}}
    shift = FusionSpec(
        name="acme.shift", pattern="y = Add(x, bias)", inputs={"x": "T[M N]", "bias": "T[N]"},
        kernels=kernels(
            "shift", grid="ceildiv(M * N, 256 * W)", requires=(*whole, "aligned(x, 16)", "aligned(bias, 16)")
        ), **common,
    )  # fmt: skip
    rows = FusionSpec(
        name="acme.rows", pattern="y = Softmax(x, axis=-1)", inputs={"x": "T[M N]"},
        kernels=kernels("rows", grid="M", requires=(*whole, "N <= 256 * (128 // bits(T))", "aligned(x, 16)")), **common,
    )  # fmt: skip
    files = {
        f"{name}_{way}.cu.j2": template(text, way)
        for name, text in (("shift", SHIFT), ("rows", ROWS))
        for way in ways
    }
    return plugin_kit.catalog(folder, files, shift, rows)
