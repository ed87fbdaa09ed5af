"""Every hook a plugin may implement. This file is the contract; it holds nothing else.

Each hook is asked plugin by plugin, in the order (plugin, name), and none depends on another's answer. A hook that
raises loses that plugin's answer to that hook and becomes a row in ``fusionreg plugins``; no other
plugin is stopped.
Hooks must be pure: no files written, no CUDA context, no import of torch, onnx or cupy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from fusionreg.core.compiler import ObjectCode
    from fusionreg.core.problem import Problem
    from fusionreg.core.registry.library_calls import LibraryCall
    from fusionreg.core.spec import Case, FusionSpec, KernelSpec, OpSpec
    from fusionreg.core.targets import Target

PROJECT = "fusionreg"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_fusions() -> Sequence[FusionSpec]:
    """The fusions this plugin defines; each name starts with a prefix that the plugin owns.

    Example::

        @hookimpl
        def register_fusions():
            return [BIAS_RELU2]
    """


@hookspec
def register_kernels() -> Sequence[KernelSpec]:
    """Kernels for fusions of this or another plugin; each names its ``fusion``.

    Example::

        @hookimpl
        def register_kernels():
            return [KernelSpec(name="fast", fusion="gemm.bias", template="fast.cu.j2", grid="1", block="128")]
    """


@hookspec
def register_library_calls() -> Sequence[LibraryCall]:
    """Calls of libraries that kernels name in ``library`` in place of a template.

    Example::

        @hookimpl
        def register_library_calls():
            return [BLAS_MATMUL]
    """


@hookspec
def register_ops() -> Sequence[OpSpec]:
    """Operators that patterns of this plugin use and the vocabulary lacks, in a domain of the plugin's own."""


@hookspec
def conformance_cases(fusion: FusionSpec) -> Sequence[Case]:
    """Further conformance cases for ``fusion``, which may belong to another plugin."""


@hookspec
def estimate(fusion: FusionSpec, problem: Problem, target: Target) -> float | None:
    """Expected seconds of ``fusion`` on ``problem``, or None to leave it to the general model."""


@hookspec
def kernel_compiled(code: ObjectCode) -> None:
    """Told of every kernel compiled in this process (not of cache hits). Its answer is ignored."""


@hookspec
def register_commands() -> Mapping[str, typer.Typer]:
    """Sub-commands of the ``fusionreg`` command line, by name."""
