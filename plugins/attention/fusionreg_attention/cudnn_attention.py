"""The fusions in ``sdpa`` as calls of cuDNN: kernels beside ours.

Left to other kernels: masks, a softcap, windows, and no keys at all. cuDNN's statistics are the log-sum-exp that
``sdpa_training`` gives. Its gradients are no kernel: where their sums are to have one order, as ours have, it has no
plan for a Hopper GPU but for short sequences (9.19).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.errors import MissingDependencyError
from fusionreg.core.problem import Problem
from fusionreg.core.registry.library_calls import LibraryCall, PreparedCall

from . import cudnn_library as library


class CudnnAttention(LibraryCall):
    """``sdpa``, with the statistics where the problem has an output for them."""

    name = "cudnn.sdpa"
    modules = (library.__name__,)

    def missing(self) -> str:
        try:
            library.cudnn()
        except MissingDependencyError as e:
            return f"cuDNN is not there: {e.found}"
        return ""

    def version(self) -> str:
        return library.cudnn().version()

    def prepare(self, problem: Problem, device: int, workspace: int) -> PreparedCall:
        tensors = {n: t for n, t in problem.tensors.items() if t is not None}
        outputs = [n for n in problem.output_names if n in tensors]
        settings = _settings(problem, library.cudnn())

        def make(graph: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
            found = graph.sdpa(name="sdpa", **given, generate_stats="lse" in outputs, **settings)
            return dict(zip(("y", "lse"), found, strict=True))

        return library.Graph(library.cudnn(), device, tensors, outputs, make, workspace, str(problem))


def _settings(problem: Problem, found: library.Cudnn) -> dict[str, Any]:
    given = problem.choices["scaling"] == "given"
    settings: dict[str, Any] = {"attn_scale": problem.attributes["scale"] if given else problem.axes["D"] ** -0.5}
    if problem.attributes["is_causal"]:  # query i sees keys to i
        top_left = found.module.diagonal_alignment.TOP_LEFT
        settings |= {"diagonal_alignment": top_left, "diagonal_band_right_bound": 0}
    return settings
