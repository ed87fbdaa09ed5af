"""Tile copies by TMA: loads, stores, swizzles, what is outside, multicast, and each misuse once."""

from __future__ import annotations

import numpy as np
import pytest
from hopper import TYPES, swizzled, tensor_map, unit
from simulated import FULL, raises

from fusionreg.core.errors import SimulatorError
from fusionreg.core.simulator import Checks

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


@pytest.mark.parametrize("ctype", ["__nv_bfloat16", "float"])
def test_what_is_outside_may_be_nan(build, geometry, ctype):
    x = np.ones((3, 16), TYPES[ctype])
    kernel, args, n = load(build, x, (8, 4), (12, 1), fill="nan")
    kernel.launch(args, geometry(shared_memory=n), checks=FULL)
    expected = boxed(x.astype(float), (8, 4), (12, 1), np.nan)
    np.testing.assert_array_equal(args[1].view(x.dtype).astype(float), expected.ravel())


STORE = """
  extern __shared__ __align__(1024) unsigned char s[];
  const int t = threadIdx.x;
  for (int i = t; i < BYTES; i += 64) s[i] = x[i];
  fr::fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    fr::tma_store(&m, s, AT);
    fr::store_commit();
    fr::store_wait<0>();
  }
"""


def store(build, y, box, at, swizzle=0, body=STORE):
    tile = np.random.default_rng(3).integers(1, 99, box[::-1]).astype(y.dtype)
    body = body.replace("BYTES", str(tile.nbytes)).replace("AT", ", ".join(map(str, at)))
    kernel = build(unit(f"const unsigned char* x, unsigned char* y, {MAP}", body, 64))
    return kernel, [swizzled(tile, swizzle), y, tensor_map(y, box, swizzle)], tile


@pytest.mark.parametrize(
    ("shape", "box", "at", "swizzle"),
    [
        ((40,), (16,), (8,), 0),
        ((16, 64), (32, 4), (16, 2), 64),
        ((10, 72), (64, 8), (-8, -3), 128),
        ((10, 72), (16, 8), (64, 6), 32),
        ((3, 5, 16), (8, 4, 2), (12, 3, -1), 0),
        ((2, 2, 3, 4, 8), (8, 2, 2, 2, 2), (0, 3, 2, 1, 0), 0),
    ],
)
def test_stores_leave_out_what_is_outside(build, geometry, shape, box, at, swizzle):
    y = np.zeros(shape, np.float16)
    kernel, args, tile = store(build, y, box, at, swizzle)
    kernel.launch(args, geometry(block=(64, 1, 1), shared_memory=tile.nbytes), checks=FULL, inout=("argument 1",))
    expected = np.zeros(shape, np.float16)
    for index in np.ndindex(*tile.shape):
        place = tuple(i + a for i, a in zip(index, at[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, shape, strict=True)):
            expected[place] = tile[index]
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("old", "new", "detector", "says"),
    [
        ("fr::fence_proxy_async();", "", "proxy", "reads what thread"),
        ("  __syncthreads();", "", "uninitialised", "a barrier may be missing"),
        ("fr::store_wait<0>();", "", "async", "exits before"),
        ("fr::store_commit();", "", "async", "exits before"),
        ("fr::store_wait<0>();", "__syncwarp(); s[0] = 0; fr::store_wait<0>();", "proxy", "reads what thread"),
        ("  }\n", "  }\n  if (t == 63) s[1] = 0;", "race", "races with a"),
        ("&m, s, AT", "&m, s, AT, 0", "tensor-map", "3 coordinates for a tensor map of rank 2"),
        ("&m, s, AT", "&m, s + 64, AT", "misaligned", "aligned to 128"),
        ("&m, s, AT", "&m, s + 256, AT", "bounds", "not in shared memory"),
    ],
)
def test_misuse_of_stores(build, geometry, old, new, detector, says):
    assert old in STORE
    y = np.zeros((16, 64), np.float16)
    kernel, args, tile = store(build, y, (32, 4), (16, 2), body=STORE.replace(old, new, 1))
    where = geometry(block=(64, 1, 1), shared_memory=tile.nbytes + 128)
    with pytest.raises(SimulatorError, match=says) as caught:
        kernel.launch(args, where, checks=FULL, inout=("argument 1",))
    assert caught.value.facts["detector"] == detector, str(caught.value)


def test_a_load_that_nobody_waits_for(build, geometry):
    x = np.ones((4, 16), np.float16)
    kernel, args, n = load(build, x, (16, 4), (0, 0), wait="__syncthreads()")
    raises(kernel, args, geometry(shared_memory=n), "async", "nobody has waited")
    kernel.launch(args, geometry(shared_memory=n), checks=Checks())
    assert np.isnan(args[1].view(np.float16)).all()


