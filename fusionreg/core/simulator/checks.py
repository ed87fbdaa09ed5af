"""What a simulated launch is checked for, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ArgumentError
from ..frozen import EMPTY, FrozenDict


@dataclass(frozen=True, slots=True)
class Checks:
    """What to look for. The default looks for nothing and runs on the caller's memory: the way models are run.

    Attributes:
        guard: run on copies between inaccessible pages, outputs filled with NaN bytes first; a store outside faults or
            breaks a canary.
        accesses: run the instrumented build, in which every load and store is checked: bounds, alignment, constness,
            asynchronous copies, and the three below.
        races: conflicting accesses that no synchronisation orders.
        uninitialised: loads of shared memory, outputs or workspace that nobody wrote.
        unwritten: elements of outputs that the launch left unwritten.
        banks: count shared-memory bank conflicts by access site.
        orders: thread and block orders to run in, each from the same inputs: ``forward``, ``reverse``, ``random:SEED``.
        deterministic: whether outputs of all orders must agree bit for bit.
        sanitize: run an AddressSanitizer and UndefinedBehaviourSanitizer build in a process of its own instead.
        workers: host threads that share the blocks of an uninstrumented launch.
        timeout: seconds after which one run is broken off; 0 waits for ever.
    """

    guard: bool = False
    accesses: bool = False
    races: bool = True
    uninitialised: bool = True
    unwritten: bool = True
    banks: bool = False
    orders: tuple[str, ...] = ("forward",)
    deterministic: bool = True
    sanitize: bool = False
    workers: int = 1
    timeout: float = 0.0

    def __post_init__(self) -> None:
        for order in self.orders:
            parse_order(order)
        if not self.orders:
            raise ArgumentError("bad checks", "", "no order", "at least one of forward, reverse, random:SEED")

    @classmethod
    def guarded(cls) -> Checks:
        """Guard zones, poisoned outputs and three orders, at nearly full speed."""
        return cls(guard=True, orders=("forward", "reverse", "random:1"), timeout=120.0)

    @classmethod
    def full(cls, *, banks: bool = False) -> Checks:
        """Everything but the sanitizers: some ten times slower; for small problems."""
        orders = ("forward", "reverse", "random:1")
        return cls(guard=True, accesses=True, banks=banks, orders=orders, timeout=240.0)


def parse_order(text: str) -> tuple[int, int]:
    """(kind, seed) of an order: 0 forward, 1 reverse, 2 random."""
    name, _, seed = text.partition(":")
    if name == "random" and seed.isdecimal():
        return 2, int(seed) % 2**32
    if text in ("forward", "reverse"):
        return ("forward", "reverse").index(text), 0
    raise ArgumentError("bad order", repr(text), "it names no order", "forward, reverse or random:SEED")


@dataclass(frozen=True, slots=True)
class SharedAccess:
    """Shared-memory accesses of one site, added up over all warps.

    A site is a line; what the lanes of a warp access in its n-th execution counts as one instruction. Bulk copies, and
    what an asynchronous copy delivers later, are no instructions of a lane.

    Attributes:
        where: ``file:line``, as exact as the compiler's line table.
        instructions: warp-wide executions.
        wavefronts: passes that the 32 banks need for them: one word of each bank at a time, 8-byte accesses by half
            warps, 16-byte ones and the matrices of ldmatrix and stmatrix by quarter warps.
        ideal: passes without any conflict.
        words: what each of the 32 banks gave or took; equal words of one pass are one.
    """

    where: str
    instructions: int
    wavefronts: int
    ideal: int
    words: tuple[int, ...] = ()

    @property
    def conflicts(self) -> int:
        """Passes beyond those without any conflict."""
        return self.wavefronts - self.ideal

    def __str__(self) -> str:
        took = f"{self.wavefronts} wavefronts for {self.instructions} accesses"
        return f"{self.where}: {took}, {self.ideal} without conflicts"


@dataclass(frozen=True, slots=True)
class SimReport:
    """What a launch did.

    Attributes:
        counters: of the first order: switches, barriers, collectives, mma, async_bytes, waits, atomics, reads, writes,
            spins (the last four in instrumented runs alone).
        orders: the orders that were run.
        shared: sites that access shared memory, when bank conflicts were counted.
        seconds: host time of all runs, never a measure of the kernel.
    """

    counters: Mapping[str, int] = field(default_factory=lambda: EMPTY)
    orders: tuple[str, ...] = ()
    shared: tuple[SharedAccess, ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "counters", FrozenDict(self.counters))

    @property
    def bank_conflicts(self) -> tuple[SharedAccess, ...]:
        """The sites that had any."""
        return tuple(s for s in self.shared if s.conflicts)
