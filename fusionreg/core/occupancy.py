"""How many blocks a multiprocessor holds at once, and what keeps it from holding more. Floor 0.

The rules are those of NVIDIA's occupancy calculator (``cuda_occupancy.h`` of the CUDA runtime), for the largest shared
memory carve-out.
"""

from __future__ import annotations

from dataclasses import dataclass

from .frozen import FrozenDict
from .targets import REGISTERS_SM, Target

LANES = 32
#: Quarters of a multiprocessor, each with a scheduler and registers of its own.
PARTITIONS = 4
#: Registers are given out to warps, and shared memory to blocks, in pieces of so many; the driver keeps some of it for
#: itself, of each block.
REGISTER_UNIT, SHARED_UNIT, SHARED_RESERVED = 256, 128, 1024


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that are resident on one multiprocessor.

    Attributes:
        blocks, warps: how many.
        most: warps that it could hold at all.
        limits: resource → blocks that it alone would admit: ``registers``, ``shared memory``, ``threads``, ``blocks``,
            ``barriers``; those that the kernel does not use have none.
    """

    blocks: int
    warps: int
    most: int
    limits: FrozenDict[str, int]

    @property
    def share(self) -> float:
        """Resident warps over those that there could be."""
        return self.warps / self.most

    @property
    def limiting(self) -> tuple[str, ...]:
        """The resources that admit no further block."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)


def occupancy(device: Target, threads: int, *, registers: int = 0, shared: int = 0, barriers: int = 0) -> Occupancy:
    """Of blocks of ``threads`` threads.

    Args:
        registers: per thread; 0 where they are not known.
        shared: bytes of static and dynamic shared memory of a block.
        barriers: named barriers of a block, ``__syncthreads`` being one of them.
    """
    warps = -(-threads // LANES)
    limits = {"blocks": device.blocks_sm, "threads": device.threads_sm // (warps * LANES)}
    if registers:
        per_warp = -(-registers * LANES // REGISTER_UNIT) * REGISTER_UNIT
        fits = -(-warps // PARTITIONS) * PARTITIONS * per_warp <= REGISTERS_SM  # the check of a launch
        limits["registers"] = PARTITIONS * (REGISTERS_SM // PARTITIONS // per_warp) // warps if fits else 0
    if shared:
        held = -(-(shared + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT
        limits["shared memory"] = device.shared_memory_sm // held if shared <= device.shared_memory else 0
    if barriers and device.barriers_sm:
        limits["barriers"] = device.barriers_sm // barriers
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, device.threads_sm // LANES, FrozenDict(limits))
