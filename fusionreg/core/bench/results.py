"""A file of results: one row per workload, the run each was measured in, and nothing that nobody measured. Floor 7."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ..errors import ModelError
from ..frozen import FrozenDict
from ..spec import Record
from .floors import Ceilings
from .statistics import Spread

#: Competitors that are not ours, in the order in which tables show them.
PEERS = ("eager", "compile", "product", "epilogue", "cudnn", "flash", "liger", "quack")


class Run(Record):
    """One run: where, when, and the ceilings measured in it."""

    date: str
    """UTC, to the second."""
    environment: FrozenDict[str, str]
    """GPU, driver, versions, and the settings that change figures."""
    ceilings: Ceilings
    """Rates measured before its first row."""


class Column(Record):
    """One competitor on one workload."""

    name: str
    """Our kernel's name, or ``eager``, ``compile``, ``product``, ``epilogue``, ``cudnn``, ``flash``, ``liger``,
    ``quack``."""
    ours: bool = False
    """Whether it is a kernel of the registry."""
    computes: str = ""
    """What it computes where that is not the workload itself."""
    note: str = ""
    """What else to know: that it is pending, or draws a mask of its own."""
    digest: str = ""
    """Of what the figure of one of our kernels depends on; see ``Subject.kernel_digest``."""
    time: Spread | None = None
    """None where it was not timed."""
    error: float | None = None
    """Its distance from float64, relative (‖got − exact‖ / ‖exact‖)."""
    reason: str = ""
    """Why it was not timed."""


class Result(Record):
    """One workload, measured or refused."""

    fusion: str
    workload: str
    row: str = ""
    mode: Literal["b", "g"]
    problem: str
    """Tensors and attributes in words."""
    digest: str
    """Of all that the row depends on; see ``Subject.digest``. It is measured anew where that has changed."""
    run: int
    """Index of the run it was measured in."""
    status: Literal["measured", "differs", "failed"]
    """``differs``: the kernel that dispatch picks gave other numbers than float64, so nothing was timed."""
    reason: str = ""
    """Why not, where it was not measured."""
    read: int
    """Bytes of all inputs."""
    written: int
    """Bytes of all outputs."""
    flops: int
    """Operations."""
    floor_ms: float
    """Least time by the run's ceilings."""
    bound: Literal["memory", "matmul"]
    """Which ceiling that is."""
    chosen: str = ""
    """The kernel that dispatch picks; where all that accept the problem are pending, the one it would pick. Empty where
    none accepts it."""
    columns: tuple[Column, ...] = ()
    """All competitors, ours first."""
    elements: int = 0
    """Elements of the largest tensor."""
    instructions: int | None = None
    """Instructions that the warps of one launch of ``chosen`` execute; None where nobody counted."""
    counted_by: Literal["", "ncu", "code"] = ""
    """``ncu``: as the device counted; ``code``: all instructions of code without loops, so at most."""
    issue_ms: float | None = None
    """Least time to issue them, by the run's ceilings: no launch of this kernel is faster, however few its bytes."""
    goal: str = ""
    """The workload's goal, as its spec writes it."""
    goal_ms: float | None = None
    """Its value; None where it needs a competitor that was not timed."""
    peer: str = ""
    """The torch code that eager and torch.compile ran."""
    peers: tuple[str, ...] = PEERS
    """Competitors that were asked for; a library that is not installed, or has no such function, has no column."""

    @property
    def key(self) -> tuple[str, str]:
        return self.fusion, self.workload

    def ms(self, name: str) -> float | None:
        """Median of a column; None when it has none."""
        return next((c.time.median for c in self.columns if c.name == name and c.time), None)

    @property
    def ours_ms(self) -> float | None:
        """Median of the kernel that dispatch picks."""
        return self.ms(self.chosen) if self.chosen else None

    @property
    def per_element(self) -> float | None:
        """Instructions of a lane for each element."""
        return 32 * self.instructions / self.elements if self.instructions and self.elements else None

    @property
    def issue_binds(self) -> bool:
        """Whether the kernel's instructions take longer to issue than the floor."""
        return self.issue_ms is not None and self.issue_ms > self.floor_ms

    @property
    def best(self) -> Column | None:
        """The fastest timed competitor that is not ours and computes the same."""
        return min(
            (c for c in self.columns if c.time and not c.ours and not c.computes),
            key=lambda c: c.time.median if c.time else 0.0,
            default=None,
        )

    @property
    def of_floor(self) -> float | None:
        """Floor over our time: 1.0 is the speed of light."""
        return self.floor_ms / self.ours_ms if self.ours_ms else None

    @property
    def to_best(self) -> float | None:
        """Our time over the best competitor's: below 1.0 we are faster."""
        best = self.best
        return self.ours_ms / best.time.median if self.ours_ms and best and best.time else None

    @property
    def to_goal(self) -> float | None:
        """Our time over the goal: at most 1.0 meets it."""
        return self.ours_ms / self.goal_ms if self.ours_ms and self.goal_ms else None


class Results(Record):
    """All rows of one GPU."""

    format: Literal["fusionreg-bench/1"] = "fusionreg-bench/1"
    """Version of this file."""
    gpu: str
    """Its name, as the driver tells it."""
    runs: tuple[Run, ...] = ()
    """Those that rows refer to."""
    rows: tuple[Result, ...] = ()
    """By fusion and workload, in the order in which they were first measured."""

    def find(self, key: tuple[str, str]) -> Result | None:
        """The row of (fusion, workload)."""
        return next((r for r in self.rows if r.key == key), None)

    def with_row(self, row: Result, run: Run) -> Results:
        """A copy in which ``row``, measured in ``run``, stands for its workload; runs without a row are dropped."""
        rows = {r.key: (r, self.runs[r.run]) for r in self.rows}
        rows[row.key] = (row, run)
        runs = tuple(dict.fromkeys(used for _, used in rows.values()))
        made = tuple(r.model_copy(update={"run": runs.index(used)}) for r, used in rows.values())
        return self.model_copy(update={"runs": runs, "rows": made})

    def write(self, path: Path) -> None:
        """Writes the file in one step: a reader, or the next run, sees the old rows or the new ones."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def read(path: Path) -> Results:
    """The results in a file; :class:`ModelError` when it is none."""
    try:
        found = Results.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as e:
        first = e.errors()[0] if isinstance(e, ValidationError) else None
        said = f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}" if first else str(e)
        raise ModelError("cannot read results", str(path), said, "a file of `fusionreg bench`") from None
    wrong = [r.key for r in found.rows if not 0 <= r.run < len(found.runs)]
    if wrong:
        raise ModelError(
            "cannot read results", str(path), f"row {wrong[0]} names no run", "a file of `fusionreg bench`"
        )
    return found


def file_name(gpu: str) -> str:
    """The file of a GPU's results: ``NVIDIA H200`` → ``nvidia-h200.json``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"
