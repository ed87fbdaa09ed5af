"""Named value generators: what a conformance case puts into its tensors. Floor 7.

Every generator is a pure function of (seed, shape, dtype); the values are exact members of the dtype, so that the
float64 reference and the kernel see the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from ..dtypes import DType, dtype
from ..errors import UnknownNameError
from ..frozen import FrozenDict

Generator = Callable[[np.random.Generator, tuple[int, ...], DType], np.ndarray]

_FILL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\Z")


def tiny(kind: DType) -> float:
    """The smallest positive normal number of a float dtype."""
    return float(np.finfo(kind.numpy).tiny) if kind.bits >= 16 and kind.name != "bfloat16" else _info(kind).tiny


def largest(kind: DType) -> float:
    """The largest finite number of a float dtype."""
    return float(_info(kind).max)


def _info(kind: DType):
    import ml_dtypes

    return ml_dtypes.finfo(kind.numpy)


def normal(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """Standard normal."""
    return rng.standard_normal(shape)


def small(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """Normal with deviation 0.3: sums of products stay where activations bend."""
    return 0.3 * rng.standard_normal(shape)


def uniform(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """Uniform in [0, 1)."""
    return rng.random(shape)


def zeros(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    return np.zeros(shape)


def ones(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    return np.ones(shape)


def integers(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """Whole numbers from -4 to 4: small sums of products are exact, so any misplaced element shows."""
    return rng.integers(-4, 5, shape).astype(np.float64)


def rising(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """Whole numbers that rise along the last axis by 0 to 7 each, from such a number on: where groups of rows end."""
    steps = np.asarray(rng.integers(0, 8, shape), np.float64)
    return np.cumsum(steps, axis=-1) if shape else steps


def bytes_(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """Whole numbers from -128 to 127, or from 0 to 255: every byte."""
    first = 0 if kind.kind == "u" else -128
    return rng.integers(first, first + 256, shape).astype(np.float64)


def seed(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """Whole numbers of all 64 bits, of either sign: seeds and offsets of random number generators."""
    return rng.integers(-(2**63), 2**63, shape, dtype=np.int64)


def offset(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """A large mean with a small spread: one-pass variances cancel here."""
    return 1024.0 + rng.standard_normal(shape)


def cancel(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """Along the last axis ones, one half, as many minus ones: sums to 0.5, and to 0 where a partial sum was rounded."""
    values = np.full(shape, 0.5)
    if values.ndim and values.size:
        values[...] = 0.0
        half = (shape[-1] - 1) // 2
        values[..., :half] = 1.0
        values[..., half] = 0.5
        values[..., half + 1 : 2 * half + 1] = -1.0
    return values


def denormal(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """Subnormal numbers of the dtype, zero and the smallest one among them."""
    step = tiny(kind) * 2.0**-kind.mantissa
    return rng.integers(-(2**kind.mantissa) + 1, 2**kind.mantissa, shape) * step


def large(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """Large numbers whose products overflow 16-bit floats, and stay finite in fp32."""
    return 256.0 * rng.choice([1.0, -1.0, 2.0, 0.5], shape)


def positive_large(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    return np.full(shape, 256.0)


#: Both tails of every activation, its turning points, and zeros of both signs.
POINTS = (0.0, 0.5, 1.0, 1.7, 2.7, 4.0, 5.5, 8.0, 10.5, 11.0, 13.5, 15.0, 40.0, 88.0, 100.0, 1e4)


def sweep(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """The first element of every row is the next of :data:`POINTS`, of either sign; all others are zero.

    With neutral other operands a row holds one function value, whose error no larger value of the row can hide.
    """
    values = np.zeros(shape)
    if values.size:
        rows = values.reshape(-1, shape[-1] if shape else 1)
        rows[:, 0] = np.resize([s * p for p in POINTS for s in (1.0, -1.0)], rows.shape[0])
    return values


def saturating(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
    """:data:`POINTS` of either sign, at random."""
    return rng.choice(np.concatenate([POINTS, np.negative(POINTS)]), shape)


def _sprinkled(*specials: float) -> Generator:
    def generate(rng: np.random.Generator, shape: tuple[int, ...], kind: DType) -> np.ndarray:
        values = rng.standard_normal(shape)
        flat = values.reshape(-1)
        if flat.size:
            places = rng.choice(flat.size, size=min(len(specials), flat.size), replace=False)
            flat[places] = specials[: len(places)]
        return values

    generate.__doc__ = f"Normal, with {', '.join(map(str, specials))} at one place each."
    return generate


GENERATORS: Mapping[str, Generator] = FrozenDict(
    normal=normal,
    small=small,
    uniform=uniform,
    zeros=zeros,
    ones=ones,
    integers=integers,
    rising=rising,
    bytes=bytes_,
    seed=seed,
    offset=offset,
    cancel=cancel,
    denormal=denormal,
    large=large,
    positive_large=positive_large,
    saturating=saturating,
    sweep=sweep,
    nan=_sprinkled(np.nan),
    inf=_sprinkled(np.inf),
    special=_sprinkled(np.nan, np.inf, -np.inf, -0.0, 0.0),
)

#: Generators of random values of natural size, which a spec's ``sizes`` are of.
_RANDOM = ("normal", "small", "uniform", "nan", "inf", "special")

#: Generators of whole numbers, which integer tensors take too.
_WHOLE = ("zeros", "ones", "integers", "rising", "bytes", "seed")


def generate(
    name: str, seed: tuple[int, ...], shape: tuple[int, ...], dtype_name: str, size: float = 1.0
) -> np.ndarray:
    """An array of ``shape`` and dtype from the generator ``name``, or filled with the number that ``name`` spells.

    ``size``: what random values of natural size are multiplied by.
    Integer and bool tensors take whole numbers from the generators that make them; see :func:`check`.
    """
    kind = dtype(dtype_name)
    check(name)
    rng = np.random.default_rng(seed)
    if _FILL.match(name):
        values = np.full(shape, float(name))
    elif kind.kind == "b" or (kind.kind in "iu" and name not in _WHOLE):
        values = rng.integers(0, 2, shape)
    else:
        values = GENERATORS[name](rng, shape, kind)
        values = values * size if name in _RANDOM else values
    if kind.kind == "u":
        values = np.abs(values)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values).astype(kind.numpy)


def check(name: str) -> None:
    """:class:`UnknownNameError` when no generator has this name and it spells no number."""
    if name not in GENERATORS and not _FILL.match(name):
        raise UnknownNameError.among("value generator", name, GENERATORS)
