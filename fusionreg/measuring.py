"""Sites of a model are measured in processes of their own: ``python -m fusionreg.measuring`` takes jobs, a line each.

First what the sites need is compiled, by several processes at a time; then one process, beside which nothing compiles,
times site after site and keeps what it finds in the cache of this machine. Both end with the time that is given for it;
a process that hangs or dies at a site costs that site alone, and nobody asks for it again.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryFile
from threading import Lock, RLock, Timer
from typing import IO, TYPE_CHECKING, Any

from fusionreg.core.bench.gains import GainRow, keep_rows
from fusionreg.core.bench.sites import Site, measured, row_of, subjects
from fusionreg.core.bench.tuned import TunedParameters
from fusionreg.core.cache import Cache
from fusionreg.core.errors import FusionregError, LaunchError
from fusionreg.core.registry.catalog import load
from fusionreg.core.turns import turn

if TYPE_CHECKING:
    from fusionreg.core.registry.catalog import Catalog
    from fusionreg.integrations.torch.bench import TorchBench

#: Seconds that one site may take, its compilation included.
PATIENCE = 45.0
#: Seconds without a job after which the process ends: what it holds of the device is free again.
IDLE = 60.0
#: Processes that compile, at most; and the share of the time that is given which that may take.
COMPILING, SHARE = 8, 0.6
#: Milliseconds that one round of one competitor gets.
BUDGET = 20.0
#: How an answer begins; all other lines are somebody else's.
ANSWER = "measured "


class Process:
    """One such process, started at its first job."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def ask(self, job: Mapping[str, Any], seconds: float) -> str | None:
        """What it says went wrong, "" for nothing, once it has done a job; None where it ended before, or was ended
        because that took longer."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        watch = Timer(seconds, process.kill)
        watch.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            lines = (line for line in iter(process.stdout.readline, "") if line.startswith(ANSWER))
            found = next(lines, None)
        except OSError:
            found = None
        finally:
            watch.cancel()
        return None if found is None else str(json.loads(found.removeprefix(ANSWER)))

    def failure(self) -> str:
        """The last that a process which has ended said."""
        assert self._errors is not None and self._process is not None
        code = self._process.wait()
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or [f"exit status {code}"])[-1]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._errors = TemporaryFile("w+")  # noqa: SIM115 - as long as the process
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fusionreg.measuring"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            )  # fmt: skip
        return self._process


class Measurer:
    """Compiles and times sites, in no more time than it is given.

    Args:
        clock: seconds, from any start.
        process: makes one that can be asked.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, process: Callable[[], Process] = Process) -> None:
        self._clock, self._make = clock, process
        self._lock = RLock()
        self._timing: Process | None = None
        self._compiling: list[Process] = []  # those of one measurement help with the next, if it comes soon

    def measure(self, sites: Sequence[Site], device: int, seconds: float) -> int:
        """How many of ``sites`` were looked at, on CUDA device ``device``, before the time was over: measured beside
        eager and torch.compile, or found to be none that can be.

        :class:`LaunchError` where nothing can be measured at all.
        """
        end = self._clock() + seconds
        with self._lock:
            timing = self._timing = self._timing or self._make()
            with ThreadPoolExecutor(1) as pool:
                started = pool.submit(self._started, timing, device, end)
                ready = self._compiled(sites, device, end - (1.0 - SHARE) * seconds)
                if failed := started.result():
                    raise LaunchError("cannot measure", f"{len(sites)} sites", failed, "a process that measures them")
            found = [self._timed(timing, s, device, end) for s in sorted(sites, key=lambda s: s not in ready)]
        return sum(found)

    def _started(self, process: Process, device: int, end: float) -> str:
        """Why a process cannot measure anything; "" where it is there."""
        for _ in range(2):  # an idle one may have ended just now
            answer = process.ask({"do": "start", "sites": [], "device": device}, end - self._clock())
            if answer is not None:
                return answer
        return "it did not start in time" if self._clock() >= end else process.failure()

    def _timed(self, process: Process, site: Site, device: int, end: float) -> bool:
        """Whether a site was looked at; one at which the process hangs or dies is written off."""
        job, left = {"sites": [site.model_dump(mode="json")], "device": device}, end - self._clock()
        if left <= 0:
            return False
        if process.ask({"do": "measure", "seconds": left, **job}, min(PATIENCE, left)) is not None:
            return True
        if self._clock() >= end:  # that may not be the fault of the site
            return False
        process.ask({"do": "write off", **job}, PATIENCE)
        return True

    def _compiled(self, sites: Sequence[Site], device: int, end: float) -> set[Site]:
        """Those whose code lies in the caches now."""
        count = min(len(sites), COMPILING, max(1, (os.cpu_count() or 1) // 2))
        if count < 2:
            return set()
        waiting, lock, ready = iter(sites), Lock(), set[Site]()

        def compile_some(process: Process) -> None:
            while True:
                with lock:
                    site = next(waiting, None)
                left = min(PATIENCE, end - self._clock())
                if site is None or left <= 0:
                    return
                job = {"do": "compile", "sites": [site.model_dump(mode="json")], "device": device}
                if process.ask(job, left) == "":
                    ready.add(site)

        self._compiling += [self._make() for _ in range(count - len(self._compiling))]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(compile_some, self._compiling[:count]))
        return ready


class _Worker:
    def __init__(self) -> None:
        self.catalog: Catalog = load()
        self.cache = Cache()
        self.benches: dict[int, TorchBench] = {}

    def run(self, job: Mapping[str, Any]) -> None:
        """Does what a job asks for: compiles or measures its sites, or keeps that they cannot be measured."""
        from fusionreg.integrations.torch.bench import TorchBench, current_device

        device, sites = job["device"], [Site.model_validate(s) for s in job["sites"]]
        with current_device(device):
            if device not in self.benches:
                made = TorchBench(self.catalog, self.cache, ("eager", "compile"), mode="default", budget=BUDGET)
                self.benches[device] = made
            bench, tuned = self.benches[device], TunedParameters()
            rows: list[GainRow] = []
            if job["do"] == "measure":
                with turn(self.cache, f"device-{device}", job["seconds"]):
                    rows += measured(sites, bench, self.catalog, tuned)
            for subject in subjects(sites, bench, self.catalog, tuned):
                if job["do"] == "compile":
                    bench.ready(subject)
                elif job["do"] == "write off":
                    rows.append(row_of(subject, bench))
        if rows:
            with turn(self.cache, "rows", PATIENCE):
                keep_rows(bench.target, rows, self.catalog, self.cache)


def _jobs() -> Iterator[Mapping[str, Any]]:
    """What stands on standard input, until it ends or nothing has come for a while."""
    while select.select([sys.stdin], [], [], IDLE)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        yield json.loads(line)


def main() -> int:
    worker = _Worker()
    for job in _jobs():
        try:
            worker.run(job)
            failed = ""
        except FusionregError as e:
            failed = str(e)
        print(f"{ANSWER}{json.dumps(failed)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
