"""Scripts run as ranks of a process group, a process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_ranks(script: str, count: int, folder: Path, families: str) -> list[dict[str, Any]]:
    """What each of ``script RANK STORE`` printed last, as JSON; a rank that failed is an assertion with its words.
    ``families``: those that the ranks load."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FUSIONREG_LOAD_PLUGINS": families}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), str(rank), str(folder / "store")], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=300) for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0] * count, said[0][1][-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]
