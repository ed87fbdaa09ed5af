"""The shared device library, executed in the simulator against NumPy and SciPy in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import scipy.special as special

from fusionreg.core.render import shared_library

LIBRARY = (shared_library() / "fusionreg.cuh.j2").read_text() + (shared_library() / "reduce.cuh.j2").read_text()
HEADERS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cuda_fp8.h>\n"


def unit(body: str) -> str:
    return f'{HEADERS}{LIBRARY}\nextern "C" __global__ void __launch_bounds__(256) k({body}'


@pytest.fixture
def apply(build, geometry):
    """``apply("fr::relu(v)", x)``: an expression over the float ``v``, element by element."""

    def run(expression: str, x: np.ndarray, result: str = "float", kind=np.float32) -> np.ndarray:
        code = f"const float* x, {result}* y, long long n) {{ const long long i = blockIdx.x * 256LL + threadIdx.x;"
        kernel = build(unit(f"{code} if (i < n) {{ const float v = x[i]; y[i] = {expression}; }} }}"))
        y = np.zeros(x.shape, kind)
        kernel.launch([x, y, x.size], geometry((-(-x.size // 256), 1, 1), (256, 1, 1)))
        return y

    return run


LINE = np.concatenate(
    [np.linspace(-12, 12, 2001), [0.0, -0.0, 1e-30, -1e-30, 40, -40, 88, -88, 1e4, -1e4, 3e38, -3e38]]
)
EDGES = np.array([np.nan, np.inf, -np.inf])

ACTIVATIONS = {
    "fr::sigmoid(v)": special.expit,
    "fr::swish(v)": lambda x: x * special.expit(x),
    "fr::tanh(v)": np.tanh,
    "fr::gelu_erf(v)": lambda x: 0.5 * x * special.erfc(-x / np.sqrt(2)),
    "fr::gelu_tanh(v)": lambda x: x * special.expit(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)),
    "fr::relu(v)": lambda x: np.where(x < 0, 0, x),
}


@pytest.mark.parametrize("expression", ACTIVATIONS)
def test_activations_are_within_few_ulp_everywhere(apply, expression):
    x = LINE.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = ACTIVATIONS[expression](x.astype(np.float64))
    got = apply(expression, x).astype(np.float64)
    # relative error grows with the exponent's argument, as that of exp does; below 2^-126 steps are absolute
    size = np.abs(x.astype(np.float64))
    argument = np.minimum(size**3 if "gelu" in expression else size, 104)
    bound = (4 + argument) * 2.0**-23 * np.abs(exact) + (1 + np.minimum(size, 104)) * 2.0**-149
    wrong = np.abs(got - exact) > bound
    assert not wrong.any(), (x[wrong][:3], got[wrong][:3], exact[wrong][:3])


@pytest.mark.parametrize("expression", ACTIVATIONS)
def test_activations_at_nan_and_infinity_follow_the_formula(apply, expression):
    with np.errstate(invalid="ignore"):
        exact = ACTIVATIONS[expression](EDGES)
    np.testing.assert_array_equal(apply(expression, EDGES.astype(np.float32)), exact)


@pytest.mark.parametrize("pair", [(np.nan, 1), (1, np.nan), (np.inf, -np.inf), (-1, 2), (0.0, -0.0)], ids=str)
def test_min_max_clip_keep_nan(build, geometry, pair):
    body = "y[0] = fr::min(a, b); y[1] = fr::max(a, b); y[2] = fr::clip(a, -0.5f, 0.5f);"
    kernel = build(unit(f"float a, float b, float* y) {{ {body} }}"))
    y = np.zeros(3, np.float32)
    kernel.launch([*map(float, pair), y], geometry((1, 1, 1), (1, 1, 1)))
    a, b = pair
    np.testing.assert_array_equal(y, [np.minimum(a, b), np.maximum(a, b), np.clip(a, -0.5, 0.5)])


CASTS = {
    "__half": (np.dtype(np.float16), 65504.0),
    "__nv_bfloat16": (np.dtype(ml_dtypes.bfloat16), 3.3895313892515355e38),
    "__nv_fp8_e4m3": (np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
    "__nv_fp8_e5m2": (np.dtype(ml_dtypes.float8_e5m2), 57344.0),
    "float": (np.dtype(np.float32), 3e38),
}


@pytest.mark.parametrize("cuda", CASTS)
def test_from_float_rounds_to_nearest_even_and_never_saturates(apply, cuda):
    kind, largest = CASTS[cuda]
    rng = np.random.default_rng(1)
    spread = (rng.standard_normal(4000) * np.exp2(rng.integers(-30, 12, 4000))).astype(np.float32)
    ties = (1 + np.arange(64) / 2048).astype(np.float32)
    x = np.concatenate(
        [spread, ties, EDGES, [largest, -largest, largest * 2 if largest < 1e38 else np.inf, 1e-45, -0.0]]
    )
    x = x.astype(np.float32)
    got = apply(f"fr::from_float<{cuda}>(v)", x, cuda, kind)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.astype(np.float64), x.astype(kind).astype(np.float64))


@pytest.mark.parametrize("cuda", [c for c in CASTS if c != "float"])
def test_to_float_is_exact(build, geometry, cuda):
    kind, _ = CASTS[cuda]
    bits = np.arange(2 ** (8 * kind.itemsize), dtype=np.uint16 if kind.itemsize == 2 else np.uint8)
    index = "const long long i = blockIdx.x * 256LL + threadIdx.x;"
    kernel = build(unit(f"const {cuda}* x, float* y, long long n) {{ {index} if (i < n) y[i] = fr::to_float(x[i]); }}"))
    y = np.zeros(bits.size, np.float32)
    kernel.launch([bits.view(kind), y, bits.size], geometry((-(-bits.size // 256), 1, 1), (256, 1, 1)))
    np.testing.assert_array_equal(y, bits.view(kind).astype(np.float32))


def test_vectors_move_all_elements(build, geometry):
    kernel = build(
        unit("const __half* x, __half* y) { fr::store(y + 8 * threadIdx.x, fr::load<8>(x + 8 * threadIdx.x)); }")
    )
    x, y = np.arange(256).astype(np.float16), np.zeros(256, np.float16)
    kernel.launch([x, y], geometry((1, 1, 1), (32, 1, 1)))
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("threads", [32, 64, 256])
def test_block_reductions_reach_every_thread_and_keep_nan(build, geometry, threads):
    body = (
        "__shared__ float s[32]; const int t = threadIdx.x; const float v = x[t];"
        f"y[2 * t] = fr::block_sum<{threads}>(v, s); y[2 * t + 1] = fr::block_max<{threads}>(v, s);"
    )
    kernel = build(unit(f"const float* x, float* y) {{ {body} }}"))
    x = np.arange(threads, dtype=np.float32)
    for poison, expected in ((None, [x.sum(), x.max()]), (threads // 2, [np.nan, np.nan])):
        given, y = x.copy(), np.zeros((threads, 2), np.float32)
        if poison is not None:
            given[poison] = np.nan
        kernel.launch([given, y], geometry((1, 1, 1), (threads, 1, 1)))
        np.testing.assert_array_equal(y, np.broadcast_to(expected, y.shape))


def test_warp_reductions_of_narrow_groups(build, geometry):
    kernel = build(unit("const float* x, float* y) { y[threadIdx.x] = fr::warp_reduce<fr::Sum, 8>(x[threadIdx.x]); }"))
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    kernel.launch([x, y], geometry((1, 1, 1), (32, 1, 1)))
    np.testing.assert_array_equal(y, np.repeat(x.reshape(4, 8).sum(1), 8))


def test_nothing_but_comments_needs_jinja():
    for path in shared_library().glob("*.cuh.j2"):
        assert "{{" not in path.read_text() and "{%" not in path.read_text(), path.name
