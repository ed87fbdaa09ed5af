"""A kernel that reads one operand through a tensor map, whose structure it declares itself."""

from __future__ import annotations

from typing import Any

import plugin_kit

from fusionreg.core.spec import FusionSpec, TensorMap

#: y[i] = relu(x[i] + bias[i % N]), where x is read at the address and by the stride that its tensor map tells.
MAPPED = """\
namespace fr { struct alignas(64) TensorMap { unsigned char bytes[128]; }; }
struct View {
  unsigned long long magic, base;
  unsigned rank, width, swizzle, none;
  unsigned long long dims[5], strides[4];
  unsigned short box[5];
  unsigned char fill;
};
{{ signature }} {
  const View& map = reinterpret_cast<const View&>(map_x);  // x: [M N], strided: x_stride_0
  const long long i = blockIdx.x * 256LL + threadIdx.x;
  const long long m = i / (long long)map.dims[0], n = i % (long long)map.dims[0];
  if (i >= M * N) return;
  const T* row = reinterpret_cast<const T*>(map.base + m * map.strides[0]);
  y[i] = fr::from_float<T>(fr::relu(fr::to_float(row[n]) + fr::to_float(bias[n])));
}
"""

#: The same, a tile of 8 rows and 16 columns to a block, loaded and stored by TMA.
TILED = """\
{{ include("mbarrier.cuh") }}
{{ include("tma.cuh") }}
{{ signature }} {
  __shared__ alignas(128) unsigned char memory[8 * 16 * sizeof(T)];
  T* tile = reinterpret_cast<T*>(memory);  // [8 16]; x_stride_0 is in the map
  __shared__ fr::Mbarrier full;
  const int t = threadIdx.x, n = blockIdx.x * 16, m = blockIdx.y * 8;
  if (t == 0) {
    fr::mbarrier_init(&full, 1);
    fr::mbarrier_fence_init();
    fr::mbarrier_arrive_expect_tx(&full, sizeof memory);
    fr::tma_load(tile, &map_x, &full, n, m);
  }
  __syncthreads();
  fr::mbarrier_wait(&full, 0);
  const float b = n + t % 16 < N ? fr::to_float(bias[n + t % 16]) : 0.0f;
  tile[t] = fr::from_float<T>(fr::relu(fr::to_float(tile[t]) + b));
  fr::fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    fr::tma_store(&map_y, tile, n, m);
    fr::store_commit();
    fr::store_wait<0>();
  }
}
"""


def mapped(*, map_: dict[str, Any] | None = None, **changes: Any) -> FusionSpec:
    """``acme.add_relu`` whose kernel has a map of x; ``map_``: fields of it, other keywords as of ``add_relu``."""
    fields: dict[str, Any] = {"name": "map_x", "operand": "x", "box": ("64", "16"), "swizzle": "128", **(map_ or {})}
    options: dict[str, Any] = {"kernel_strides": "x", "kernel_targets": "sm_90+", "kernel_requires": "N > 0"}
    options |= {"kernel_tensor_maps": (TensorMap(**fields),), "dtypes": {"T": ("float16", "bfloat16", "float32")}}
    return plugin_kit.add_relu(**{**options, **changes})
