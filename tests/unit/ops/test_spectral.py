"""DFT and STFT against torch's transforms, windows against torch's, lengths and axes by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionreg.core.errors import GraphError
from fusionreg.core.ir import Value
from fusionreg.core.ops import backend_of, default_vocabulary, infer, numpy_backend

OPS = default_vocabulary()
RNG = np.random.default_rng(9)


def ours(op: str, *arrays: np.ndarray | None, to: str = "numpy", **attributes) -> np.ndarray:
    xp = numpy_backend() if to == "numpy" else backend_of(torch.zeros(1))
    values = [None if a is None else Value(f"i{k}", a.dtype.name, a.shape) for k, a in enumerate(arrays)]
    known = {k: a for k, a in enumerate(arrays) if a is not None and a.dtype == np.int64}
    ((dtype, shape),) = infer(OPS[op], values, attributes, known)
    y = OPS[op].meaning(
        xp, *[None if a is None else xp.asarray(a) for a in arrays], **{**OPS[op].attributes, **attributes}
    )
    y = xp.to_numpy(y)
    assert y.dtype.name == dtype
    assert all(d in (None, n) for d, n in zip(shape, y.shape, strict=True))
    return y


def scalar(n: int) -> np.ndarray:
    return np.array(n, np.int64)


def parts(z: np.ndarray) -> np.ndarray:
    return np.stack([z.real, z.imag], -1)


@pytest.mark.parametrize("to", ["numpy", "torch"])
@pytest.mark.parametrize("length", [None, 5, 12])
@pytest.mark.parametrize("axis", [1, -2])
def test_dft(to: str, length: int | None, axis: int) -> None:
    x = RNG.standard_normal((2, 9, 8, 2)).astype(np.float32)
    z, n = x[..., 0] + 1j * x[..., 1], None if length is None else scalar(length)
    over = 1 if axis == 1 else 2
    for inverse, transform in ((0, np.fft.fft), (1, np.fft.ifft)):
        got = ours("DFT", x, n, scalar(axis), to=to, inverse=inverse)
        np.testing.assert_allclose(got, parts(transform(z, length, over)), rtol=1e-4, atol=1e-5)
    real = ours("DFT", x[..., :1], n, scalar(axis), to=to, onesided=1)
    np.testing.assert_allclose(real, parts(np.fft.rfft(x[..., 0], length, over)), rtol=1e-4, atol=1e-5)
    full = ours("DFT", x[..., :1], n, scalar(axis), to=to)
    np.testing.assert_allclose(full, parts(np.fft.fft(x[..., 0], length, over)), rtol=1e-4, atol=1e-5)
    back = ours("DFT", x, n, scalar(axis), to=to, inverse=1, onesided=1)
    np.testing.assert_allclose(back[..., 0], np.fft.irfft(z, length, over), rtol=1e-4, atol=1e-5)


def test_dft_along_the_parts_is_refused() -> None:
    with pytest.raises(GraphError, match="real and imaginary"):
        ours("DFT", np.ones((2, 4, 1), np.float32), None, scalar(-1))


@pytest.mark.parametrize("to", ["numpy", "torch"])
@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("windowed", [False, True])
def test_stft(to: str, onesided: int, windowed: bool) -> None:
    signal = RNG.standard_normal((2, 50)).astype(np.float32)
    window = np.hanning(16).astype(np.float32) if windowed else None
    length = None if windowed else scalar(16)
    want = torch.stft(
        torch.tensor(signal), 16, 6, window=None if window is None else torch.tensor(window), center=False,
        onesided=bool(onesided), return_complex=True,
    )  # fmt: skip
    want = parts(np.swapaxes(want.numpy(), 1, 2))
    got = ours("STFT", signal[..., None], scalar(6), window, length, to=to, onesided=onesided)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize(
    ("op", "peer"),
    [
        ("HannWindow", torch.hann_window),
        ("HammingWindow", lambda n, periodic: torch.hamming_window(n, periodic, 25 / 46, 21 / 46)),
        ("BlackmanWindow", torch.blackman_window),
    ],
)
def test_windows(op: str, peer, periodic: int) -> None:
    for n in (2, 9):  # of one element torch says 1, whatever the formula
        want = peer(n, periodic=bool(periodic)).numpy()
        np.testing.assert_allclose(ours(op, scalar(n), periodic=periodic), want, rtol=1e-5, atol=1e-6)
    assert ours(op, scalar(0)).shape == (0,) and ours(op, scalar(4), output_datatype="float64").dtype == np.float64
