"""``fusionreg inspect``: compiled variants of kernels, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionreg.core.bench.results import read
from fusionreg.core.cache import Cache
from fusionreg.core.errors import ArgumentError, FusionregError
from fusionreg.core.frozen import EMPTY, FrozenDict
from fusionreg.core.inspection import Question, Variant, candidates, examine, subject, watch
from fusionreg.core.registry.catalog import Catalog, load

if TYPE_CHECKING:
    from fusionreg.core.registry.entries import FusionEntry, KernelEntry

#: Files of results that are looked at where none is named.
RESULTS = Path("benchmarks/results")


def inspect(
    targets: Sequence[str],
    *,
    params: Sequence[Mapping[str, Any]] = (),
    every: bool = False,
    workload: str = "",
    axes: Mapping[str, int] = EMPTY,
    dtypes: Mapping[str, str] = EMPTY,
    attributes: Mapping[str, Any] = EMPTY,
    arch: str = "sm_90a",
    banks: bool = True,
    results: Sequence[Path] | None = None,
    progress: Callable[[int, int, str], Any] | None = None,
) -> tuple[tuple[Variant, ...], tuple[tuple[str, FusionregError], ...]]:
    """The variants of fusions and kernels on one problem, and those that could not be compiled, with the reason.

    Args:
        targets: ``fusion`` or ``fusion/kernel``.
        params, every: as for :func:`fusionreg.core.inspection.candidates`.
        workload, axes, dtypes, attributes: the problem, as of :class:`fusionreg.core.inspection.Question`.
        arch: architecture to compile for.
        banks: whether each variant is also run in the simulator and its shared-memory accesses counted.
        results: files with measured times; None takes those of ``benchmarks/results`` that there are.
        progress: called with the number done, that of all, and what is next.

    Raises: :class:`UnknownNameError`, :class:`ArgumentError`, :class:`SpecError` as :func:`~.core.inspection.subject`
    does; :class:`ModelError` for a file that holds no results.
    """
    catalog, cache = load(), Cache()
    files = [read(p) for p in results] if results is not None else _results()
    question = Question(workload, FrozenDict(axes), FrozenDict(dtypes), FrozenDict(attributes), arch)
    wanted = []
    for name in targets:
        entry, kernel = _named(catalog, name)
        if not entry.kernels:
            raise ArgumentError("cannot inspect", name, "no kernel", "a fusion with a kernel", catalog.lost(name))
        made = subject(entry, kernel, question, catalog.ops)
        wanted += [(made, candidate) for candidate in candidates(made, kernel, params, every)]
    found: list[Variant] = []
    failed: list[tuple[str, FusionregError]] = []
    for at, (made, candidate) in enumerate(wanted):
        if progress is not None:
            progress(at, len(wanted), candidate.kernel.key)
        try:
            variant = examine(made, candidate, cache, files)
        except FusionregError as e:
            failed.append((f"{candidate.kernel.key} {dict(candidate.params)}", e))
            continue
        shared = watch(made, candidate, cache) if banks else None
        found.append(variant.model_copy(update={"shared": shared}))
    return tuple(found), tuple(failed)


def _named(catalog: Catalog, name: str) -> tuple[FusionEntry, KernelEntry | None]:
    """A fusion, the first member of an open one, and the kernel where one is named."""
    fusion, _, kernel = name.partition("/")
    entry = catalog[fusion]
    entry = entry.members[0] if entry.spec.open else entry
    return entry, entry.kernel(kernel) if kernel else None


def _results() -> list[Any]:
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        try:
            found.append(read(path))
        except FusionregError:  # the folder may hold other files than those of `bench`
            continue
    return found
