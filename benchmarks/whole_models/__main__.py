"""Whole models: eager, torch.compile, also with ``max-autotune``, and torch.compile with this backend, in inference and
in one training step.

    python -m whole_models [--models bert,resnet50:infer] [--steps infer,train] [--policy aggressive] [--mode MODE]
        [--ways compile,inductor] --out FILE

in benchmarks/.

Each model and step runs in a process of its own, several at once while they compile; while one is timed the others are
stopped, so that nothing else of this uses the GPU meanwhile. Loss and gradients are compared with the eager model in
float32; what a training step keeps for its backward pass is told.
Times are medians of CUDA graph replays where the step can be captured (device time), and of calls from the host. Ways
that are not run again stay as the file has them, where torch, GPU and driver are the same: ``--ways max-autotune`` adds
that one to all rows.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

#: What docs/torch-compile.md tells of.
MODELS = (
    "bert,llama,llama_decode:infer,mixtral_1:infer,mixtral_64:infer,mixtral_4096,resnet50:infer,resnet50_256,convnext,"
    "resblock,feedforward"
)


FORMAT = "fusionreg-whole-models/1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS, help="of all steps, or name:step")
    parser.add_argument("--steps", default="infer,train")
    parser.add_argument("--ways", default="eager,compile,inductor,inner-eager")
    parser.add_argument("--workers", type=int, default=64, help="processes at a time")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policy", default="balanced", help="of the fused ways")
    parser.add_argument("--mode", default="", help="of torch.compile, and of what is left to it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for all of it")
    parser.add_argument("--untimed", action="store_true", help="numbers and sites alone")
    parser.add_argument("--measure", action="store_true", help="sites that nobody has measured here are measured first")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, in the simulator: a trial")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, step = given.one.split(":")
        _write(given.out, _measured(name, step, given))
        return 0
    return _all(given)


def _all(given: Any) -> int:
    given.out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.limit
    keys = [
        f"{name}:{step}"
        for name, _, own in (m.partition(":") for m in given.models.split(","))
        for step in ([own] if own else given.steps.split(","))
    ]
    rows, failed = _read(given.out), []
    for file in given.out.parent.glob(f"{given.out.stem}.turn.*"):
        file.unlink()
    with ThreadPoolExecutor(given.workers) as pool:
        for done in as_completed([pool.submit(_process, key, given, deadline) for key in keys]):
            found, why = done.result()
            print(why or _table(found.values()), file=sys.stderr if why else sys.stdout, flush=True)
            failed += [why] if why else []
            rows |= {k: joined(r, rows.get(k)) for k, r in found.items()}
            keep(rows, given.out)
    for file in given.out.parent.glob(f"{given.out.stem}.turn.*"):
        file.unlink()
    return 1 if failed else 0


def joined(row: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """``row``, with what an older one of the same has of ways that were not run this time."""
    if before is None or any(before[k] != row[k] for k in ("torch", "gpu", "driver")):
        return row
    ways = [w for w in before["times"] if w not in row["times"] and (w not in before["fused"] or not row["fused"])]
    dated = {w: {"date": before["date"], **before["times"][w]} for w in ways}
    parts = {p: {**{w: before[p][w] for w in ways if w in before[p]}, **row[p]} for p in ("errors", "fused", "saved")}
    return {**row, "times": {**dated, **row["times"]}, **parts}


def keep(rows: dict[str, Any], path: Path) -> None:
    """Writes a file of results: rows without what lost."""
    for row in rows.values():
        for told in row["fused"].values():
            told.pop("lost", None)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"format": FORMAT, "rows": list(rows.values())}, indent=1) + "\n")
    part.replace(path)


def _process(key: str, given: Any, deadline: float) -> tuple[dict[str, Any], str]:
    """The row of one model and step, measured in a process of its own; and why there is none."""
    part = given.out.with_name(f"{given.out.stem}.{key.replace(':', '.')}.json")
    part.unlink(missing_ok=True)
    command = [sys.executable, "-m", "whole_models", "--one", key, "--dtype", given.dtype, "--ways", given.ways]
    command += ["--policy", given.policy, "--mode", given.mode, "--out", str(part), "--limit", str(given.limit)]
    command += ["--tiny"] if given.tiny else []
    command += ["--untimed"] if given.untimed else []
    command += ["--measure"] if given.measure else []
    environment = {**os.environ, "WHOLE_MODELS_TURN": str(given.out.with_suffix(".turn"))}
    process = subprocess.Popen(command, env=environment)
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
    code = process.wait()
    rows = {_key(r): r for r in _read(part).values()}
    part.unlink(missing_ok=True)
    return rows, f"{key}: not finished (exit {code})" if code else ""


def _measured(name: str, step: str, given: Any) -> dict[str, Any]:
    from whole_models.measuring import WAYS, Plan, measure

    ways = tuple(WAYS[w] for w in given.ways.split(","))
    plan = Plan(name, step, given.dtype, given.policy, given.mode, given.tiny, given.measure, ways)
    return measure(plan, None if given.tiny or given.untimed else Turn())


def _key(row: dict[str, Any]) -> str:
    return ":".join(row[k] for k in ("model", "step", "dtype", "policy", "mode"))


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return {_key(r): r for r in json.loads(path.read_text())["rows"]}


def _write(path: Path, row: dict[str, Any]) -> None:
    path.write_text(json.dumps({"rows": [row]}))


def _table(rows: Any) -> str:
    """Device times where the step was captured, else those of calls from the host (in brackets)."""
    lines = []
    for row in rows:
        lines.append(f"{row['model']} {row['step']} ({row['policy']}{', ' if row['mode'] else ''}{row['mode']})")
        for way, times in row["times"].items():
            told = row["fused"].get(way, {})
            sites = f"{told['sites']} sites, deepest {told['deepest']}" if told else ""
            device = f"{times['graph_ms']:9.3f} ms" if "graph_ms" in times else " " * 12
            host = f"({times['ms']:.3f} ms called, {times['host_ms']:.3f} of the host)" if "ms" in times else ""
            errors = " ".join(f"{k} {v:.1e}" for k, v in row["errors"].get(way, {}).items())
            kept = row["saved"].get(way)
            saved = f"keeps {kept['mb']} MB, {kept['masks']} masks" if kept else ""
            host += f" ({times['graph_host_ms']:.3f} of a replay)" if "graph_host_ms" in times else ""
            parts = [device, host, sites, errors, saved, times.get("failed", "")]
            lines.append(f"  {way:26}{' '.join(filter(None, parts))}".rstrip())
            lines += [f"      {n}× {fusion}" for fusion, n in told.get("fusions", {}).items()]
            lines += [f"      refused: {t}" for t in told.get("refused", ())]
    return "\n".join(lines)


class Turn:
    """The GPU to oneself: one process is timed at a time, and the others of a run are stopped meanwhile, whatever they
    are at."""

    def __init__(self) -> None:
        base = os.environ.get("WHOLE_MODELS_TURN", "")
        self.lock = open(f"{base}.lock" if base else os.devnull, "w")  # noqa: SIM115 - held until the end
        self.others = Path(f"{base}.processes") if base else Path(os.devnull)
        fcntl.flock(self.lock, fcntl.LOCK_SH)  # who begins waits for whom it could disturb
        with open(self.others, "a") as known:
            known.write(f"{os.getpid()}\n")
        fcntl.flock(self.lock, fcntl.LOCK_UN)

    def __enter__(self) -> Turn:
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self._all(signal.SIGSTOP)
        time.sleep(0.3)  # what they have launched ends
        return self

    def __exit__(self, *_: object) -> None:
        self._all(signal.SIGCONT)
        self.lock.close()

    def _all(self, what: signal.Signals) -> None:
        for pid in map(int, self.others.read_text().split()):
            if pid != os.getpid() and _runs_us(pid):
                os.kill(pid, what)


def _runs_us(pid: int) -> bool:
    """Whether there is such a process still, and it is one of a run."""
    try:
        return b"whole_models" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
