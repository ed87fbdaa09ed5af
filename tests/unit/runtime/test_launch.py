"""What reaches the driver: geometry, attributes, parameters in order, the stream; and what its answers become."""

from __future__ import annotations

import ctypes
import threading

import fake_gpu
import numpy as np
import plugin_kit
import pytest

from fusionreg.core.cache import Cache
from fusionreg.core.errors import ArgumentError, CompileError, LaunchError
from fusionreg.core.runtime import Runtime, kernels
from fusionreg.core.runtime.dispatch import FallbackWarning
from fusionreg.core.runtime.driver import Attribute, Config
from fusionreg.core.runtime.libraries import Place, library_of
from fusionreg.core.spec import AttributeSpec

LOAD = kernels.load  # before any test replaces it

#: Reads everything that a kernel can be given.
ALL = """\
{{ include("programmatic.cuh") }}
{{ signature }} {
  extern __shared__ float room[];
  fr::grid_dependency_wait();
  const long long i = blockIdx.x * 256LL + threadIdx.x;
  if (i >= M * N) return;
  workspace[0] = 0;
  room[0] = alpha;
  const float v = fr::to_float(x[i / N * x_stride_0 + i % N * x_stride_1]);
  y[i] = fr::from_float<T>(v + fr::to_float(bias[i % N]) + room[0]);
}
"""


def everything(tmp_path, **changes):
    options = {
        "kernel_strides": "x", "kernel_workspace": "M * 4", "kernel_shared_memory": "1024",
        "kernel_cluster": ("2", "1", "1"),
        "kernel_grid": "align(ceildiv(M * N, 256), 2)", "kernel_cooperative": True, "kernel_programmatic": True,
        "kernel_targets": "sm_90+", "pattern": "y = Swish(Add(x, bias), alpha=alpha)",
        "attributes": {"alpha": AttributeSpec(type="float", default=1.0)},
    }  # fmt: skip
    return plugin_kit.catalog(tmp_path, {"k.cu.j2": ALL}, plugin_kit.add_relu(**{**options, **changes}))


def zeros(*shape, dtype="float32"):
    """Aligned as a GPU's allocator aligns, so that equal shapes are equal layouts."""
    array = library_of(np.ndarray).allocator(shape, dtype, Place("cuda", 0))()
    array[...] = 0
    return array


@pytest.fixture
def gpu(monkeypatch):
    library = fake_gpu.FakeLibrary()
    library.loaded = fake_gpu.install(monkeypatch, library)
    return library


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("cubins"))


def test_layouts_are_the_driver_s():
    """``cuda.h``: CUlaunchConfig is 56 bytes with hStream at 32, attrs at 40, numAttrs at 48; an attribute is 72."""
    offsets = [getattr(Config, n).offset for n in ("grid", "block", "shared", "stream", "attributes", "count")]
    assert offsets == [0, 12, 24, 32, 40, 48] and ctypes.sizeof(Config) == 56
    assert ctypes.sizeof(Attribute) == 72 and Attribute.value.offset == 8


def test_a_launch_is_packed_in_order(gpu, cache, tmp_path):
    runtime = Runtime(everything(tmp_path), cache=cache)
    x = np.zeros((2, 3, 40), np.float16)[:, :, :8]  # rows 40 apart
    bias = np.zeros(8, np.float16)
    y = runtime.call("acme.add_relu", x, bias, alpha=0.1)
    (launch,) = gpu.launches
    assert launch.grid == (2, 1, 1) and launch.block == (256, 1, 1) and launch.shared == 1024 and launch.stream == 77
    assert launch.function == 5001 and y.shape == (2, 3, 8) and y.dtype == np.float16
    pointers = [launch.value(i, ctypes.c_uint64) for i in range(3)]
    assert pointers == [a.__array_interface__["data"][0] for a in (x, bias, y)]
    assert [launch.value(i) for i in range(3, 7)] == [40, 1, 6, 8]  # strides of x, M, N
    assert launch.value(7, ctypes.c_float) == np.float32(0.1)
    assert launch.value(8, ctypes.c_uint64) % 256 == 0 and launch.value(8, ctypes.c_uint64) not in pointers
    assert launch.attributes[2][0] == 1 and launch.attributes[4][:3] == (2, 1, 1) and launch.attributes[6][0] == 1


