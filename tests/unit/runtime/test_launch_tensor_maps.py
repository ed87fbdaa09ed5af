"""Tensor maps on their way to the driver: every argument of its encoder, which launch gets which map, what is kept."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import fake_gpu
import numpy as np
import pytest
from mapped import MAPPED, mapped
from plugin_kit import catalog as kit

from fusionreg.core.cache import Cache
from fusionreg.core.errors import LaunchError
from fusionreg.core.headers import include_directories
from fusionreg.core.problem import TensorMapLayout
from fusionreg.core.runtime import Runtime, tensor_maps
from fusionreg.core.runtime.driver import Driver
from fusionreg.core.runtime.libraries import Place, library_of

NAME = "acme.add_relu"


def zeros(*shape, dtype="float16"):
    array = library_of(np.ndarray).allocator(shape, dtype, Place("cuda", 0))()
    array[...] = 0
    return array


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def map_of(launch: fake_gpu.Launched) -> tuple[int, int]:
    """Number of the encoding and address of the operand, as the kernel's last parameter holds them."""
    return tuple((ctypes.c_uint64 * 2).from_address(launch.parameters[7]))


@pytest.fixture
def gpu(monkeypatch):
    library = fake_gpu.FakeLibrary()
    fake_gpu.install(monkeypatch, library)
    return library


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("cubins"))


@pytest.fixture
def runtime(gpu, cache, tmp_path):
    return Runtime(kit(tmp_path, {"k.cu.j2": MAPPED}, mapped(map_={"box": ("32", "16")})), cache=cache)


def test_every_argument_of_the_encoder(gpu, runtime):
    x, bias = zeros(6, 96, dtype="float32")[:, :40], zeros(40, dtype="float32")
    y = runtime.call(NAME, x, bias)
    (encoded,) = gpu.encoded
    assert encoded == fake_gpu.Encoded(
        type=7, address=address(x), dims=(40, 6), strides=(384,), box=(32, 16), steps=(1, 1), interleave=0, swizzle=3,
        promotion=2, fill=0,
    )  # fmt: skip
    (launch,) = gpu.launches
    assert map_of(launch) == (1, address(x)) and launch.value(2, ctypes.c_uint64) == address(y)
    assert [launch.value(i) for i in (3, 4)] == [96, 1]  # the strides of x stand before


