"""Gradients of operators: the backward fusion that a spec names, else those of the operators that the fusion replaces.

Saved for the backward pass is what either reads and nothing else: inputs and declared outputs. Values in between that a
chain of operators needs are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.fx import traceback

from fusionreg.core.errors import ArgumentError
from fusionreg.core.registry.entries import FusionEntry
from fusionreg.core.validate.gradients import Gradients

from ..derivatives.chain import Chain
from .autocast import AUTOCAST
from .chains import Chains

#: ``(fusion, tensors, attributes)``, and the same of one fusion: its output, or a tuple of several.
Run = Callable[[str, Sequence[Any], Mapping[str, Any]], Any]
Call = Callable[[Sequence[Any], Mapping[str, Any]], Any]

#: Whether a backward fusion is called for gradients that may be differentiated again.
_IN_BACKWARD: ContextVar[bool] = ContextVar("in_backward", default=False)

#: The order of maps whose channels lie side by side, by their number of axes.
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

#: What a node of a traced graph has, that says on which side of the partition it is.
_TAG = "partitioner_tag"

#: The dispatch keys of a call that meets nothing but autograd on its way to the kernel: plain tensors on a CPU or GPU,
#: no mode that traces, no transform. A call with any other is passed on, for its own part of torch to see to.
_PLAIN = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "AutocastCPU", "AutocastCUDA")


def _bits(names: Iterable[str]) -> int:
    return reduce(or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, n)).raw_repr() for n in names))


def kernel(
    op: Any, run: Run, entry: FusionEntry, gradients: Gradients | None, backward: Any, chains: Chains
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What an operator does where autograd looks at it: the kernel for torch's dispatcher, and what it comes down to on
    plain tensors, a function of ``(tensors, attributes)``.

    Args:
        op: the operator.
        run: ``(fusion, tensors, attributes)``: the runtime. On plain tensors it is called directly, without a second
            turn through torch's dispatcher.
        entry: the fusion.
        gradients: how ``backward`` is called; None where the fusion names none.
        backward: what calls the operator of the backward fusion.
        chains: the gradients of its operators, for a fusion that names no backward fusion.
    """
    fusion, foreign, after = entry.name, ~_bits(_PLAIN), torch._C._after_autograd_keyset
    grad_enabled, any_requires_grad = torch.is_grad_enabled, torch._C._any_requires_grad
    function = chained(entry, chains) if gradients is None else differentiable(entry, gradients, backward)
    last = _last(fusion)
    total = gradients is not None and not entry.optional and all(n in gradients.results for n in entry.inputs)
    direct = partial(run, fusion)

    def plain(tensors: Sequence[Any], attributes: Mapping[str, Any], call: Call = direct) -> Any:
        if not (grad_enabled() and any_requires_grad(*tensors)):
            return call(tensors, attributes)
        if gradients is None:
            found, _ = chains.of(tensors, attributes, [t is not None and t.requires_grad for t in tensors])
            if isinstance(found, str):
                if not _IN_BACKWARD.get():
                    raise _without_gradients(fusion, found)
                return _apply(last, call, attributes, *tensors)
        elif not total:
            _check_wanted(entry, gradients, tensors)
        return _apply(function, call, attributes, *tensors)

    def on(keyset: Any, /, *tensors: Any, **attributes: Any) -> Any:
        if forward_ad._current_level >= 0:
            _check_tangents(fusion, tensors)
        return plain(tensors, attributes, _below(op, keyset & after) if keyset.raw_repr() & foreign else direct)

    return on, plain


def _check_wanted(entry: FusionEntry, gradients: Gradients, tensors: Sequence[Any]) -> None:
    """:class:`ArgumentError` where an input wants a gradient that the backward fusion does not give."""
    given = {n: t for n, t in zip(entry.inputs, tensors, strict=False) if t is not None}
    absent = [n for n in entry.inputs if n not in given]
    refusal = gradients.refusal([n for n, t in given.items() if t.requires_grad], absent)
    if refusal:
        raise _without_gradients(entry.name, refusal)


def _without_gradients(fusion: str, refusal: str) -> ArgumentError:
    return ArgumentError(
        "cannot call", fusion, f"an input requires a gradient, and {refusal}", "inputs that need none",
        "Call it under torch.no_grad(), or detach that input", fusion=fusion,
    )  # fmt: skip


def _below(op: Any, keyset: Any) -> Call:
    """The operator where autograd has had its turn."""

    def call(tensors: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset, *tensors, **attributes)

    return call


