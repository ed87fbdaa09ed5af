"""Executes CUDA kernels on the CPU: the same source, compiled by the host's C++ compiler, checked as it runs. Floor 6.

Every CUDA thread is a fiber; blocks run one after another, those of a cluster or of a cooperative grid together. It is
a model of what a kernel may do, never of how long that takes. What it cannot execute: inline PTX (the device library
has functions in its place), textures, dynamic parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache import Cache
from .checks import Checks, SharedAccess, SimReport
from .toolchain import HostCompiler, Mode, host_compiler

if TYPE_CHECKING:
    from ..render import KernelSource
    from .build import Builder
    from .kernel import SimKernel

__all__ = [
    "Checks",
    "HostCompiler",
    "SharedAccess",
    "SimKernel",
    "SimReport",
    "compile",
    "compile_text",
    "host_compiler",
    "require",
]


def compile(
    source: KernelSource, *, cache: Cache | None = None, modes: Sequence[Mode] = ("fast",)
) -> SimKernel:
    """Compiles a rendered kernel for the simulator.

    Args:
        source: what :func:`fusionreg.core.render.render` gave.
        cache: where compiled units are kept; None takes the default cache.
        modes: the builds to make at once, as for :func:`compile_text`.

    Raises:
        CompileError: the host compiler refuses the unit; ``facts``: log.
        MissingDependencyError: there is no host compiler, or no CUDA headers.
    """
    return compile_text(
        source.text, source.entry, cache=cache, name=source.kernel, target=source.target, arguments=source.arguments,
        modes=modes,
    )  # fmt: skip


def require(cache: Cache | None = None) -> None:
    """:class:`MissingDependencyError` where nothing could be simulated: no CUDA headers, no compiler that builds it."""
    _builder(cache).begin()


def compile_text(
    text: str,
    entry: str,
    *,
    cache: Cache | None = None,
    name: str = "",
    target: str = "sm_90a",
    arguments: Any = (),
    modes: Sequence[Mode] = ("fast",),
) -> SimKernel:
    """Compiles any CUDA C++ whose kernel ``entry`` is ``extern "C"``; errors as for :func:`compile`.

    ``modes``: the builds to make at once; others are made by the first launch that asks for them.
    """
    from .kernel import SimKernel

    kernel = SimKernel(text, entry, name=name or entry, target=target, arguments=arguments, builder=_builder(cache))
    for mode in modes:
        kernel.prepare(mode)
    return kernel


def _builder(cache: Cache | None) -> Builder:
    cache = cache if cache is not None else _default_cache()
    found = host_compiler()
    shared = cache.path is not None and not cache.reason
    return _builder_of((cache.path, cache.limit) if shared else cache, found)


@lru_cache(maxsize=8)
def _builder_of(place: Cache | tuple[Path | None, int], compiler: HostCompiler) -> Builder:
    """One builder for all caches of one folder: it holds headers of some 30 MB, read and verified."""
    from .build import Builder

    return Builder(place if isinstance(place, Cache) else Cache(*place))


@lru_cache(maxsize=1)
def _default_cache() -> Cache:
    return Cache()


def __getattr__(name: str) -> Any:
    if name == "SimKernel":
        from .kernel import SimKernel

        return SimKernel
    raise AttributeError(name)
