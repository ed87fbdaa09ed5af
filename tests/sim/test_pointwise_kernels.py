"""The kernels of point-wise regions on every kind of layout, in the simulator, against the pattern in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import region_kit

from fusionreg.core.errors import ArgumentError
from fusionreg.core.problem import bind
from fusionreg.core.problem import iteration as iterations
from fusionreg.core.runtime import Runtime
from fusionreg.core.runtime.libraries import library_of
from fusionreg.core.simulator import Checks

BF16 = np.dtype(ml_dtypes.bfloat16)
ADD_MUL = "v0 = Add(x, a)\ny = Mul(v0, b)"
TWO = "v0 = Add(x, a)\ny = Relu(v0)"
KINDS = ("vector", "transposed", "ragged", "strided")
SPACE = {1: "A0", 2: "A0 A1", 3: "A0 A1 A2", 4: "A0 A1 A2 A3"}


def two(rank, dtype="float32", **texts):
    whole = f"{dtype}[{SPACE[rank]}]"
    return TWO, {"x": whole, "a": whole, **texts}, {"y": whole}


CATALOG = region_kit.catalog(
    two1=two(1),
    two2=two(2),
    two3=two(3),
    two4=two(4),
    half2=two(2, "float16"),
    half4=two(4, "float16"),
    byte2=two(2, "int8"),
    wide2=two(2, "float64"),
    row=two(2, a="float32[A1]"),
    row_bf16=two(2, "bfloat16", a="bfloat16[A1]"),
    column=two(2, a="float32[A0 1]"),
    gated=(
        "v0 = Add(x, a)\nv1 = Mul(v0, c)\ny = Mul(v1, r)",
        {"x": "float16[A0 A1]", "a": "float16[A0 A1]", "c": "float16[A0 1]", "r": "float16[A1]"},
        {"y": "float16[A0 A1]"},
    ),
    channel=two(4, a="float32[A1 1 1]"),
    channel_last=two(4, a="float32[A3]"),
    number=two(2, a="float32[]"),
    plane=two(3, a="float32[A1 1]"),
    point=(TWO, {"x": "float32[]", "a": "float32[]"}, {"y": "float32[]"}),
    mixed=(
        'v0 = Cast(x, to="float32")\nv1 = Mul(v0, r)\ny = Add(v1, a)\nz = Greater(y, r)',
        {"x": "bfloat16[A0 A1]", "r": "float32[A0 A1]", "a": "float32[A1]"},
        {"y": "float32[A0 A1]", "z": "bool[A0 A1]"},
    ),
    where=(
        "v0 = Where(m, x, a)\ny = Relu(v0)",
        {"m": "bool[A0 A1]", "x": "float16[A0 A1]", "a": "float16[A0 A1]"},
        {"y": "float16[A0 A1]"},
    ),
    mask_row=(
        "v0 = Where(m, x, a)\ny = Neg(v0)",
        {"m": "bool[1 A1]", "x": "int64[A0 A1]", "a": "int64[]"},
        {"y": "int64[A0 A1]"},
    ),
    fp8=(
        "v0 = Cast(x, to=\"float32\")\nv1 = Mul(v0, s)\ny = Cast(v1, to=\"float16\")",
        {"x": "float8_e4m3fn[A0 A1]", "s": "float32[A1]"},
        {"y": "float16[A0 A1]"},
    ),
    narrow=("v0 = Mul(x, a)\ny = Max(v0, x)", {"x": "int16[A0 A1]", "a": "int16[A0 1]"}, {"y": "int16[A0 A1]"}),
    add_mul=(ADD_MUL, dict.fromkeys("xab", "float32[A0 A1]"), {"y": "float32[A0 A1]"}),
    twelve=(
        "v0 = Relu(x)\nv1 = Neg(v0)\nv2 = Abs(v1)\nv3 = Exp(v1)\nv4 = Sqrt(v2)\nv5 = Tanh(v4)\nv6 = Sigmoid(v5)\n"
        "v7 = Mul(v6, v3)\nv8 = Add(v7, a)\nv9 = Max(v8, x)\nv10 = Sub(v9, v5)\ny = Mul(v10, v10)",
        {"x": "float32[A0 A1]", "a": "float32[A1]"},
        {"y": "float32[A0 A1]"},
    ),
)


@pytest.fixture(scope="module")
def run(sim_cache):
    """``run(name, *arrays, kernel=…)``: the outputs of exactly that kernel, under every check."""

    def call(name, *arrays, kernel, out=None, params=None):
        key = f"pointwise.{name}/{kernel}"
        runtime = Runtime(
            CATALOG, device="sim", cache=sim_cache, checks=Checks.full(), measured={key: 1e-9},
            tuned={key: params} if params else {},
        )  # fmt: skip
        found = runtime.call(f"pointwise.{name}", *arrays, out=out)
        if kernel == "vector" and np.size(arrays[0]) and space(name, *arrays, out=out).widest == 1:
            key = f"pointwise.{name}/strided"  # nothing wider than an element fits
        assert dict(runtime.kernels_used) == ({key: 1} if np.size(arrays[0]) else {})
        return found

    return call


def space(name, *arrays, out=None):
    """The iteration of a call on these arrays."""
    entry = CATALOG[f"pointwise.{name}"]
    named = dict(zip(entry.inputs, arrays, strict=True)) | ({} if out is None else {"y": out})
    library = library_of(np.ndarray)
    return iterations.space(bind(entry, {n: library.tensor(np.asarray(a)) for n, a in named.items()}, {}, "sm_90a"))


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def relu_sum(x, a):
    return np.maximum(x.astype(np.float64) + a.astype(np.float64), 0)


def check(got, want, dtype=None):
    rtol = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-7, "float64": 0}[got.dtype.name]
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("kernel", ["vector", "strided"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 1023, 1024, 1025, 2049, 5000])
def test_tails(run, kernel, n):
    x, a = normal(n), normal(n, seed=1)
    check(run("two1", x, a, kernel=kernel), relu_sum(x, a))


@pytest.mark.parametrize("params", [{"VEC": v, "UNROLL": u} for v in (4, 2) for u in (1, 2)])
def test_every_unrolling(run, params):
    x, a = normal(37, 132), normal(132, seed=1)
    check(run("row", x, a, kernel="vector", params=params), relu_sum(x, a))


@pytest.mark.parametrize("kernel", ["vector", "strided"])
@pytest.mark.parametrize(
    ("name", "x", "a"),
    [
        ("row", (20, 24), (24,)),
        ("row", (37, 23), (23,)),
        ("row_bf16", (71, 41), (41,)),
        ("plane", (36, 3, 7), (3, 1)),
        ("row", (5, 24), (24,)),
        ("row", (5, 23), (23,)),  # vectors run over the ends of rows
        ("row", (1, 23), (23,)),
        ("row", (70, 1), (1,)),
        ("row_bf16", (3, 40), (40,)),
        ("row_bf16", (9, 41), (41,)),
        ("column", (6, 16), (6, 1)),
        ("column", (7, 13), (7, 1)),
        ("channel", (2, 3, 4, 8), (3, 1, 1)),
        ("channel", (2, 5, 3, 7), (5, 1, 1)),
        ("channel_last", (2, 3, 5, 3), (3,)),
        ("channel_last", (1, 3, 5, 12), (12,)),
        ("number", (4, 9), ()),
        ("plane", (4, 3, 10), (3, 1)),
        ("plane", (4, 3, 7), (3, 1)),
        ("plane", (2, 3, 301), (3, 1)),  # rows so long that few vectors reach beyond one
    ],
)
def test_broadcasts(run, kernel, name, x, a):
    dtype = BF16 if name.endswith("bf16") else "float32"
    x, a = normal(*x, dtype=dtype), normal(*a, dtype=dtype, seed=1)
    check(run(name, x, a, kernel=kernel), relu_sum(x, a))


def strided(array, how):
    """``array``'s values in another layout."""
    if how == "reversed":
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    if how == "upside down":
        return np.ascontiguousarray(array[::-1])[::-1]
    if how == "every other":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if how == "padded":
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + 8), array.dtype)
        wide[..., :-8] = array
        return wide[..., :-8]
    if how == "misaligned":
        flat = np.zeros(array.size + 1, array.dtype)
        flat[1:] = array.reshape(-1)
        return flat[1:].reshape(array.shape)
    if how == "transposed":
        return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)
    if how == "channels last":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
    if how == "expanded":
        return np.broadcast_to(array[:1], array.shape)
    assert how == "plain"
    return array


