"""Conformance: every kernel on every derived case, against the pattern in float64. Floor 7.

>>> report = run(catalog, ["gemm.bias"], device="sim", cases="quick")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_HOMES = {
    "run": "runner",
    "run_one": "runner",
    "run_mutants": "mutants",
    "derive": "cases",
    "VERSION": "cases",
    "Trial": "trial",
    "executor_for": "devices",
}

__all__ = ["VERSION", "Trial", "derive", "executor_for", "run", "run_mutants", "run_one"]

if TYPE_CHECKING:
    from .cases import VERSION, derive
    from .devices import executor_for
    from .mutants import run_mutants
    from .runner import run, run_one
    from .trial import Trial


def __getattr__(name: str) -> Any:  # lazily: `cases` alone must not bring a device's modules
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
