"""Managed memory on a GPU: read and written as what it is, device memory; told apart where a fusion asks for it."""

from __future__ import annotations

import ctypes

import plugin_kit
import pytest

torch = pytest.importorskip("torch")

from fusionreg.core.cache import Cache  # noqa: E402
from fusionreg.core.errors import ArgumentError  # noqa: E402
from fusionreg.core.runtime import Runtime  # noqa: E402
from fusionreg.core.runtime.driver import driver  # noqa: E402

pytestmark = pytest.mark.gpu


class Managed:
    """Floats in managed memory, for torch to look at."""

    def __init__(self, *shape: int) -> None:
        allocate = driver().library.cuMemAllocManaged
        size, self.address = 4 * torch.Size(shape).numel(), ctypes.c_uint64()
        driver().check(allocate(ctypes.byref(self.address), ctypes.c_size_t(size), 1), "managed memory")
        self.__cuda_array_interface__ = {
            "version": 2, "typestr": "<f4", "shape": shape, "data": (self.address.value, False)
        }  # fmt: skip


def test_managed_memory(tmp_path) -> None:
    torch.zeros(1, device="cuda")
    x, y = (torch.as_tensor(Managed(64, 256), device="cuda") for _ in range(2))
    bias, here = torch.as_tensor(Managed(256), device="cuda"), torch.randn(256, device="cuda")
    assert [driver().managed(t.data_ptr()) for t in (x, bias, here)] == [True, True, False]
    host = torch.zeros(8)
    assert not any(driver().managed(t.data_ptr()) for t in (host, host.pin_memory()))
    x.normal_()
    bias.normal_()
    for place, space in ((tmp_path / "plain", ""), (tmp_path / "declared", " managed")):
        spec = plugin_kit.add_relu(inputs={"x": "T[M N]", "bias": f"T[N]{space}"})
        catalog = plugin_kit.catalog(place, {"k.cu.j2": plugin_kit.ADD_RELU}, spec)
        runtime = Runtime(catalog, "cuda", Cache(tmp_path / "cache"))
        fusion = next(iter(catalog.fusions))
        if space:
            with pytest.raises(ArgumentError, match="bias is not in managed memory"):
                runtime.call(fusion, x, here)
        assert runtime.call(fusion, x, bias, out=y) is y
        torch.testing.assert_close(y, torch.relu(x + bias))
        assert list(runtime.kernels_used) == [f"{fusion}/plain"]