LAYOUTS = ("reversed", "upside down", "every other", "padded", "misaligned", "transposed", "expanded")


@pytest.mark.parametrize("kernel", ["vector", "strided"])
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("shape", [(12, 32), (5, 7)])
def test_layouts(run, kernel, how, shape):
    x, a = normal(*shape), strided(normal(*shape, seed=1), how)
    check(run("two2", x, a, kernel=kernel), relu_sum(x, a))


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("kernel", ["vector", "strided"])
def test_strided_out(run, kernel, how):
    if how == "expanded":
        pytest.skip("an expanded array cannot be written")
    x, a = normal(12, 32), normal(12, 32, seed=1)
    out = strided(np.full((12, 32), 7, np.float32), how)
    assert run("two2", x, a, kernel=kernel, out=out) is out
    check(out, relu_sum(x, a))


@pytest.mark.parametrize(
    ("name", "dtype", "vec"),
    [("two2", "float32", 4), ("half2", "float16", 8), ("byte2", "int8", 16), ("wide2", "float64", 2)],
)
@pytest.mark.parametrize("shape", [(32, 64), (160, 16), (256, 128), (33, 35), (7, 50), (2, 2), (203, 187)])
@pytest.mark.parametrize("kernel", ["transposed", "ragged"])
def test_tiles(run, name, dtype, vec, shape, kernel):
    """Whole tiles, tails of whole runs, and odd extents, of every width of an element."""
    x, a = (4 * normal(*shape)).astype(dtype), (4 * normal(*shape, seed=1)).astype(dtype)
    got = run(name, x, strided(a, "transposed"), kernel=kernel)
    want = relu_sum(x, a)
    if dtype == "int8":
        np.testing.assert_array_equal(got, want.astype("int8"))
    else:
        check(got, want)


