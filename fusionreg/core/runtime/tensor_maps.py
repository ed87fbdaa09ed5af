"""Tensor maps as the driver encodes them: once for each address that a prepared launch meets. Floor 6."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ..problem import TensorMapLayout
from .driver import Driver

#: Bytes of a ``CUtensorMap``, and the alignment that encoding needs.
SIZE, ALIGNMENT = 128, 64
#: Addresses that one parameter of a prepared launch remembers: allocators hand out the same few again and again.
KEPT = 64

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
_TYPES = {
    "uint8": 0, "int8": 0, "bool": 0, "float8_e4m3fn": 0, "float8_e5m2": 0, "uint16": 1, "int16": 1, "uint32": 2,
    "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_FILLS = {"zeros": 0, "nan": 1}
_NO_INTERLEAVE = 0


class Block:
    """An encoded map in memory of its own.

    Attributes:
        address: of its 128 bytes.
    """

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = (ctypes.c_ubyte * (SIZE + ALIGNMENT))()
        start = ctypes.addressof(self._memory)
        self.address = start + -start % ALIGNMENT


def _here(call: Callable[[], int]) -> int:
    return call()


class MapEncoder:
    """The maps of one layout, which is packed once: a map is then one call of the driver for each address.

    Not safe for threads: the launch's lock guards it.

    Args:
        driver, layout: whose, and what is mapped.
        whom: the kernel, for errors.
        within: calls a function where the context of the operand's device is current, which encoding needs: a thread
            that has only allocated from a cache has none.
    """

    __slots__ = ("_after", "_before", "_blocks", "_driver", "_encode", "_keep", "_whom", "_within", "layout")

    def __init__(
        self, driver: Driver, layout: TensorMapLayout, whom: str, within: Callable[[Callable[[], int]], int] = _here
    ) -> None:
        self.layout, self._driver, self._whom, self._within = layout, driver, whom, within
        self._encode = driver.library.cuTensorMapEncodeTiled
        self._blocks: dict[int, Block] = {}
        rank = len(layout.dims)
        dims, strides = (ctypes.c_uint64 * rank)(*layout.dims), (ctypes.c_uint64 * max(1, rank - 1))(*layout.strides)
        box, steps = (ctypes.c_uint32 * rank)(*layout.box), (ctypes.c_uint32 * rank)(*[1] * rank)
        self._keep = dims, strides, box, steps
        self._before = _TYPES[layout.dtype], rank
        self._after = (
            *(ctypes.addressof(array) for array in self._keep), _NO_INTERLEAVE, _SWIZZLES[layout.swizzle],
            _PROMOTIONS[layout.l2_promotion], _FILLS[layout.fill],
        )  # fmt: skip

    def encoded(self, address: int) -> Block:
        """A new map of the operand at ``address``; :class:`LaunchError` where the driver refuses it."""
        block = Block()
        code = self._within(lambda: self._encode(block.address, *self._before, address, *self._after))
        if code:
            m = self.layout
            self._driver.check(code, f"tensor map {m.name} of {m.operand} for {self._whom} ({m})", "cannot encode")
        return block

    def at(self, address: int) -> int:
        """Where the map of the operand at ``address`` is, made at the first call with it; errors as above."""
        found = self._blocks.get(address)
        if found is None:
            found = self.encoded(address)
            if len(self._blocks) >= KEPT:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[address] = found
        return found.address
