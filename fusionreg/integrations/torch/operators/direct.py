"""Calls of operators without a turn through torch's dispatcher, where nothing on that way would see to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fusionreg.core.errors import ArgumentError

#: What an operator does to plain tensors where autograd looks at it.
Plain = Callable[[Sequence[Any], Mapping[str, Any]], Any]

#: Tensors and attributes that are what they seem.
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_ATTRIBUTES = frozenset((float, int, bool, str))


def direct(op: Any, inputs: Collection[str]) -> Callable[..., Any]:
    """An operator of a fusion with these inputs as a function that does at once what it does to plain tensors, unless
    something on the way there wants to see the call.

    The dispatcher remains for: tracing and compiling, modes, transforms, autocast, the profiler, tensors of other
    classes or by name, forward-mode derivatives, and every call that the runtime refuses: torch's schema may make
    something else of its arguments, or know better what is wrong with them.
    """
    plain: Plain = op._fusionreg_plain
    named, tensor_classes, attribute_classes = frozenset(inputs), _TENSORS.issuperset, _ATTRIBUTES.issuperset
    compiling = torch.compiler.is_compiling
    modes, functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
    transformed, traced = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
    autocast, profiled = torch._C._is_any_autocast_enabled, torch.autograd._profiler_enabled

    def call(*tensors: Any, **attributes: Any) -> Any:
        if (
            compiling()
            or modes()
            or functions()
            or autocast()
            or profiled()
            or transformed() is not None
            or traced() is not None
            or forward_ad._current_level >= 0
            or not tensor_classes(map(type, tensors))
            or (attributes and not (attribute_classes(map(type, attributes.values())) and named.isdisjoint(attributes)))
        ):
            return op(*tensors, **attributes)
        try:
            return plain(tensors, attributes)
        except ArgumentError:  # before anything ran: the same word again, or torch's own
            return op(*tensors, **attributes)

    return call
