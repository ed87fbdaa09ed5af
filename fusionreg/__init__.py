"""fusionreg: the plugin registry of fused CUDA kernels.

The public names are loaded on first use; importing this package imports no torch, onnx, cupy or numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "load_registry": "fusionreg.api",
    "Registry": "fusionreg.api",
    "fuse": "fusionreg.api",
    "verify": "fusionreg.verifying",
    "Verification": "fusionreg.verifying",
    "capture": "fusionreg.integrations.torch.graphs",
    "GraphPool": "fusionreg.integrations.torch.graphs",
    "FusionSpec": "fusionreg.core.spec",
    "KernelSpec": "fusionreg.core.spec",
    "AttributeSpec": "fusionreg.core.spec",
    "Backward": "fusionreg.core.spec",
    "LibraryCall": "fusionreg.core.registry.library_calls",
    "OpSpec": "fusionreg.core.spec",
    "Case": "fusionreg.core.spec",
    "TensorMap": "fusionreg.core.spec",
    "Tolerance": "fusionreg.core.spec",
    "Workload": "fusionreg.core.spec",
    "hookimpl": "fusionreg.hookspecs",
    "FusionregError": "fusionreg.core.errors",
}

#: Modules found as attributes, too.
_MODULES = ("torch",)

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from fusionreg.api import Registry, fuse, load_registry
    from fusionreg.core.errors import FusionregError
    from fusionreg.core.registry.library_calls import LibraryCall
    from fusionreg.core.spec import (
        AttributeSpec,
        Backward,
        Case,
        FusionSpec,
        KernelSpec,
        OpSpec,
        TensorMap,
        Tolerance,
        Workload,
    )  # fmt: skip
    from fusionreg.hookspecs import hookimpl
    from fusionreg.integrations.torch.graphs import GraphPool, capture
    from fusionreg.verifying import Verification, verify


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"fusionreg.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fusionreg' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
