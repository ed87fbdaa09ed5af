"""Operands in host memory beside a GPU: which kernels read them there, and what is said of all others."""

from __future__ import annotations

import fake_gpu
import numpy as np
import plugin_kit
import pytest

from fusionreg.core.cache import Cache
from fusionreg.core.errors import ArgumentError
from fusionreg.core.registry import catalog as registry
from fusionreg.core.runtime import Runtime, libraries
from fusionreg.core.runtime.libraries import Place, library_of


def zeros(*shape, dtype="float32"):
    array = library_of(np.ndarray).allocator(shape, dtype, Place("cuda", 0))()
    array[...] = 0
    return array


@pytest.fixture
def host(monkeypatch):
    """A GPU; arrays in ``host["pinned"]`` and ``host["pageable"]`` (by id) are in such memory of the host instead."""
    where: dict[str, set[int]] = {"pinned": set(), "pageable": set()}
    library = fake_gpu.FakeLibrary()
    fake_gpu.install(monkeypatch, library)
    monkeypatch.setattr(
        libraries._Numpy, "place",
        lambda self, a: Place("cpu" if any(id(a) in ids for ids in where.values()) else "cuda", 0),
    )  # fmt: skip
    monkeypatch.setattr(
        libraries._Numpy, "space", lambda self, a: "pinned_host" if id(a) in where["pinned"] else "device"
    )
    layout = libraries._Numpy.layout
    monkeypatch.setattr(
        libraries._Numpy, "layout", staticmethod(lambda a: (layout(a), *(id(a) in ids for ids in where.values())))
    )
    return where, library


@pytest.fixture
def runtime(tmp_path):
    text = "{{ signature }} { y[0] = fr::from_float<T>(fr::to_float(x[0]) + fr::to_float(bias[0])); }"
    spec = plugin_kit.add_relu(kernel_spaces={"bias": "pinned_host"})
    return Runtime(plugin_kit.catalog(tmp_path, {"k.cu.j2": text}, spec), cache=Cache(tmp_path / "cache"))


def test_a_kernel_reads_what_it_says_where_it_lies(host, runtime):
    where, library = host
    x, bias = zeros(4, 8), zeros(8)
    where["pinned"].add(id(bias))
    fusion = next(iter(runtime.catalog.fusions))
    y = runtime.call(fusion, x, bias)
    assert library_of(np.ndarray).place(y) == Place("cuda", 0)
    launched = library.launches[-1]
    pointer = library_of(np.ndarray).pointer
    assert [launched.value(0), launched.value(1)] == [pointer(x), pointer(bias)]


def test_one_layout_in_two_memories_is_two_calls(host, runtime):
    where, _ = host
    fusion = next(iter(runtime.catalog.fusions))
    x, here, there, lost = zeros(4, 8), zeros(8), zeros(8), zeros(8)
    where["pinned"].add(id(there))
    where["pageable"].add(id(lost))
    runtime.call(fusion, x, here)
    runtime.call(fusion, x, there)
    with pytest.raises(ArgumentError, match=r"bias is on cpu — cuda:0, as x is, or pinned_host memory"):
        runtime.call(fusion, x, lost)


def test_an_input_that_no_kernel_reads_there_is_refused(host, runtime):
    where, library = host
    fusion = next(iter(runtime.catalog.fusions))
    x, bias = zeros(4, 8), zeros(8)
    where["pinned"].add(id(x))
    with pytest.raises(ArgumentError, match="bias is on cuda:0 — cpu, as x is") as caught:
        runtime.call(fusion, x, bias)
    assert caught.value.facts["tensor"] == "bias" and not library.launches


def test_outputs_are_on_the_gpu(host, runtime):
    where, _ = host
    fusion = next(iter(runtime.catalog.fusions))
    x, bias, y = zeros(4, 8), zeros(8), zeros(4, 8)
    where["pinned"].add(id(y))
    with pytest.raises(ArgumentError, match="y is on cpu"):
        runtime.call(fusion, x, bias, out=y)


def test_where_no_kernel_takes_the_call_nothing_is_copied(host, tmp_path):
    where, library = host
    spec = plugin_kit.add_relu(kernel_spaces={"bias": "pinned_host"}, kernel_requires="N % 16 == 0")
    catalog = plugin_kit.catalog(tmp_path, {"k.cu.j2": "{{ signature }} { y[0] = x[0]; }"}, spec)
    x, bias = zeros(4, 8), zeros(8)
    where["pinned"].add(id(bias))
    with pytest.raises(ArgumentError, match=r"bias is in pinned_host memory: .*requires N % 16 == 0 .* — cuda:0"):
        Runtime(catalog, cache=Cache(tmp_path / "c")).call(next(iter(catalog.fusions)), x, bias)
    assert not library.launches


