"""Code that a workload needs compiled: the torch peer's, and all of it ahead of a run, on no clock."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.runtime import benchmarking

from fusionreg.core.bench import Subject
from fusionreg.core.compiler import compile_source
from fusionreg.core.render import render
from fusionreg.core.turns import turn

from .bench_arrays import arrays_of
from .library_peers import library_peers
from .peers import torch_module, undropped

if TYPE_CHECKING:
    from fusionreg.core.cache import Cache
    from fusionreg.core.ir import Graph
    from fusionreg.core.problem import Candidate

COMPILE_MODE = "max-autotune-no-cudagraphs"
#: Seconds after which a process no longer waits for its turn to tune.
PATIENCE = 120.0
#: Libraries whose kernels are compiled at their first call, and kept.
_COMPILING = ("liger", "quack")


def compiled(module: Any, mode: str = COMPILE_MODE) -> Callable[..., Any]:
    """The module compiled; its first call, which tunes, keeps the tuner's tables and failed candidates to itself."""
    function = torch.compile(module, mode=mode, dynamic=False, fullgraph=True)
    tuned = False

    def call(*arrays: Any) -> Any:
        nonlocal tuned
        if tuned:
            return function(*arrays)
        with _silence():
            found = function(*arrays)
        tuned = True
        return found

    return call


@contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def compile_ours(subjects: Sequence[Subject], cache: Cache) -> tuple[str, ...]:
    """Compiles our kernels for workloads, a thread to a processor, so that the cache has them: what failed, and why."""

    def compiled(c: Candidate, subject: Subject) -> str:
        try:
            compile_source(render(subject.entry, c.kernel, subject.problem, c.params), cache)
        except Exception as error:
            return _failed(c.kernel.key, error)
        return ""

    work = [(c, s) for s in subjects for c in s.selection.accepted if not c.kernel.spec.library]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC drops the interpreter's lock
        return tuple(filter(None, pool.map(compiled, *zip(*work, strict=True)))) if work else ()


def compile_all(
    subject: Subject, device: str, cache: Cache, peers: Sequence[str], mode: str = COMPILE_MODE
) -> tuple[str, ...]:
    """Compiles our kernels and what ``peers`` run on a workload, torch.compile in ``mode``, so that the caches have it:
    what failed, and why.

    Inductor's tuner runs, and keeps what it finds in a cache of its own; nothing else is timed.
    """
    works: list[tuple[str, Callable[[], Any]]] = []
    works.append(("competitors", lambda: works.extend(_competitors(subject, device, peers, mode))))
    failed = list(compile_ours([subject], cache))
    for name, work in works:
        try:
            with tuning_alone(cache, _place(device)):
                work()
        except Exception as error:  # whatever a peer's compiler raises is that peer's reason
            failed.append(_failed(name, error))
    return tuple(failed)


@contextmanager
def tuning_alone(cache: Cache, device: str) -> Iterator[None]:
    """Inductor's tuner times its candidates one at a time on a device, whatever other processes prepare there: what
    competes is then what it picks on a device of its own."""
    held = 0

    @contextmanager
    def alone() -> Iterator[None]:
        nonlocal held
        with nullcontext() if held else turn(cache, device, PATIENCE):
            held += 1
            try:
                yield
            finally:
                held -= 1

    set_context = getattr(benchmarking, "set_gpu_benchmark_lock_context", None)
    if set_context is not None:  # torch 2.13
        before = set_context(alone)
        try:
            yield
        finally:
            set_context(before)
        return
    tuner: Any = benchmarking.benchmarker
    timed = tuner.benchmark_gpu
    tuner.benchmark_gpu = lambda *a, **k: _inside(alone(), partial(timed, *a, **k))
    try:
        yield
    finally:
        del tuner.benchmark_gpu


def _inside(context: AbstractContextManager[None], call: Callable[[], Any]) -> Any:
    with context:
        return call()


def _place(device: str) -> str:
    """A name of the device that all processes of the machine have for it."""
    return f"device-{torch.cuda.get_device_properties(device).uuid}" if device != "cpu" else device


def _failed(name: str, error: Exception) -> str:
    return f"{name}: {next(iter(str(error).splitlines()), type(error).__name__)}"


def _competitors(subject: Subject, device: str, peers: Sequence[str], mode: str) -> list[tuple[str, Callable[[], Any]]]:
    """Names, and calls that compile; their arrays are there before the first is called."""
    others = [p for p in library_peers(subject.graph, subject.ops) if p.name in peers and p.name in _COMPILING]
    if "compile" not in peers and not others:
        return []
    arrays = arrays_of(subject, device, 0)
    given = [arrays[n] for n in subject.graph.inputs]
    found: list[tuple[str, Callable[[], Any]]] = []
    for graph, how in ((subject.graph, mode), (undropped(subject.graph), "default")):
        if graph is not None and "compile" in peers:
            found.append(("compile", partial(_compile, subject, graph, device, how, given)))
    return found + [(p.name, partial(p.call, *(arrays[n] for n in p.inputs))) for p in others]


def _compile(subject: Subject, graph: Graph, device: str, mode: str, arrays: Sequence[Any]) -> None:
    compiled(torch_module(graph, subject.ops, device), mode)(*arrays)
