"""Seeded dropout, domain ``fusionreg``: a mask is a function of (seed, offset, index), stored nowhere. Floor 1."""

from __future__ import annotations

import struct
from typing import Any

from ..errors import GraphError
from .define import operator, specs_in
from .inference import Attributes, Constants, Inputs, Type, fail, operand

#: Philox4x32: the multipliers of the two products of a round, and what is added to the key after each round.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

#: Elements that share one Philox block, and the resolution of a probability.
GROUP, RESOLUTION = 8, 65536

_LOW = 0xFFFFFFFF


def _product(a: int, b: Any) -> tuple[Any, Any]:
    """High and low word of the product of two 32-bit numbers that are held in int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)  # both below 2^48
    carried = high + (low >> 16)
    return carried >> 16, ((carried & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11), reference Random123.

    Counter, key and result are 32-bit words held in int64: numbers, or arrays of any library.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        h0, l0 = _product(MULTIPLIERS[0], c0)
        h1, l1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """round(p · 65536), half to even, of p as float32: elements whose 16-bit word is below it are dropped.

    Raises:
        GraphError: p is no probability.
    """
    if not 0.0 <= p <= 1.0:
        raise GraphError("bad attribute", "", f"p = {p} of fusionreg::Dropout", "a probability from 0 to 1")
    return round(struct.unpack("f", struct.pack("f", p))[0] * RESOLUTION)


def _dropout_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, rng = operand(inputs, 0), operand(inputs, 1)
    if rng.dtype != "int64" or rng.shape not in (None, (2,)):
        fail(f"rng of type {rng.dtype}{list(rng.shape or ())}", "int64[2]: seed and offset")
    return [(x.dtype, x.shape)]


@operator("fusionreg::Dropout", "x rng", infer=_dropout_type, attributes={"p": "<required>"})
def dropout(xp: Any, x: Any, rng: Any, *, p: float) -> Any:
    """x / (1 - q) where an element is kept, 0 where it is dropped (NaN and infinity too).

    rng is int64[2], (seed, offset). Element i, counted in row-major order whatever the layout, belongs to block i // 8.
    Its four 32-bit words out[0 … 3] are Philox4x32-10 of key (seed low, seed high) and counter (block low, block high,
    offset low, offset high). Element i has the 16-bit word j = i % 8, (out[j // 2] >> 16 (j % 2)) & 0xffff, and is kept
    where that is at least t = round(65536 p); q = t / 65536 is the probability that is really used. p = 0 gives x
    exactly, p = 1 gives zeros. The gradient is the same operator on dy. This layout is part of the public contract.
    """
    drop = threshold(p)
    if drop == 0:
        return x
    if drop == RESOLUTION:
        return xp.ns.zeros_like(x)
    seed, offset = rng[0], rng[1]
    size = 1
    for extent in x.shape:
        size *= int(extent)
    block = xp.arange(-(-size // GROUP))
    counter = (block & _LOW, block >> 32, offset & _LOW, (offset >> 32) & _LOW)
    out = philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW))
    halves = [(word >> shift) & 0xFFFF for word in out for shift in (0, 16)]
    words = xp.ns.reshape(xp.ns.stack(halves, axis=-1), (-1,))[:size]
    keep = xp.ns.reshape(words, tuple(x.shape)) >= drop
    return xp.ns.where(keep, x * (RESOLUTION / (RESOLUTION - drop)), xp.ns.zeros_like(x))


OPS = specs_in(globals())
