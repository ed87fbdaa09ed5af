"""Kernels for the simulator's tests: all in one cache, the user's own, so that each unit is compiled once for all tests
and workers, and the next run compiles only what has changed since."""

from __future__ import annotations

import pytest
from simulated import Geometry

from fusionreg.core import simulator
from fusionreg.core.cache import Cache


@pytest.fixture(scope="session")
def sim_cache() -> Cache:
    return Cache()


@pytest.fixture(scope="session")
def build(sim_cache):
    """``build(text, entry="k", **options)``: a kernel, compiled when it is first launched."""

    def make(text: str, entry: str = "k", **options):
        options.setdefault("modes", ())
        return simulator.compile_text(text, entry, cache=sim_cache, **options)

    return make


@pytest.fixture(scope="session")
def geometry() -> type[Geometry]:
    return Geometry
