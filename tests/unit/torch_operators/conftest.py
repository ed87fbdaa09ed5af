"""One registry for all tests of operators: its kernels run in the simulator."""

from __future__ import annotations

import pytest

import fusionreg
from fusionreg.integrations.torch.operators import Operators


@pytest.fixture(scope="session")
def registry():
    return fusionreg.load_registry(device="sim")


@pytest.fixture(scope="session")
def operators(registry):
    return Operators.of(registry)
