"""What workers do, and how it becomes one report, one file of results, or one set of parameters.

A worker loads the plugins that are installed where it runs. Kernels are proven there as they are there: evidence is
refused where that is not what is installed here, or where workers differ among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fusionreg import benching
from fusionreg.core.bench import Outcome, Preparation, Results, current, gains
from fusionreg.core.bench.results import PEERS, file_name, read
from fusionreg.core.bench.subject import Subject, workloads
from fusionreg.core.bench.tuned import ShippedParameters, TunedParameters, key_of, tuning_environment
from fusionreg.core.bench.tuning import Tuned, keep
from fusionreg.core.bench.tuning import ship as ship_parameters
from fusionreg.core.cache import Cache
from fusionreg.core.conformance.cases import Extent
from fusionreg.core.conformance.runner import Progress
from fusionreg.core.errors import ArgumentError, FusionregError, ModelError, UnknownNameError
from fusionreg.core.proof import evidence as proofs
from fusionreg.core.proof.prove import chosen_kernels, prove
from fusionreg.core.proof.report import Evaluation, Report, Status
from fusionreg.core.registry.catalog import Catalog, load

from .workers import Lost, Workers

if TYPE_CHECKING:
    from fusionreg.core.registry.entries import FusionEntry, KernelEntry

#: Facts of a run in which workers may not differ where their results become one piece of evidence.
SAME = ("device", "gpu", "driver", "nvrtc", "target")
#: Workloads that a worker takes at a time.
AT_ONCE = 8
#: What all cases of a kernel are taken to need where no kernel of its fusion has evidence.
SECONDS = 10.0

_catalog = cache(load)


def proof(fusion: str, kernel: str, device: str, cases: Extent, part: tuple[int, int]) -> tuple[Report, str]:
    """On a worker: every ``part[1]``-th case of one kernel from number ``part[0]`` on; with the first part of what may
    become evidence, the kernel's digest."""
    catalog = _catalog()
    entry = catalog[fusion]
    report = prove(catalog, (fusion,), device=device, cases=cases, kernels=(f"{fusion}/{kernel}",), part=part)
    own = tuple(e for e in report.evaluations if e.fusion == fusion)
    return replace(report, evaluations=own), _digest(entry, kernel) if part[0] == 0 and cases == "all" else ""


def _digest(entry: Any, kernel: str) -> str:
    try:
        return proofs.digest(entry, entry.kernel(kernel))
    except FusionregError:  # it does not render: the report says so
        return ""


def run(
    on: Workers,
    names: Sequence[str] = (),
    *,
    device: str = "auto",
    cases: Extent = "quick",
    kernels: Sequence[str] | None = None,
    progress: Progress | None = None,
    evidence: Path | None = None,
) -> Report:
    """As :func:`fusionreg.core.proof.prove.prove`, kernels and parts of their cases spread over workers.

    What took longest when evidence was last written begins first. Evidence of a kernel is written as soon as all of its
    parts have come. A part whose workers died is an evaluation that failed. Raises :class:`ArgumentError` where workers
    differ in what evidence names, or have other kernels than are installed here.
    """
    catalog = load()
    chosen = chosen_kernels(catalog, names, kernels)
    seconds = [_seconds(e, k) for e, k in chosen]
    parts = [ceil(s * 2 * on.count / sum(seconds)) for s in seconds]
    items = [(e.name, k.name, device, cases, (i, n)) for (e, k), n in zip(chosen, parts, strict=True) for i in range(n)]
    expected = [s / n for s, n in zip(seconds, parts, strict=True) for _ in range(n)]
    order = sorted(range(len(items)), key=lambda i: -expected[i])
    found: dict[int, Report] = {}
    whole: dict[str, list[Report]] = {}
    digests: dict[str, str] = {}
    facts: dict[str, Any] = {}
    for ended, made in on.map(proof, [items[i] for i in order]):
        index = order[ended]
        name, kernel, *_, (i, n) = items[index]
        key = f"{name}/{kernel}"
        if isinstance(made, Lost):
            lost = Evaluation(name, kernel, f"part {i + 1} of {n}", "", Status.RUNTIME_ERROR, reason=made.reason)
            made = Report((lost,)), ""
        else:
            _same(facts, made[0].environment, key)
            if evidence is not None and i == 0 and not on.here and made[1] != _digest(catalog[name], kernel):
                raise ArgumentError(
                    "cannot write evidence", f"of {key}", "a worker has another version of it than is here",
                    "the same plugins everywhere",
                )  # fmt: skip
        found[index] = made[0]
        whole.setdefault(key, []).append(made[0])
        digests[key] = made[1] or digests.get(key, "")
        if evidence is not None and len(whole[key]) == n:
            proofs.write(evidence, proofs.collect(_joined(whole[key]), [catalog[name]], digests))
        if progress is not None and made[0].evaluations:
            progress(len(found), len(items), made[0].evaluations[-1])
    return _joined([found[i] for i in sorted(found)])


