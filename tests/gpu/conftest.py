"""GPU tests are not collected on a machine without a device: the driver is asked, no framework is imported for it."""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusionreg.core.errors import FusionregError
from fusionreg.core.runtime.driver import driver


@functools.cache
def _devices() -> int:
    try:
        return driver().device_count()
    except FusionregError:
        return 0


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if _devices() else True


@pytest.fixture
def alone() -> None:
    """For tests that time something: no other one of these tests runs meanwhile, in whatever process."""


@pytest.fixture(autouse=True)
def _turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = tmp_path_factory.getbasetemp().parent
    with open(place / "gpu.lock", "w") as lock, open(place / "gpu.gate", "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)  # behind one that waits to be alone nobody else begins
        fcntl.flock(lock, fcntl.LOCK_EX if "alone" in request.fixturenames else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
