"""``fusionreg bench`` and ``tune``: kernels against torch and libraries, and against themselves, on this GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionreg.core import bench as core
from fusionreg.core.bench import Outcome, Preparation, Results, current, gains, measure, subjects, tuning
from fusionreg.core.bench.results import PEERS
from fusionreg.core.bench.tuned import ShippedParameters, TunedParameters
from fusionreg.core.bench.tuning import Tuned
from fusionreg.core.cache import Cache
from fusionreg.core.errors import MissingDependencyError, UnknownNameError
from fusionreg.core.registry.catalog import Catalog, load

if TYPE_CHECKING:
    from fusionreg.core.bench.measure import Progress
    from fusionreg.integrations.torch.bench import TorchBench

FOLDER = Path("benchmarks/results")


def bench(
    names: Sequence[str] = (),
    *,
    only: Sequence[str] = (),
    out: Path = FOLDER,
    again: bool = False,
    frozen: bool = False,
    peers: Sequence[str] = PEERS,
    count: bool = True,
    time_limit: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Measures the workloads of fusions on the current CUDA device.

    Args:
        names: fusions; all by default.
        only: patterns of workload names or rows.
        out: folder of result files, one per GPU.
        again: measure also what the file has figures for.
        frozen: kernels with the parameters they ship with, not those that tuning found here.
        peers: competitors; a row that was measured against fewer is measured anew.
        count: whether the instructions of kernels are counted, where a profiler or a disassembler is.
        time_limit: seconds after which no further workload is begun.

    Raises: :class:`MissingDependencyError` without torch or a GPU, :class:`UnknownNameError` for a fusion, workload or
    competitor that nothing has.
    """
    catalog, device = _device(names, peers)
    tuned = ShippedParameters() if frozen else TunedParameters()
    wanted = subjects(catalog, device.target, names, only, tuned, device.multiprocessors)
    outcome = measure(wanted, device, out, again=again, time_limit=time_limit, progress=progress, count=count)
    gains.keep(*current(outcome.results.model_copy(update={"rows": outcome.rows}), catalog, tuned), catalog, Cache())
    return outcome


def prepare(
    names: Sequence[str] = (),
    *,
    only: Sequence[str] = (),
    out: Path = FOLDER,
    again: bool = False,
    frozen: bool = False,
    peers: Sequence[str] = PEERS,
    time_limit: float | None = None,
    progress: Progress | None = None,
    catalog: Catalog | None = None,
) -> Preparation:
    """Compiles what :func:`bench` would on its way, for as many processes at a time as there are processors: a run that
    follows finds it in the caches. Inductor's tuner runs, and keeps what it finds; nothing else is timed.

    Arguments and errors as for :func:`bench`; ``catalog``: the installed plugins, where the caller has loaded them.
    """
    catalog, device = _device(names, peers, catalog)
    tuned = ShippedParameters() if frozen else TunedParameters()
    wanted = subjects(catalog, device.target, names, only, tuned, device.multiprocessors)
    return core.prepare(wanted, device, out, again=again, time_limit=time_limit, progress=progress)


def tune(
    names: Sequence[str] = (),
    *,
    only: Sequence[str] = (),
    again: bool = False,
    ship: bool = False,
    time_limit: float | None = None,
    progress: Progress | None = None,
) -> tuple[Tuned, ...]:
    """Tries the parameters of kernels on the workloads of fusions; later calls on this machine use the best.

    Arguments and errors as for :func:`bench`.

    Args:
        ship: write the best also into the plugins' packages, for every machine of this architecture.
    """
    catalog, device = _device(names)
    wanted = subjects(catalog, device.target, names, only, multiprocessors=device.multiprocessors)
    found = tuning.tune(wanted, device, Cache(), again=again, time_limit=time_limit, progress=progress)
    if ship:
        tuning.ship(found, catalog, device.environment)
    return found


def device_facts() -> dict[str, Any]:
    """What figures of the current CUDA device depend on: ``target``, ``multiprocessors``, ``environment``."""
    _, device = _device(())
    return {
        "target": device.target, "multiprocessors": device.multiprocessors, "environment": dict(device.environment)
    }  # fmt: skip


def as_installed(found: Results) -> tuple[Results, frozenset[tuple[str, str]]]:
    """Results with the kernels that dispatch picks now as ours, and the (fusion, workload) of rows that have no figure
    of them; needs no GPU."""
    return current(found, load(), ShippedParameters())


def ship(found: Results) -> tuple[Path, ...]:
    """Writes how kernels measured against the executors of the rest into the packages of their plugins, where planning
    reads it; the files. Rows of other kernels than are installed now are left out; needs no GPU."""
    catalog = load()
    return gains.ship(*current(found, catalog, ShippedParameters()), catalog)


def _device(
    names: Sequence[str], peers: Sequence[str] = (), catalog: Catalog | None = None
) -> tuple[Catalog, TorchBench]:
    for peer in peers:
        if peer not in PEERS:
            raise UnknownNameError.among("competitor", peer, PEERS)
    catalog = catalog or load()
    for name in names:
        catalog[name]
    try:
        from fusionreg.integrations.torch.bench import TorchBench
    except ImportError as e:
        raise MissingDependencyError(
            "cannot measure", "speed", str(e), "torch on a GPU", "Install it with: pip install 'fusionreg[torch]'"
        ) from None
    return catalog, TorchBench(catalog, peers=peers)
