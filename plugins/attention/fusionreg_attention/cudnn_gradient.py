"""The gradients of attention as calls of cuDNN: a kernel of ``sdpa_backward`` beside ours.

cuDNN takes for the weights what the exponential gives, where the operator takes no more than 1: the same for a
log-sum-exp that is one of those scores. Its algorithm that adds in one order is asked for, as ours are such.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.problem import Problem
from fusionreg.core.registry.library_calls import PreparedCall

from . import cudnn_attention, cudnn_library
from .cudnn_attention import CudnnAttention, _settings

#: Of the fusion → of the frontend.
_NAMES = {"dy": "dO", "q": "q", "k": "k", "v": "v", "y": "o", "lse": "stats"}


class CudnnAttentionGrad(CudnnAttention):
    """``sdpa_backward``."""

    name = "cudnn.sdpa_backward"
    modules = (cudnn_library.__name__, cudnn_attention.__name__)

    def prepare(self, problem: Problem, device: int, workspace: int) -> PreparedCall:
        found = cudnn_library.cudnn()
        tensors = {n: t for n, t in problem.tensors.items() if t is not None}

        def make(graph: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
            named = {_NAMES[n]: t for n, t in given.items()}
            made = graph.sdpa_backward(
                name="sdpa_backward", **named, use_deterministic_algorithm=True, **_settings(problem, found)
            )
            return dict(zip(("dq", "dk", "dv"), made, strict=True))

        return cudnn_library.Graph(found, device, tensors, problem.output_names, make, workspace, str(problem))
