"""Every 8-bit number as 16-bit floats, by instructions of sm_89 and by those of before."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

TEXT = (Path(__file__).parents[2] / "templates" / "widen.cuh.j2").read_text()
CTYPES = {"int8": "signed char", "float8_e4m3fn": "__nv_fp8_e4m3", "float16": "__half", "bfloat16": "__nv_bfloat16"}


def kind(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("source", ["int8", "float8_e4m3fn"])
def test_every_byte(build, geometry, source, to, arch):
    headers = "".join(f"#include <cuda_{h}.h>\n" for h in ("bf16", "fp16", "fp8"))
    kernel = build(
        f"""{headers}{TEXT}
        extern "C" __global__ void __launch_bounds__(64) k(const unsigned* x, unsigned* y) {{
          unsigned wide[2];
          gemm::Widen<{CTYPES[source]}, {CTYPES[to]}>::four(x[threadIdx.x], wide);
          y[2 * threadIdx.x] = wide[0], y[2 * threadIdx.x + 1] = wide[1];
        }}""",
        target=arch,
    )
    bytes_, y = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint16)
    kernel.launch([bytes_.view(np.uint32), y.view(np.uint32)], geometry((1, 1, 1), (64, 1, 1)))
    got, exact = y.view(kind(to)).astype(float), bytes_.view(kind(source)).astype(float)
    np.testing.assert_array_equal(got, exact)
    assert np.isnan(got).sum() == (2 if source != "int8" else 0)
