"""The process that runs one launch under the sanitizers: ``python -m fusionreg.core.simulator.sanitized REQUEST ANSWER``.

Every buffer is a heap block of exactly its size, so that AddressSanitizer knows its ends.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FusionregError, SimulatorError
from . import abi, library
from .checks import parse_order
from .elf import uninitialised
from .memory import Pointer, Region, regions


def main(asked: str, answered: str) -> None:
    request = pickle.loads(Path(asked).read_bytes())
    try:
        answer: Any = run(request, Path(asked).parent)
    except FusionregError as error:
        answer = error
    Path(answered).write_bytes(pickle.dumps(answer))


def run(request: dict[str, Any], folder: Path) -> list[Any]:
    """The arguments after the launch, in the first order; :class:`SimulatorError` when the runtime finds a fault."""
    runtime = abi.declare(library.load(request["runtime"], "fusionreg-simulator.so"))
    launch, args = request["launch"], request["args"]
    resident = int(np.prod(launch["grid"] if launch["cooperative"] else launch["cluster"] or (1, 1, 1)))
    variables = uninitialised(request["unit"])
    units = [library.LoadedUnit(request["unit"], f"unit{i}", variables, folder) for i in range(resident)]
    parameters = units[0].info.parameters[: units[0].info.n_parameters]
    pointers = [Pointer(f"argument {i}", a, p.kind == 2, True, False) for i, (a, p) in enumerate(zip(args, parameters, strict=True))
                if isinstance(a, np.ndarray)]  # fmt: skip
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    first: list[Any] = []
    for order in request["orders"]:
        found = regions(pointers)
        for r in found:
            r.mapping = libc.malloc(r.bytes + 256) if r.low % 16 else libc.malloc(max(1, r.bytes))
            r.base = r.mapping + r.low % 16
            r.view()[...] = r.original()
        values = [_value(a, p, found, pointers) for a, p in zip(args, parameters, strict=True)]
        result = _launch(runtime, units, launch, values, order)
        if result.failed:
            raise SimulatorError(
                "the simulator found a fault", f"in {request['name']}", result.message.decode(errors="replace"),
                "a kernel without faults", f"It shows in thread order {order}", detector=result.detector.decode(),
            )  # fmt: skip
        if not first:
            first = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
            for r in found:
                saved = r.original().copy()
                r.original()[...] = r.view()
                for i, a in enumerate(args):
                    if isinstance(a, np.ndarray) and any(m.array is a for m in r.members):
                        first[i] = a.copy()
                r.original()[...] = saved
        for r in found:
            libc.free(r.mapping)
    return first


def _value(given: Any, p: abi.Parameter, found: list[Region], pointers: list[Pointer]) -> Any:
    if isinstance(given, np.ndarray):
        for r in found:
            if any(m.array is given for m in r.members):
                return ctypes.c_void_p(r.base + given.ctypes.data - r.low)
    if p.kind == 4:
        return ctypes.create_string_buffer(bytes(given), p.bytes)
    if p.kind == 1:
        return (ctypes.c_float if p.bytes == 4 else ctypes.c_double)(given)
    if given is None:
        return ctypes.c_void_p()
    return {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}[p.bytes](int(given))


def _launch(
    runtime: ctypes.CDLL, units: list[library.LoadedUnit], launch: dict[str, Any], values: list[Any], order: str
) -> abi.Result:
    copies = (abi.Copy * len(units))(*(u.copy() for u in units))
    pointers = (abi.vp * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
    kind, seed = parse_order(order)
    request = abi.Request(
        copies=copies, args=pointers, n_copies=len(units), workers=1, grid=abi.Three(*launch["grid"]),
        block=abi.Three(*launch["block"]), cluster=abi.Three(*(launch["cluster"] or (1, 1, 1))),
        dynamic_shared=launch["shared_memory"], stack_bytes=512 << 10, order=kind, seed=seed,
        cooperative=launch["cooperative"], sanitized=True,
    )  # fmt: skip
    result = abi.Result()
    runtime.frsim_launch(ctypes.byref(request), ctypes.byref(result))
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
