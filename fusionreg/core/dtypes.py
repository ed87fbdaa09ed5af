"""Element types: one row each, with the names the field uses and the CUDA type a kernel sees.

Floor 0. NumPy and ml_dtypes are imported only when an array type is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from .errors import UnknownNameError

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: as NumPy, torch and ONNX call it, e.g. ``"bfloat16"``.
        bits: storage width in bits.
        kind: ``f`` float, ``i`` signed, ``u`` unsigned, ``b`` bool, ``c`` complex.
        cuda: the C++ type in a kernel.
        header: the CUDA header that defines it, or "".
        onnx: the value in ``onnx.TensorProto.DataType``.
        mantissa: explicit fraction bits of a float (0 otherwise): one ulp of 1.0 is ``2**-mantissa``.
    """

    name: str
    bits: int
    kind: Literal["f", "i", "u", "b", "c"]
    cuda: str
    header: str
    onnx: int
    mantissa: int = 0

    @property
    def bytes(self) -> int:
        return max(1, self.bits // 8)

    @property
    def floating(self) -> bool:
        return self.kind == "f"

    @property
    def numpy(self) -> numpy.dtype:
        return _numpy(self.name)

    def __str__(self) -> str:
        return self.name


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("float16", 16, "f", "__half", "cuda_fp16.h", 10, 10),
        DType("bfloat16", 16, "f", "__nv_bfloat16", "cuda_bf16.h", 16, 7),
        DType("float32", 32, "f", "float", "", 1, 23),
        DType("float64", 64, "f", "double", "", 11, 52),
        DType("float8_e4m3fn", 8, "f", "__nv_fp8_e4m3", "cuda_fp8.h", 17, 3),
        DType("float8_e5m2", 8, "f", "__nv_fp8_e5m2", "cuda_fp8.h", 19, 2),
        DType("int8", 8, "i", "signed char", "", 3),
        DType("int16", 16, "i", "short", "", 5),
        DType("int32", 32, "i", "int", "", 6),
        DType("int64", 64, "i", "long long", "", 7),
        DType("uint8", 8, "u", "unsigned char", "", 2),
        DType("uint16", 16, "u", "unsigned short", "", 4),
        DType("uint32", 32, "u", "unsigned int", "", 12),
        DType("uint64", 64, "u", "unsigned long long", "", 13),
        DType("bool", 8, "b", "bool", "", 9),
        DType("complex64", 64, "c", "float2", "", 14),
        DType("complex128", 128, "c", "double2", "", 15),
        DType("string", 0, "b", "", "", 8),
    )
}

_BY_ONNX = {d.onnx: d for d in DTYPES.values()}


def dtype(name: str) -> DType:
    """The row for ``name``; :class:`UnknownNameError` when there is none."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UnknownNameError.among("dtype", name, DTYPES) from None


def from_onnx(code: int) -> DType:
    """The row for an ``onnx.TensorProto.DataType`` value; :class:`UnknownNameError` when there is none."""
    try:
        return _BY_ONNX[code]
    except KeyError:
        raise UnknownNameError.among("ONNX element type", str(code), map(str, _BY_ONNX)) from None


@cache
def _numpy(name: str) -> numpy.dtype:
    import numpy as np

    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(object if name == "string" else name)
