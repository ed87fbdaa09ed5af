"""Fusions in PyTorch programs: ``torch.compile(model, backend="fusionreg")``, and
``fusionreg.torch.ops.<family>.<fusion>(…)``.

>>> from fusionreg.torch import ops
>>> y, h = ops.norm.residual_rmsnorm(x, residual, scale, epsilon=1e-6)
>>> help(ops.norm.residual_rmsnorm)

They work under autograd, autocast and ``torch.compile``, with any backend. Importing this module imports torch; plugins
are loaded at the first use of ``ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from fusionreg.api import Registry, load_registry
from fusionreg.integrations.torch.compile import FusionWarning, Options, Report, compile_graph
from fusionreg.integrations.torch.operators import Operators
from fusionreg.integrations.torch.operators.namespace import Ops

if TYPE_CHECKING:
    import torch

__all__ = ["FusionWarning", "Operators", "Ops", "Options", "Report", "backend", "expert_parallel_ffn", "ops"]


@cache
def _installed(device: str, spare: int = 0) -> Registry:
    """The registry of all installed plugins, loaded once: operators keep their names."""
    return load_registry(device="auto" if device == "cuda" else device, spare=spare)


ops = Ops(lambda: _installed("cuda"))
"""The functions of all installed plugins; ``ops.use(registry)`` are those of another registry."""


@cache
def _sparing(spare: int) -> Ops:
    return ops.use(_installed("cuda", spare)) if spare else ops


def expert_parallel_ffn(*args: Any, spare: int = 0, **attributes: Any) -> torch.Tensor:
    """``ops.moe.routed_ffn`` with experts that lie on the ranks of a process group: tokens travel, weights stay.

    Arguments, result and errors of :func:`fusionreg.integrations.torch.experts.expert_parallel_ffn`, whose ``ffn``,
    ``routing`` and ``sum_up`` are the installed fusions.

    Args:
        spare: multiprocessors that its kernels leave to transfers, which can be under way beside them then alone.

    >>> y = expert_parallel_ffn(x, logits, own_gate_up, own_down, activation="Swish", top_k=2, renormalise=1)
    """
    from fusionreg.integrations.torch import experts

    moe = _sparing(spare).moe
    fusions = {"ffn": moe.expert_ffn, "routing": moe.route, "sum_up": moe.gather_sum}
    return experts.expert_parallel_ffn(*args, **{**fusions, **attributes})


def backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend behind ``torch.compile(model, backend="fusionreg")``, for a graph that Dynamo captured.

    Args:
        gm, example_inputs: as Dynamo hands them over.
        options: by name, as :class:`Options` documents them.
        mode: as of ``torch.compile``, for Inductor.

    Returns: a callable of the graph's inputs.
    Raises: :class:`UnknownNameError` or :class:`ArgumentError` for wrong options.
    """
    return compile_graph(gm, example_inputs, load=_installed, options=options, mode=mode)
