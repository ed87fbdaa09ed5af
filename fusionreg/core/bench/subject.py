"""A workload made concrete: the trial, its problem, the reference graph, and the digest of a measurement. Floor 7."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from itertools import product
from typing import TYPE_CHECKING, Any

from ..conformance.coverage import problem_of
from ..conformance.reference import graph_of
from ..conformance.trial import Trial
from ..errors import FusionregError, SpecError, UnknownNameError
from ..frozen import EMPTY, FrozenDict
from ..ir import Graph
from ..ops import Vocabulary
from ..problem import Candidate, Problem, Selection, select
from ..proof.evidence import stripped
from ..render import render
from ..spec import Workload
from ..validate.fusion import form_index
from .floors import Traffic

if TYPE_CHECKING:
    from ..registry.catalog import Catalog
    from ..registry.entries import FusionEntry
    from .results import Results

Tuning = Callable[["FusionEntry", Problem], Mapping[str, Mapping[str, Any]]]

#: Part of every digest: raise it when a change of the method makes older figures mean something else.
VERSION = 2


@dataclass(frozen=True, eq=False)
class Subject:
    """One workload of one fusion on one architecture.

    Attributes:
        entry, workload: what is measured.
        trial: one call of it, on contiguous tensors.
        problem: the same as kernels see it.
        graph: what the fusion's first spelling stands for here.
        traffic: bytes and operations it needs at least.
        selection: the kernels that accept it, as dispatch orders them.
        ops: the vocabulary.
    """

    entry: FusionEntry
    workload: Workload
    trial: Trial
    problem: Problem
    graph: Graph
    traffic: Traffic
    selection: Selection
    ops: Vocabulary = field(repr=False)

    @classmethod
    def of(
        cls,
        entry: FusionEntry,
        workload: Workload,
        target: str,
        ops: Vocabulary,
        tuned: Tuning | None = None,
        multiprocessors: int | None = None,
    ) -> Subject:
        """:class:`SpecError` when the fusion's contract admits no such problem. ``tuned``: as the runtime has it;
        ``multiprocessors``: as for ``problem.bind``."""
        trial, problem = _fitting(entry, workload, target, multiprocessors)
        graph = graph_of(entry, trial, ops)
        parameters = EMPTY if tuned is None else tuned(entry, problem)
        selection = select(entry, problem, pending=True, tuned=parameters)
        return cls(entry, workload, trial, problem, graph, Traffic.of(problem, graph, ops), selection, ops)

    @property
    def key(self) -> tuple[str, str]:
        """(fusion, workload): unique in a file of results."""
        return self.entry.name, self.workload.name

    @property
    def chosen(self) -> Candidate | None:
        """What dispatch picks; where all that accept the problem are pending, what it would pick."""
        accepted = self.selection.accepted
        return next((c for c in accepted if not c.kernel.spec.pending), accepted[0] if accepted else None)

    def digest(self, environment: Mapping[str, str]) -> str:
        """SHA-256 over all that the figures depend on: the workload, the kernels that accept it as rendered and
        launched, and where they run."""
        parts: list[Any] = [VERSION, self.workload.model_dump(mode="json"), list(self.entry.spec.pattern)]
        for c in self.selection.accepted:
            try:
                source = render(self.entry, c.kernel, self.problem, c.params)
                unit = f"{stripped(source.text)} {source.options}"
            except FusionregError as e:
                unit = str(e)
            parts.append([c.kernel.key, dict(c.params), asdict(c.launch), c.kernel.spec.pending, unit])
        parts.append(sorted(environment.items()))
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _fitting(
    entry: FusionEntry, workload: Workload, target: str, multiprocessors: int | None
) -> tuple[Trial, Problem]:
    """The first combination of forms that the fusion admits, named ones as they are named."""
    named = {name: form_index(entry.inputs[name], text) for name, text in workload.forms.items()}
    trial = Trial(
        workload.name,
        FrozenDict(workload.dtypes),
        FrozenDict(workload.axes),
        leading=workload.batch,
        attributes=FrozenDict({k: v for k, v in workload.attributes.items() if k in entry.spec.attributes}),
        choices=FrozenDict({k: v for k, v in workload.attributes.items() if k in entry.choices}),
        absent=workload.absent,
        layouts=FrozenDict(workload.layouts),
    )
    several = {n: range(len(t.forms)) for n, t in entry.inputs.items() if n not in workload.absent and len(t.forms) > 1}
    levels = [(named[n],) if named.get(n) is not None else forms for n, forms in several.items()]
    for forms in product(*levels):
        made = trial.with_(workload.name, forms=dict(zip(several, forms, strict=True)))
        problem = problem_of(entry, made, target, multiprocessors)
        if problem is not None:
            return made, problem
    raise SpecError(
        "unusable workload", f"{workload.name!r} of {entry.name}", f"axes {dict(workload.axes)}",
        "what the fusion's constraints admit", fusion=entry.name, field="workloads",
    )  # fmt: skip


def subjects(
    catalog: Catalog,
    target: str,
    names: Sequence[str] = (),
    only: Sequence[str] = (),
    tuned: Tuning | None = None,
    multiprocessors: int | None = None,
) -> Iterator[Subject]:
    """Every workload of the fusions ``names`` (all by default) whose name or row is like one of ``only``.

    Raises: :class:`UnknownNameError` for an unknown fusion, and where no workload is left.
    """
    entries = catalog.entries(names or sorted(catalog.fusions))
    wanted = [
        (entry, w)
        for entry in entries
        for w in entry.spec.workloads
        if not only or any(fnmatch(w.name, o) or fnmatch(w.row, o) for o in only)
    ]
    if not wanted:
        known = [w.name for entry in entries for w in entry.spec.workloads]
        raise UnknownNameError.among("workload", ", ".join(only or names) or "any", known)
    return (Subject.of(entry, workload, target, catalog.ops, tuned, multiprocessors) for entry, workload in wanted)


def outdated(results: Results, catalog: Catalog, tuned: Tuning | None = None) -> frozenset[tuple[str, str]]:
    """(fusion, workload) of rows that were measured on something else than what is there now: another kernel, launch,
    workload or method. The environment is taken as it was then; no GPU is needed."""
    found = set()
    for row in results.rows:
        facts = results.runs[row.run].environment
        entry = catalog.get(row.fusion)
        workload = next((w for w in entry.spec.workloads if w.name == row.workload), None) if entry else None
        now = ""
        if entry is not None and workload is not None:
            number = int(facts["multiprocessors"]) if "multiprocessors" in facts else None
            with suppress(FusionregError):
                now = Subject.of(entry, workload, facts.get("target", ""), catalog.ops, tuned, number).digest(facts)
        if now != row.digest:
            found.add(row.key)
    return frozenset(found)
