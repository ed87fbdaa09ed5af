"""A tensor map as the simulator's models of TMA read it: 128 bytes that hold what the driver would encode."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from ..problem import TensorMapLayout

#: Little-endian: magic, address; rank, bytes of an element, swizzle, nothing; dims[5]; strides[4]; box[5], fill.
FORMAT = struct.Struct("<QQ4I5Q4Q5HB13x")
MAGIC = 0x0050414D46524D54
#: Of ``fr::TensorMap``: the host's compiler may rely on it.
ALIGNMENT = 64
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


@dataclass(frozen=True, eq=False)
class MapArgument:
    """A tensor map as an argument of a simulated launch.

    Attributes:
        layout: the map.
        array: its operand, which is an argument of the same launch too.
    """

    layout: TensorMapLayout
    array: np.ndarray


def pack(layout: TensorMapLayout, address: int) -> bytes:
    """The map of an operand at ``address``."""
    dims, strides, box = (
        (*values, *[0] * (n - len(values))) for values, n in ((layout.dims, 5), (layout.strides, 4), (layout.box, 5))
    )
    head = (MAGIC, address, len(layout.dims), layout.element_bytes, _SWIZZLES[layout.swizzle], 0)
    return FORMAT.pack(*head, *dims, *strides, *box, layout.fill == "nan")


def placed(layout: TensorMapLayout | None, address: int) -> Any:
    """The ctypes value of a parameter that points to ``address``: a tensor map, or a pointer where there is no map."""
    if layout is None:
        return ctypes.c_void_p(address)
    room = (ctypes.c_uint8 * (FORMAT.size + ALIGNMENT))()
    start = -ctypes.addressof(room) % ALIGNMENT
    ctypes.memmove(ctypes.addressof(room) + start, pack(layout, address), FORMAT.size)
    return (ctypes.c_uint8 * FORMAT.size).from_buffer(room, start)
