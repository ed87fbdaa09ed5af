"""``fusionreg bench``: kernels against torch and libraries on the GPU of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusionreg.core.bench import Outcome, measure, subjects
from fusionreg.core.errors import MissingDependencyError
from fusionreg.core.registry.catalog import load

if TYPE_CHECKING:
    from fusionreg.core.bench.measure import Progress

FOLDER = Path("benchmarks/results")


def bench(
    names: Sequence[str] = (),
    *,
    only: Sequence[str] = (),
    out: Path = FOLDER,
    again: bool = False,
    time_limit: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Measures the workloads of fusions on the current CUDA device.

    Args:
        names: fusions; all by default.
        only: patterns of workload names or rows.
        out: folder of result files, one per GPU.
        again: measure also what the file has figures for.
        time_limit: seconds after which no further workload is begun.

    Raises: :class:`MissingDependencyError` without torch or a GPU, :class:`UnknownNameError` for a fusion or workload
    that nothing has.
    """
    catalog = load()
    for name in names:
        catalog[name]
    try:
        from fusionreg.integrations.torch.bench import TorchBench
    except ImportError as e:
        raise MissingDependencyError(
            "cannot measure", "speed", str(e), "torch on a GPU", "Install it with: pip install 'fusionreg[torch]'"
        ) from None
    device = TorchBench(catalog)
    wanted = subjects(catalog, device.target, names, only)
    return measure(wanted, device, out, again=again, time_limit=time_limit, progress=progress)
