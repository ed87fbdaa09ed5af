"""Parameters that plugins ship: ``tuned/<architecture>.json`` in a plugin's package, written by ``fusionreg tune
--ship``. Floor 7.

They hold for every machine of an architecture. A row names the kernel's digest; one that is no longer the kernel's is
stale: it is not used, and ``fusionreg doctor`` tells.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from ..errors import ModelError
from ..expressions import next_pow2
from ..frozen import FrozenDict
from ..problem import Preferences, Problem
from ..proof.evidence import stripped
from ..spec import Record

if TYPE_CHECKING:
    from ..registry.catalog import Catalog
    from ..registry.entries import FusionEntry, KernelEntry

FOLDER = "tuned"
_INCLUDE = re.compile(r"""include\(\s*["']([^"']+)["']\s*\)""")


class ShippedRow(Record):
    """The parameters of one kernel for one class of problems."""

    kernel: str
    """``fusion/kernel``."""
    workload: str
    """The workload they were found on."""
    problems: FrozenDict[str, Any]
    """The class; see :func:`problem_class`."""
    digest: str
    """Of the kernel; see :func:`kernel_digest`."""
    params: FrozenDict[str, Any]
    """The best ones."""
    ms: float
    """Their median, where they were found."""
    default_ms: float | None = None
    """The median of what dispatch took before."""
    gpu: str
    """Where they were found."""
    driver: str
    nvrtc: str


class Shipped(Record):
    """All rows of one plugin for one architecture."""

    format: Literal["fusionreg-tuned/1"] = "fusionreg-tuned/1"
    target: str
    rows: tuple[ShippedRow, ...] = ()


def problem_class(problem: Problem) -> dict[str, Any]:
    """What problems share that are tuned as one: everything but the extents, which count by their next power of two
    and by whether they are multiples of 8."""
    return {
        "fusion": problem.fusion,
        "dtypes": dict(problem.dtypes),
        "attributes": dict(problem.attributes),
        "choices": dict(problem.choices),
        "forms": dict(problem.forms),
        "axes": {name: (next_pow2(extent), gcd(extent, 8)) for name, extent in problem.axes.items()},
        "dense": [None if t is None else (t.is_contiguous, t.alignment >= 16) for t in problem.tensors.values()],
        "target": problem.target,
        "multiprocessors": problem.multiprocessors,
    }


def class_text(problems: Mapping[str, Any]) -> str:
    """A class as one text, equal for equal classes; the machine is left out."""
    kept = {k: v for k, v in problems.items() if k not in ("target", "multiprocessors")}
    return json.dumps(kept, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def kernel_digest(kernel: KernelEntry) -> str:
    """SHA-256 over what the best parameters of a kernel depend on: its template with what that includes of the plugin's
    own, without comments, and the fields of its spec that make the space and the launch."""
    fields = kernel.spec.model_dump(
        mode="json", include={"params", "valid", "constants", "grid", "block", "cluster", "shared_memory",
                              "cooperative", "max_registers", "min_blocks"},
    )  # fmt: skip
    if kernel.spec.tensor_maps:
        fields["tensor_maps"] = [m.model_dump(mode="json") for m in kernel.spec.tensor_maps]
    if kernel.library is not None:
        fields["library"] = kernel.library.digest
    texts, ahead = {}, [kernel.spec.template] if kernel.spec.template else []
    while ahead:
        name = ahead.pop()
        places = (place / n for place in (kernel.root, kernel.root / "templates") for n in (name, f"{name}.j2"))
        path = next((p for p in places if p.is_file()), None)
        if name in texts or path is None:  # of the shared library, which every kernel has
            continue
        texts[name] = path.read_text(encoding="utf-8")
        ahead += _INCLUDE.findall(texts[name])
    parts = [fields, sorted((name, stripped(text)) for name, text in texts.items())]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def path_of(root: Path, target: str) -> Path:
    """The file of a plugin for an architecture."""
    return root / FOLDER / f"{target}.json"


def read(path: Path) -> Shipped | None:
    """The rows of a file; None where there is none. :class:`ModelError` for a file that is something else."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError("cannot read parameters", str(path), str(e), "a file of `fusionreg tune --ship`") from None
    try:
        return Shipped.model_validate_json(text)
    except ValidationError as e:
        said = f"{'.'.join(map(str, e.errors()[0]['loc'])) or 'file'}: {e.errors()[0]['msg']}"
        raise ModelError("cannot read parameters", str(path), said, "a file of `fusionreg tune --ship`") from None


def write(path: Path, target: str, rows: Iterable[ShippedRow], catalog: Catalog) -> Shipped:
    """Adds rows to a file in place of those of the same kernel and class; stale ones go, the rest stays."""
    known = {k.key: k for e in catalog.entries() for k in e.kernels}
    before = read(path)
    kept = [
        r for r in (before.rows if before else ())
        if r.kernel in known and kernel_digest(known[r.kernel]) == r.digest
    ]  # fmt: skip
    every = {(r.kernel, class_text(r.problems)): r for r in (*kept, *rows)}
    made = Shipped(target=target, rows=tuple(every[key] for key in sorted(every)))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(made.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return made


class ShippedParameters:
    """Kernel key → parameters that its plugin ships for problems of this class, and times; asked by the runtime."""

    def __init__(self) -> None:
        self._files: dict[Path, Mapping[tuple[str, str], ShippedRow]] = {}
        self._digests: dict[tuple[Path, str], str] = {}

    def __call__(self, entry: FusionEntry, problem: Problem, device: int = 0) -> Preferences:
        params: dict[str, Mapping[str, Any]] = {}
        seconds: dict[str, float] = {}
        text = ""
        for kernel in entry.kernels:
            rows = self._rows(path_of(kernel.root, problem.target))
            if not rows:
                continue
            text = text or class_text(problem_class(problem))
            row = rows.get((kernel.key, text))
            if row is not None and row.digest == self._digest(kernel):
                params[kernel.key], seconds[kernel.key] = row.params, row.ms * 1e-3
        return Preferences(params, seconds)

    def _rows(self, path: Path) -> Mapping[tuple[str, str], ShippedRow]:
        if path not in self._files:
            try:
                shipped = read(path)
            except ModelError:  # a damaged file costs speed alone; doctor tells
                shipped = None
            rows = shipped.rows if shipped is not None else ()
            self._files[path] = {(r.kernel, class_text(r.problems)): r for r in rows}
        return self._files[path]

    def _digest(self, kernel: KernelEntry) -> str:
        key = kernel.root, kernel.key
        if key not in self._digests:
            self._digests[key] = kernel_digest(kernel)
        return self._digests[key]


def stale(catalog: Catalog) -> tuple[int, list[str]]:
    """(rows that hold, what is wrong with each other one) over all files of all plugins."""
    kernels = {k.key: k for e in catalog.entries() for k in e.kernels}
    good, wrong = 0, []
    for root in sorted({k.root for k in kernels.values()}):
        for path in sorted((root / FOLDER).glob("*.json")):
            try:
                shipped = read(path)
            except ModelError as e:
                wrong.append(str(e))
                continue
            for row in shipped.rows if shipped is not None else ():
                if row.kernel not in kernels:
                    wrong.append(f"{row.kernel} for {path.stem}: there is no such kernel")
                elif kernel_digest(kernels[row.kernel]) != row.digest:
                    wrong.append(f"{row.kernel} on {row.workload} for {path.stem}: the kernel has changed since")
                else:
                    good += 1
    return good, wrong
