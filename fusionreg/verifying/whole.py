"""Verification of a model: every fused site on its own, then the whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionreg.checking import against_original, chosen_device, placed
from fusionreg.core.errors import ArgumentError
from fusionreg.core.ir import FUSED
from fusionreg.core.planner.plan import Policy
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime import FallbackWarning, Runtime
from fusionreg.core.simulator import Checks
from fusionreg.integrations import Declared, Opened, open_model
from fusionreg.model import FusedModel

from .inputs import arrays_from
from .records import Drift, SiteCheck, Verification
from .sites import Observer, empty

if TYPE_CHECKING:
    from fusionreg.api import Registry
    from fusionreg.core.planner.plan import Plan

#: (runs done, runs in all, what is being run)
Progress = Callable[[int, int, str], None]

#: Seconds after which the simulator breaks off a site.
TIMEOUT = 600.0


def verify(
    model: Any,
    *example: Any,
    registry: Registry | None = None,
    runs: int | None = None,
    seed: int = 0,
    data: Sequence[str | Path | Mapping[str, Any]] = (),
    policy: Policy = "balanced",
    device: str = "auto",
    declared: Sequence[Declared] = (),
) -> Verification:
    """Runs ``model`` fused, and at every fused site the operators it replaced, on the activations that reach it.

    Args:
        model: as :func:`fusionreg.fuse` takes it, or ``"package.module:factory"``, which runs that module's code.
        example: arguments of one call, for a ``torch.nn.Module``.
        registry: the fusions; all that are installed by default.
        runs: how many runs on inputs made from ``seed``, ``seed + 1`` …; at seed 0 a model that brings inputs is run on
            those. By default one, or none where ``data`` is given.
        data: further inputs: ``.npz`` files, or arrays by input name; what they leave out is as in the first run.
        policy: of the planner.
        device: ``sim``, ``cuda``, or ``auto``: a GPU where there is one.
        declared: types of the inputs of a live module that brings none.

    Returns: a :class:`Verification`; a wrong result is a status in it.
    Raises: the typed errors of opening a model; :class:`ArgumentError` for inputs that do not fit;
    :class:`MissingDependencyError` where nothing can run.
    """
    if registry is None:
        from fusionreg.api import load_registry

        registry = load_registry(device=device)
    opened = open_model(model, example, ops=registry.catalog.ops, declared=declared)
    name = model if isinstance(model, str) else str(model) if isinstance(model, Path) else opened.name
    plan = registry.plan(opened, policy=policy)
    return verify_opened(registry, opened, plan, name=name, runs=runs, seed=seed, data=data, device=device)


def verify_opened(
    registry: Registry,
    opened: Opened,
    plan: Plan,
    *,
    name: str = "",
    runs: int | None = None,
    seed: int = 0,
    data: Sequence[str | Path | Mapping[str, Any]] = (),
    device: str = "auto",
    progress: Progress | None = None,
) -> Verification:
    """:func:`verify` of a model that is opened and planned already."""
    count = runs if runs is not None else int(not data)
    if count < 0 or not count + len(data):
        raise ArgumentError("cannot verify", name or opened.name, f"{count} runs", "at least one")
    device = chosen_device(device)
    checks = Checks(guard=True, timeout=TIMEOUT)  # a store beside its tensor must not go into ours
    runtime = Runtime(registry.catalog, device=registry.device, checks=checks, tuned=registry.runtime.tuned)
    model = FusedModel.build(opened.graph, plan, registry.catalog, runtime)
    fused = [n for n in model.graph.nodes if n.op.startswith(FUSED)]
    sites = {n.name: empty(n) for n in fused}
    drift, names = Drift(Status.PASSED), []
    for i, (said, inputs) in enumerate(_runs(opened, count, seed, data)):
        names.append(said)
        if progress is not None:
            progress(i, count + len(data), said)
        seen, drifted = _one(opened, model, inputs, device)
        sites = {key: site.merged(seen[key], i) for key, site in sites.items()}
        drift = drift.merged(drifted, i)
    return Verification(
        name or opened.name, len(opened.graph.nodes), device, plan.policy, tuple(names), tuple(sites.values()), drift
    )


def _runs(
    opened: Opened, count: int, seed: int, data: Sequence[str | Path | Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each run is on, in words, and its inputs."""
    given = [arrays_from(item, opened, seed) for item in data]  # what does not fit is told before the work
    for i in range(count):
        yield f"seed {seed + i}", dict(opened.example(seed + i))
    for i, item in enumerate(data):
        yield f"inputs {i}" if isinstance(item, Mapping) else str(item), given[i]


def _one(
    opened: Opened, model: FusedModel, inputs: Mapping[str, Any], device: str
) -> tuple[dict[str, SiteCheck], Drift]:
    """One run: its sites by node name, and the whole."""
    observer, given = Observer(model), placed(inputs, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the table says it
        outputs = model.watched(observer, **given)
    v = against_original(opened, model, inputs, outputs, given)
    return observer.found, Drift(v.status, v.reason, -1, v.max_abs, v.max_rel, v.ours, v.theirs, v.unfused)