def test_a_second_call_prepares_nothing(gpu, cache, tmp_path, monkeypatch):
    runtime = Runtime(everything(tmp_path), cache=cache)
    x, bias = zeros(6, 8), zeros(8)
    runtime.call("acme.add_relu", x, bias)
    monkeypatch.setattr(runtime, "_make", lambda *a: pytest.fail("prepared again"))
    runtime.call("acme.add_relu", zeros(6, 8), bias)
    a, b = gpu.launches
    assert a.function == b.function and len(gpu.loaded) == 1
    assert runtime.kernels_used == {"acme.add_relu/plain": 2}


def test_other_extents_and_scalars_share_the_code(gpu, cache, tmp_path):
    """Ten batch sizes and ten floats: one compilation (pytorch#121080)."""
    runtime = Runtime(everything(tmp_path), cache=cache)
    for i in range(1, 11):
        runtime.call("acme.add_relu", np.zeros((i, 8), np.float32), zeros(8), alpha=i / 10)
    assert len(gpu.loaded) == 1 and len(gpu.launches) == 10
    assert [g.value(7, ctypes.c_float) for g in gpu.launches] == [np.float32(i / 10) for i in range(1, 11)]


@pytest.mark.parametrize(
    "pair", [(0.0, -0.0), (1, 1.0), (np.float32(0.0), np.float32(-0.0)), (float("nan"), float("nan"))]
)
def test_attributes_that_python_takes_for_equal_stay_apart(gpu, cache, tmp_path, pair):
    runtime = Runtime(everything(tmp_path), cache=cache)
    x, bias = zeros(6, 8), zeros(8)
    for value in pair:
        runtime.call("acme.add_relu", x, bias, alpha=value)
    bits = [g.value(7, ctypes.c_uint32) for g in gpu.launches]
    assert bits == [np.float32(v).view(np.uint32) for v in pair]
    assert len(runtime._prepared) == (1 if pair[0] != pair[0] else 2)


def test_the_call_follows_the_current_stream(cache, tmp_path, monkeypatch):
    library, current = fake_gpu.FakeLibrary(), [11]
    fake_gpu.install(monkeypatch, library, stream=lambda index: current[0])
    runtime = Runtime(everything(tmp_path), cache=cache)
    x, bias = zeros(6, 8), zeros(8)
    runtime.call("acme.add_relu", x, bias)
    current[0] = 22
    runtime.call("acme.add_relu", x, bias)
    bound = runtime.bind("acme.add_relu", x, bias)
    current[0] = 33
    bound()
    assert [g.stream for g in library.launches] == [11, 22, 22, 33]


def test_bound_relaunches_on_its_own_arrays(gpu, cache, tmp_path):
    runtime = Runtime(everything(tmp_path), cache=cache)
    x, bias = zeros(6, 8), zeros(8)
    bound = runtime.bind("acme.add_relu", x, bias)
    runtime.call("acme.add_relu", zeros(6, 8), bias)  # the same layout must not disturb it
    assert bound() is bound.outputs[0] and bound.kernel == "acme.add_relu/plain"
    first, other, again = gpu.launches
    assert [again.value(i, ctypes.c_uint64) for i in range(3)] == [
        a.__array_interface__["data"][0] for a in (x, bias, bound.outputs[0])
    ]
    assert other.value(0, ctypes.c_uint64) != again.value(0, ctypes.c_uint64)
    assert again.grid == first.grid and again.attributes == first.attributes


def test_a_handle_keeps_its_arrays_alive(gpu, cache, tmp_path):
    import gc
    import weakref

    runtime = Runtime(everything(tmp_path), cache=cache)
    x = np.zeros((6, 8), np.float32)
    seen = weakref.ref(x)
    bound = runtime.bind("acme.add_relu", x, zeros(8))
    del x
    gc.collect()
    assert seen() is not None
    del bound
    gc.collect()
    assert seen() is None  # and the runtime itself keeps no input of a call


def test_out_is_filled_and_returned(gpu, cache, tmp_path):
    runtime = Runtime(everything(tmp_path), cache=cache)
    x, bias, y = zeros(6, 8), zeros(8), zeros(6, 8)
    assert runtime.call("acme.add_relu", x, bias, out=y) is y
    assert gpu.launches[0].value(2, ctypes.c_uint64) == y.__array_interface__["data"][0]
    for wrong in (x, x[::-1], y[:, :4], y.astype(np.float16), np.broadcast_to(y[:1], (6, 8))):
        with pytest.raises(ArgumentError):
            runtime.call("acme.add_relu", x, bias, out=wrong)


# --- answers of the driver -------------------------------------------------------------------------------------------


