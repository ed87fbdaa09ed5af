"""Losses of classes by number, as a user writes them in torch, and what autograd calls for their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict

from .peer_site import Site

F = torch.nn.functional
#: ``at::Reduction``
_NUMBERS = {"none": 0, "mean": 1, "sum": 2}
#: Torch's own default, a label that no row has.
_NONE = -100


def _ignored(s: Site) -> int:
    index = s.attributes["ignore_index"]
    return _NONE if index is None else index


def _loss(function: Callable[..., Any]) -> Callable[[Site], Any]:
    def write(s: Site) -> Any:
        weight = s.args[2] if s.given(2) else None
        how = {"ignore_index": _ignored(s), "reduction": s.attributes["reduction"]}
        return function(s.args[0], s.args[1].long(), weight, **how)

    return write


def _gradient(s: Site) -> Any:
    dy, x, labels = s.args
    labels, how = labels.long(), _NUMBERS[s.attributes["reduction"]]
    logs = torch.log_softmax(x, 1)
    count = (labels != _ignored(s)).sum().to(x.dtype)
    of_logs = torch.ops.aten.nll_loss_backward(dy, logs, labels, None, how, _ignored(s), count)
    return torch._log_softmax_backward_data(of_logs, logs, 1, s.dtype(1))


WRITERS: Mapping[str, Callable[[Site], Any]] = FrozenDict(
    {
        "SoftmaxCrossEntropyLoss": _loss(F.cross_entropy),
        "NegativeLogLikelihoodLoss": _loss(F.nll_loss),
        "fusionreg::SoftmaxCrossEntropyGrad": _gradient,
    }
)
"""Operator → how a user writes it in torch."""