def test_enums_are_those_of_the_driver_s_header():
    header = next(p for f in include_directories() if (p := Path(f, "cuda.h")).is_file()).read_text("utf-8", "replace")

    def value(name: str) -> int:
        """Of an enumerator: given, or one more than the one before it."""
        text = re.search(rf"enum [^{{}}]*\{{([^{{}}]*\b{name}\b[^{{}}]*)\}}", header)[1]
        number = -1
        for item in re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S).split(","):
            word, _, given = item.partition("=")
            number = int(given, 0) if given.strip() else number + 1
            if word.strip() == name:
                return number
        raise AssertionError(name)

    names = {"float8_e4m3fn": "UINT8", "bool": "UINT8", "int8": "UINT8", "float8_e5m2": "UINT8", "int16": "UINT16"}
    for dtype, number in tensor_maps._TYPES.items():
        assert number == value(f"CU_TENSOR_MAP_DATA_TYPE_{names.get(dtype, dtype.upper())}"), dtype
    for bytes_, number in tensor_maps._SWIZZLES.items():
        assert number == value(f"CU_TENSOR_MAP_SWIZZLE_{f'{bytes_}B' if bytes_ else 'NONE'}")
    for bytes_, number in tensor_maps._PROMOTIONS.items():
        assert number == value(f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{bytes_}B' if bytes_ else 'NONE'}")
    assert tensor_maps._FILLS["zeros"] == value("CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE")
    assert tensor_maps._FILLS["nan"] == value("CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA")
    assert value("CU_TENSOR_MAP_INTERLEAVE_NONE") == tensor_maps._NO_INTERLEAVE
    assert 8 * int(re.search(r"#define CU_TENSOR_MAP_NUM_QWORDS (\d+)", header)[1]) == tensor_maps.SIZE


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_arrays_of_the_encoder_have_the_driver_s_widths(rank):
    """Read back as the driver does: extents and strides of 64 bits, box and steps of 32."""
    library, seen = fake_gpu.FakeLibrary(), {}

    def encode(block, type_, n, base, dims, strides, box, steps, *enums):
        def read(kind, array, count):
            return list((kind * count).from_address(array))

        seen.update(dims=read(ctypes.c_uint64, dims, n), strides=read(ctypes.c_uint64, strides, n - 1))
        seen.update(box=read(ctypes.c_uint32, box, n), steps=read(ctypes.c_uint32, steps, n), enums=enums, n=n)
        return 0

    library.cuTensorMapEncodeTiled.answer = encode
    dims, strides, box = ((1 << 32) - 1, 7, 6, 5, 4), ((1 << 40) - 16, 32, 48, 64), (256, 2, 3, 4, 5)
    layout = TensorMapLayout(
        "m", "x", "bfloat16", dims[:rank], strides[: rank - 1], box[:rank], 64, l2_promotion=256, fill="nan"
    )
    tensor_maps.MapEncoder(Driver(library), layout, "k").encoded(4096)
    assert seen["n"] == rank and seen["enums"] == (0, 2, 3, 1) and seen["steps"] == [1] * rank
    assert (seen["dims"], seen["strides"]) == (list(dims[:rank]), list(strides[: rank - 1]))
    assert seen["box"] == list(box[:rank])


def test_an_address_is_encoded_once(gpu, runtime):
    a, b, bias = zeros(6, 40), zeros(6, 40), zeros(40)
    for x in (a, a, b, a, b):
        runtime.call(NAME, x, bias)
    assert [e.address for e in gpu.encoded] == [address(a), address(b)]
    assert [map_of(launch) for launch in gpu.launches][-2:] == [(1, address(a)), (2, address(b))]


def test_a_thread_without_a_context(gpu, runtime):
    """Its arrays come from a cache, so nothing has made one current before; and none is afterwards."""
    x, bias = zeros(6, 40), zeros(40)
    gpu.contexts.clear()
    runtime.call(NAME, x, bias)
    runtime.bind(NAME, x, bias)()
    assert {map_of(launch)[1] for launch in gpu.launches} == {address(x)} and gpu.contexts == []


def test_another_layout_at_the_same_address_is_another_map(gpu, runtime):
    held, bias = zeros(1024), zeros(40)
    runtime.call(NAME, held[:240].reshape(6, 40), bias)
    runtime.call(NAME, held[:320].reshape(8, 40), bias)
    runtime.call(NAME, held[: 6 * 64].reshape(6, 64)[:, :40], bias)
    assert [(e.dims, e.strides) for e in gpu.encoded] == [((40, 6), (80,)), ((40, 8), (80,)), ((40, 6), (128,))]
    assert len({e.address for e in gpu.encoded}) == 1


def test_what_is_kept_is_bounded(gpu):
    layout = TensorMapLayout("m", "x", "float16", (64, 8), (128,), (8, 8))
    found = tensor_maps.MapEncoder(Driver(gpu), layout, "k")
    first = found.at(16)
    assert found.at(16) == first and first % 64 == 0 and len(gpu.encoded) == 1
    for i in range(2, tensor_maps.KEPT + 2):
        found.at(16 * i)
    assert len(found._blocks) == tensor_maps.KEPT and len(gpu.encoded) == tensor_maps.KEPT + 1
    found.at(16)
    assert len(gpu.encoded) == tensor_maps.KEPT + 2  # the oldest made room
    found.at(16 * (tensor_maps.KEPT + 1))
    assert len(gpu.encoded) == tensor_maps.KEPT + 2


def test_a_bound_call_keeps_its_own_map_and_encodes_no_more(gpu, runtime):
    x, bias = zeros(6, 40), zeros(40)
    bound = runtime.bind(NAME, x, bias)
    encoded = len(gpu.encoded)
    others = [zeros(6, 40) for _ in range(tensor_maps.KEPT + 3)]
    for other in others:  # they push the first address out of what the prepared launch remembers
        runtime.call(NAME, other, bias)
    del gpu.launches[:]
    for _ in range(3):
        bound()
    assert len(gpu.encoded) == encoded + len(others)
    assert {map_of(launch)[1] for launch in gpu.launches} == {address(x)} and len(gpu.launches) == 3


def test_a_map_of_an_output_follows_the_output(gpu, cache, tmp_path):
    spec = mapped(map_={"operand": "y", "box": ("32", "16")})
    runtime = Runtime(kit(tmp_path, {"k.cu.j2": MAPPED}, spec), cache=cache)
    out = zeros(6, 40)
    runtime.call(NAME, zeros(6, 40), zeros(40), out=out)
    y = runtime.call(NAME, zeros(6, 40), zeros(40))
    assert [e.address for e in gpu.encoded] == [address(out), address(y)]


def test_what_the_driver_refuses_is_a_typed_error(gpu, runtime):
    gpu.fail_encoding.append(1)
    with pytest.raises(LaunchError, match=r"cannot encode tensor map map_x of x .*CUDA_ERROR_FAKE \(1\)"):
        runtime.call(NAME, zeros(6, 40), zeros(40))
    assert not gpu.launches
