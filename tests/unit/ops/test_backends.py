"""The backends themselves: made from arrays, moving arrays exactly, and equal tables."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from fusionreg.core.dtypes import DTYPES, dtype
from fusionreg.core.errors import ArgumentError
from fusionreg.core.ops import backend_of, numpy_backend
from fusionreg.core.ops.tables import NAMES

NUMPY, TORCH = numpy_backend(), backend_of(torch.zeros(1))
RNG = np.random.default_rng(5)


def test_a_backend_is_found_from_the_arrays() -> None:
    assert backend_of().name == backend_of(np.zeros(1), 1.0, [1]).name == "numpy"
    assert TORCH.name == "torch" and TORCH.device == torch.device("cpu")
    assert backend_of(np.zeros(1), torch.nn.Parameter(torch.zeros(1))) is TORCH


def test_foreign_and_mixed_arrays_are_refused() -> None:
    with pytest.raises(ArgumentError, match="fractions"):
        from fractions import Fraction

        backend_of(Fraction(1, 2))
    with pytest.raises(ArgumentError, match="one device"):
        backend_of(torch.zeros(1), torch.zeros(1, device="meta"))


@pytest.mark.parametrize("xp", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_the_table_is_whole(xp) -> None:
    assert set(xp.table) == set(NAMES)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        xp.nothing_like_it  # noqa: B018


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "string"])
def test_arrays_go_to_torch_and_back_bit_for_bit(name: str) -> None:
    x = np.array([[0, 1, 3], [7, 2, 5]]).astype(dtype(name).numpy)
    t = TORCH.asarray(x)
    assert TORCH.name_of(t) == name and t.shape == (2, 3)
    back = TORCH.to_numpy(t)
    assert back.dtype == x.dtype and back.tobytes() == x.tobytes()
    assert TORCH.to_numpy(TORCH.asarray(x[0, 1])).shape == ()


def test_uploading_never_shares_memory() -> None:
    x = np.zeros(3, np.float32)
    TORCH.asarray(x)[0] = 5
    assert x[0] == 0


def test_what_floats_mean_inside_an_operator() -> None:
    wide, exact = NUMPY.with_floats("wide"), NUMPY.with_floats("exact")
    assert [wide.compute_name(n) for n in ("float16", "bfloat16", "float8_e5m2", "float64", "int32")] == [
        "float32", "float32", "float32", "float64", "int32",
    ]  # fmt: skip
    assert exact.compute_name("float16") == "float64" and exact.dtype("float16") == np.float64
    assert NUMPY.compute_name("float16") == "float16" and NUMPY.with_floats("native") is NUMPY
    assert TORCH.with_floats("wide").compute_name("uint16") == "int64"


@pytest.mark.parametrize("xp", [NUMPY, TORCH], ids=["numpy", "torch"])
@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_float64_is_rounded_once(xp, target: str) -> None:
    bits = 10 if target == "float16" else 7
    half = 2.0 ** -(bits + 1)
    x = np.array(
        [1 + half + 2**-45, 1 + half - 2**-45, -1 - half - 2**-45, 1 + half, 1 + 3 * half, np.inf, -0.0, 1e308]
    )
    got = xp.to_numpy(xp.cast(xp.asarray(x), target)).astype(np.float64)
    ulp = 2.0**-bits
    assert got.tolist() == [1 + ulp, 1, -1 - ulp, 1, 1 + 2 * ulp, np.inf, 0, np.inf] and np.signbit(got[6])
    assert np.isnan(xp.to_numpy(xp.cast(xp.asarray(np.array([np.nan])), target)).astype(float)).all()


def test_float64_rounding_agrees_with_exact_rational_rounding() -> None:
    x = RNG.standard_normal(2000) * 10.0 ** RNG.integers(-30, 30, 2000)
    got = NUMPY.cast(x, "bfloat16").astype(np.float64)
    mantissa, exponent = np.frexp(x)
    want = np.ldexp(np.round(mantissa * 256), exponent - 8)  # 8 significant bits, round half even
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min", "max"])
def test_scatter_with_repeated_indices(reduction: str) -> None:
    x, index = np.arange(5.0), np.array([3, 1, 3, 3, 0])
    updates = np.array([10.0, 20.0, 30.0, 2.0, 5.0])
    want = x.copy()
    for i, u in zip(index, updates, strict=True):
        want[i] = {"none": u, "add": want[i] + u, "mul": want[i] * u, "min": min(want[i], u), "max": max(want[i], u)}[
            reduction
        ]
    for xp in (NUMPY, TORCH):
        given = xp.asarray(x)
        got = xp.scatter(given, xp.asarray(index), xp.asarray(updates), reduction)
        np.testing.assert_array_equal(xp.to_numpy(got), want)
        np.testing.assert_array_equal(xp.to_numpy(given), x)


@pytest.mark.parametrize("spatial", [1, 2, 3, 4])
def test_windows_and_conv_agree(spatial: int) -> None:
    shape = (2, 4, *(6, 5, 4, 3)[:spatial])
    kernel, strides, dilations = (2, 3, 2, 1)[:spatial], (2, 1, 1, 1)[:spatial], (2, 1, 2, 1)[:spatial]
    x, w = RNG.standard_normal(shape), RNG.standard_normal((6, 2, *kernel))
    views = [xp.to_numpy(xp.windows(xp.asarray(x), kernel, strides, dilations)) for xp in (NUMPY, TORCH)]
    np.testing.assert_array_equal(*views)
    assert views[0].shape[-spatial:] == kernel
    results = [xp.to_numpy(xp.conv(xp.asarray(x), xp.asarray(w), strides, dilations, 2)) for xp in (NUMPY, TORCH)]
    np.testing.assert_allclose(*results, rtol=1e-10, atol=1e-12)
    by_hand = np.einsum("bgc...k,gfck->bgf...", *_unrolled(views[0], w, spatial))
    np.testing.assert_allclose(results[0].reshape(by_hand.shape), by_hand, rtol=1e-10, atol=1e-12)


def _unrolled(view: np.ndarray, w: np.ndarray, spatial: int) -> tuple[np.ndarray, np.ndarray]:
    positions = view.shape[2 : 2 + spatial]
    return view.reshape(2, 2, 2, *positions, -1), w.reshape(2, 3, 2, -1)


def test_ints_and_scalars_come_from_any_array() -> None:
    for xp in (NUMPY, TORCH):
        assert xp.ints(xp.asarray([[1, -2]])) == (1, -2) and xp.scalar(xp.asarray(2.5)) == 2.5
    assert TORCH.ints(np.array([3])) == (3,)
    assert isinstance(NUMPY.asarray(np.float32(1)), np.ndarray)
    assert NUMPY.name_of(np.zeros(1, ml_dtypes.bfloat16)) == "bfloat16"


def test_nothing_records_gradients_or_warns(recwarn) -> None:
    with TORCH.quiet():
        assert not (torch.ones(1, requires_grad=True) * 2).requires_grad
    with NUMPY.quiet():
        np.float32(1e30) * np.float32(1e30)
    assert not recwarn.list
