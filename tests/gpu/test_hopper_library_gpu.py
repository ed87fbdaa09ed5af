"""The Hopper part of the device library on a real device: the cases of hopper_tiles.py, hopper_products.py."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper import TYPES
from hopper_products import (  # noqa: F401
    launch,
    narrow,
    test_a_from_registers,
    test_ldmatrix,
    test_operands_without_swizzle,
    test_products,
    test_products_keep_nan_and_infinity,
    test_stmatrix,
    test_warpgroups,
)
from hopper_tiles import (  # noqa: F401
    test_bulk_copies,
    test_memory_of_other_blocks,
    test_multicast,
    test_stores_leave_out_what_is_outside,
    test_swizzled_elements,
    test_swizzles,
    test_tiles_of_every_rank,
    test_what_is_outside_may_be_nan,
)
from simulated import Geometry

from fusionreg.core import headers
from fusionreg.core.compiler import nvrtc
from fusionreg.core.render import OPTIONS
from fusionreg.core.runtime.driver import config, driver
from fusionreg.core.runtime.tensor_maps import MapEncoder
from fusionreg.core.simulator.tensor_map import MapArgument

cupy = pytest.importorskip("cupy", reason="CuPy loads the unit")
pytestmark = pytest.mark.gpu


class DeviceKernel:
    """What ``build`` makes: launched with the arguments that the simulator takes, which is told what to check."""

    def __init__(self, text: str) -> None:
        from cupy.cuda.function import Module

        folders = [f"-I{d}" for d in headers.include_directories()]
        self.module = Module()
        self.module.load(nvrtc.compile_unit(text, "k.cu", "sm_90a", (*OPTIONS, *folders), "the unit")[0])
        self.function = int(self.module.get_function("k").ptr)

    def launch(self, args: list[Any], where: Geometry, checks: object = None, inout: object = ()) -> None:
        cuda = driver()
        held = {id(a): cupy.asarray(np.ascontiguousarray(a).view(np.uint8).reshape(-1)) for a in args if _array(a)}
        values: list[Any] = []
        maps = []
        for a in args:
            if isinstance(a, MapArgument):
                maps.append(MapEncoder(cuda, a.layout, "the unit").encoded(held[id(a.array)].data.ptr))
                values.append((ctypes.c_ubyte * 128).from_address(maps[-1].address))
            else:
                values.append(ctypes.c_void_p(held[id(a)].data.ptr) if _array(a) else ctypes.c_int(a))
        if where.shared_memory > 48 << 10:
            cuda.allow_shared(self.function, where.shared_memory, "the unit")
        asked = config(where.grid, where.block, where.shared_memory, where.cluster, False, False)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        cuda.check(cuda.launch(ctypes.byref(asked), self.function, pointers, None), "the unit")
        cupy.cuda.Device().synchronize()
        for a in args:
            if _array(a) and a.flags.writeable:
                a[...] = cupy.asnumpy(held[id(a)]).view(a.dtype).reshape(a.shape)


def _array(value: object) -> bool:
    return isinstance(value, np.ndarray)


@pytest.fixture(scope="module", autouse=True)
def hopper():
    if driver().capability(0) != (9, 0):
        pytest.skip("wgmma is of compute capability 9.0 alone")


@pytest.fixture
def build():
    return DeviceKernel


@pytest.fixture
def geometry() -> type[Geometry]:
    return Geometry


def test_e4m3_accumulators_keep_few_bits(build, geometry):
    """Why kernels add to fp32 of their own: 1024 of K in one accumulator are off by more than fp32 ever is."""
    rng, kind, k = np.random.default_rng(2), TYPES["__nv_fp8_e4m3"], 1024
    a, b = rng.uniform(0.5, 2, (64, k)).astype(kind), rng.uniform(0.5, 2, (k, 8)).astype(kind)
    model = np.zeros((64, 8), np.float32)
    got = launch(build, geometry, "__nv_fp8_e4m3", 8, False, False, 128, a, b, model)
    for at in range(0, k, 32):
        model = narrow(a[:, at : at + 32], b[at : at + 32], model)
    np.testing.assert_array_equal(got, model)
    exact = a.astype(float) @ b.astype(float)
    assert (np.abs(got - exact) / exact).mean() > 1e-3


COORDINATE = """
import numpy as np
from hopper_tiles import load, store
from simulated import Geometry
from test_hopper_library_gpu import DeviceKernel

x = np.ones((8, 64), np.float16)
if "{way}" == "load":
    kernel, args, n = load(DeviceKernel, x, (16, 4), ({at}, 0))
    kernel.launch(args, Geometry(shared_memory=n))
else:
    kernel, args, tile = store(DeviceKernel, x, (16, 4), ({at}, 0))
    kernel.launch(args, Geometry(block=(64, 1, 1), shared_memory=tile.nbytes))
"""


@pytest.mark.parametrize(
    ("way", "at"), [("load", 8), ("load", 1), ("load", 2), ("load", 4), ("store", 8), ("store", 1), ("store", 4)]
)
def test_the_innermost_coordinate_is_one_of_whole_16_bytes(way, at):
    """Other ones are what the simulator calls a fault; each in a process of its own, whose context is lost."""
    folders = [str(Path(__file__).parent), *sys.path]
    ran = subprocess.run(
        [sys.executable, "-c", COORDINATE.format(way=way, at=at)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )  # fmt: skip
    assert (ran.returncode == 0) == (at == 8), ran.stderr
    assert at == 8 or "illegal instruction" in ran.stderr, ran.stderr
