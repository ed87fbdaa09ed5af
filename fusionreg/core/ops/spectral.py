"""Fourier transforms and their windows. A complex number is the last axis: its real and imaginary part. Floor 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .define import operator, specs_in
from .inference import (
    Attributes,
    Constants,
    Extent,
    Inputs,
    Type,
    axis_of,
    fail,
    known_ints,
    length_of,
    operand,
    present,
)


def _half(n: Extent) -> Extent:
    return n // 2 + 1 if isinstance(n, int) else None


def _complex(x: Any) -> Any:
    """``[..., 1]`` or ``[..., 2]`` as numbers."""
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _parts(xp: Any, z: Any) -> Any:
    return xp.ns.stack([xp.ns.real(z), xp.ns.imag(z)], axis=-1)


def _dft_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, length, over = operand(inputs, 0), known_ints(constants, 1), known_ints(constants, 2)
    if x.shape is None:
        return [(x.dtype, None)]
    last: Extent = 1 if attributes["inverse"] and attributes["onesided"] else 2
    if present(inputs, 2) and over is None:
        return [(x.dtype, (*(None,) * (len(x.shape) - 1), last))]
    axis = axis_of(over[0] if over else -2, len(x.shape))
    if axis == len(x.shape) - 1:
        fail("the axis of the real and imaginary parts", "another axis")
    n: Extent = length[0] if length else None if present(inputs, 1) else x.shape[axis]
    if attributes["onesided"]:
        if attributes["inverse"]:
            n = n if length else 2 * (n - 1) if isinstance(n, int) else None
        else:
            n = _half(n)
    return [(x.dtype, (*x.shape[:axis], n, *x.shape[axis + 1 : -1], last))]


@operator(
    "DFT",
    "x dft_length? axis?",
    infer=_dft_type,
    attributes={"inverse": 0, "onesided": 0},
    host=("dft_length", "axis"),
)
def dft(xp: Any, x: Any, dft_length: Any = None, axis: Any = None, *, inverse: int, onesided: int) -> Any:
    """As ONNX DFT (opset 20); the inverse divides by the length."""
    over = axis_of(-2 if axis is None else xp.ints(axis)[0], x.ndim)
    extent = 2 * (x.shape[over] - 1) if inverse and onesided else x.shape[over]
    n = extent if dft_length is None else xp.ints(dft_length)[0]
    z, fft = _complex(x), xp.ns.fft
    if inverse and onesided:
        return fft.irfft(z, n=n, axis=over)[..., None]
    if inverse:
        return _parts(xp, fft.ifft(z, n=n, axis=over))
    if x.shape[-1] == 1 and onesided:
        return _parts(xp, fft.rfft(z, n=n, axis=over))
    if x.shape[-1] == 1:
        z = z + 0j
    z = fft.fft(z, n=n, axis=over)
    return _parts(xp, z[(slice(None),) * over + (slice(0, n // 2 + 1),)] if onesided else z)


def _stft_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, step, length = operand(inputs, 0), known_ints(constants, 1), known_ints(constants, 3)
    n: Extent = length[0] if length else None
    if n is None and not present(inputs, 3) and present(inputs, 2):
        n = length_of(operand(inputs, 2))
    frames: Extent = None
    if x.shape is not None and step and isinstance(n, int) and isinstance(x.shape[1], int):
        frames = 1 + (x.shape[1] - n) // step[0]
    return [(x.dtype, (None if x.shape is None else x.shape[0], frames, _half(n) if attributes["onesided"] else n, 2))]


@operator(
    "STFT",
    "signal frame_step window? frame_length?",
    infer=_stft_type,
    attributes={"onesided": 1},
    host=("frame_step", "frame_length"),
)
def stft(xp: Any, signal: Any, frame_step: Any, window: Any = None, frame_length: Any = None, *, onesided: int) -> Any:
    """As ONNX STFT: frames, times the window (the rest of a frame beyond it is 0), transformed."""
    z = signal if signal.ndim == 2 else _complex(signal)
    if frame_length is not None:
        n = xp.ints(frame_length)[0]
    else:
        n = z.shape[1] if window is None else window.shape[0]
    frames = xp.windows(z, (n,), (xp.ints(frame_step)[0],), (1,))
    if window is not None:
        frames = frames[..., : window.shape[0]] * window
    if onesided and signal.ndim == 3 and signal.shape[-1] == 2:
        raise ValueError("half the spectrum of a complex signal")
    if onesided:
        return _parts(xp, xp.ns.fft.rfft(frames, n=n, axis=-1))
    return _parts(xp, xp.ns.fft.fft(frames + 0j, n=n, axis=-1))


def _window_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    size = known_ints(constants, 0)
    return [(attributes["output_datatype"], (size[0] if size else None,))]


def _window(name: str, terms: tuple[float, ...], text: str) -> Any:
    """A window that is a sum of cosines: ``terms[k] · cos(2πk i / n)``."""

    def meaning(xp: Any, size: Any, *, output_datatype: str, periodic: int) -> Any:
        import numpy as np

        n = xp.ints(size)[0]
        at = 2.0 * math.pi * np.arange(n) / max(n if periodic else n - 1, 1)
        values = sum(term * np.cos(k * at) for k, term in enumerate(terms)) + np.zeros(n)
        return xp.cast(xp.asarray(values), xp.compute_name(output_datatype))

    meaning.__doc__ = f"As ONNX {name}: {text} of 2πi over n, or n - 1 when not periodic."
    attributes = {"output_datatype": "float32", "periodic": 1}
    define: Callable[[Any], Any] = operator(name, "size", infer=_window_type, attributes=attributes, host=("size",))
    return define(meaning)


hann_window = _window("HannWindow", (0.5, -0.5), "(1 - cos) / 2")
hamming_window = _window("HammingWindow", (25.0 / 46.0, -21.0 / 46.0), "(25 - 21 cos) / 46")
blackman_window = _window("BlackmanWindow", (0.42, -0.5, 0.08), "0.42 - 0.5 cos + 0.08 cos of the double")


OPS = specs_in(globals())
