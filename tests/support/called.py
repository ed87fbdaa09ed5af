"""A library of nothing but this process: a call of it computes on the addresses that it is given."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from fusionreg.core.errors import UnsupportedError
from fusionreg.core.problem import Problem
from fusionreg.core.registry.library_calls import LibraryCall, PreparedCall

KINDS = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


class AddRelu(LibraryCall):
    """``relu(x + bias)`` of contiguous tensors.

    Attributes:
        gone: what `missing` says.
        prepared: (device, bytes of scratch memory) of every call made.
        enqueued: (pointers, scratch, stream) of every launch.
        none: whether the library has no algorithm.
    """

    name = "acme.add_relu"

    def __init__(self) -> None:
        self.gone, self.none = "", False
        self.prepared: list[tuple[int, int]] = []
        self.enqueued: list[tuple[tuple[int, ...], int, int]] = []

    def missing(self) -> str:
        return self.gone

    def version(self) -> str:
        return "7.1"

    def refusal(self, problem: Problem) -> str:
        return "odd columns" if problem.axes["N"] % 2 else ""

    def prepare(self, problem: Problem, device: int, workspace: int) -> PreparedCall:
        self.prepared.append((device, workspace))
        if self.none:
            raise UnsupportedError("cannot prepare", self.name, "no algorithm")
        kind = np.dtype(KINDS[problem.dtypes["T"]])
        m, n = problem.axes["M"], problem.axes["N"]

        def view(address: int, *shape: int) -> np.ndarray:
            count = int(np.prod(shape)) * kind.itemsize
            return np.frombuffer((ctypes.c_ubyte * count).from_address(address), kind).reshape(shape)

        def call(pointers: Sequence[int], scratch: int, stream: int) -> None:
            self.enqueued.append((tuple(pointers), scratch, stream))
            x, bias, y = view(pointers[0], m, n), view(pointers[1], n), view(pointers[2], m, n)
            y[...] = np.maximum(x.astype(np.float64) + bias, 0).astype(kind)

        return call
