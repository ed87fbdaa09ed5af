"""Launches in the simulator under all of its checks, and what they find."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fusionreg.core.errors import SimulatorError
from fusionreg.core.simulator import Checks

FULL = Checks(accesses=True, orders=("forward", "reverse", "random:5"), timeout=60.0)


@dataclass(frozen=True)
class Geometry:
    """What the simulator reads of a launch."""

    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, ...] = ()
    shared_memory: int = 0
    cooperative: bool = False
    programmatic: bool = False


def raises(kernel, args, launch, detector, says="", checks=FULL):
    """The fault that ``detector`` reports of the launch, in words that match ``says``."""
    with pytest.raises(SimulatorError, match=says or None) as caught:
        kernel.launch(args, launch, checks=checks)
    assert caught.value.facts["detector"] == detector, str(caught.value)
    return caught.value