def test_a_refused_launch_raises_at_the_call(gpu, cache, tmp_path):
    runtime = Runtime(everything(tmp_path), cache=cache)
    x, bias = zeros(6, 8), zeros(8)
    bound = runtime.bind("acme.add_relu", x, bias)
    for call in (lambda: runtime.call("acme.add_relu", x, bias), bound):
        gpu.fail.append(720)
        with pytest.raises(LaunchError, match=r"acme.add_relu/plain .*CUDA_ERROR_FAKE \(720\)") as caught:
            call()
        assert caught.value.facts["code"] == 720
        call()


def test_a_thread_without_a_context_gets_one(gpu, cache, tmp_path):
    runtime = Runtime(everything(tmp_path), cache=cache)
    x, bias = zeros(6, 8), zeros(8)
    runtime.call("acme.add_relu", x, bias)
    gpu.contexts.clear()
    runtime.call("acme.add_relu", x, bias)
    assert len(gpu.launches) == 2 and gpu.contexts == []  # and it is left as it was found


def test_another_current_device_is_left_as_it_was(cache, tmp_path, monkeypatch):
    """cupy#6569: tensors on device 1 while device 0 is current."""
    library, seen = fake_gpu.FakeLibrary(devices=2), []
    fake_gpu.install(monkeypatch, library, device_of=lambda a: 1)
    runtime = Runtime(everything(tmp_path), cache=cache)
    x, bias = zeros(6, 8), zeros(8)
    launch = library.cuLaunchKernelEx.answer
    library.cuLaunchKernelEx.answer = lambda *a: (seen.append(library.contexts[-1]), launch(*a))[1]
    runtime.call("acme.add_relu", x, bias)
    library.fail.append(700)
    with pytest.raises(LaunchError):
        runtime.call("acme.add_relu", x, bias)
    runtime.bind("acme.add_relu", x, bias)()
    assert set(seen) == {1001} and library.contexts == [1000] and library.launches[0].stream == 78


def test_arrays_on_two_devices(cache, tmp_path, monkeypatch):
    fake_gpu.install(monkeypatch, fake_gpu.FakeLibrary(devices=2), device_of=lambda a: a.ndim - 1)
    with pytest.raises(ArgumentError, match="bias is on cuda:0 — cuda:1, as x is"):
        Runtime(everything(tmp_path), cache=cache).call("acme.add_relu", np.zeros((6, 8)), np.zeros(8))


def test_the_first_call_of_a_layout_inside_a_capture(gpu, cache, tmp_path):
    """pytorch#185074: a clear error, nothing loaded, and the same call works before and after."""
    runtime = Runtime(everything(tmp_path), cache=cache)
    x, bias = zeros(6, 8), zeros(8)
    gpu.capturing = True
    with pytest.raises(LaunchError, match="captured into a CUDA graph"):
        runtime.call("acme.add_relu", x, bias)
    assert not gpu.loaded and not gpu.launches
    gpu.capturing = False
    runtime.call("acme.add_relu", x, bias)
    gpu.capturing = True
    runtime.call("acme.add_relu", x, bias)
    runtime.call("acme.add_relu", x[:3], bias)  # another extent, but the kernel is loaded
    assert len(gpu.launches) == 3


def test_large_shared_memory_is_asked_for(gpu, cache, tmp_path):
    runtime = Runtime(everything(tmp_path, kernel_shared_memory="N * 1024"), cache=cache)
    for n in (8, 64, 128, 100):
        runtime.call("acme.add_relu", np.zeros((2, n), np.float32), np.zeros(n, np.float32))
    assert gpu.shared == {5001: 128 * 1024} and [g.shared for g in gpu.launches] == [8192, 65536, 131072, 102400]


PLAIN = """\
{{ signature }} {
  __shared__ float room[{{ ROOM }}];
  const long long i = blockIdx.x * 256LL + threadIdx.x;
  room[threadIdx.x % {{ ROOM }}] = 0.0f;
  __syncthreads();
  if (i >= M * N) return;
  const float v = fr::to_float(x[i]) + fr::to_float(bias[i % N]);
  y[i] = fr::from_float<T>(fr::relu(v + room[i % {{ ROOM }}]));
}
"""


def two_kernels(tmp_path, **first):
    """``first``, which the estimates prefer, and ``second``, which takes everything."""
    spec = plugin_kit.add_relu(kernel_constants={"ROOM": "256"})
    plain = spec.kernels[0]
    kernels_ = (
        plain.model_copy(update={"name": "first", "estimate": "1e-9", **first}),
        plain.model_copy(update={"name": "second", "estimate": "1e-3"}),
    )
    return plugin_kit.catalog(tmp_path, {"k.cu.j2": PLAIN}, spec.model_copy(update={"kernels": kernels_}))


