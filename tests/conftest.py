"""What all tests share: one thread of linear algebra per worker, one load of the plugins that are installed.

Tests load the same installed plugins hundreds of times, which takes a second each time and gives equal catalogs: here
every further load of them answers with the first one. What a test adds is loaded as ever: further plugins, entry points
or distributions, other packages first on the path, other lists of names.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from dataclasses import replace

#: Workers of pytest-xdist share the processors; threads of theirs would only wait for each other.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from fusionreg.core.registry import catalog, discovery  # noqa: E402

_FRESH = catalog.load
#: Tests of loading itself: each of their loads is a load.
_OF_LOADING = ("test_registry", "test_validate", "test_manifest", "test_discovery")


def _installed() -> tuple[object, ...]:
    found, broken = discovery.find()
    return tuple(found), tuple(broken)


_INSTALLED = _installed()
_PATH = tuple(sys.path)


@functools.cache
def _loaded(strict, allow, deny):
    return _FRESH(strict=strict, allow=allow, deny=deny)


@functools.wraps(_FRESH)
def _load(*, strict=False, allow=None, deny=None, entry_points=None, extra_plugins=()):
    given = {"strict": strict, "allow": allow, "deny": deny, "entry_points": entry_points}
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    known = (
        entry_points is None
        and not extra_plugins
        and not isinstance(allow, str)
        and not isinstance(deny, str)
        and not any(f"/{name}" in test for name in _OF_LOADING)
        and set(sys.path) <= set(_PATH) | {""}
        and _installed() == _INSTALLED
    )
    if not known:
        return _FRESH(**given, extra_plugins=extra_plugins)
    env_allow, env_deny = discovery.chosen(os.environ)
    allow = env_allow if allow is None else frozenset(allow)
    found = _loaded(strict, allow, env_deny if deny is None else frozenset(deny))
    return replace(found, _derived={})  # regions that one test derived are none of another's


catalog.load = _load  # before any module takes the name from there


def pytest_collectstart() -> None:
    gc.disable()  # until all tests are found: what is imported stays, and looking through it took a quarter of the time


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage need look at it again. And the processes that tests start
    keep the byte code of what they import, also where the environment would not have it: each next one reads it."""
    gc.enable()
    gc.collect()
    gc.freeze()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
