"""Turns of processes of one machine: what only one of them may do at a time. Floor 5."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import LaunchError

if TYPE_CHECKING:
    from .cache import Cache


@contextmanager
def turn(cache: Cache, name: str, seconds: float) -> Iterator[None]:
    """``name`` to oneself, as far as others that measure on this machine are concerned: a device, the rows.

    Raises: :class:`LaunchError` where that takes longer.
    """
    if cache.path is None:
        yield
        return
    cache.path.mkdir(parents=True, exist_ok=True)
    with open(cache.path / f"measuring-{name}.lock", "w") as lock:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise LaunchError("cannot measure", f"on {name}", "others do", "a turn in time") from None
                time.sleep(0.005)
        yield
