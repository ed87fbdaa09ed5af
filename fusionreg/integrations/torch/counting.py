"""Kernels launched once each under a profiler, in a process of their own: how many instructions they execute.

``python -m fusionreg.integrations.torch.counting JOBS DONE`` is that process: it reads jobs, launches what they name,
and writes down what it launched.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusionreg.core.bench import Subject
from fusionreg.core.bench.counting import profile
from fusionreg.core.cache import Cache
from fusionreg.core.errors import FusionregError
from fusionreg.core.registry.catalog import load

from .bench_arrays import arrays_of, bound

#: Seconds that the process may take, and for each of its launches.
_START, _EACH = 90.0, 5.0


@dataclass(frozen=True)
class Job:
    """One launch: a workload's problem, and the kernel with its parameters."""

    fusion: str
    workload: str
    kernel: str
    params: dict[str, Any]
    target: str
    multiprocessors: int

    @classmethod
    def of(cls, subject: Subject) -> Job | None:
        """What dispatch picks; None where it picks nothing."""
        chosen, problem = subject.chosen, subject.problem
        if chosen is None:
            return None
        names = subject.entry.name, subject.workload.name, chosen.kernel.key
        return cls(*names, dict(chosen.params), problem.target, problem.multiprocessors)


def executed(jobs: Sequence[Job | None]) -> list[int | None]:
    """Instructions of each launch; None for one that did not happen.

    Raises: :class:`FusionregError` where the profiler is missing or cannot count.
    """
    wanted = [(i, job) for i, job in enumerate(jobs) if job is not None]
    with tempfile.TemporaryDirectory() as folder:
        asked, done = Path(folder) / "jobs.json", Path(folder) / "done.json"
        asked.write_text(json.dumps([{"index": i, **asdict(job)} for i, job in wanted]))
        command = [sys.executable, "-m", __name__, str(asked), str(done)]
        counts = profile(command, _START + _EACH * len(wanted))
        launched = json.loads(done.read_text()) if done.exists() else []
    if [name for _, name in launched] != [name for name, _ in counts]:
        raise FusionregError(
            "cannot count", "instructions", f"{len(counts)} kernels were counted", f"the {len(launched)} of the jobs"
        )
    found: list[int | None] = [None] * len(jobs)
    for (index, _), (_, number) in zip(launched, counts, strict=True):
        found[index] = number
    return found


def main(asked: str, done: str, device: str = "cuda") -> None:
    """Launches every job once; one that fails is left out."""
    from fusionreg.core.render import render

    catalog, cache, launched = load(), Cache(), []
    for job in json.loads(Path(asked).read_text()):
        try:
            entry = catalog[job["fusion"]]
            workload = next(w for w in entry.spec.workloads if w.name == job["workload"])
            subject = Subject.of(entry, workload, job["target"], catalog.ops, None, job["multiprocessors"])
            kernel = next(k for k in entry.kernels if k.key == job["kernel"])
            made = arrays_of(subject, "cpu", 0)  # no kernel of torch runs here: a profiler makes each one slow to load
            arrays = {name: array.to(device) for name, array in made.items()}
            bound(subject, catalog, kernel, job["params"], [arrays], cache)
            name = render(entry, kernel, subject.problem, job["params"]).entry
        except (FusionregError, RuntimeError, StopIteration):
            continue
        launched.append((job["index"], name))
    Path(done).write_text(json.dumps(launched))


if __name__ == "__main__":
    main(*sys.argv[1:])