def test_weights_in_host_memory(host, tmp_path):
    """Kernels for few rows read them in place, and nothing else there."""
    where, _ = host
    catalog = registry.load(allow=("gemm",))
    x, w, scale = zeros(4, 64, dtype="float16"), zeros(32, 64, dtype="float16"), zeros(1, dtype="float16")
    where["pinned"].add(id(w))
    assert [k.name for k in catalog["gemm.scale"].kernels if "w" in k.spec.spaces] == ["skinny"]
    runtime = Runtime(catalog, cache=Cache(tmp_path / "c"))
    runtime.call("gemm.scale", x, w, scale, transB=1, activation="none")
    assert runtime.kernels_used == {"gemm.scale/skinny": 1}
    wide = zeros(4, 64), zeros(32, 64), zeros(1)
    where["pinned"].add(id(wide[1]))
    with pytest.raises(ArgumentError) as caught:
        runtime.call("gemm.scale", *wide, transB=1, activation="none")
    assert "plain: w is in pinned_host memory" in str(caught.value)
    assert "skinny: requires T in " in str(caught.value)


def test_managed_memory_is_what_the_driver_says(host, tmp_path, monkeypatch):
    """Declared, it must be: an address of the device, or one that CUDA does not know, is refused. Undeclared, it is an
    address like any other."""
    _, library = host
    adapter = library_of(np.ndarray)
    monkeypatch.setattr(
        libraries._Numpy, "space",
        lambda self, a: "managed" if libraries.driver().managed(adapter.pointer(a)) else "device",
    )  # fmt: skip
    text = {"k.cu.j2": "{{ signature }} { y[0] = fr::from_float<T>(fr::to_float(x[0]) + fr::to_float(bias[0])); }"}
    declared = plugin_kit.add_relu(inputs={"x": "T[M N]", "bias": "T[N] managed"})
    runtime = Runtime(plugin_kit.catalog(tmp_path / "a", text, declared), cache=Cache(tmp_path / "c"))
    fusion = next(iter(runtime.catalog.fusions))
    x, bias, here, unknown = zeros(4, 8), zeros(8), zeros(8), zeros(8)
    library.managed.add(adapter.pointer(bias))
    library.known.add(adapter.pointer(here))
    for wrong in (here, unknown):
        with pytest.raises(ArgumentError, match="bias is not in managed memory — managed memory") as caught:
            runtime.call(fusion, x, wrong)
        assert caught.value.facts["tensor"] == "bias" and not library.launches
    runtime.call(fusion, x, bias)
    assert library.launches[-1].value(1) == adapter.pointer(bias)
    plain = Runtime(plugin_kit.catalog(tmp_path / "b", text, plugin_kit.add_relu()), cache=Cache(tmp_path / "c"))
    plain.call(fusion, x, bias)
    assert library.launches[-1].value(1) == adapter.pointer(bias)


def test_in_the_simulator_a_declared_space_is_any(tmp_path):
    for space in ("managed", "pinned_host"):
        spec = plugin_kit.add_relu(inputs={"x": "T[M N]", "bias": f"T[N] {space}"})
        catalog = plugin_kit.catalog(tmp_path / space, {"k.cu.j2": plugin_kit.ADD_RELU}, spec)
        x, bias = np.ones((4, 8), np.float32), np.arange(8, dtype=np.float32) - 4
        y = Runtime(catalog, device="sim", cache=Cache(tmp_path / "c")).call(next(iter(catalog.fusions)), x, bias)
        np.testing.assert_array_equal(y, np.maximum(x + bias, 0))


def test_in_the_simulator_all_memory_is_one(monkeypatch, tmp_path):
    """What a GPU would read over the bus is an array like any other there."""
    monkeypatch.setattr(libraries._Numpy, "space", lambda self, a: "pinned_host")
    runtime = Runtime(registry.load(allow=("gemm",)), device="sim", cache=Cache(tmp_path / "c"))
    rng = np.random.default_rng(3)
    x, w = rng.integers(-3, 4, (2, 16)).astype("float32"), rng.integers(-3, 4, (8, 16)).astype("float32")
    y = runtime.call("gemm.activation", x, w, transB=1, activation="Relu")
    np.testing.assert_array_equal(y, np.maximum(x @ w.T, 0))


@pytest.mark.parametrize(
    ("spaces", "says"),
    [({"y": "pinned_host"}, "no input"), ({"bias": "disk"}, "disk"), ({"bias": "device"}, "all read device"),
     ({"bias": "managed"}, "all read device and managed")],
)
def test_spaces_that_mean_nothing(tmp_path, spaces, says):
    spec = plugin_kit.add_relu(kernel_spaces=spaces)
    with pytest.raises(AssertionError, match=says):  # the kit loads plugins without failures alone
        plugin_kit.catalog(tmp_path, {"k.cu.j2": "{{ signature }} { y[0] = x[0]; }"}, spec)
