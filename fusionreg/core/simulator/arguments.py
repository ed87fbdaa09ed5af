"""A launch's arguments as the kernel's parameters take them."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from . import abi
from .memory import Pointer
from .tensor_map import FORMAT, MapArgument, placed

_POINTERS = (2, 3)


def convert(
    whom: str,
    parameters: Sequence[abi.Parameter],
    args: Sequence[Any],
    names: Sequence[str],
    kinds: Sequence[str],
    inout: Collection[str],
) -> tuple[list[Any], list[Pointer | None]]:
    """For every argument its ctypes value, and what it points to; :class:`ArgumentError` when one does not fit.

    A tensor map points to its operand, as the argument that is the operand itself does.

    ``kinds``: by argument, ``output`` for tensors that the launch must write completely.
    """
    if len(args) != len(parameters):
        raise ArgumentError(
            "cannot launch", whom, f"{len(args)} arguments", f"{len(parameters)}, as many as the kernel has parameters"
        )
    values: list[Any] = []
    pointers: list[Pointer | None] = []
    for name, value, kind, p in zip(names, args, kinds, parameters, strict=True):
        pointer = None
        if isinstance(value, MapArgument):
            if (p.kind, p.bytes) != (4, FORMAT.size):
                raise ArgumentError("cannot launch", whom, f"{name} is a tensor map", "an argument of another kind")
            values.append(None)
        elif p.kind in _POINTERS and value is not None:
            pointer = _pointer(whom, name, value, p, kind, name in inout)
            values.append(ctypes.c_void_p(pointer.array.ctypes.data))
        else:
            values.append(_number(whom, name, value, p))
        pointers.append(pointer)
    for i, value in enumerate(args):
        if isinstance(value, MapArgument):
            pointers[i] = _operand(whom, names[i], value, pointers)
            values[i] = placed(value.layout, value.array.ctypes.data)
    return values, pointers


def _operand(whom: str, name: str, value: MapArgument, pointers: Sequence[Pointer | None]) -> Pointer:
    found = next((p for p in pointers if p is not None and p.array is value.array), None)
    if found is None:
        raise ArgumentError(
            "cannot launch", whom, f"tensor map {name} of an array that is no argument itself", "an argument's array"
        )
    return found


def _pointer(whom: str, name: str, value: Any, p: abi.Parameter, kind: str, inout: bool) -> Pointer:
    wrong = ""
    if not isinstance(value, np.ndarray):
        wrong, right = f"{name} is a {type(value).__name__}", "a NumPy array"
    elif p.kind == 2 and not value.flags.writeable:
        wrong, right = f"{name} is a read-only array", "one that the kernel can write"
    elif p.pointee > 1 and value.itemsize not in (1, p.pointee):
        wrong, right = f"{name} has dtype {value.dtype}", f"elements of {p.pointee} bytes"
    if wrong:
        raise ArgumentError("cannot launch", whom, wrong, right)
    return Pointer(name, value, p.kind == 2, inout, p.kind == 2 and not inout and kind == "output")


def _number(whom: str, name: str, value: Any, p: abi.Parameter) -> Any:
    if value is None and p.kind in _POINTERS:
        return ctypes.c_void_p()
    if p.kind == 4:
        raw = bytes(value)
        if len(raw) != p.bytes:
            raise ArgumentError("cannot launch", whom, f"{name} has {len(raw)} bytes", f"a structure of {p.bytes}")
        return ctypes.create_string_buffer(raw, len(raw))
    if isinstance(value, np.ndarray) or p.kind in _POINTERS:
        right = "a number" if p.kind < 2 else "an array"
        raise ArgumentError("cannot launch", whom, f"{name} is a {type(value).__name__}", right)
    if p.kind == 1:
        return (ctypes.c_float if p.bytes == 4 else ctypes.c_double)(float(value))
    integer = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}[p.bytes]
    if not -(1 << (8 * p.bytes - 1)) <= int(value) < 1 << (8 * p.bytes):
        raise ArgumentError("cannot launch", whom, f"{name} is {value}", f"an integer of {p.bytes} bytes")
    return integer(int(value))
