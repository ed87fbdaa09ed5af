"""A graph of calls as a function that only makes them: one line for each, nothing looked up while it runs.

Fused calls go to the runtime at once where nothing wants to see them (``operators/direct.py``). Other operators are
called below the wrapper that torch has around them, and by torch's own function or method of that name where one comes
down to the very same operator and arguments, which is tried out on what was recorded of the operands: that is how eager
calls them, and what it costs there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..operators.registration import CALL

#: Where torch has functions of operators, and methods of tensors, for Python to call.
_HOMES = (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn)
#: What would record gradients, and have the result of a view be one.
_ABOVE = reduce(
    or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, n))
        for n in ("ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutogradMeta", "AutogradOther")
    ),
)
_PLAIN = (int, bool, str, type(None))
_HELD = ("placeholder", "call_function")
_KINDS = (*_HELD, "get_attr", "output")


def boxed(module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The function of a graph, of a list of its inputs, which it empties; a value is let go of after its last use."""
    if any(n.op not in _KINDS for n in module.graph.nodes):
        return make_boxed_func(module.forward)
    writer = _Writer(module)
    exec(compile(writer.text(), "<fusionreg calls>", "exec"), writer.names)  # our own text: calls of names, in order
    run: Any = writer.names["run"]
    run._boxed_call = True
    return run


class _Writer:
    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module = module
        self.names: dict[str, Any] = {}
        self.values: dict[torch.fx.Node, str] = {}
        self.known: dict[Any, str] = {}

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        nodes = list(self.module.graph.nodes)
        last = {used: node for node in nodes for used in node.all_input_nodes}
        inputs = [n for n in nodes if n.op == "placeholder"]
        yield "def run(given):"
        for i, node in enumerate(nodes):
            self.values[node] = f"v{i}"
        if inputs:
            yield f"    {''.join(f'{self.values[n]}, ' for n in inputs)} = given"
        yield "    given.clear()"
        for node in nodes:
            if node.op == "output":
                yield f"    return {self._argument(node.args[0])}"
            elif node.op == "get_attr":
                self.values[node] = self._named(operator.attrgetter(str(node.target))(self.module))
            elif node.op == "call_function":
                yield f"    {self.values[node]} = {self._call(node)}"
            gone = [self.values[n] for n in (*node.all_input_nodes, node) if last.get(n, n) is node and n.op in _HELD]
            if gone and node.op != "output":
                yield f"    del {', '.join(dict.fromkeys(gone))}"

    def _call(self, node: torch.fx.Node) -> str:
        if node.target is operator.getitem:
            return "{}[{}]".format(*map(self._argument, node.args))
        given = [self._argument(a) for a in node.args]
        given += [f"{k}={self._argument(v)}" for k, v in node.kwargs.items()]
        return f"{self._named(_function(node))}({', '.join(given)})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return self.values[value]
        if isinstance(value, list):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._argument(v)}, ' for v in value)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._argument(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._argument, (value.start, value.stop, value.step)))})"
        if type(value) in _PLAIN or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._named(value)

    def _named(self, value: Any) -> str:
        """A name for something that is there before the call."""
        found = self.known.get(id(value))
        if found is None:
            found = self.known[id(value)] = f"c{len(self.names)}"
            self.names[found] = value
        return found


def _function(node: torch.fx.Node) -> Any:
    """What to call for a node."""
    target: Any = node.target
    if type(target) is not torch._ops.OpOverload:
        return target
    return getattr(target, CALL, None) or _short(node, target) or getattr(target, "_op", target)


def _short(node: torch.fx.Node, target: torch._ops.OpOverload) -> Any:
    """Torch's own function for an operator of aten, where it makes the same call of it; None where not."""
    if target.namespace != "aten" or not node.args or "val" not in node.meta:
        return None
    try:
        args, kwargs = torch.fx.map_arg((list(node.args), dict(node.kwargs)), lambda n: n.meta["val"])
    except KeyError:
        return None
    if not any(isinstance(a, torch.Tensor) for a in tree_leaves(args)):
        return None  # what makes tensors has a default device, which is somebody else's
    name = target._schema.name.removeprefix("aten::")
    for home in _HOMES:
        found = getattr(home, name, None)
        if found is not None and _same(found, target, args, kwargs, node.meta["val"]):
            return found
    return None


class _First(TorchDispatchMode):
    """Notes the first operator that is called, and gives what is known to come of it; nothing is computed."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result, self.calls = result, list[tuple[Any, Any, Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return self.result


def _same(function: Any, target: torch._ops.OpOverload, args: Any, kwargs: Any, result: Any) -> bool:
    mode = _First(result)
    try:
        with torch._C._ExcludeDispatchKeyGuard(_ABOVE), mode:
            function(*args, **kwargs)
    except Exception:  # it takes other arguments
        return False
    if len(mode.calls) != 1 or mode.calls[0][0] is not target:
        return False
    mine, other = (_bound(target, a, k) for a, k in ((args, kwargs), mode.calls[0][1:]))
    return mine.keys() == other.keys() and all(_equal(mine[k], other[k]) for k in mine)


def _bound(target: torch._ops.OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    arguments = target._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and (one is other or bool(one == other))


__all__ = ["boxed"]
