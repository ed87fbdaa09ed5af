"""One small case of every kernel under compute-sanitizer: ``python tools/sanitize.py [--json FILE] [NAME …]``, names of
fusions or of kernels (``fusion/kernel``).

For each kernel and each tool (memcheck, racecheck) a process of its own, ``--jobs`` of them at a time, runs the
kernel's first plain conformance case on the GPU. Rows are written as they come. Exit status 1 when a tool reports an
error or a case does not pass. Needs a GPU and compute-sanitizer.

racecheck follows an mbarrier from the threads that arrive on it alone. Where threads read a word, meet
(``__syncwarp``, a named barrier of some of the block) and one arrives for all, it calls the next write of whoever
waits for that a WAR hazard: a kernel of nothing but that is reported so, and the same kernel in which every reader
arrives is not. This is all that it has against ``attention.sdpa*_backward/wgmma``: the number of the tile,
``*taken``, which all threads of a warpgroup read before they meet at its named barrier, whose first thread then
arrives on ``own_empty``, for which the producer waits before it writes the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck")


def one(kernel: str) -> int:
    """Runs the kernel's first plain case in this process."""
    from fusionreg.core.conformance import derive, executor_for, run_one
    from fusionreg.core.proof.report import Status
    from fusionreg.core.registry.catalog import load

    catalog = load()
    entry = catalog[kernel.partition("/")[0]]
    spec = entry.kernel(kernel)
    executor = executor_for("cuda")
    for trial in derive(entry, spec, executor.target, "quick"):
        found = run_one(catalog, entry.name, spec.name, trial, executor)
        if found.status is not Status.SKIPPED_UNSUPPORTED:
            print(found)
            return 0 if found.status is Status.PASSED else 1
    return 1


def check(kernel: str, tool: str) -> dict[str, Any]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--one", kernel]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
    except subprocess.TimeoutExpired as late:
        words = f"no end within {late.timeout} s"
        return {"kernel": kernel, "tool": tool, "summary": words, "case": "", "clean": False}
    text = done.stdout + done.stderr
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
    case = re.findall(rf"^{re.escape(kernel)}\[.*", text, re.M)
    return {
        "kernel": kernel,
        "tool": tool,
        "summary": summary[-1] if summary else text[-400:],
        "case": case[-1] if case else "",
        "clean": done.returncode == 0 and bool(summary) and bool(case),
    }


def kernels(names: Sequence[str]) -> list[str]:
    """Those that names of fusions and kernels stand for; all without any."""
    from fusionreg.core.registry.catalog import load

    catalog = load()
    whole = [n for n in names if "/" not in n] if names else sorted(catalog.fusions)
    fusions = [e.name for e in catalog.entries(whole)] if whole else []
    single = [catalog[n.partition("/")[0]].kernel(n.partition("/")[2]).key for n in names if "/" in n]
    return list(dict.fromkeys([*(k.key for name in fusions for k in catalog[name].kernels), *single]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="fusions or kernels; all by default")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--json", type=Path, help="write the findings there as well")
    options = parser.parse_args()
    if options.one:
        return one(options.one)
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(check, k, tool) for k in kernels(options.names) for tool in TOOLS]):
            row = done.result()
            rows.append(row)
            verdict = "clean" if row["clean"] else "FAULT"
            print(f"{row['kernel']:32} {row['tool']:10} {verdict}  {row['summary']}  {row['case']}", flush=True)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows}
                options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if all(row["clean"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
