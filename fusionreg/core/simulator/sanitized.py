"""The process that runs a launch under the sanitizers: ``python -m fusionreg.core.simulator.sanitized FOLDER``.

Every buffer is a heap block of exactly its size, so that AddressSanitizer knows its ends. The folder holds ``request``
and receives ``answer`` and the libraries, whose line numbers the sanitizers read.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import FusionregError, SimulatorError
from . import abi, library
from .checks import parse_order
from .elf import uninitialised
from .tensor_map import placed

if TYPE_CHECKING:
    from ..problem import TensorMapLayout

#: Bytes of one thread's stack: code with AddressSanitizer keeps more of it than other builds.
STACK = 512 << 10


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        whom: the kernel, for messages.
        unit, runtime: the libraries.
        copies: of the unit: as many as blocks are resident together.
        grid, block, cluster, shared_memory, cooperative: the launch.
        orders: of threads, one run each.
        memory: content of every region, and its address modulo 16.
        values: the arguments: region, offset and tensor map of what points there, or the bytes of a number.
    """

    whom: str
    unit: bytes
    runtime: bytes
    copies: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    shared_memory: int
    cooperative: bool
    orders: tuple[str, ...]
    memory: tuple[tuple[bytes, int], ...]
    values: tuple[tuple[int, int, TensorMapLayout | None] | bytes, ...]


def run(request: Request, folder: Path) -> list[bytes]:
    """The regions after the launch in the first order; :class:`SimulatorError` when the runtime finds a fault."""
    runtime = abi.declare(library.load(request.runtime, "fusionreg-simulator.so", folder))
    variables = uninitialised(request.unit)
    units = [library.LoadedUnit(request.unit, f"unit{i}", variables, folder) for i in range(request.copies)]
    first: list[bytes] = []
    for order in request.orders:
        results = _once(request, runtime, units, order)
        first = first or results
    return first


def _once(request: Request, runtime: ctypes.CDLL, units: list[library.LoadedUnit], order: str) -> list[bytes]:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(len(content) + residue) for content, residue in request.memory]
    bases = [block + residue for block, (_, residue) in zip(blocks, request.memory, strict=True)]
    for base, (content, _) in zip(bases, request.memory, strict=True):
        ctypes.memmove(base, content, len(content))
    held = [
        ctypes.create_string_buffer(v, len(v)) if isinstance(v, bytes) else placed(v[2], bases[v[0]] + v[1])
        for v in request.values
    ]
    copies = (abi.Copy * len(units))(*(u.copy() for u in units))
    pointers = (abi.vp * max(1, len(held)))(*(ctypes.addressof(v) for v in held))
    kind, seed = parse_order(order)
    asked = abi.Request(
        copies=copies, args=pointers, n_copies=len(units), workers=1, grid=abi.Three(*request.grid),
        block=abi.Three(*request.block), cluster=abi.Three(*(request.cluster or (1, 1, 1))),
        dynamic_shared=request.shared_memory, stack_bytes=STACK, order=kind, seed=seed,
        cooperative=request.cooperative, sanitized=True,
    )  # fmt: skip
    result = abi.Result()
    runtime.frsim_launch(ctypes.byref(asked), ctypes.byref(result))
    if result.failed:
        raise SimulatorError(
            "the simulator found a fault", f"in {request.whom}", result.message.decode(errors="replace"),
            "a kernel without faults", f"It shows in thread order {order}",
            detector=result.detector.decode(), order=order,
        )  # fmt: skip
    results = [ctypes.string_at(base, len(content)) for base, (content, _) in zip(bases, request.memory, strict=True)]
    for block in blocks:
        libc.free(block)
    return results


def main(folder: Path) -> None:
    request = pickle.loads((folder / "request").read_bytes())  # written by the process that started this one
    try:
        answer: list[bytes] | FusionregError = run(request, folder)
    except FusionregError as error:
        answer = error
    (folder / "answer").write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
