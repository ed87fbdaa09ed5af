"""The cheap activations of 16-bit epilogues against float64, over the whole line of fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, log_ndtr
from simulated import FULL

SOURCE = (Path(__file__).parents[2] / "templates" / "approximate.cuh.j2").read_text("utf-8")
NAMES = ("gelu_erf", "gelu_tanh", "sigmoid", "swish")
CALLS = "\n".join(f"    y[{row} * n + i] = fr::approximate::{name}(x[i]);" for row, name in enumerate(NAMES))
KERNEL = f"""
extern "C" __global__ void k(const float* x, float* y, long long n) {{
  const long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i < n) {{
{CALLS}
  }}
}}
"""
SPECIAL = [np.nan, np.inf, -np.inf]


@pytest.fixture(scope="module")
def values(build, geometry):
    """x: every exponent of fp32 with 256 mantissas, either sign, and a fine grid where the functions bend; and each
    function's values."""
    top = np.arange(0x7F800000 >> 15, dtype=np.uint32)
    bits = (top << 15 | (top * 2654435761 & 0x7FFF)).astype(np.uint32)
    x = np.concatenate([bits.view(np.float32), np.linspace(0, 16, 20001, dtype=np.float32)])
    x = np.concatenate([x, -x, np.array(SPECIAL, np.float32)])
    y = np.full(len(NAMES) * x.size, np.nan, np.float32)
    build(SOURCE + KERNEL).launch([x, y, x.size], geometry(grid=(-(-x.size // 256), 1, 1), block=(256, 1, 1)))
    return x, dict(zip(NAMES, y.reshape(len(NAMES), -1), strict=True))


def exact(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The function in float64, and the argument of its exponential."""
    if name == "gelu_erf":
        return x * np.exp(log_ndtr(x)), np.zeros_like(x)
    with np.errstate(over="ignore"):
        argument = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3) if name == "gelu_tanh" else x
    return expit(argument) * (1.0 if name == "sigmoid" else x), argument


@pytest.mark.parametrize("name", NAMES)
def test_stated_error(values, name):
    x, y = values[0][:-3].astype(np.float64), values[1][name][:-3]
    want, argument = exact(name, x)
    if name == "gelu_erf":
        relative = np.select([x > -5.5, x > -13.3], [2.6e-4, 2.1e-3], 6e-2)
    else:
        relative = 3e-6 + 1.2e-7 * np.minimum(abs(argument), 300)
    wrong = np.abs(y - want) > np.abs(want) * relative + 2.0**-149 * np.maximum(1.0, abs(x))
    assert not wrong.any(), (x[wrong][:5], y[wrong][:5], want[wrong][:5])


def test_special_values(values):
    for name in NAMES:
        assert np.isnan(values[1][name][-3]), name
    at_infinity = {name: values[1][name][-2:] for name in NAMES}
    np.testing.assert_array_equal(at_infinity.pop("sigmoid"), [1, 0])
    for found in at_infinity.values():
        np.testing.assert_array_equal(found, [np.inf, np.nan])


def test_special_functions_flush_subnormal_numbers(build, geometry):
    """As ex2.approx.ftz and rcp.approx.ftz do (PTX ISA): operands and results, with their sign."""
    kernel = build("""extern "C" __global__ void k(const float* x, float* y) {
      const int t = threadIdx.x;
      y[t] = t < 4 ? fr_sim::ex2_approx(x[t]) : fr_sim::rcp_approx(x[t]);
    }""")
    x = np.array([-126, -126.5, -1e-40, np.nan, 2.0**126, -1.5 * 2.0**126, 1e-40, -1e-40], np.float32)
    y = np.zeros(8, np.float32)
    kernel.launch([x, y], geometry(block=(8, 1, 1)), checks=FULL)
    np.testing.assert_array_equal(y, np.array([2.0**-126, 0, 1, np.nan, 2.0**-126, 0, np.inf, -np.inf], np.float32))
    assert np.signbit(y[5])