@pytest.mark.parametrize("shape", [(2, 16, 8, 8), (3, 5, 7, 3), (1, 32, 4, 12)])
@pytest.mark.parametrize("kernel", KINDS)
def test_channels_last_beside_channels_first(run, kernel, shape):
    x, a = normal(*shape, dtype="float16"), strided(normal(*shape, dtype="float16", seed=1), "channels last")
    check(run("half4", x, a, kernel=kernel), relu_sum(x, a))


@pytest.mark.parametrize("kernel", KINDS)
@pytest.mark.parametrize("shape", [(62, 66), (16, 32), (13, 71)])
def test_rows_and_columns_beside_tiles(run, kernel, shape):
    """An element of each row, and one of each column, whatever a vector spans."""
    x, a = normal(*shape, dtype="float16"), strided(normal(*shape, dtype="float16", seed=1), "transposed")
    c, r = normal(shape[0], 1, dtype="float16", seed=2), normal(shape[1], dtype="float16", seed=3)
    want = (x.astype(np.float64) + a) * c * r
    check(run("gated", x, a, c, r, kernel=kernel), want)


@pytest.mark.parametrize("shape", [(24, 32), (13, 9)])
def test_transposed_output(run, shape):
    """Where most operands lie in columns, the output is what passes through shared memory."""
    x, a = (strided(normal(*shape, seed=i), "transposed") for i in range(2))
    check(run("two2", x, a, kernel="transposed"), relu_sum(x, a))
    out = strided(np.zeros(shape, np.float32), "transposed")
    x, a = normal(*shape), normal(*shape, seed=1)
    check(run("two2", x, a, kernel="transposed", out=out), relu_sum(x, a))


@pytest.mark.parametrize("kernel", ["vector", "strided"])
@pytest.mark.parametrize("shape", [(6, 32), (5, 11)])
def test_mixed_dtypes_and_two_outputs(run, kernel, shape):
    x, r, a = normal(*shape, dtype=BF16), normal(*shape, seed=1), normal(shape[1], seed=2)
    y, z = run("mixed", x, r, a, kernel=kernel)
    want = x.astype(np.float64) * r + a
    check(y, want)
    np.testing.assert_array_equal(z, want > r)
    assert z.dtype == np.bool_


@pytest.mark.parametrize("kernel", KINDS)
def test_mixed_dtypes_through_tiles(run, kernel):
    m = strided(normal(20, 24) > 0, "transposed")
    x, a = normal(20, 24, dtype="float16"), strided(normal(20, 24, dtype="float16", seed=1), "transposed")
    check(run("where", m, x, a, kernel=kernel), np.maximum(np.where(m, x, a), 0).astype(np.float64))


@pytest.mark.parametrize("kernel", ["vector", "strided"])
def test_integers_and_bools(run, kernel):
    big = 2**62 + 3
    x = np.array([[big, -big, 5], [1, -1, 0]])
    m, a = np.array([[True, False, True]]), np.array(-7)
    if kernel == "vector":
        x, m = np.hstack([x, x]), np.hstack([m, m])
    np.testing.assert_array_equal(run("mask_row", m, x, a, kernel=kernel), -np.where(m, x, a))


