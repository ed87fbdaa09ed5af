"""GPU architectures as data: what a kernel may use on each, and the limits a launch must keep.

Floor 0. Limits: CUDA C++ Programming Guide 13, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import SpecError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture.

    Attributes:
        name: what NVRTC's ``-arch`` takes, e.g. ``"sm_90a"``.
        capability: major * 10 + minor.
        shared_memory: bytes of dynamic shared memory one block may opt in to.
        shared_memory_sm: bytes of shared memory of one SM.
        threads_sm, blocks_sm: resident threads and blocks of one SM.
        barriers_sm: named barriers of all of them together; 0 where those are never what limits.
        multiprocessors: SMs of the largest part in common use; a device at hand tells its own number.
        features: names among mma, cp_async, cluster, tma, mbarrier, pdl, wgmma, setmaxnreg.
    """

    name: str
    capability: int
    shared_memory: int
    shared_memory_sm: int
    threads_sm: int
    blocks_sm: int
    barriers_sm: int
    multiprocessors: int
    features: frozenset[str]

    @property
    def specific(self) -> bool:
        """Whether code built for it runs on this architecture (or family) alone."""
        return self.name[-1] in "af"


_BASE = frozenset({"mma", "cp_async"})
_HOPPER = _BASE | {"cluster", "tma", "mbarrier", "pdl"}

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("sm_80", 80, 166_912, 167_936, 2048, 32, 0, 108, _BASE),
        Target("sm_86", 86, 101_376, 102_400, 1536, 16, 0, 84, _BASE),
        Target("sm_89", 89, 101_376, 102_400, 1536, 24, 0, 142, _BASE),
        Target("sm_90", 90, 232_448, 233_472, 2048, 32, 64, 132, _HOPPER),
        Target("sm_90a", 90, 232_448, 233_472, 2048, 32, 64, 132, _HOPPER | {"wgmma", "setmaxnreg"}),
        Target("sm_100f", 100, 232_448, 233_472, 2048, 32, 64, 148, _HOPPER | {"setmaxnreg"}),
        Target("sm_120f", 120, 101_376, 102_400, 1536, 24, 24, 188, _HOPPER | {"setmaxnreg"}),
    )
}

#: What every shipped kernel is compiled for in CI, with or without such a GPU.
SHIPPED = ("sm_80", "sm_90a", "sm_100f", "sm_120f")

REGISTERS_SM = 65_536
THREADS_BLOCK = 1024
GRID_X, GRID_YZ = 2**31 - 1, 65_535
STATIC_SHARED = 49_152

#: A tensor map (TMA): axes, elements of a tile along one of them, swizzled bytes, and the alignment in bytes of its
#: address, of every stride and of the rows of a tile.
MAP_RANK, MAP_BOX, MAP_SWIZZLES, MAP_GRANULE = 5, 256, (0, 32, 64, 128), 16


def target(name: str) -> Target:
    """The row for ``name``; :class:`UnknownNameError` when there is none."""
    try:
        return TARGETS[name]
    except KeyError:
        raise UnknownNameError.among("architecture", name, TARGETS) from None


def for_capability(major: int, minor: int) -> Target | None:
    """The best target that runs on a device of this compute capability, or None if there is none.

    An architecture-specific target is taken on exactly its own capability, a family target within its
    major version, and a plain one on its own major version or any later one of the same major.
    """
    found = major * 10 + minor
    fitting = [
        t
        for t in TARGETS.values()
        if (t.name.endswith("a") and t.capability == found)
        or (t.name.endswith("f") and t.capability // 10 == major and t.capability <= found)
        or (not t.specific and t.capability // 10 == major and t.capability <= found)
    ]
    return max(fitting, key=lambda t: (t.capability, len(t.features)), default=None)


def accepts(declared: str, candidate: Target) -> bool:
    """Whether a kernel that declares ``declared`` may be built for ``candidate``.

    ``"sm_80+"`` accepts every target of capability 8.0 and up; ``"sm_90a"`` accepts exactly that one.
    """
    if not re.fullmatch(r"sm_\d+[af]?\+?", declared):
        raise SpecError("bad target", repr(declared), "it is no architecture", "sm_NN, sm_NNa, sm_NNf or sm_NN+")
    if declared.endswith("+"):
        return candidate.capability >= target_capability(declared[:-1])
    return candidate.name == declared


def target_capability(name: str) -> int:
    return int(re.sub(r"\D", "", name))
