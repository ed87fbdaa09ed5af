"""Which problem a kernel is looked at on, and with which parameters. Floor 7."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..bench import Subject
from ..bench.shipped import ShippedParameters
from ..bench.tuning import TRIED, order
from ..conformance import cases, coverage
from ..errors import ArgumentError, SpecError, UnknownNameError
from ..frozen import EMPTY, FrozenDict
from ..problem import Candidate, combinations
from ..spec import Workload
from ..targets import target

if TYPE_CHECKING:
    from ..ops import Vocabulary
    from ..registry.entries import FusionEntry, KernelEntry


@dataclass(frozen=True)
class Question:
    """A problem as somebody asks for it; what is left open comes from the fusion.

    Attributes:
        workload: pattern of a workload's name or row; "" for the fusion's first one that a kernel takes.
        axes: extents that differ from the workload's, or from those of conformance where there is no workload.
        dtypes: dtype variable → dtype; one under the empty name holds for all of them.
        attributes: attributes and choices.
        target: architecture.
    """

    workload: str = ""
    axes: FrozenDict[str, int] = EMPTY
    dtypes: FrozenDict[str, str] = EMPTY
    attributes: FrozenDict[str, Any] = EMPTY
    target: str = "sm_90a"


def subject(entry: FusionEntry, kernel: KernelEntry | None, question: Question, ops: Vocabulary) -> Subject:
    """The problem that ``question`` means for ``kernel``, or for any kernel of the fusion.

    Raises: :class:`UnknownNameError` for a name that the fusion does not have, :class:`ArgumentError` where the kernel
    takes none of the problems, :class:`SpecError` where the fusion's contract excludes the problem.
    """
    target(question.target)
    refusals = []
    for workload in _workloads(entry, kernel, question):
        try:
            made = Subject.of(entry, workload, question.target, ops, ShippedParameters())
        except SpecError:
            if not workload.forms:
                raise
            other = workload.model_copy(update={"forms": EMPTY})  # other attributes may ask for other forms
            made = Subject.of(entry, other, question.target, ops, ShippedParameters())
        if any(kernel is None or c.kernel is kernel for c in made.selection.accepted):
            return made
        refused = [r for r in made.selection.refused if kernel is None or r.kernel is kernel]
        refusals.append(f"{workload.name}: {'; '.join(map(str, refused))}")
    whom = kernel.key if kernel is not None else entry.name
    raise ArgumentError(
        "cannot inspect", f"{whom} on {question.target}", "; ".join(dict.fromkeys(refusals)) or "it takes no problem",
        "a problem that it takes: --workload, or --axes, --dtype and --attributes", fusion=entry.name,
    )  # fmt: skip


def _workloads(entry: FusionEntry, kernel: KernelEntry | None, question: Question) -> Iterator[Workload]:
    every = entry.spec.workloads
    if question.workload:
        wanted = question.workload
        every = tuple(w for w in every if fnmatch(w.name, wanted) or fnmatch(w.row, wanted))
        if not every:
            names = [w.name for w in entry.spec.workloads]
            raise UnknownNameError.among(f"workload of {entry.name}", wanted, names)
    for workload in every:
        yield _changed(entry, workload, question)
    if not question.workload:
        for k in [kernel] if kernel is not None else entry.kernels:
            plain, _, _ = coverage.rows(entry, k, cases.base_axes(entry), question.target, 0)
            for row in plain:
                forms = {n: f"{entry.inputs[n].dtype}[{entry.inputs[n].forms[i]}]" for n, i in row.forms.items()}
                yield _changed(
                    entry,
                    Workload(
                        name="conformance", axes=row.axes, dtypes=row.dtypes, attributes=row.keywords, forms=forms,
                        absent=row.absent, batch=row.leading, layouts=row.layouts,
                    ),
                    question,
                )  # fmt: skip


def _changed(entry: FusionEntry, workload: Workload, question: Question) -> Workload:
    """The workload with what the question says otherwise, and a name that says so."""
    _known("axis", entry, question.axes, entry.axes)
    _known("dtype variable", entry, [d for d in question.dtypes if d], entry.spec.dtypes)
    _known("attribute", entry, question.attributes, [*entry.spec.attributes, *entry.choices])
    everywhere = question.dtypes.get("")
    dtypes = {k: everywhere or v for k, v in workload.dtypes.items()}
    if everywhere:  # where a variable cannot be that, it stays what it was
        dtypes = {k: v if v in entry.spec.dtypes[k] else workload.dtypes[k] for k, v in dtypes.items()}
        if everywhere not in dtypes.values():
            every = sorted({d for names in entry.spec.dtypes.values() for d in names})
            raise UnknownNameError.among(f"dtype of {entry.name}", everywhere, every)
    changes: dict[str, Any] = {
        "axes": {**workload.axes, **question.axes},
        "dtypes": {**dtypes, **{k: v for k, v in question.dtypes.items() if k}},
        "attributes": {**workload.attributes, **question.attributes},
    }
    if all(FrozenDict(value) == getattr(workload, name) for name, value in changes.items()):
        return workload
    try:
        return Workload(**{**workload.model_dump(), **changes, "name": "asked"})
    except ValidationError as e:
        wrong = e.errors()[0]
        found = f"{'.'.join(map(str, wrong['loc']))}={wrong['input']!r}"
        raise ArgumentError("cannot inspect", entry.name, found, str(wrong["msg"])) from None


def _known(what: str, entry: FusionEntry, names: Mapping[str, Any] | Sequence[str], known: Any) -> None:
    for name in names:
        if name not in known:
            raise UnknownNameError.among(f"{what} of {entry.name}", name, list(known))


def candidates(
    made: Subject, kernel: KernelEntry | None, params: Sequence[Mapping[str, Any]] = (), every: bool = False
) -> list[Candidate]:
    """The variants of ``kernel``, or of all kernels that take the problem.

    Args:
        params: combinations, each the first valid one that has these values; none for the one that dispatch takes.
        every: all valid combinations, the most promising first, at most :data:`~..bench.tuning.TRIED` of a kernel.
    """
    found: list[Candidate] = []
    accepted = [c for c in made.selection.accepted if kernel is None or c.kernel is kernel]
    for chosen in accepted:
        valid = list(combinations(chosen.kernel, made.problem)) if params or every else []
        for asked in params:
            fitting = (c for c in valid if all(c.params.get(k) == v for k, v in asked.items()))
            found += [c for c in [next(fitting, None)] if c is not None and c not in found]
        if every:
            found += [c for c in order(valid, made.problem, made.problem.multiprocessors)[:TRIED] if c not in found]
        if not params and not every:
            found.append(chosen)
    if params and not found:
        known = "; ".join(f"{c.kernel.name}: {dict(c.kernel.spec.params)}" for c in accepted)
        raise ArgumentError("cannot inspect", made.entry.name, f"no kernel has {[dict(p) for p in params]} here", known)
    return found