def test_a_load_into_what_was_stored_wants_a_proxy_fence(build, geometry):
    x = np.ones((4, 16), np.float16)
    for fence, detector in (("", "proxy"), ("fr::fence_proxy_async();", "")):
        body = LOAD.replace("__syncthreads();", f"s[4 * t] = 0; {fence} __syncthreads();").replace("BYTES", "128")
        body = body.replace("AT", "0, 0").replace("WAIT", "fr::mbarrier_wait(&full, 0)")
        kernel = build(unit(f"const unsigned char* x, unsigned char* y, {MAP}", body, 32))
        args, where = [x, np.zeros(128, np.uint8), tensor_map(x, (16, 4))], geometry(shared_memory=128)
        if detector:
            raises(kernel, args, where, detector, "overwrites what thread")
        else:
            kernel.launch(args, where, checks=FULL)
            np.testing.assert_array_equal(args[1].view(np.float16), x.ravel())


@pytest.mark.parametrize(
    ("shape", "box", "swizzle", "says"),
    [
        ((8, 20), (16, 4), 0, "stride 40"),
        ((8, 64), (4, 4), 0, "rows of a box have 8 bytes"),
        ((8, 64), (64, 4), 64, "rows of a box have 128 bytes, and its swizzle 64"),
        ((8, 512), (257, 4), 0, "box of 257"),
    ],
)
def test_maps_that_tma_does_not_take(build, geometry, shape, box, swizzle, says):
    kernel, args, n = load(build, np.ones(shape, np.float16), box, (0, 0), swizzle)
    raises(kernel, args, geometry(shared_memory=n), "tensor-map", says, Checks())


def test_what_is_no_map(build, geometry):
    kernel, args, n = load(build, np.ones((8, 64), np.float16), (16, 4), (0, 0))
    raises(kernel, [*args[:2], bytes(128)], geometry(shared_memory=n), "tensor-map", "it was not encoded", Checks())


CLUSTER = """
  extern __shared__ __align__(1024) unsigned char s[];  // a half from each block
  __shared__ fr::Mbarrier full, used;
  const int t = threadIdx.x, rank = static_cast<int>(fr::cluster_rank());
  if (t == 0) {
    fr::mbarrier_init(&full, 1);
    fr::mbarrier_init(&used, 2);
    fr::mbarrier_fence_init();
  }
  fr::cluster_sync();
  for (int round = 0; round < 2; ++round) {
    if (t == 0) {
      if (round) fr::mbarrier_wait_cluster(&used, 0);
      fr::mbarrier_arrive_expect_tx(&full, 1024);
      fr::tma_load_multicast(s + 512 * rank, &m, &full, MASK, fr::Keep::kAgain, 0, 8 * (2 * round + rank));
    }
    fr::mbarrier_wait(&full, round);
    for (int i = t; i < 1024; i += 32) y[2048 * rank + 1024 * round + i] = s[i];
    __syncwarp();
    RELEASE
  }
  fr::cluster_sync();
"""
RELEASE = "if (t < 2) fr::mbarrier_arrive_cluster(&used, t);"


def test_multicast(build, geometry):
    x = np.arange(32 * 32).reshape(32, 32).astype(np.float16)
    body = CLUSTER.replace("RELEASE", RELEASE)
    parameters = f"const unsigned char* x, unsigned char* y, {MAP}"
    args = [x, np.zeros((2, 2048), np.uint8), tensor_map(x, (32, 8), 64)]
    where = geometry(grid=(2, 1, 1), cluster=(2, 1, 1), shared_memory=1024)
    build(unit(parameters, body.replace("MASK", "3"), 32)).launch(args, where, checks=FULL)
    halves = np.concatenate([swizzled(x[at : at + 8], 64) for at in range(0, 32, 8)])
    np.testing.assert_array_equal(args[1], np.stack([halves, halves]))
    raises(build(unit(parameters, body.replace("MASK", "5"), 32)), args, where, "cluster", "blocks 0x5")
    early = CLUSTER.replace("RELEASE", "").replace("fr::mbarrier_wait(&full", RELEASE + " fr::mbarrier_wait(&full")
    with pytest.raises(SimulatorError) as caught:  # a tile is given back before it was read
        build(unit(parameters, early.replace("MASK", "3"), 32)).launch(args, where, checks=FULL)
    assert caught.value.facts["detector"] in ("race", "async"), str(caught.value)


def test_swizzled_elements(build, geometry):
    """fr::swizzled finds what TMA has written, and fr::swizzle is its own inverse."""
    x = np.arange(32 * 64).reshape(32, 64).astype(np.float16)
    body = LOAD[: LOAD.index("for (int")].replace("BYTES", "4096").replace("AT", "0, 0")
    body = body.replace("WAIT", "fr::mbarrier_wait(&full, 0)") + """
      static_assert(fr::swizzle<64>(fr::swizzle<64>(12345)) == 12345 && fr::swizzle_alignment<32> == 256, "");
      for (int c = 0; c < 64; ++c) y[t * 64 + c] = *fr::swizzled<128>(reinterpret_cast<__half*>(s), t, c);
    """
    kernel = build(unit(f"const __half* x, __half* y, {MAP}", body, 32))
    y = np.zeros_like(x)
    kernel.launch([x, y, tensor_map(x, (64, 32), 128)], geometry(shared_memory=4096), checks=FULL)
    np.testing.assert_array_equal(y, x)
