"""Whole models: eager, torch.compile, and torch.compile with this backend, in inference and in one training step.

    python -m whole_models [--models bert,llama] [--steps infer,train] [--dtype bfloat16] --out FILE   (in benchmarks/)

Each model and step runs in a process of its own, several at once while they compile; what is timed waits for its turn,
so that nothing else uses the GPU meanwhile. Loss and gradients are compared with the eager model in float32. Times are
medians of CUDA graph replays where the step can be captured (device time), and of host-bound calls beside them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="bert,llama,mixtral,resnet50,convnext,resblock,feedforward")
    parser.add_argument("--steps", default="infer,train")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for all of it")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, in the simulator: a trial")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, step = given.one.split(":")
        _write(given.out, _measured(name, step, given.dtype, given.tiny))
        return 0
    return _all(given)


def _all(given: Any) -> int:
    given.out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.limit
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    for name in given.models.split(","):
        for step in given.steps.split(","):
            part = given.out.with_name(f"{given.out.stem}.{name}.{step}.json")
            part.unlink(missing_ok=True)
            command = [sys.executable, "-m", "whole_models", "--one", f"{name}:{step}", "--dtype", given.dtype]
            command += ["--out", str(part), *(["--tiny"] if given.tiny else [])]
            environment = {**os.environ, "WHOLE_MODELS_TURN": str(given.out.with_suffix(".lock"))}
            running[f"{name}:{step}"] = (subprocess.Popen(command, env=environment), part)
    rows = _read(given.out)
    failed = 0
    for key, (process, part) in running.items():
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
        for row in _read(part).values():
            rows[f"{row['model']}:{row['step']}:{row['dtype']}"] = row
        part.unlink(missing_ok=True)
        if process.returncode != 0:
            failed += 1
            print(f"{key}: not finished (exit {process.returncode})", file=sys.stderr)
    given.out.write_text(json.dumps({"rows": list(rows.values())}, indent=1) + "\n")
    print(_table(rows.values()))
    return 1 if failed else 0


def _measured(name: str, step: str, dtype: str, tiny: bool) -> dict[str, Any]:
    from whole_models.measuring import measure

    return measure(name, step, dtype, tiny)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return {f"{r['model']}:{r['step']}:{r['dtype']}": r for r in json.loads(path.read_text())["rows"]}


def _write(path: Path, row: dict[str, Any]) -> None:
    path.write_text(json.dumps({"rows": [row]}))


def _table(rows: Any) -> str:
    lines = [f"{'model':22} {'sites':>5} {'deepest':>7}  milliseconds"]
    for row in rows:
        times = ", ".join(f"{k} {v['ms']:.3f}" for k, v in row["times"].items() if v.get("ms"))
        lines.append(f"{row['model'] + ' ' + row['step']:22} {row['sites']:5} {row['deepest']:7}  {times}")
    return "\n".join(lines)


class Turn:
    """The GPU to oneself, while others compile."""

    def __enter__(self) -> Turn:
        self.file = open(os.environ.get("WHOLE_MODELS_TURN", os.devnull), "w")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


if __name__ == "__main__":
    sys.exit(main())