def _apply(function: Callable[..., Any], call: Call, *arguments: Any) -> Any:
    """An autograd function at the level of the innermost transform of ``torch.func``, where there is one; what it calls
    is for the transforms outside to differentiate."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return function(call, *arguments)

    def outside(tensors: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return call(tensors, attributes)

    with enable_single_level_autograd_function():
        return function(outside, *arguments)


def differentiable(entry: FusionEntry, gradients: Gradients, backward: Any) -> Callable[..., Any]:
    """The autograd function of a fusion, of ``(call, attributes, *tensors)``."""
    fusion, outputs, inputs = entry.name, tuple(entry.outputs), len(entry.inputs)
    sources = tuple(gradients.sources.values())
    kept = tuple((s.kind == "input", s.index) for s in sources if s.kind != "gradient")
    constant = tuple(i for i, name in enumerate(outputs) if name not in gradients.differentiable)
    order = {name: i for i, name in enumerate(gradients.outputs)}
    results = tuple(order.get(gradients.results.get(n, ""), -1) for n in entry.inputs)
    passed, defaults, several = gradients.attributes, dict(gradients.defaults), len(order) > 1
    maps = bool(entry.spec.layouts)

    def forward(ctx: Any, call: Call, attributes: dict[str, Any], *tensors: Any) -> Any:
        found = call(tensors, attributes)
        values = found if found.__class__ is tuple else (found,)
        given = tensors if len(tensors) == inputs else (*tensors, *(None,) * (inputs - len(tensors)))
        ctx.save_for_backward(*[given[i] if is_input else values[i] for is_input, i in kept])
        own = {k: v for k, v in attributes.items() if k in passed} if attributes else attributes
        ctx.attributes = {**defaults, **own} if defaults else own
        if constant:
            ctx.mark_non_differentiable(*[values[i] for i in constant])
        return found

    def apply_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        saved = iter(tensors)
        arguments = [_laid(grads[s.index], tensors, maps) if s.kind == "gradient" else next(saved) for s in sources]
        if torch.is_grad_enabled():  # someone may want gradients of these gradients
            token = _IN_BACKWARD.set(True)
            try:
                found = backward(*arguments, **ctx.attributes)
            finally:
                _IN_BACKWARD.reset(token)
        else:
            found = backward(*arguments, **ctx.attributes)
        given = found if several else (found,)
        needed = ctx.needs_input_grad[2:]
        return None, None, *[given[k] if k >= 0 and n else None for n, k in zip(needed, results, strict=False)]

    return _function(fusion, forward, apply_backward)


def _laid(gradient: Any, saved: Iterable[Any], maps: bool) -> Any:
    """A gradient that fast kernels read: one that stands for several elements at one address, as that of a sum does, is
    written out; one of ``maps`` lies as the saved map of its shape, whatever order whoever computes it gives it (that
    of a mean is row-major behind maps with channels last)."""
    strides = gradient.stride()
    spread = 0 in strides
    if not (spread or maps):
        return gradient
    order = _CHANNELS_LAST.get(len(strides))
    like = next((t for t in saved if t is not None and t.shape == gradient.shape), None) if order else None
    if like is None:
        return gradient.contiguous() if spread else gradient
    last = like.stride()[1] == 1
    if (strides[1] == 1) == last and not spread:
        return gradient
    return gradient.contiguous(memory_format=order if last else torch.contiguous_format)


def chained(entry: FusionEntry, chains: Chains) -> Callable[..., Any]:
    """The autograd function of a fusion by the operators that it replaces, of ``(call, attributes, *tensors)``.

    Its backward pass is calls of torch on what was saved, so it can be differentiated again, and traced.
    """
    fusion, inputs, outputs = entry.name, tuple(entry.inputs), tuple(entry.outputs)

    def forward(ctx: Any, call: Call, attributes: dict[str, Any], *tensors: Any) -> Any:
        chain, extents = chains.of(tensors, attributes, ctx.needs_input_grad[2:])
        assert not isinstance(chain, str), chain
        found = call(tensors, attributes)
        values = found if found.__class__ is tuple else (found,)
        named = {**dict(zip(inputs, tensors, strict=False)), **dict(zip(outputs, values, strict=True))}
        ctx.save_for_backward(*[named[n] for n in chain.saved])
        ctx.chain, ctx.extents = chain, extents
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[v for n, v in zip(outputs, values, strict=True) if n not in chain.outputs])
        return found

    def apply_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        chain: Chain = ctx.chain
        slopes = {n: g for n, g in zip(outputs, grads, strict=True) if g is not None and n in chain.outputs}
        saved = dict(zip(chain.saved, ctx.saved_tensors, strict=True))
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST), _kept_in_backward():  # dtypes are those of the forward pass
            found = chain.run(saved, slopes, ctx.extents) if slopes else {}
        return None, None, *[found.get(n) for n, _ in zip(inputs, ctx.needs_input_grad[2:], strict=False)]

    return _function(fusion, forward, apply_backward)


@contextmanager
def _kept_in_backward() -> Iterator[None]:
    """Where a backward pass is traced: what runs here belongs into its graph.

    A partitioner would else compute values in the forward pass as well, and save those instead of inputs.
    """
    meta = traceback.current_meta
    if meta.get(_TAG) != "is_backward":
        yield
        return
    meta[_TAG] = "must_be_in_backward"
    try:
        yield
    finally:
        meta[_TAG] = "is_backward"


def _last(fusion: str) -> Callable[..., Any]:
    """The autograd function of a backward fusion: gradients of its results are an error, never a silent zero."""

    def forward(ctx: Any, call: Call, attributes: dict[str, Any], *tensors: Any) -> Any:
        return call(tensors, attributes)

    def apply_backward(ctx: Any, *grads: Any) -> Any:
        raise ArgumentError(
            "cannot differentiate", f"the results of {fusion}", "a second derivative is wanted",
            "first derivatives: a backward fusion has no gradients", "Run the unfused operators for it", fusion=fusion,
        )  # fmt: skip

    return _function(fusion, forward, apply_backward)


def _function(fusion: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The ``apply`` of an autograd function; no ``Function``, which would want to see to transforms itself: an operator
    is asked level by level where they are nested, as torch's own are."""
    methods = {
        "forward": staticmethod(forward), "backward": staticmethod(backward),
        "_compiled_autograd_key": staticmethod(lambda ctx: (ctx._autograd_function_id,)),  # as of a `Function`
    }  # fmt: skip
    made = type(f"{fusion.replace('.', '_')}_differentiable", (_SingleLevelFunction,), methods)
    applied: Callable[..., Any] = made.apply  # type: ignore[attr-defined]
    return applied


def _check_tangents(fusion: str, tensors: Sequence[Any]) -> None:
    """Forward-mode derivatives are none of ours: :class:`ArgumentError`, never a silent loss of a tangent."""
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ArgumentError(
                "cannot call", fusion, "an input has a forward-mode tangent", "inputs without one",
                "Run the unfused operators for it", fusion=fusion,
            )  # fmt: skip
