"""Torch functions as Dynamo records them → aten calls that autograd has not seen yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx


def to_aten(module: torch.fx.GraphModule, values: Sequence[Any]) -> torch.fx.GraphModule:
    """The aten operators that ``module`` calls on ``values``, composite ones whole: ``aten.linear``, ``aten.dropout``.

    They are recorded above autograd, so that what is made of them is differentiated as the module would be.

    Args:
        module: straight-line calls.
        values: for its placeholders: fake tensors, symbolic numbers, plain values.

    Returns: a module of one graph, whose nodes have ``meta["val"]`` and where they stand in the model.
    """
    interpreter = torch.fx.Interpreter(module)

    def run(*args: Any) -> Any:
        return interpreter.run(*args)

    with traceback.preserve_node_meta(), _leaving_no_trace(values):
        return make_fx(run, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True)(*values)


@contextmanager
def _leaving_no_trace(values: Sequence[Any]) -> Iterator[None]:
    """Dynamo has asked all that this asks again: neither guards nor symbols of the second trace are of use to it. Nor
    are hooks that pack what autograd saves called: a checkpoint around the compiled call counts what they are given.
    """
    modes = (v.fake_mode for v in values if hasattr(v, "fake_mode"))
    environment = next((m.shape_env for m in modes if m.shape_env is not None), None)
    with ExitStack() as stack:
        stack.enter_context(_disable_saved_tensors_hooks_during_tracing())
        if environment is not None:
            stack.enter_context(environment.suppress_guards())
            stack.enter_context(environment.ignore_fresh_unbacked_symbols())
        yield
