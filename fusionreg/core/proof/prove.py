"""``fusionreg run`` on fusions: every kernel compiled for every target, then conformance on one device. Floor 7."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache import Cache
from ..compiler import ObjectCode, compile_all
from ..conformance import cases as derived
from ..conformance import executor_for, run
from ..conformance.runner import Progress
from ..errors import ArgumentError, FusionregError, MissingDependencyError, RenderError, UnknownNameError
from ..targets import SHIPPED
from . import evidence as proofs
from .report import Evaluation, Report, Status
from .units import first_units

if TYPE_CHECKING:
    from ..registry.catalog import Catalog
    from ..registry.entries import FusionEntry, KernelEntry


def prove(
    catalog: Catalog,
    names: Sequence[str] = (),
    *,
    device: str = "auto",
    cases: derived.Extent = "quick",
    kernels: Sequence[str] | None = None,
    progress: Progress | None = None,
    evidence: Path | None = None,
    sanitize: bool = False,
    part: tuple[int, int] = (0, 1),
) -> Report:
    """Compiles every kernel for every shipped architecture it declares, then runs conformance.

    Arguments as in :func:`conformance.run` and :func:`conformance.executor_for`; ``evidence``: file to write the
    evidence of a GPU run to. The first of several parts is the one that compiles for every architecture. Errors as
    there, and of :func:`chosen_kernels`.
    """
    cache = Cache()
    chosen = chosen_kernels(catalog, names, kernels)
    executor = executor_for(device, cache, sanitize=sanitize)
    proven = run(
        catalog, names, device=device, cases=cases, kernels=kernels, progress=progress, cache=cache, executor=executor,
        part=part,
    )  # fmt: skip
    if evidence is not None:
        proofs.write(evidence, proofs.collect(proven, catalog.entries(names)))
    units = compiled(chosen, cache) if part[0] == 0 else []
    return Report(tuple(units) + proven.evaluations, (), proven.environment)


def chosen_kernels(
    catalog: Catalog, names: Sequence[str], kernels: Sequence[str] | None
) -> list[tuple[FusionEntry, KernelEntry]]:
    """The kernels named, or all, of the fusions named, or of all.

    Raises: :class:`ArgumentError` where none is there to be proven, :class:`UnknownNameError` for a name.
    """
    entries = catalog.entries(names)
    chosen = [(e, k) for e in entries for k in e.kernels if kernels is None or {k.name, k.key} & set(kernels)]
    if not chosen and not kernels:
        whom, found = (", ".join(names), "no kernel") if names else ("", "no plugin has a fusion with a kernel")
        why = next(filter(None, map(catalog.lost, names)), "See `fusionreg plugins`")
        raise ArgumentError("nothing to prove", whom, found, "at least one kernel", why)
    if not chosen:
        known = [name for e in entries for k in e.kernels for name in (k.name, k.key)]
        raise UnknownNameError.among("kernel", ", ".join(kernels or ()), known)
    return chosen


def compiled(kernels: Sequence[tuple[FusionEntry, KernelEntry]], cache: Cache | None) -> list[Evaluation]:
    """One evaluation per kernel and shipped architecture: the first unit of each dtype, compiled by NVRTC.

    A template that does not render fails its own kernel alone, as it does where cases are executed.
    """
    units, broken = [], []
    for entry, kernel in kernels:
        for name in SHIPPED:
            try:
                units += [(entry, kernel, name, unit) for unit in first_units(entry, kernel, name)]
            except RenderError as error:
                broken.append(_evaluation(entry, kernel, "any", name, error, ""))
    codes = compile_all([unit.source for *_, unit in units], cache)
    return broken + [
        _evaluation(entry, kernel, unit.dtypes, name, code, unit.source.digest)
        for (entry, kernel, name, unit), code in zip(units, codes, strict=True)
    ]


def _evaluation(
    entry: FusionEntry, kernel: KernelEntry, dtype: str, name: str, code: ObjectCode | FusionregError, digest: str
) -> Evaluation:
    if isinstance(code, ObjectCode):
        return Evaluation(
            entry.name, kernel.name, f"compile {dtype} {name}", dtype, Status.PASSED, device="nvrtc", target=name,
            seconds=0.0 if code.cached else code.seconds, digest=digest,
        )  # fmt: skip
    status = Status.SKIPPED_UNSUPPORTED if isinstance(code, MissingDependencyError) else Status.COMPILE_ERROR
    return Evaluation(
        entry.name, kernel.name, f"compile {dtype} {name}", dtype, status, device="nvrtc", target=name, reason=str(code)
    )
