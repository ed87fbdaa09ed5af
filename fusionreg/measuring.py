"""Sites of a model are measured in a process of its own, where nothing is being compiled meanwhile: ``python -m
fusionreg.measuring`` takes jobs, a line each, and keeps what it finds in the cache of this machine."""

from __future__ import annotations

import fcntl
import json
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from threading import RLock, Timer
from typing import IO, TYPE_CHECKING, Any

from fusionreg.core.bench.gains import keep_rows
from fusionreg.core.bench.sites import Site, measured
from fusionreg.core.bench.tuned import TunedParameters
from fusionreg.core.cache import Cache
from fusionreg.core.errors import FusionregError, LaunchError
from fusionreg.core.registry.catalog import load

if TYPE_CHECKING:
    from fusionreg.core.registry.catalog import Catalog
    from fusionreg.integrations.torch.bench import TorchBench

#: Seconds that one site may take, its compilation included.
PATIENCE = 120.0
#: Seconds without a job after which the process ends: what it holds of the device is free again.
IDLE = 30.0
#: How an answer begins; all other lines are somebody else's.
ANSWER = "measured "


class Measurer:
    """The process, which is started at the first job, and again where it has ended."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def measure(self, sites: Sequence[Site], device: int) -> None:
        """Measures ``sites`` beside eager and torch.compile, on CUDA device ``device``; returns once it is done.

        :class:`LaunchError` where that fails.
        """
        job = json.dumps({"sites": [s.model_dump(mode="json") for s in sites], "device": device})
        with self._lock:
            answer = self._ask(job, len(sites))
            if answer is None:  # it may have ended just now
                answer = self._ask(job, len(sites))
            failed = self._failure() if answer is None else answer
        if failed:
            raise LaunchError("cannot measure", f"{len(sites)} sites", failed, "a process that measures them")

    def _ask(self, job: str, sites: int) -> str | None:
        """What it says went wrong, "" for nothing, once it has done a job; None where it ended before."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        watch = Timer(PATIENCE * (1 + sites), process.kill)
        watch.start()
        try:
            process.stdin.write(job + "\n")
            process.stdin.flush()
            lines = (line for line in iter(process.stdout.readline, "") if line.startswith(ANSWER))
            found = next(lines, None)
        except OSError:
            found = None
        finally:
            watch.cancel()
        return None if found is None else str(json.loads(found.removeprefix(ANSWER)))

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._errors = TemporaryFile("w+")  # noqa: SIM115 - as long as the process
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fusionreg.measuring"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            )  # fmt: skip
        return self._process

    def _failure(self) -> str:
        assert self._errors is not None and self._process is not None
        code = self._process.wait()
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or [f"exit status {code}"])[-1]


@contextmanager
def _turn(cache: Cache, device: int) -> Iterator[None]:
    """The device to oneself, as far as others that measure on this machine are concerned."""
    if cache.path is None:
        yield
        return
    cache.path.mkdir(parents=True, exist_ok=True)
    with open(cache.path / f"measuring-{device}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Worker:
    def __init__(self) -> None:
        self.catalog: Catalog = load()
        self.cache = Cache()
        self.benches: dict[int, TorchBench] = {}

    def run(self, job: Mapping[str, Any]) -> None:
        """Measures the sites of a job, and keeps the rows."""
        from fusionreg.integrations.torch.bench import TorchBench, current_device

        device = job["device"]
        with current_device(device), _turn(self.cache, device):
            if device not in self.benches:
                self.benches[device] = TorchBench(self.catalog, self.cache, ("eager", "compile"), mode="default")
            bench, sites = self.benches[device], [Site.model_validate(s) for s in job["sites"]]
            for row in measured(sites, bench, self.catalog, TunedParameters()):
                keep_rows(bench.target, [row], self.catalog, self.cache)


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
