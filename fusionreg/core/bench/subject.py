"""A workload made concrete: the trial, its problem, the reference graph, and the digest of a measurement. Floor 7."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from itertools import product
from typing import TYPE_CHECKING, Any

from ..conformance.coverage import problem_of, tensors_of
from ..conformance.reference import graph_of
from ..conformance.trial import Trial
from ..errors import FusionregError, SpecError, UnknownNameError
from ..frozen import EMPTY, FrozenDict
from ..ir import Graph, Node, Value
from ..ops import Vocabulary
from ..problem import Candidate, Problem, Selection, bind, select
from ..proof.evidence import stripped
from ..render import render
from ..spec import Workload
from ..validate.cases import form_index
from .floors import Traffic

if TYPE_CHECKING:
    from ..registry.catalog import Catalog
    from ..registry.entries import FusionEntry
    from .results import Result, Results

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
        graph: what the fusion's first spelling stands for here, behind the products that the workload names.
        traffic: bytes and operations it needs at least.
        selection: the kernels that accept it, as dispatch orders them.
        ops: the vocabulary.
        asked: how many of its outputs, the first of them, competitors give; 0: all.
    """

    entry: FusionEntry
    workload: Workload
    trial: Trial
    problem: Problem
    graph: Graph
    traffic: Traffic
    selection: Selection
    ops: Vocabulary = field(repr=False)
    asked: int = 0

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
        graph = _with_products(graph_of(entry, trial, ops), workload)
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

    def cold(self) -> Subject:
        """The same, for single launches that find nothing in L2."""
        return replace(self, workload=self.workload.model_copy(update={"mode": "b"}))

    def asking(self, outputs: int) -> Subject:
        """The same where somebody asks for the first ``outputs`` alone; our kernel still gives all."""
        return replace(self, asked=outputs)

    def digest(self, environment: Mapping[str, str]) -> str:
        """SHA-256 over all that the figures depend on: the workload, the kernels that accept it as rendered and
        launched, and where they run."""
        kernels = [[*self._launched(c), c.kernel.spec.pending, self._unit(c)] for c in self.selection.accepted]
        return self._hash(kernels, environment)

    def kernel_digests(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Kernel → the same over it alone: all that *its* figure depends on."""
        accepted = self.selection.accepted
        return {c.kernel.name: self._hash([[*self._launched(c), self._unit(c)]], environment) for c in accepted}

    def _hash(self, kernels: list[Any], environment: Mapping[str, str]) -> str:
        workload = self.workload.model_dump(mode="json")
        for name in ("values", "products"):  # digests from before there were such fields
            if not workload[name]:
                del workload[name]
        parts = [VERSION, workload, list(self.entry.spec.pattern), *kernels]
        parts.append(sorted(environment.items()))
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def _launched(self, c: Candidate) -> list[Any]:
        return [c.kernel.key, dict(c.params), asdict(c.launch)]

    def _unit(self, c: Candidate) -> str:
        """What is compiled; the reason where nothing is."""
        try:
            source = render(self.entry, c.kernel, self.problem, c.params)
        except FusionregError as e:
            return str(e)
        return f"{stripped(source.text)} {source.options}"


def _with_products(graph: Graph, workload: Workload) -> Graph:
    """The graph with the products that a workload names in front of it, their weights as further inputs."""
    for name, text in workload.products.items():
        x, weight = (part.strip() for part in text.split("@"))
        values, y, rows = graph.values, graph.values[name], graph.values[x].shape
        assert y.shape is not None and rows is not None  # a trial has extents
        w = Value(weight, y.dtype, (y.shape[-1], rows[-1]))
        node = Node(f"product_{name}", "MatMul", (x, weight), (name,), attrs=FrozenDict({"transB": 1}))
        inputs = (*(n for n in graph.inputs if n != name), weight)
        graph = replace(graph, inputs=inputs, nodes=(node, *graph.nodes), values=values | {weight: w}).check()
    return graph


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
    try:
        bind(entry, tensors_of(entry, made), made.passed(entry), target, multiprocessors)
    except FusionregError as e:
        whom = f"{workload.name!r} of {entry.name}"
        raise SpecError("unusable workload", whom, e.found, e.expected, fusion=entry.name, field="workloads") from None
    raise AssertionError(f"{entry.name} admits {made} now")


def workloads(
    catalog: Catalog, names: Sequence[str] = (), only: Sequence[str] = ()
) -> list[tuple[FusionEntry, Workload]]:
    """The workloads of the fusions ``names`` (all by default) whose name or row is like one of ``only``, in its order.

    Raises: :class:`UnknownNameError` for an unknown fusion, and where no workload is left.
    """
    entries = catalog.entries(names or sorted(catalog.fusions))
    every = [(entry, w) for entry in entries for w in entry.spec.workloads]
    places = [next((i for i, o in enumerate(only) if fnmatch(w.name, o) or fnmatch(w.row, o)), None) for _, w in every]
    wanted = [every[k] for i in range(len(only)) for k, place in enumerate(places) if place == i] if only else every
    if not wanted:
        known = [w.name for entry in entries for w in entry.spec.workloads]
        raise UnknownNameError.among("workload", ", ".join(only or names) or "any", known)
    return wanted


def subjects(
    catalog: Catalog,
    target: str,
    names: Sequence[str] = (),
    only: Sequence[str] = (),
    tuned: Tuning | None = None,
    multiprocessors: int | None = None,
) -> Iterator[Subject]:
    """Every one of :func:`workloads`, made concrete. Raises as that."""
    wanted = workloads(catalog, names, only)
    return (Subject.of(entry, workload, target, catalog.ops, tuned, multiprocessors) for entry, workload in wanted)


def current(
    results: Results, catalog: Catalog, tuned: Tuning | None = None
) -> tuple[Results, frozenset[tuple[str, str]]]:
    """The results as they hold for what is installed now, and the (fusion, workload) of rows that do not.

    A row has figures of all kernels that took the problem. The one that dispatch picks now stands for us, where it is
    still what was measured: the same kernel, launch, workload and method, in the environment of then. No GPU is needed.
    """
    rows, outdated = [], set()
    for row in results.rows:
        facts = results.runs[row.run].environment
        entry = catalog.get(row.fusion)
        workload = next((w for w in entry.spec.workloads if w.name == row.workload), None) if entry else None
        found: Result | None = None
        if entry is not None and workload is not None:
            number = int(facts["multiprocessors"]) if "multiprocessors" in facts else None
            with suppress(FusionregError):
                subject = Subject.of(entry, workload, facts.get("target", ""), catalog.ops, tuned, number)
                found = _as_chosen(row, subject, facts)
        if found is None:
            outdated.add(row.key)
        rows.append(found or row)
    return results.model_copy(update={"rows": tuple(rows)}), frozenset(outdated)


def _as_chosen(row: Result, subject: Subject, facts: Mapping[str, str]) -> Result | None:
    """The row for the kernel that dispatch picks now; None where its figure is of something else, or not there."""
    if subject.chosen is None:
        return None
    kernel = subject.chosen.kernel
    column = next((c for c in row.columns if c.ours and c.name == kernel.name), None)
    if column is None or not column.digest or column.digest != subject.kernel_digests(facts)[kernel.name]:
        return None
    noted = column.model_copy(update={"note": f"pending: {kernel.spec.pending}" if kernel.spec.pending else ""})
    columns = tuple(noted if c is column else c for c in row.columns)
    changes: dict[str, Any] = {"chosen": kernel.name, "columns": columns}
    if kernel.name != row.chosen:  # instructions were counted of the other
        changes |= {"instructions": None, "counted_by": "", "issue_ms": None}
    return row.model_copy(update=changes)
