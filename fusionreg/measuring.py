"""``python -m fusionreg.measuring < sites.json``: measures sites of a model on the current CUDA device, in a process of
its own, where nothing is being compiled meanwhile; rows go to the cache of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fusionreg.core.bench.gains import keep_rows
from fusionreg.core.bench.sites import Site, measured
from fusionreg.core.bench.tuned import TunedParameters
from fusionreg.core.cache import Cache
from fusionreg.core.errors import FusionregError, LaunchError
from fusionreg.core.registry.catalog import load

if TYPE_CHECKING:
    from fusionreg.core.bench.gains import GainRow

#: Seconds that one site may take, its compilation included.
PATIENCE = 120.0


def in_process(sites: Sequence[Site], device: int) -> None:
    """Measures ``sites`` beside eager and torch.compile, on CUDA device ``device``, in another process; returns once it
    is done. :class:`LaunchError` where that fails."""
    job = {"sites": [s.model_dump(mode="json") for s in sites], "device": device}
    command, patience = [sys.executable, "-m", "fusionreg.measuring"], PATIENCE * (1 + len(sites))
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=patience, check=False
        )
        failed = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired) as e:
        failed = str(e)
    if failed:
        raise LaunchError("cannot measure", f"{len(sites)} sites", failed, "a process that measures them")


def run(job: Mapping[str, Any]) -> list[GainRow]:
    """The rows of a job, which are kept as well."""
    import torch

    from fusionreg.integrations.torch.bench import TorchBench

    torch.cuda.set_device(job["device"])
    catalog, cache = load(), Cache()
    bench = TorchBench(catalog, cache, ("eager", "compile"), mode="default")
    rows = []
    for row in measured([Site.model_validate(s) for s in job["sites"]], bench, catalog, TunedParameters()):
        rows.append(row)
        keep_rows(bench.target, [row], catalog, cache)
    return rows


def main() -> int:
    try:
        for row in run(json.load(sys.stdin)):
            print(row.model_dump_json())
    except FusionregError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
