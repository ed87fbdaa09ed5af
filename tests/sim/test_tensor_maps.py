"""Tile copies by TMA in the simulator: each misuse once. Their values: tests/support/hopper_tiles.py."""

from __future__ import annotations

import numpy as np
import pytest
from hopper import tensor_map, unit
from hopper_tiles import CLUSTER, LOAD, MAP, RELEASE, STORE, load, store
from simulated import FULL, raises

from fusionreg.core.errors import SimulatorError
from fusionreg.core.simulator import Checks


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


@pytest.mark.parametrize(
    ("dtype", "at", "fine"),
    [
        (np.uint8, 8, False), (np.float16, 4, False), (np.float16, -1, False), (np.float32, 2, False),
        (np.float16, -8, True), (np.float32, 4, True),
    ],
)  # fmt: skip
def test_coordinates_that_hardware_takes(build, geometry, dtype, at, fine):
    for make in (load, store):
        kernel, args, tile = make(build, np.ones((8, 64), dtype), (16, 4), (at, 0))
        n = tile if make is load else tile.nbytes
        where = geometry(block=(32 if make is load else 64, 1, 1), shared_memory=n)
        if fine and at < 0 and make is store:
            raises(kernel, args, where, "tensor-map", f"stored at coordinate {at} of axis 0", Checks())
        elif fine:
            kernel.launch(args, where, checks=FULL, inout=("argument 1",))
        else:
            raises(kernel, args, where, "misaligned", f"innermost coordinate {at} ", Checks())


def test_what_is_no_map(build, geometry):
    kernel, args, n = load(build, np.ones((8, 64), np.float16), (16, 4), (0, 0))
    raises(kernel, [*args[:2], bytes(128)], geometry(shared_memory=n), "tensor-map", "it was not encoded", Checks())


def test_misuse_of_multicast(build, geometry):
    parameters = f"const unsigned char* x, unsigned char* y, {MAP}"
    x = np.ones((32, 32), np.float16)
    args = [x, np.zeros((2, 2048), np.uint8), tensor_map(x, (32, 8), 64)]
    where = geometry(grid=(2, 1, 1), cluster=(2, 1, 1), shared_memory=1024)
    beyond = CLUSTER.replace("RELEASE", RELEASE).replace("MASK", "5")
    raises(build(unit(parameters, beyond, 32)), args, where, "cluster", "blocks 0x5")
    early = CLUSTER.replace("RELEASE", "").replace("fr::mbarrier_wait(&full", RELEASE + " fr::mbarrier_wait(&full")
    with pytest.raises(SimulatorError) as caught:  # a tile is given back before it was read
        build(unit(parameters, early.replace("MASK", "3"), 32)).launch(args, where, checks=FULL)
    assert caught.value.facts["detector"] in ("race", "async"), str(caught.value)
