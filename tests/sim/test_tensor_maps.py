"""Tile copies by TMA: loads, stores, swizzles, what is outside, multicast, and each misuse once."""

from __future__ import annotations

import numpy as np
import pytest
from hopper import TYPES, swizzled, tensor_map, unit
from simulated import FULL

MAP = "const __grid_constant__ fr::TensorMap m"
LOAD = """
  extern __shared__ __align__(1024) unsigned char s[];
  __shared__ fr::Mbarrier full;
  const int t = threadIdx.x;
  if (t == 0) {
    fr::tma_prefetch(&m);
    fr::mbarrier_init(&full, 1);
    fr::mbarrier_fence_init();
  }
  __syncthreads();
  if (t == 0) {
    fr::mbarrier_arrive_expect_tx(&full, BYTES);
    fr::tma_load(s, &m, &full, AT);
  }
  WAIT;
  for (int i = t; i < BYTES; i += 32) y[i] = s[i];
"""
RANKS = [(37,), (9, 40), (3, 9, 24), (2, 3, 5, 16), (2, 2, 3, 4, 16)]


def load(build, x, box, at, swizzle=0, fill="zeros", wait="fr::mbarrier_wait(&full, 0)"):
    n = int(np.prod(box)) * x.itemsize
    body = LOAD.replace("BYTES", str(n)).replace("AT", ", ".join(map(str, at))).replace("WAIT", wait)
    kernel = build(unit(f"const unsigned char* x, unsigned char* y, {MAP}", body, 32))
    return kernel, [x, np.zeros(n, np.uint8), tensor_map(x, box, swizzle, fill)], n


def boxed(x: np.ndarray, box: tuple[int, ...], at: tuple[int, ...], fill: float = 0) -> np.ndarray:
    """The box of ``x`` at ``at`` (the last axis first), ``fill`` outside."""
    out = np.full(box[::-1], fill, x.dtype)
    for index in np.ndindex(*out.shape):
        place = tuple(i + a for i, a in zip(index, at[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, x.shape, strict=True)):
            out[index] = x[place]
    return out


@pytest.mark.parametrize("shape", RANKS, ids=len)
@pytest.mark.parametrize("where", ["inside", "before", "behind"])
def test_tiles_of_every_rank(build, geometry, shape, where):
    x = (np.arange(np.prod(shape)) % 2039 + 1).astype(np.float16)[: int(np.prod(shape))].reshape(shape)
    if len(shape) == 1:
        x = np.resize(x, 37)
    box = (8, *(2 for _ in shape[1:]))
    at = {
        "inside": [1, *(n - 2 for n in shape[-2::-1])],
        "before": [-3, *(-1 for _ in shape[1:])],
        "behind": [n - 1 for n in shape[::-1]],
    }[where]
    kernel, args, n = load(build, x, box, at)
    kernel.launch(args, geometry(shared_memory=n), checks=FULL)
    np.testing.assert_array_equal(args[1].view(np.float16), boxed(x, box, at).ravel())


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("ctype", ["__nv_bfloat16", "__nv_fp8_e4m3", "float"])
def test_swizzles(build, geometry, swizzle, ctype):
    kind = TYPES[ctype]
    x = np.arange(24 * 256 // kind.itemsize).astype(np.uint8).astype(kind).reshape(24, -1)
    box, at = (swizzle // kind.itemsize, 20), (16 // kind.itemsize, 2)
    kernel, args, n = load(build, x, box, at, swizzle)
    kernel.launch(args, geometry(shared_memory=n), checks=FULL)
    np.testing.assert_array_equal(args[1], swizzled(boxed(x, box, at), swizzle))