def _seconds(entry: FusionEntry, kernel: KernelEntry) -> float:
    """How long all cases of a kernel took when its evidence was written, or else the slowest beside it."""
    held = proofs.held(entry)
    rows = held[kernel.name] or [row for rows in held.values() for row in rows]
    return max((row.seconds for row in rows), default=0.0) or SECONDS


def _joined(reports: Sequence[Report]) -> Report:
    environment = next((r.environment for r in reports if "target" in r.environment), reports[0].environment)
    return Report(tuple(e for part in reports for e in part.evaluations), (), environment)


def _same(facts: dict[str, Any], environment: Any, whom: str) -> None:
    for name in SAME:
        here = environment.get(name, "")
        if facts.setdefault(name, here) != here:
            raise ArgumentError(
                "workers differ", f"in their {name}", f"{here!r} where {whom} ran", f"{facts[name]!r} as before"
            )


def measured(fusion: str, workloads: Sequence[str], known: str, options: dict[str, Any]) -> str:
    """On a worker: results of some workloads of one fusion as JSON; ``known``: what the file has, "" for nothing."""
    with TemporaryDirectory() as folder:
        _keep(known, Path(folder))
        outcome = benching.bench((fusion,), only=tuple(workloads), out=Path(folder), **options)
        return outcome.results.model_copy(update={"rows": outcome.rows}).model_dump_json()


