"""What the runtime library found, as errors that name the tensor, the thread and the line."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import SimulatorError
from . import abi, library
from .build import Built
from .memory import Region

_EXPECTED = {
    "bounds": "accesses inside the tensors",
    "space": "a pointer into the memory that the instruction is for",
    "misaligned": "an address aligned to the access",
    "uninitialised": "memory that was written before it is read",
    "race": "a barrier or an atomic between the two",
    "async": "a wait, and a barrier after it, before anybody touches the data",
    "deadlock": "all threads of the block, or lanes of the mask, at the same barrier",
    "divergent-barrier": "one barrier that all threads of the block reach",
    "divergent-warp": "one collective that all its lanes reach",
    "warp": "lanes of the mask only",
    "mbarrier": "an initialised mbarrier and as many arrivals as its count",
    "proxy": "fence.proxy.async in every thread that stored, and a barrier after it, before TMA or wgmma",
    "wgmma": "wgmma.fence, wgmma.mma_async, commit_group and wait_group in this order, by whole warpgroups",
    "tensor-map": "a tensor map that TMA takes, and as many coordinates as it has axes",
    "cluster": "a cluster barrier before any block of the cluster exits",
    "timeout": "a launch that ends",
    "trap": "no trap",
    "dependency": "grid_dependency_wait() before the first access to a tensor: the launch before may still be running",
    "arithmetic": "divisors other than zero",
    "stack": "local memory that fits a thread",
    "order": "results that do not depend on the order of threads",
    "unwritten": "every element of an output written",
}


def fault(whom: str, built: Built, result: abi.Result, names: Sequence[str], order: str) -> SimulatorError:
    """The error for a launch that ended in a fault."""
    detector = result.detector.decode()
    facts: dict[str, Any] = {"detector": detector, "order": order}
    image = result.copy_image
    asked = [w.pc - image for w in (result.at, result.other)]
    lines = library.source_lines(built.data, [a if 0 < a < 1 << 40 else 0 for a in asked]) if image else [(), ()]
    text = result.message.decode(errors="replace")
    if result.buffer >= 0:
        facts.update(tensor=names[result.buffer], offset=int(result.offset))
        text += f"; tensor {names[result.buffer]}, byte offset {result.offset}"
    elif result.buffer < -1:
        facts.update(tensor="shared memory", offset=int(result.offset))
        text += _shared(built, result) if "of dynamic shared memory" not in text else ""
    if result.has_at:
        facts.update(_place(result.at, lines[0]))
        text += f"; thread {facts['thread']} of block {facts['block']}{_at(result.at, lines[0])}"
    if result.has_other:
        other = _place(result.other, lines[1])
        facts["other"] = other
        text += f"; the other access{_at(result.other, lines[1])}"
    return SimulatorError(
        "the simulator found a fault", f"in {whom}", text, _EXPECTED.get(detector, "a kernel without faults"),
        f"It shows in thread order {order}", **facts,
    )  # fmt: skip


def _shared(built: Built, result: abi.Result) -> str:
    if result.buffer == -2:
        return f"; dynamic shared memory, byte offset {result.offset}"
    for v in built.variables:
        if v.offset <= result.offset < v.offset + v.bytes:
            return f"; shared variable {v.name}, byte offset {result.offset - v.offset}"
    return "; between shared variables"


def _place(where: abi.Where, lines: Sequence[tuple[str, int]]) -> dict[str, Any]:
    named = (where.file.decode(errors="replace").rsplit("/", 1)[-1], where.line) if where.line else None
    place = named or (lines[0] if lines else ("", 0))
    return {"thread": tuple(where.thread), "block": tuple(where.block), "file": place[0], "line": place[1]}


def _at(where: abi.Where, lines: Sequence[tuple[str, int]]) -> str:
    text = library.place_text(lines)
    if not text and where.line:
        text = f"{where.file.decode(errors='replace').rsplit('/', 1)[-1]}:{where.line}"
    return f" at {text}" if text else ""


def unwritten(whom: str, found: Sequence[Region], buffers: Sequence[abi.Buffer] | ctypes.Array[abi.Buffer]) -> None:
    """:class:`SimulatorError` when the launch left an element of an output unwritten."""
    for r, b in zip(found, buffers, strict=False):
        if r.complete and b.unwritten:
            raise SimulatorError(
                "the simulator found a fault", f"in {whom}",
                f"{b.unwritten} of {r.bytes} bytes of tensor {r.names} were never written, "
                f"the first at byte offset {b.first_unwritten}",
                _EXPECTED["unwritten"], detector="unwritten", tensor=r.names, offset=int(b.first_unwritten),
            )  # fmt: skip


def never_waits(whom: str) -> SimulatorError:
    """A programmatic launch that ends without having waited: whoever comes after it could overtake what came before."""
    return SimulatorError(
        "the simulator found a fault", f"in {whom}", "no thread called grid_dependency_wait()", _EXPECTED["dependency"],
        "Call it in every thread, before threads without work return", detector="dependency",
    )  # fmt: skip


def order_dependence(
    whom: str,
    found: Sequence[Region],
    expected: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    first: str,
    order: str,
) -> None:
    """:class:`SimulatorError` when two orders gave different results."""
    for r, a, b in zip([r for r in found if r.writable], expected, results, strict=True):
        if not np.array_equal(a, b):
            at = int(np.argmax(a != b))
            raise SimulatorError(
                "the simulator found a fault", f"in {whom}",
                f"tensor {r.names} depends on thread order: {first} and {order} differ at byte offset {at}",
                _EXPECTED["order"],
                "Sum in a fixed order; a test of floating-point atomics alone may launch with deterministic=False",
                detector="order", tensor=r.names, offset=at, order=order,
            )  # fmt: skip
