"""Several operands of a point-wise region that lie along another axis, through the tiles of kernels that have some."""

from __future__ import annotations

import numpy as np
import pytest

import fusionreg
from fusionreg.core.runtime import Runtime
from fusionreg.core.spec import Region

WHOLE = "T[A0 A1 A2]"
REGION = Region(
    name="staged", pattern="v0 = Add(x, a)\nv1 = Mul(v0, b)\ny = Relu(v1)",
    inputs={"x": WHOLE, "a": WHOLE, "b": WHOLE}, outputs={"y": WHOLE}, dtypes={"T": ("float32",)},
)  # fmt: skip


@pytest.mark.parametrize("kernel", ["ragged", "transposed"])
def test_two_staged_operands(kernel, sim_cache):
    catalog = fusionreg.load_registry(device="sim", allow=("pointwise",)).catalog
    entry = catalog.derive(catalog["pointwise.region"], REGION)
    name = f"{entry.name}/{kernel}"
    runtime = Runtime(catalog, device="sim", cache=sim_cache, measured={name: 1e-9})
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 19, 75), dtype=np.float32)
    a, b = (rng.standard_normal((2, 75, 19), dtype=np.float32).transpose(0, 2, 1) for _ in range(2))
    found = runtime.call(entry.name, x, a, b)
    np.testing.assert_allclose(found, np.maximum((x + a) * b, 0), rtol=1e-6, atol=1e-6)
    assert runtime.kernels_used == {name: 1}