def used(catalog, cache, m):
    runtime = Runtime(catalog, cache=cache)
    runtime.call("acme.add_relu", zeros(m, 256), zeros(256))
    return dict(runtime.kernels_used)


def test_a_cooperative_grid_that_does_not_fit_gives_way(gpu, cache, tmp_path):
    catalog = two_kernels(tmp_path, cooperative=True)
    gpu.resident = 2
    assert used(catalog, cache, 2 * 132) == {"acme.add_relu/first": 1}
    assert used(catalog, cache, 2 * 132 + 1) == {"acme.add_relu/second": 1}
    assert [g.attributes.keys() for g in gpu.launches] == [{2}, set()] and gpu.contexts == [1000]


@pytest.mark.parametrize(("dynamic", "expected"), [(232_448 - 1024, "first"), (232_448 - 1023, "second")])
def test_shared_memory_that_the_code_declares_counts(gpu, cache, tmp_path, dynamic, expected):
    catalog = two_kernels(tmp_path, shared_memory=str(dynamic))
    assert used(catalog, cache, 4) == {f"acme.add_relu/{expected}": 1}


def test_no_kernel_fits_the_device(gpu, cache, tmp_path):
    spec = plugin_kit.add_relu(kernel_constants={"ROOM": "256"}, kernel_cooperative=True)
    gpu.resident = 0
    runtime = Runtime(plugin_kit.catalog(tmp_path, {"k.cu.j2": PLAIN}, spec), cache=cache)
    with pytest.warns(FallbackWarning, match="a cooperative grid of 4 blocks, Fake GPU holds 0 of them at once"):
        runtime.call("acme.add_relu", zeros(4, 256), zeros(256))
    assert not gpu.launches


@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (13, 0)])
def test_a_gpu_without_a_target(cache, tmp_path, monkeypatch, capability):
    fake_gpu.install(monkeypatch, fake_gpu.FakeLibrary(capability=capability))
    with pytest.raises(LaunchError, match=rf"Fake GPU: compute capability {capability[0]}.{capability[1]}"):
        Runtime(everything(tmp_path), cache=cache).call("acme.add_relu", np.zeros((6, 8)), np.zeros(8))


def test_a_gpu_newer_than_this_nvrtc(cache, tmp_path, monkeypatch):
    fake_gpu.install(monkeypatch, fake_gpu.FakeLibrary(capability=(12, 9)))
    monkeypatch.setattr("fusionreg.core.compiler.nvrtc.supported", lambda: frozenset({80, 90}))
    catalog = everything(tmp_path, kernel_cooperative=False)
    with pytest.raises(CompileError, match=r"does not know sm_120f .*sm_80, sm_90"):
        Runtime(catalog, cache=Cache(tmp_path / "c")).call("acme.add_relu", np.zeros((6, 8)), np.zeros(8))


def test_a_cubin_that_the_driver_refuses(gpu, cache, tmp_path, monkeypatch):
    monkeypatch.undo()
    library = fake_gpu.FakeLibrary()
    fake_gpu.install(monkeypatch, library)
    import cupy.cuda.function as function

    class Module:
        def load(self, cubin):
            raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the driver is older than the code")

    monkeypatch.setattr(kernels, "load", LOAD)
    monkeypatch.setattr(function, "Module", Module)
    with pytest.raises(LaunchError, match=r"Fake GPU.*UNSUPPORTED.*driver supports CUDA 13.0"):
        Runtime(everything(tmp_path), cache=cache).call("acme.add_relu", np.zeros((6, 8)), np.zeros(8))
    assert library.contexts == [1000]


def test_threads_do_not_mix_their_arguments(gpu, cache, tmp_path):
    runtime = Runtime(everything(tmp_path), cache=cache)
    bias = zeros(8)
    runtime.call("acme.add_relu", zeros(6, 8), bias)
    gpu.launches.clear()
    wrong, record = [], gpu.cuLaunchKernelEx.answer

    def answer(config, function, parameters, extra):
        before = ctypes.c_uint64.from_address(ctypes.c_void_p.from_address(parameters).value).value
        import time

        time.sleep(0.0005)  # as if the driver had let go of the interpreter's lock
        after = ctypes.c_uint64.from_address(ctypes.c_void_p.from_address(parameters).value).value
        if before != after:
            wrong.append((before, after))
        return record(config, function, parameters, extra)

    gpu.cuLaunchKernelEx.answer = answer

    def work():
        x = zeros(6, 8)
        for _ in range(20):
            runtime.call("acme.add_relu", x, bias)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(gpu.launches) == 80
