"""One graph of Dynamo: fused where something is known, the rest compiled by another backend."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend

from fusionreg.core.errors import ModelError

from ..graphs.graphed import graphed
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
        mode: as of ``torch.compile``, for the inner backend.

    Returns: a callable of the graph's inputs.
    """
    chosen = Options.parse(options)
    start = time.perf_counter()
    registry = chosen.registry if chosen.registry is not None else load(chosen.device)
    fuser = Fuser(registry, chosen)
    rewritten = rewrite_graph(gm, fuser.rewrite)
    report = Report.joined(fuser.reports, chosen.policy, time.perf_counter() - start)
    _tell(report, chosen)
    if chosen.inner == "eager":
        made = _eager(rewritten, example_inputs, registry, chosen)
    else:
        made = _inductor(rewritten, example_inputs, chosen, mode)
    return graphed(made, example_inputs) if chosen.cuda_graph else made


def _eager(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], registry: Registry, options: Options
) -> Callable[..., Any]:
    """What autograd makes of the graph, forward and backward by themselves, with more fused: no gradients are left to
    ask for, so that what has no backward fusion can be taken as well."""

    def compiler(stage: str) -> Callable[..., Any]:
        def fuse(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            start = time.perf_counter()
            fuser = Fuser(registry, options)
            made = fuser.rewrite_traced(module)
            _tell(Report.joined(fuser.reports, options.policy, time.perf_counter() - start, stage), options)
            return make_boxed_func(made.forward)

        return fuse

    made = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference")
    )
    return made(gm, list(example_inputs))


def _inductor(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options, mode: str | None
) -> Callable[..., Any]:
    patches = dict(options.inner_options)
    if mode is not None and mode != "default":
        patches = {**torch._inductor.list_mode_options(mode), **patches}
    return lookup_backend("inductor")(gm, list(example_inputs), **({"options": patches} if patches else {}))


def _tell(report: Report, options: Options) -> None:
    if options.report is not None:
        options.report(report)
    if options.explain:
        print(report)
    if options.strict and report.refused:
        raise ModelError("cannot rewrite", "a graph", report.refused[0], "a graph that can be traced and rewritten")
    captured = report.stage == "captured" and options.policy != "off"
    if captured and not report.fused and (report.lost or report.refused):
        warnings.warn(
            'backend fusionreg fused nothing in a graph; options={"explain": True} tells why, and so does '
            "`fusionreg match --explain`",
            FusionWarning,
            stacklevel=2,
        )


__all__ = ["FusionWarning", "compile_graph"]
