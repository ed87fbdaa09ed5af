"""GPU tests are deselected on a machine without a device: the driver is asked, no framework is imported for it."""

from __future__ import annotations

import pytest

from fusionreg.core.errors import FusionregError
from fusionreg.core.runtime.driver import driver


def _devices() -> int:
    try:
        return driver().device_count()
    except FusionregError:
        return 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _devices():
        return
    without = [i for i in items if "gpu" in i.keywords]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [i for i in items if "gpu" not in i.keywords]
