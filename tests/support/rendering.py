"""Problems and rendered units of ``plugin_kit``'s fusion."""

from __future__ import annotations

from fusionreg.core.problem import Tensor, bind, select
from fusionreg.core.render import render


def problem_of(entry, shape=(4, 8), dtype="float16", target="sm_90a", **keywords):
    tensors = {"x": Tensor.contiguous(dtype, shape), "bias": Tensor.contiguous(dtype, shape[-1:])}
    return bind(entry, tensors, keywords, target)


def rendered(entry, **options):
    problem = problem_of(entry, **options)
    candidate = select(entry, problem, pending=True).accepted[0]
    return render(entry, candidate.kernel, problem, candidate.params)
