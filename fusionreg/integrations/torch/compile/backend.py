"""One graph of Dynamo: fused where something is known, the rest compiled by another backend."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fusionreg.core.errors import ModelError

from ..graphs.graphed import graphed
from . import inner
from .options import Options
from .report import Report
from .segment import Fuser
from .segments import rewrite_graph

if TYPE_CHECKING:
    from fusionreg.api import Registry


class FusionWarning(UserWarning):
    """A graph in which nothing was fused, or that could not be rewritten."""


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    load: Callable[[str], Registry],
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles a graph that Dynamo captured: fuses what is known, and gives the rest to the inner backend.

    Args:
        gm: the graph, before autograd: fused calls are differentiable operators in it.
        example_inputs: as Dynamo hands them over; passed on.
        load: device → the registry to use where the options name none.
        options: see :class:`Options`.
        mode: as of ``torch.compile``, for the inner backend, where the options name none.

    Returns: a callable of the graph's inputs.
    """
    chosen = Options.parse(options)
    mode = chosen.mode or mode
    start = time.perf_counter()
    registry = chosen.registry if chosen.registry is not None else load(chosen.device)
    executor = "inductor-max-autotune" if inner.tuned(chosen, mode) else chosen.inner
    fuser = Fuser(registry, chosen, executor)
    rewritten = rewrite_graph(gm, fuser.rewrite)
    report = Report.joined(fuser.reports, chosen.policy, time.perf_counter() - start)
    _tell(report, chosen)
    told = [report]
    refit = _refitting(registry, chosen, executor, report.moved > 0, told) if chosen.policy != "off" else None
    if chosen.inner == "eager":
        made = inner.eager(rewritten, example_inputs, refit)
    else:
        made = inner.inductor(rewritten, example_inputs, chosen, mode, refit, inner.key_of(registry, chosen))
    computes = any(n.op.startswith("call") for n in gm.graph.nodes)
    if refit is not None and computes and not any(r.fused for r in told):
        warnings.warn(
            'backend fusionreg fused nothing in a graph; options={"explain": True} tells why, and so does '
            "`fusionreg match --explain`",
            FusionWarning,
            stacklevel=2,
        )
    return graphed(made, example_inputs) if chosen.cuda_graph else made


def _refitting(registry: Registry, options: Options, executor: str, moved: bool, told: list[Report]) -> inner.Refit:
    """Fuses more in what autograd makes of a graph, and tells of it; ``told`` gets the reports too."""

    def refit(module: torch.fx.GraphModule, stage: str) -> torch.fx.GraphModule:
        start = time.perf_counter()
        fuser = Fuser(registry, options, executor)
        made = fuser.rewrite_traced(module, moved)
        told.append(Report.joined(fuser.reports, options.policy, time.perf_counter() - start, stage))
        _tell(told[-1], options)
        return made

    return refit


def _tell(report: Report, options: Options) -> None:
    if options.report is not None:
        options.report(report)
    if options.explain:
        print(report)
    if options.strict and report.refused:
        raise ModelError("cannot rewrite", "a graph", report.refused[0], "a graph that can be traced and rewritten")


__all__ = ["FusionWarning", "compile_graph"]