@pytest.mark.parametrize("shape", [(4, 32), (3, 7)])
def test_eight_bit_floats(run, shape):
    x = (100 * normal(*shape)).astype(ml_dtypes.float8_e4m3fn)
    s = normal(shape[1], seed=1)
    want = (x.astype(np.float32) * s).astype(np.float16)
    np.testing.assert_array_equal(run("fp8", x, s, kernel="vector"), want)


@pytest.mark.parametrize("kernel", ["vector", "strided"])
def test_small_integers_wrap(run, kernel):
    x = np.random.default_rng(0).integers(-(2**15), 2**15, (6, 24), dtype=np.int16)
    a = np.random.default_rng(1).integers(-(2**15), 2**15, (6, 1), dtype=np.int16)
    np.testing.assert_array_equal(run("narrow", x, a, kernel=kernel), np.maximum(x * a, x))


def test_twelve_operators_are_one_launch(run):
    x, a = normal(9, 20), normal(20, seed=1)
    r = np.maximum(x.astype(np.float64), 0)
    v5 = np.tanh(np.sqrt(r))
    want = (np.maximum(np.exp(-r) / (1 + np.exp(-v5)) + a, x) - v5) ** 2
    np.testing.assert_allclose(run("twelve", x, a, kernel="vector"), want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["strided"])
def test_no_axes(run, kernel):
    y = run("point", np.full((), 2, np.float32), np.full((), -5, np.float32), kernel=kernel)
    assert y.shape == () and y == 0  # relu(2 - 5)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
def test_empty(run, shape):
    y = run("two2", np.zeros(shape, np.float32), np.zeros(shape, np.float32), kernel="vector")
    assert y.shape == shape and y.dtype == np.float32


@pytest.mark.parametrize("kernel", KINDS)
@pytest.mark.parametrize("name", ["two2", "two3", "row"])
def test_wide_indices(run, kernel, name, monkeypatch):
    """What a tensor of more than 2^31 elements takes, on a small one."""
    if kernel in ("transposed", "ragged") and name == "row":
        pytest.skip("a row is contiguous along the last axis alone")
    monkeypatch.setattr(iterations, "NARROW", 8)
    iterations.space.cache_clear()
    shape = (6, 5, 20) if name == "two3" else (15, 20)
    x = normal(*shape)
    a = normal(20, seed=1) if name == "row" else strided(normal(*shape, seed=1), "transposed")
    try:
        assert space(name, x, a).structure.wide
        check(run(name, x, a, kernel=kernel), relu_sum(x, a))
    finally:
        iterations.space.cache_clear()


def test_offsets_beyond_32_bits():
    far = np.lib.stride_tricks.as_strided(np.zeros(8, np.int8), (2, 4), (2**32, 1))
    found = space("byte2", np.zeros((2, 4), np.int8), far)
    assert found.structure.wide and found.stride("a", 0) == 2**32
    assert not space("byte2", np.zeros((2, 4), np.int8), far[:1].repeat(2, 0)).structure.wide


def test_shapes_that_do_not_fit(run):
    with pytest.raises(ArgumentError, match="A1"):
        run("row", normal(4, 8), normal(9), kernel="vector")


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("two2", "float32", (64, 96)),
        ("two2", "float32", (63, 95)),
        ("half2", "float16", (128, 64)),
        ("half2", "float16", (96, 36)),
        ("half2", "float16", (65, 67)),
        ("byte2", "int8", (128, 256)),
        ("wide2", "float64", (48, 32)),
    ],
)
@pytest.mark.parametrize("kernel", ["transposed", "ragged"])
def test_tiles_have_no_bank_conflicts(name, dtype, shape, kernel, sim_cache):
    key = f"pointwise.{name}/{kernel}"
    runtime = Runtime(CATALOG, device="sim", cache=sim_cache, checks=Checks.full(banks=True), measured={key: 1e-9})
    x, a = normal(*shape).astype(dtype), strided(normal(*shape).astype(dtype), "transposed")
    runtime.call(f"pointwise.{name}", x, a)
    (prepared,) = runtime._prepared.values()
    assert prepared.kernel == key and prepared.report is not None
    found = prepared.report.bank_conflicts
    if (kernel, dtype) == ("ragged", "int8"):  # runs of 8 bytes: every other one goes in beside that of another column
        assert all(c.wavefronts <= 2 * c.ideal for c in found), [str(c) for c in found]
    else:
        assert not found, [str(c) for c in found]
