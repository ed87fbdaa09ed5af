"""Kernels for the simulator's tests: one cache for the whole run, so that its runtime and headers are built once."""

from __future__ import annotations

import os

import pytest
from simulated import Geometry

from fusionreg.core import simulator
from fusionreg.core.cache import Cache


@pytest.fixture(scope="session")
def sim_cache(tmp_path_factory) -> Cache:
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent  # shared by the workers
    return Cache(base / "simulator-cache")


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
