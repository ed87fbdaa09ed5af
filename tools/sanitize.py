"""One small case of every kernel under compute-sanitizer: ``python tools/sanitize.py [--json FILE] [FUSION …]``.

For each kernel and each tool (memcheck, racecheck) a process of its own runs the kernel's first plain conformance case
on the GPU. Exit status 1 when a tool reports an error or a case does not pass. Needs a GPU and compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
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
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fusions", nargs="*", help="fusions; all by default")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the findings there as well")
    options = parser.parse_args()
    if options.one:
        return one(options.one)
    from fusionreg.core.registry.catalog import load

    catalog = load()
    names = [e.name for e in catalog.entries(options.fusions or sorted(catalog.fusions))]
    rows = [check(k.key, tool) for name in names for k in catalog[name].kernels for tool in TOOLS]
    for row in rows:
        verdict = "clean" if row["clean"] else "FAULT"
        print(f"{row['kernel']:32} {row['tool']:10} {verdict}  {row['summary']}  {row['case']}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if all(row["clean"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
