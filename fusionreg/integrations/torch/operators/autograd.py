"""Gradients of operators: the backward fusion that a spec names, as torch calls it.

Saved for the backward pass is what that fusion reads and nothing else: inputs and declared outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from fusionreg.core.errors import ArgumentError
from fusionreg.core.registry.entries import FusionEntry
from fusionreg.core.runtime.call import no_backward
from fusionreg.core.validate.gradients import Gradients

Call = Callable[..., Any]

#: What a dispatch key set holds where a call meets nothing but autograd on its way to the kernel: plain tensors on a
#: CPU or GPU, no mode that traces, no transform. Everything else is passed on, for its own part of torch to see to.
_PLAIN = 0
for _key in ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "AutocastCPU", "AutocastCUDA"):
    _PLAIN |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key)).raw_repr()
_FOREIGN = ~_PLAIN


def kernel(op: Any, run: Call, entry: FusionEntry, gradients: Gradients | None, backward: Call | None) -> Call:
    """What an operator does where autograd looks at it.

    Args:
        op: the operator.
        run: its kernel: on plain tensors it is called directly, without a second turn through torch's dispatcher.
        gradients: how ``backward`` is called; None where there are none.
        backward: the operator of the backward fusion.
    """
    below, after = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    grad_enabled, any_requires_grad = torch.is_grad_enabled, torch._C._any_requires_grad
    function = None if gradients is None or backward is None else differentiable(entry, gradients, backward)

    def on(keyset: Any, *tensors: Any, **attributes: Any) -> Any:
        if forward_ad._current_level >= 0:
            _check_tangents(entry.name, tensors)
        if keyset.raw_repr() & _FOREIGN:
            call = _passing(op, keyset & after)
            if grad_enabled() and any_requires_grad(*tensors):
                if function is None:
                    raise no_backward(entry.name)
                return function.apply(call, attributes, *tensors)
            return call(*tensors, **attributes)
        if grad_enabled() and any_requires_grad(*tensors):
            if function is None:
                raise no_backward(entry.name)
            return function.apply(run, attributes, *tensors)
        return run(*tensors, **attributes)

    def _passing(op: Any, keyset: Any) -> Call:
        def call(*tensors: Any, **attributes: Any) -> Any:
            with below():
                return op.redispatch(keyset, *tensors, **attributes)

        return call

    return on


def differentiable(entry: FusionEntry, gradients: Gradients, backward: Call) -> Any:
    """The autograd function of a fusion: ``apply(call, attributes, *tensors)``."""
    fusion, outputs = entry.name, tuple(entry.outputs)
    sources = tuple(gradients.sources.values())
    kept = tuple((s.kind == "input", s.index) for s in sources if s.kind != "gradient")
    constant = tuple(i for i, name in enumerate(outputs) if name not in gradients.differentiable)
    order = {name: i for i, name in enumerate(gradients.outputs)}
    results = tuple(order.get(gradients.results.get(n, ""), -1) for n in entry.inputs)
    passed, several = gradients.attributes, len(order) > 1

    def forward(ctx: Any, call: Call, attributes: dict[str, Any], *tensors: Any) -> Any:
        found = call(*tensors, **attributes)
        values = found if isinstance(found, tuple) else (found,)
        given = (*tensors, *(None,) * (len(results) - len(tensors)))
        ctx.save_for_backward(*[given[i] if is_input else values[i] for is_input, i in kept])
        ctx.attributes = {k: v for k, v in attributes.items() if k in passed}
        if constant:
            ctx.mark_non_differentiable(*[values[i] for i in constant])
        return found

    def apply_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        arguments = [grads[s.index] if s.kind == "gradient" else next(saved) for s in sources]
        if torch.is_grad_enabled():  # someone may want gradients of these gradients
            found = _Last.apply(fusion, backward, ctx.attributes, *arguments)
        else:
            found = backward(*arguments, **ctx.attributes)
        given = found if several else (found,)
        needed = ctx.needs_input_grad[2:]
        return None, None, *[given[k] if k >= 0 and n else None for n, k in zip(needed, results, strict=False)]

    # Not `Function`: an operator is asked level by level where transforms are nested, as torch's own are.
    name = f"{entry.name.replace('.', '_')}_differentiable"
    return type(
        name, (_SingleLevelFunction,), {"forward": staticmethod(forward), "backward": staticmethod(apply_backward)}
    )


class _Last(_SingleLevelFunction):
    """A backward fusion. Its results have no gradients: asking for them is an error, never a silent zero."""

    @staticmethod
    def forward(ctx: Any, fusion: str, call: Call, attributes: dict[str, Any], *arguments: Any) -> Any:
        ctx.fusion = fusion
        return call(*arguments, **attributes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArgumentError(
            "cannot differentiate", f"the gradients of {ctx.fusion}", "a second derivative is wanted",
            "first derivatives: a backward fusion has no gradients", "Run the unfused operators for it",
            fusion=ctx.fusion,
        )  # fmt: skip


def _check_tangents(fusion: str, tensors: Sequence[Any]) -> None:
    """Forward-mode derivatives are none of ours: :class:`ArgumentError`, never a silent loss of a tangent."""
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ArgumentError(
                "cannot call", fusion, "an input has a forward-mode tangent", "inputs without one",
                "Run the unfused operators for it", fusion=fusion,
            )  # fmt: skip
