"""Tensor maps as the driver encodes them: once for each address that a prepared launch meets. Floor 6."""

from __future__ import annotations

import ctypes
from typing import Any

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


class MapParameter:
    """One tensor map of a prepared launch. The layout is fixed here, so that the address alone is the key.

    Not safe for threads: the launch's lock guards it.
    """

    __slots__ = ("_blocks", "_driver", "_whom", "layout")

    def __init__(self, driver: Driver, layout: TensorMapLayout, whom: str) -> None:
        self.layout, self._driver, self._whom = layout, driver, whom
        self._blocks: dict[int, Block] = {}

    def at(self, address: int) -> int:
        """Where the map of the operand at ``address`` is; :class:`LaunchError` where the driver refuses it."""
        found = self._blocks.get(address)
        if found is None:
            found = encode(self._driver, self.layout, address, self._whom)
            if len(self._blocks) >= KEPT:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[address] = found
        return found.address


def encode(driver: Driver, layout: TensorMapLayout, address: int, whom: str) -> Block:
    """The map of the tensor at ``address``; :class:`LaunchError` where the driver refuses it."""
    rank = len(layout.dims)
    ones: Any = (ctypes.c_uint32 * rank)(*[1] * rank)
    block = Block()
    code = driver.library.cuTensorMapEncodeTiled(
        block.address, _TYPES[layout.dtype], rank, address, (ctypes.c_uint64 * rank)(*layout.dims),
        (ctypes.c_uint64 * max(1, rank - 1))(*layout.strides), (ctypes.c_uint32 * rank)(*layout.box), ones,
        _NO_INTERLEAVE, _SWIZZLES[layout.swizzle], _PROMOTIONS[layout.l2_promotion], _FILLS[layout.fill],
    )  # fmt: skip
    driver.check(code, f"tensor map {layout.name} of {layout.operand} for {whom} ({layout})", "cannot encode")
    return block