def bench(
    on: Workers,
    names: Sequence[str] = (),
    *,
    only: Sequence[str] = (),
    out: Path = benching.FOLDER,
    again: bool = False,
    frozen: bool = False,
    peers: Sequence[str] = PEERS,
    count: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> Outcome:
    """As :func:`fusionreg.benching.bench`, workloads spread over workers, which all have one kind of GPU.

    The file is written as soon as a worker has answered. Workloads whose workers died have no row.
    """
    catalog = load()
    items: list[tuple[str, list[str]]] = _chunks(catalog, names, only)
    options = {"again": again, "frozen": frozen, "peers": tuple(peers), "count": count}
    there = _there(out)
    calls = [(fusion, some, _rows_of(there, fusion, some), options) for fusion, some in items]
    results: Results | None = None
    path = out
    done, lost = [], ""
    for ended, (index, made) in enumerate(on.map(measured, calls), 1):
        if isinstance(made, Lost):
            lost = f"{items[index][0]}: {made.reason}"
            continue
        part = Results.model_validate_json(made)
        if results is None:
            path = out / file_name(part.gpu)
            results = read(path) if path.exists() else Results(gpu=part.gpu)
        if part.gpu != results.gpu:
            raise ArgumentError("workers differ", "in their GPU", repr(part.gpu), repr(results.gpu))
        for row in part.rows:
            results = results.with_row(row, part.runs[row.run])
            done.append(row.key)
        results.write(path)
        if progress is not None:
            progress(ended, len(items), items[index][0])
    if results is None:
        raise FusionregError("cannot measure", "speed", lost, "workers that live")
    tuned = ShippedParameters() if frozen else TunedParameters()
    rows = tuple(r for r in map(results.find, done) if r is not None)
    gains.keep(*current(results.model_copy(update={"rows": rows}), catalog, tuned), catalog, Cache())
    wanted = sum(len(some) for _, some in items)
    return Outcome(results, path, rows, len(done), 0, wanted - len(done), lost)


def prepared(fusion: str, workloads: Sequence[str], known: str, options: dict[str, Any]) -> Preparation:
    """On a worker: some workloads of one fusion; arguments as for :func:`measured`."""
    with TemporaryDirectory() as folder:
        _keep(known, Path(folder))
        names = tuple(workloads)
        return benching.prepare((fusion,), only=names, out=Path(folder), catalog=_catalog(), **options)


def prepare(
    on: Workers,
    names: Sequence[str] = (),
    *,
    only: Sequence[str] = (),
    out: Path = benching.FOLDER,
    again: bool = False,
    frozen: bool = False,
    peers: Sequence[str] = PEERS,
    progress: Callable[[int, int, str], None] | None = None,
) -> Preparation:
    """As :func:`fusionreg.benching.prepare`, workloads spread one by one over workers that share their caches."""
    items = [(entry.name, [workload.name]) for entry, workload in workloads(load(), names, only)]
    options = {"again": again, "frozen": frozen, "peers": tuple(peers)}
    there = _there(out)
    done = Preparation()
    for ended, (index, made) in enumerate(
        on.map(prepared, [(fusion, some, _rows_of(there, fusion, some), options) for fusion, some in items]), 1
    ):
        name = " ".join((items[index][0], *items[index][1]))
        done += Preparation(left=1, remarks=(f"{name}: {made.reason}",)) if isinstance(made, Lost) else made
        if progress is not None:
            progress(ended, len(items), name)
    return done


def _keep(known: str, folder: Path) -> None:
    """Rows as JSON, "" for none, as the file of a folder."""
    if known:
        there = Results.model_validate_json(known)
        there.write(folder / file_name(there.gpu))


def _there(folder: Path) -> list[Results]:
    """The files of results in a folder; others may lie beside them."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with suppress(ModelError):
            found.append(read(path))
    return found


def _rows_of(files: Sequence[Results], fusion: str, workloads: Sequence[str]) -> str:
    """What a file has of these workloads, as JSON; "" where none has any, or several of different GPUs have."""
    rows = [tuple(r for r in f.rows if r.fusion == fusion and r.workload in workloads) for f in files]
    found = [f.model_copy(update={"rows": some}) for f, some in zip(files, rows, strict=True) if some]
    return found[0].model_dump_json() if len(found) == 1 else ""


def _chunks(catalog: Catalog, names: Sequence[str], only: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(fusion, some of its workloads), for one worker each."""
    wanted: dict[str, list[str]] = {}
    for entry, workload in workloads(catalog, names, only):
        wanted.setdefault(entry.name, []).append(workload.name)
    return [(f, w[i : i + AT_ONCE]) for f, w in wanted.items() for i in range(0, len(w), AT_ONCE)]


def searched(fusion: str, workloads: Sequence[str], again: bool) -> tuple[dict[str, Any], list[Tuned]]:
    """On a worker: the device, and what tuning found, without what cannot be sent."""
    found = benching.tune((fusion,), only=tuple(workloads), again=again)
    return benching.device_facts(), [replace(t, subject=None, entry=None) for t in found]


def tune(
    on: Workers,
    names: Sequence[str] = (),
    *,
    only: Sequence[str] = (),
    again: bool = False,
    ship: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Tuned, ...]:
    """As :func:`fusionreg.benching.tune`, workloads spread over workers; this machine keeps what they found, too."""
    catalog, cache = load(), Cache()
    items = _chunks(catalog, names, only)
    found: list[Tuned] = []
    environment: dict[str, str] = {}
    for ended, (index, made) in enumerate(on.map(searched, [(f, some, again) for f, some in items]), 1):
        fusion, some = items[index]
        if isinstance(made, Lost):
            found += [Tuned(fusion, workload, reason=made.reason) for workload in some]
            continue
        device, rows = made
        environment = device["environment"]
        for tuned in (_made_concrete(row, catalog, device) for row in rows):
            if tuned.subject is not None and tuned.entry is not None:
                facts = tuning_environment(environment)
                keep(tuned, key_of(tuned.subject.entry, tuned.entry, tuned.subject.problem, facts), cache, facts)
            found.append(tuned)
        if progress is not None:
            progress(ended, len(items), fusion)
    if ship:
        ship_parameters(found, catalog, environment)
    return tuple(found)


def _made_concrete(tuned: Tuned, catalog: Catalog, device: dict[str, Any]) -> Tuned:
    """With the workload and the kernel as they are here, which no worker can send."""
    if tuned.ms is None:
        return tuned
    fusion, _, kernel = tuned.kernel.rpartition("/")
    entry = catalog[fusion]
    workload = next((w for w in entry.spec.workloads if w.name == tuned.workload), None)
    if workload is None:
        raise UnknownNameError.among("workload", tuned.workload, [w.name for w in entry.spec.workloads])
    subject = Subject.of(entry, workload, device["target"], catalog.ops, None, device["multiprocessors"])
    return replace(tuned, subject=subject, entry=entry.kernel(kernel))
