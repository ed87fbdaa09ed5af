"""How fusions measured against the executors of the rest: ``measured/<architecture>.json`` in a plugin's package,
written by ``fusionreg bench --ship``, read by the planner. Floor 7.

A row holds the medians of one workload: our kernel's and the competitors'. It counts for problems like its own, and as
long as the kernel is the one that was measured. What was measured on this machine is kept in its cache and comes first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from math import inf, log
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from ..cache import Cache, cache_key
from ..errors import FusionregError, ModelError
from ..frozen import EMPTY, FrozenDict
from ..planner.costs import Gain
from ..planner.executor import Executor
from ..spec import Record
from .results import Results
from .shipped import kernel_digest
from .subject import Subject

if TYPE_CHECKING:
    from ..matcher.match import Match
    from ..registry.catalog import Catalog
    from ..registry.entries import FusionEntry, KernelEntry

FOLDER = "measured"
#: Kind of cache entries, and the version of what they mean.
KIND, VERSION = "measured", "1"
#: A measurement tells of problems of up to so many times its bytes, and of no less than their inverse share.
NEAR = 4.0
#: Of so many times its bytes or as few, it leaves nothing to other measurements.
SURE = 1.2
#: Dtypes of one width that the same units multiply: what was measured of one tells of the other.
ALIKE = {"bfloat16": "float16"}
#: Facts of a run that rows keep.
FACTS = ("gpu", "driver", "torch", "compile", "date")


class GainRow(Record):
    """One workload, measured."""

    fusion: str
    workload: str
    kernel: str
    """Name of the kernel that dispatch picks."""
    digest: str
    """Of that kernel; see ``shipped.kernel_digest``."""
    dtypes: FrozenDict[str, str]
    choices: FrozenDict[str, str]
    bytes: int
    """Of all inputs and outputs."""
    axes: FrozenDict[str, int] = EMPTY
    """Extent of every axis, where it is of a site of a model."""
    batch: tuple[int, ...] = ()
    """The leading ones."""
    absent: tuple[str, ...] | None = None
    """Inputs that were left out; None where nobody told."""
    ms: float
    """Our median."""
    peers: FrozenDict[str, float]
    """Competitor → its median."""
    facts: FrozenDict[str, str]
    """Where and when."""


class Gains(Record):
    """All rows of one plugin for one architecture."""

    format: Literal["fusionreg-measured/1"] = "fusionreg-measured/1"
    target: str
    rows: tuple[GainRow, ...] = ()


def path_of(root: Path, target: str) -> Path:
    """The file of a plugin for an architecture."""
    return root / FOLDER / f"{target}.json"


def read(path: Path) -> Gains | None:
    """The rows of a file; None where there is none. :class:`ModelError` for a file that is something else."""
    try:
        return Gains.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as e:
        first = e.errors()[0] if isinstance(e, ValidationError) else None
        said = f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}" if first else str(e)
        raise ModelError("cannot read times", str(path), said, "a file of `fusionreg bench --ship`") from None


def ship(results: Results, outdated: Collection[tuple[str, str]], catalog: Catalog) -> tuple[Path, ...]:
    """Writes the rows of ``results`` into the packages of the plugins that the kernels are of; the files.

    Rows of the same workloads are replaced, others of kernels that changed since go, and a file without rows goes,
    too. What is ``outdated`` (fusion, workload), was not measured, or has no competitor, is left out.
    :class:`OSError` where a package cannot be written to.
    """
    files: dict[Path, list[GainRow]] = {}
    for kernel, target, row in _rows(results, outdated, catalog):
        files.setdefault(path_of(kernel.root, target), []).append(row)
    for path in _files(catalog):
        files.setdefault(path, [])
    return tuple(path for path, rows in files.items() if _write(path, rows, catalog))


def _files(catalog: Catalog) -> Iterator[Path]:
    """What plugins ship now."""
    for root in sorted({k.root for e in catalog.entries() for k in e.kernels}):
        yield from sorted((root / FOLDER).glob("*.json"))


def keep(results: Results, outdated: Collection[tuple[str, str]], catalog: Catalog, cache: Cache) -> None:
    """The same into the cache of this machine."""
    found: dict[str, list[GainRow]] = {}
    for _, target, row in _rows(results, outdated, catalog):
        found.setdefault(target, []).append(row)
    for target, rows in found.items():
        keep_rows(target, rows, catalog, cache)


def keep_rows(target: str, rows: Iterable[GainRow], catalog: Catalog, cache: Cache) -> None:
    """Rows of an architecture into the cache of this machine."""
    made = _merged(target, _kept(cache, target), rows, catalog)
    cache.put(KIND, _key(target), made.model_dump_json().encode())


def _kept(cache: Cache, target: str) -> tuple[GainRow, ...]:
    data = cache.get(KIND, _key(target))
    try:
        return () if data is None else Gains.model_validate_json(data).rows
    except ValidationError:  # of another version
        return ()


def _key(target: str) -> str:
    return cache_key({"version": VERSION, "target": target})


def _rows(
    results: Results, outdated: Collection[tuple[str, str]], catalog: Catalog
) -> Iterator[tuple[KernelEntry, str, GainRow]]:
    for result in results.rows:
        entry = catalog.get(result.fusion)
        if result.key in outdated or entry is None or result.ours_ms is None or result.status != "measured":
            continue
        run = results.runs[result.run]
        target = run.environment.get("target", "")
        workload = next((w for w in entry.spec.workloads if w.name == result.workload), None)
        peers = {c.name: c.time.median for c in result.columns if c.time and not c.ours and not c.computes}
        if workload is None or not peers:
            continue
        try:
            subject = Subject.of(entry, workload, target, catalog.ops)
        except FusionregError:
            continue
        ours = {c.name: c.time.median for c in result.columns if c.time and c.ours}
        now = subject.chosen.kernel.name if subject.chosen is not None else ""
        kernel = next((k for k in entry.kernels if k.name == (now if now in ours else result.chosen)), None)
        if kernel is None:
            continue
        problem, facts = subject.problem, {**run.environment, "date": run.date}
        yield kernel, target, GainRow(
            fusion=result.fusion, workload=result.workload, kernel=kernel.name, digest=kernel_digest(kernel),
            dtypes=problem.dtypes, choices=problem.choices, bytes=result.read + result.written,
            absent=tuple(n for n in entry.inputs if n in workload.absent), ms=ours[kernel.name],
            peers=FrozenDict(peers), facts=FrozenDict({k: facts[k] for k in FACTS if k in facts}),
        )  # fmt: skip


def _write(path: Path, rows: Iterable[GainRow], catalog: Catalog) -> bool:
    """Whether there is such a file afterwards."""
    before = read(path)
    made = _merged(path.stem, before.rows if before is not None else (), rows, catalog)
    if not made.rows:
        path.unlink(missing_ok=True)
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(made.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return True


def _merged(target: str, before: Iterable[GainRow], rows: Iterable[GainRow], catalog: Catalog) -> Gains:
    """Rows in place of those of the same workloads, with times of competitors that were left out this time; of the
    others those whose kernels have not changed."""
    known = {(r.fusion, r.workload): r for r in before}
    kept = [r for r in known.values() if _holds(r, catalog.get(r.fusion), kernel_digest)]
    every = {(r.fusion, r.workload): r for r in kept}
    every |= {key: _with_peers(r, known.get(key)) for r in rows for key in [(r.fusion, r.workload)]}
    return Gains(target=target, rows=tuple(every[key] for key in sorted(every)))


def _with_peers(row: GainRow, before: GainRow | None) -> GainRow:
    """A row with what an older one has of other competitors, which do not know our kernels: of the same problem, in the
    same surroundings. One without any stays so: it cannot be measured."""
    if before is None or not row.peers or any(before.facts.get(k) != row.facts.get(k) for k in FACTS if k != "date"):
        return row
    if any(getattr(before, k) != getattr(row, k) for k in ("dtypes", "choices", "bytes", "axes", "batch", "absent")):
        return row
    return row.model_copy(update={"peers": before.peers | row.peers})


def _holds(row: GainRow, entry: FusionEntry | None, digest: Callable[[KernelEntry], str]) -> bool:
    """Whether the kernel of a row is still the one that was measured."""
    kernel = next((k for k in entry.kernels if k.name == row.kernel), None) if entry is not None else None
    return kernel is not None and digest(kernel) == row.digest


class MeasuredGains:
    """(match, executor, bytes) → how the like of it measured against that executor; asked by the planner.

    Like is: the same fusion (of a derived one, that which it was derived from), choices and kernel, dtypes that are the
    same or :data:`ALIKE`, no input left out that the row has, and at most :data:`NEAR` times as many bytes or as few,
    or any number where an extent is symbolic; the nearest of those. Attributes, dtypes that vectors alone have, and the
    order of axes in memory do not count, but what kernel would run does. What was measured at a site of a model counts
    for its very extents and inputs alone, and before all others.

    Args:
        catalog: the loaded fusions.
        kernel: match → name of the kernel that dispatch would pick, "" for none.
        target: the architecture that times are of.
        cache: of this machine; None for what plugins ship alone.
    """

    def __init__(
        self, catalog: Catalog, kernel: Callable[[Match], str], target: str, cache: Cache | None = None
    ) -> None:
        self._catalog, self._kernel, self._target, self._cache = catalog, kernel, target, cache
        self._files: dict[Path, tuple[GainRow, ...]] = {}
        self._rows: dict[str, tuple[GainRow, ...]] = {}

    def __call__(
        self, match: Match, executor: Executor, size: int, kernel: Callable[[Match], str] | None = None
    ) -> Gain | None:
        """``kernel``: in place of this object's, as for the length of a plan, in which matches repeat."""
        if size <= 0:
            return None
        name = match.base or match.fusion
        wide = self._wide(name)
        known = all(isinstance(d, int) for d in (*match.axes.values(), *match.leading))
        near = log(NEAR) if known else inf
        rows = [
            (not r.axes, r.dtypes != match.dtypes, abs(log(size / r.bytes)), r.workload, column, r)
            for r in self._of(name)
            if all(_kind(r.dtypes.get(v)) == _kind(match.dtypes.get(v)) for v in wide)
            and all(match.choices.get(k, v) == v for k, v in r.choices.items())
            and (column := next((c for c in executor.columns if r.peers.get(c)), ""))
            and r.bytes > 0
            and (self._same(r, match) if r.axes else self._like(r, match) and abs(log(size / r.bytes)) <= near)
        ]
        if not rows:
            return None
        runs = (kernel or self._kernel)(match)
        found = min((r for r in rows if r[-1].kernel == runs), default=None)
        if found is None:
            return None
        _, _, far, _, column, row = found
        ratio = row.ms / row.peers[column]
        source = f"{row.fusion}/{row.kernel} on {row.workload}: {ratio:.2f}× {column}"
        sure = bool(row.axes) or (known and far <= log(SURE) and not match.base)
        return Gain(ratio, source, row.kernel, sure)

    def _same(self, row: GainRow, match: Match) -> bool:
        """Whether a row is of the very extents, and of the same inputs."""
        if row.absent is not None and row.absent != absent(self._catalog[row.fusion], match):
            return False
        return row.batch == match.leading and all(match.axes.get(k) == v for k, v in row.axes.items())

    def _like(self, row: GainRow, match: Match) -> bool:
        """Whether the match leaves nothing out that was there, and took its time, when the row was measured."""
        return row.absent is None or set(absent(self._catalog[row.fusion], match)) <= set(row.absent)

    def knows(self, match: Match, workload: str) -> bool:
        """Whether there is a row of that workload for a match: one of this machine, or a shipped one of the kernel that
        dispatch would pick."""
        rows = [r for r in self._of(match.base or match.fusion) if r.workload == workload]
        return any(r in self._local for r in rows) or any(r.kernel == self._kernel(match) for r in rows)

    def _wide(self, fusion: str) -> frozenset[str]:
        """The dtype variables of a fusion's tensors that are more than vectors; all of them where none are."""
        entry = self._catalog.get(fusion)
        types = tuple(entry.tensors.values()) if entry is not None else ()
        return frozenset(t.dtype for t in types if any(f.leading or len(f.axes) > 1 for f in t.forms)) or frozenset(
            t.dtype for t in types
        )

    def _of(self, fusion: str) -> tuple[GainRow, ...]:
        if fusion not in self._rows:
            entry = self._catalog.get(fusion)
            found = () if entry is None else tuple(self._holding(entry))
            self._rows[fusion] = found
        return self._rows[fusion]

    def _holding(self, entry: FusionEntry) -> Iterator[GainRow]:
        found: dict[str, GainRow] = {}
        shipped = [self._shipped(path_of(root, self._target)) for root in dict.fromkeys(k.root for k in entry.kernels)]
        for rows in (*shipped, self._local):
            mine = (r for r in rows if r.fusion == entry.spec.name)
            found |= {r.workload: r for r in mine if _holds(r, entry, kernel_digest)}
        yield from found.values()

    @cached_property
    def _local(self) -> tuple[GainRow, ...]:
        return _kept(self._cache, self._target) if self._cache is not None else ()

    def _shipped(self, path: Path) -> tuple[GainRow, ...]:
        if path not in self._files:
            try:
                known = read(path)
            except ModelError:  # a damaged file costs an estimate alone; doctor tells
                known = None
            self._files[path] = known.rows if known is not None else ()
        return self._files[path]


def _kind(dtype: str | None) -> str | None:
    """What a dtype counts as."""
    return dtype if dtype is None else ALIKE.get(dtype, dtype)


def absent(entry: FusionEntry, match: Match) -> tuple[str, ...]:
    """Optional inputs of a fusion that a match leaves out."""
    return tuple(n for n in entry.inputs if n in entry.optional and n not in match.inputs)


def stale(catalog: Catalog) -> tuple[int, list[str]]:
    """(rows that hold, what is wrong with each other one) over all files of all plugins."""
    good, wrong = 0, list[str]()
    for path in _files(catalog):
        try:
            found = read(path)
        except ModelError as e:
            wrong.append(str(e))
            continue
        for row in found.rows if found is not None else ():
            if _holds(row, catalog.get(row.fusion), kernel_digest):
                good += 1
            else:
                wrong.append(f"{row.fusion}/{row.kernel} on {row.workload} for {path.stem}: another kernel")
    return good, wrong
