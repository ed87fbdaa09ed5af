"""What a measurement would compile, compiled before it: little but timing is left for a GPU of one's own. Floor 7."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from .measure import Bench, Progress, holds
from .results import Results, file_name, read
from .subject import Subject


@dataclass(frozen=True)
class Preparation:
    """What one call of :func:`prepare` did.

    Attributes:
        ready, kept, left: workloads whose code is in the caches now, that have figures already, and not begun.
        remarks: what did not compile, and why.
    """

    ready: int = 0
    kept: int = 0
    left: int = 0
    remarks: tuple[str, ...] = ()

    def __add__(self, other: Preparation) -> Preparation:
        return Preparation(
            self.ready + other.ready, self.kept + other.kept, self.left + other.left, self.remarks + other.remarks
        )


def prepare(
    subjects: Iterable[Subject],
    bench: Bench,
    folder: Path,
    *,
    again: bool = False,
    time_limit: float | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Preparation:
    """Compiles what every subject needs that the folder's file has no figures for; arguments as for ``measure``."""
    started = clock()
    path = folder / file_name(bench.gpu)
    results = read(path) if path.exists() else Results(gpu=bench.gpu)
    every, done = tuple(subjects), Preparation()
    for i, subject in enumerate(every):
        there = results.find(subject.key)
        if there is not None and not again and holds(there, subject.digest(bench.environment), bench):
            done += Preparation(kept=1)
        elif time_limit is not None and clock() - started >= time_limit:
            done += Preparation(left=1)
        else:
            name = f"{subject.entry.name} {subject.workload.name}"
            if progress is not None:
                progress(i, len(every), name)
            done += Preparation(ready=1, remarks=tuple(f"{name}, {why}" for why in bench.ready(subject)))
    if progress is not None:
        progress(len(every), len(every), "")
    return done
