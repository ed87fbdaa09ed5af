"""A model of throughput: how many warps work, how fast they issue, and what barriers cost them. Floor 7.

``throughput = N_warp * IPC * f / (1 + alpha * D_sync)`` for a multiprocessor, times their number. It orders what
``fusionreg tune`` tries, and its prediction stands beside the measurement; it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compiler import ObjectCode, instructions
from ..occupancy import LANES, PARTITIONS, occupancy
from ..problem import Candidate
from ..targets import Target

#: Instructions per cycle of one warp that waits for memory as usual: half of the most warps keep all schedulers busy.
WARP_IPC = 1.0 / 8.0
BUSY = PARTITIONS / WARP_IPC
#: What delays of the schedulers make of a barrier, and cycles that a barrier itself takes.
ALPHA, BARRIER_CYCLES = 2.0, 30.0
#: Clock that counts where none is known: predictions are compared with each other.
CLOCK = 1.0e9


@dataclass(frozen=True)
class Prediction:
    """What the model says of one candidate.

    Attributes:
        warps: those of a multiprocessor that work, averaged over all waves of blocks: up to as many as keep its
            schedulers busy, fewer where the last wave is small.
        sync: cycles at barriers for each cycle of issuing.
        throughput: warp instructions per second of the device.
        share: the same over what all schedulers could issue.
        seconds: what it takes to issue the code of every warp once at that rate: candidates of one kernel differ in how
            much they issue as well as in how fast. Loops count once; 0 where the code is not known.
    """

    warps: float
    sync: float
    throughput: float
    share: float
    seconds: float = 0.0


def resident(candidate: Candidate, device: Target, code: ObjectCode | None = None) -> int:
    """Blocks that a multiprocessor holds at once: by threads, shared memory and, where they are known, registers."""
    launch = candidate.launch
    shared = launch.shared_memory + (code.shared if code is not None else 0)
    registers = code.registers if code is not None else candidate.kernel.spec.max_registers
    return max(1, occupancy(device, launch.threads, registers=registers, shared=shared).blocks)


def predict(
    candidate: Candidate,
    device: Target,
    multiprocessors: int,
    code: ObjectCode | None = None,
    clock: float = CLOCK,
) -> Prediction:
    """The model on one candidate; without its code, barriers count as none and registers as the spec bounds them."""
    launch = candidate.launch
    if not launch.blocks:
        return Prediction(0.0, 0.0, 0.0, 0.0)
    held, block = resident(candidate, device, code), -(-launch.threads // LANES)
    full, rest = divmod(launch.blocks, held * multiprocessors)
    time = full * max(1.0, held * block / BUSY) + (max(1.0, -(-rest // multiprocessors) * block / BUSY) if rest else 0)
    warps = launch.blocks * block / (multiprocessors * time)
    sync, size = 0.0, 0
    if code is not None:
        size, barriers = instructions(code.cubin, code.entry)
        busy = size * min(held, -(-launch.blocks // multiprocessors)) * block / PARTITIONS
        sync = barriers * BARRIER_CYCLES / busy if busy else 0.0  # other blocks issue while one waits
    issued = warps * WARP_IPC / (1.0 + ALPHA * sync)
    throughput = issued * multiprocessors * clock
    return Prediction(warps, sync, throughput, issued / PARTITIONS, size * launch.blocks * block / throughput)


def agreement(predicted: list[float], seen: list[float]) -> float | None:
    """Rank correlation (Spearman) of throughputs predicted with times seen: 1.0 where the model orders candidates as
    the measurement does, -1.0 where it has them the other way round; None where there is nothing to compare."""
    a, b = _ranks([-p for p in predicted]), _ranks(seen)
    n = len(a)
    if n < 3 or len(set(a)) < 2 or len(set(b)) < 2:
        return None
    mean = (n - 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return float(top / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5)


def _ranks(values: list[float]) -> list[float]:
    """Rank of each, the mean of their places for equal ones."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [sum(places[v]) / len(places[v]) for v in values]
