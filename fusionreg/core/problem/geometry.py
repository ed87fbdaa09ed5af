"""Launch geometry: a kernel's expressions evaluated on a problem, held against the device's limits. Floor 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError
from ..frozen import EMPTY, FrozenDict
from ..spec import WHOLE
from ..targets import GRID_X, GRID_YZ, THREADS_BLOCK, Target, target
from .iteration import space
from .types import Problem

if TYPE_CHECKING:
    from ..registry.catalog import KernelEntry

#: Thread blocks of one cluster without the non-portable opt-in.
CLUSTER_BLOCKS = 8
BLOCK_Z = 64


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is launched.

    Attributes:
        grid, block: three extents each.
        cluster: three extents in blocks, or () for none.
        shared_memory: bytes of dynamic shared memory per block.
        workspace: bytes of scratch memory.
        cooperative: whether the whole grid must be resident.
        programmatic: whether it is launched with programmatic stream serialization.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, ...] = ()
    shared_memory: int = 0
    workspace: int = 0
    cooperative: bool = False
    programmatic: bool = False

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return prod(self.block)

    @property
    def blocks(self) -> int:
        return prod(self.grid)

    @property
    def impossible(self) -> bool:
        """Whether no device could have it."""
        return min(*self.grid, self.shared_memory, self.workspace) < 0 or min(self.block) < 1

    def violation(self, device: Target) -> str:
        """The limit that this launch passes on ``device``, as a sentence; "" when it keeps them all.

        A grid of extent 0 is no violation here: whether there is nothing to do is the caller's to know.
        """
        x, y, z = self.grid
        if min(self.grid) < 0 or min(self.block) < 1:
            return f"grid {self.grid}, block {self.block}: extents are not positive"
        if x > GRID_X:
            return f"grid x is {x}, the limit is {GRID_X}"
        if y > GRID_YZ or z > GRID_YZ:
            return f"grid {'y' if y > GRID_YZ else 'z'} is {max(y, z)}, the limit is {GRID_YZ}"
        if self.threads > THREADS_BLOCK:
            return f"a block of {self.threads} threads, the limit is {THREADS_BLOCK}"
        if self.block[2] > BLOCK_Z:
            return f"block z is {self.block[2]}, the limit is {BLOCK_Z}"
        if not 0 <= self.shared_memory <= device.shared_memory:
            return f"{self.shared_memory} bytes of dynamic shared memory, {device.name} has {device.shared_memory}"
        if self.workspace < 0:
            return f"a workspace of {self.workspace} bytes"
        return self._cluster_violation(device)

    def _cluster_violation(self, device: Target) -> str:
        if self.programmatic and "pdl" not in device.features:
            return f"programmatic dependent launch, which {device.name} lacks"
        if not self.cluster:
            return ""
        if "cluster" not in device.features:
            return f"a cluster of {self.cluster}, which {device.name} lacks"
        if min(self.cluster) < 1 or prod(self.cluster) > CLUSTER_BLOCKS:
            return f"a cluster of {self.cluster}, the limit is {CLUSTER_BLOCKS} blocks"
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            return f"grid {self.grid} is no multiple of cluster {self.cluster}"
        return ""

    def check(self, device: Target, whom: str) -> Launch:
        """Itself; :class:`LaunchError` when it passes a limit of ``device``."""
        wrong = self.violation(device)
        if wrong:
            raise LaunchError("cannot launch", whom, wrong, f"a launch within the limits of {device.name}", launch=self)
        return self


def names(kernel: KernelEntry, problem: Problem) -> Mapping[str, Any]:
    """What the kernel's expressions read of the problem; with its iteration, where the whole pattern is a region.

    :class:`MisfitError` when there is none.
    """
    if WHOLE not in kernel.spec.regions:
        return problem.env()
    return {**problem.env(), **space(problem).env}


def environment(
    kernel: KernelEntry, problem: Problem, params: Mapping[str, Any]
) -> tuple[dict[str, Any], FrozenDict[str, Any]]:
    """What a kernel's geometry reads (problem, params, constants), and the constants alone."""
    env: dict[str, Any] = {**names(kernel, problem), **params}
    if not kernel.spec.constants:
        return env, EMPTY
    constants: dict[str, Any] = {}
    for name, expression in kernel.constants.expressions.items():  # in declared order: one may read those before it
        constants[name] = env[name] = expression(env)
    return env, FrozenDict(constants)


def launch_geometry(kernel: KernelEntry, problem: Problem, params: Mapping[str, Any]) -> Launch:
    """The launch of ``kernel`` on ``problem``, limits unchecked.

    :class:`ExpressionError` where an expression fails, :class:`LaunchError` where one gives no integer.
    """
    spec = kernel.spec
    env, _ = environment(kernel, problem, params)
    values = kernel.geometry(env)
    sizes = {name: integer(kernel, name, value) for name, value in values.items()}

    def triple(field: str, count: int) -> tuple[int, ...]:
        return tuple(sizes[f"{field}{i}"] if i < count else 1 for i in range(3))

    return Launch(
        grid=triple("grid", len(spec.grid)),  # type: ignore[arg-type]
        block=triple("block", len(spec.block)),  # type: ignore[arg-type]
        cluster=triple("cluster", len(spec.cluster)) if spec.cluster else (),
        shared_memory=sizes["shared_memory"],
        workspace=sizes["workspace"],
        cooperative=spec.cooperative,
        programmatic=spec.programmatic and "pdl" in target(problem.target).features,
    )


def integer(kernel: KernelEntry, field: str, value: Any) -> int:
    """What an expression gave, as an integer; :class:`LaunchError` where it is none."""
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise LaunchError("cannot launch", kernel.key, f"{field} is {value!r}", "an integer", field=field)
