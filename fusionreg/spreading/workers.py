"""Workers: processes of this machine, one or more for each of its GPUs, or those of a Dask cluster.

What a worker had in hand when it died is done again by another one; what has killed :data:`ATTEMPTS` of them is
:class:`Lost`, and everything else goes on.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Protocol

from fusionreg.core.errors import ArgumentError, FusionregError, MissingDependencyError

#: How often work is begun before it counts as what kills its workers.
ATTEMPTS = 2

FORMS = "gpus, gpus:N, gpus:NxM, processes:N or dask:ADDRESS"

_GPUS = re.compile(r"gpus(?::([0-9]+)(?:x([1-9][0-9]*))?)?")

Work = Callable[..., Any]
"""A function of a module, so that workers can import it."""


@dataclass(frozen=True)
class Lost:
    """In place of a result: why no worker lived to give one."""

    reason: str


class Workers(Protocol):
    """Where work is done.

    Attributes:
        count: how many there are at the start.
        here: whether they are processes of this machine, which load the plugins that this process loads.
    """

    count: int
    here: bool

    def map(self, work: Work, items: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """(index, ``work(*items[index])`` or :class:`Lost`) for each item, in the order in which they end.

        What ``work`` raises is raised here, and nothing further is begun.
        """
        ...


def workers(text: str) -> Workers:
    """The workers that a text names: ``gpus`` of this host, ``gpus:N`` of them, ``gpus:NxM``: M processes on each,
    ``processes:N``, ``dask:ADDRESS``.

    Raises: :class:`ArgumentError` for another text, :class:`MissingDependencyError` where there is no GPU or no
    ``distributed``, or no scheduler answers.
    """
    kind, _, rest = text.partition(":")
    if kind == "dask" and rest:
        return DaskWorkers(rest)
    if form := _GPUS.fullmatch(text):
        devices = visible_devices()
        wanted = int(form[1]) if form[1] else len(devices)
        if not 1 <= wanted <= len(devices):
            raise ArgumentError("too many workers", text, f"{len(devices)} GPUs are here", f"1 to {len(devices)} GPUs")
        each = int(form[2] or 1)
        shared = _shares(wanted * each)
        return LocalWorkers([{"CUDA_VISIBLE_DEVICES": d, **shared} for d in devices[:wanted]] * each)
    if kind == "processes" and rest.isdecimal() and int(rest) > 0:
        return LocalWorkers([_shares(int(rest))] * int(rest))
    raise ArgumentError("unknown executor", repr(text), "", FORMS)


def _shares(count: int) -> dict[str, str]:
    """Inductor compiles in a pool of as many processes as there are processors; ``count`` such pools share them.

    What the caller has set stays.
    """
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    return {} if name in os.environ else {name: str(max(1, (os.cpu_count() or 1) // count))}


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    Raises: :class:`MissingDependencyError` where there is none.
    """
    from fusionreg.core.runtime.driver import driver

    count = driver().device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = [d.strip() for d in named.split(",")][:count] if named else [str(i) for i in range(count)]
    if not devices:
        raise MissingDependencyError("cannot spread work", "over GPUs", "no GPU is here", "processes:N or dask:ADDRESS")
    return devices


class LocalWorkers:
    """Processes of this machine, each with an environment of its own."""

    here = True

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        self.environments = tuple(environments)
        self.count = len(self.environments)

    def map(self, work: Work, items: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        waiting: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        ended: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        for i in range(len(items)):
            waiting.put((i, 1))
        done = threading.Event()
        threads = [
            threading.Thread(target=_serve, args=(environment, work, items, waiting, ended, done), daemon=True)
            for environment in self.environments[: len(items)]
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in items:
                index, result, error = ended.get()
                if error is not None:
                    raise error
                yield index, result
        finally:
            done.set()
            for thread in threads:
                thread.join()


def _serve(
    environment: Mapping[str, str],
    work: Work,
    items: Sequence[tuple[Any, ...]],
    waiting: queue.SimpleQueue[tuple[int, int]],
    ended: queue.SimpleQueue[tuple[int, Any, BaseException | None]],
    done: threading.Event,
) -> None:
    """One process after another, as long as there is work: a new one stands in for one that died."""
    pool: ProcessPoolExecutor | None = None
    try:
        while not done.is_set():
            try:
                index, attempt = waiting.get(timeout=0.05)
            except queue.Empty:
                continue
            pool = pool or ProcessPoolExecutor(1, get_context("spawn"), initializer=_begin, initargs=(environment,))
            try:
                ended.put((index, pool.submit(work, *items[index]).result(), None))
            except BrokenProcessPool:
                pool = None
                if attempt < ATTEMPTS:
                    waiting.put((index, attempt + 1))
                else:
                    ended.put((index, Lost(f"{attempt} worker processes died of it"), None))
            except Exception as error:
                ended.put((index, None, error))
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _begin(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)


class DaskWorkers:
    """Workers of a Dask cluster, each of which has one GPU, or none, and runs one thing at a time."""

    here = False

    def __init__(self, address: str) -> None:
        try:
            from distributed import Client
        except ImportError as e:
            raise MissingDependencyError(
                "cannot spread work", f"over dask:{address}", str(e), "Dask Distributed",
                "Install it with: pip install 'fusionreg[fleet]'",
            ) from None  # fmt: skip
        try:
            self.client = Client(address, timeout="10s", set_as_default=False)
        except (OSError, ValueError) as e:
            raise MissingDependencyError(
                "cannot spread work", f"over dask:{address}", str(e), "a scheduler that answers"
            ) from None
        self.count = max(1, len(self.client.scheduler_info(n_workers=-1)["workers"]))

    def map(self, work: Work, items: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        from distributed import as_completed
        from distributed.scheduler import KilledWorker

        # a dead worker's tasks go to others by themselves, until the scheduler's `allowed-failures` are used up
        futures = {self.client.submit(work, *item, pure=False): i for i, item in enumerate(items)}
        try:
            with self.client.as_current():
                ended = as_completed(futures)
            for future in ended:
                try:
                    yield futures[future], future.result()
                except KilledWorker as error:
                    yield futures[future], Lost(str(error))
        finally:
            with suppress(FusionregError, OSError):
                self.client.cancel(list(futures))
