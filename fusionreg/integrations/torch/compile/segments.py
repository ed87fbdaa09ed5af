"""Dynamo's graph, rewritten part by part.

Nodes that switch a mode, that hold a graph of their own, or that are inside of ``vmap``, ``grad`` or ``jvp``, stand
where they are; what lies between two of them is one segment: it is traced to aten calls, matched, and replaced when
something in it was fused. Otherwise its nodes stay.
Switches that change nothing divide nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

#: Functions that switch a mode for everything behind them.
_SWITCHES = frozenset(
    (
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
    )
)

#: Functions that begin a transform, and those that end it.
_ENTER = frozenset(f"_{transform}_increment_nesting" for transform in ("vmap", "grad", "jvp"))
_LEAVE = frozenset(f"_{transform}_decrement_nesting" for transform in ("vmap", "grad", "jvp"))

#: A segment and the fake values of its inputs → the graph that takes its place, or None to leave it.
Rewrite = Callable[[torch.fx.GraphModule, list[Any]], "torch.fx.GraphModule | None"]


def rewrite_graph(module: torch.fx.GraphModule, rewrite: Rewrite) -> torch.fx.GraphModule:
    """``module`` with every segment rewritten; itself where none was."""
    return _Walk(module, rewrite).run()


class _Walk:
    def __init__(self, module: torch.fx.GraphModule, rewrite: Rewrite) -> None:
        self.module, self.rewrite = module, rewrite
        self.out = torch.fx.Graph()
        self.made: dict[torch.fx.Node, Any] = {}
        self.pending: list[torch.fx.Node] = []
        self.held: dict[str, Any] = {}  # submodules and tensors that take the place of, or join, those of `module`
        self.changed = False
        self.switched: list[Any] = []
        self.transforms = 0  # of functorch, under way
        self.idle = _idle(list(module.graph.nodes))

    def run(self) -> torch.fx.GraphModule:
        with self._modes():
            for node in self.module.graph.nodes:
                if node.op in ("placeholder", "get_attr") or self._unpacks(node):
                    self._copy(node)
                elif node in self.idle:
                    continue
                elif self._transformed(node) or node.op == "output" or _stands(node):
                    self._flush()
                    self._switch(node)
                    self._inner(node)
                    self._copy(node)
                else:
                    self.pending.append(node)
        if not self.changed:
            return self.module
        root = torch.nn.Module()
        for name, value in {**_attributes(self.module), **self.held}.items():
            _hold(root, name, value)
        made = torch.fx.GraphModule(root, self.out)
        made.meta = dict(self.module.meta)
        return made

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """Grad mode and autocast as they were, whatever is switched within."""
        enabled = torch.is_grad_enabled()
        try:
            yield
        finally:
            torch._C._set_grad_enabled(enabled)
            while self.switched:
                torch.amp.autocast_mode._exit_autocast(self.switched.pop())

    def _unpacks(self, node: torch.fx.Node) -> bool:
        """Whether it takes one of the results of a node that stands; of a tensor it would take elements."""
        source = node.args[0] if node.target is operator.getitem else None
        return source in self.made and not isinstance(_recorded(source), torch.Tensor)  # type: ignore[arg-type]

    def _transformed(self, node: torch.fx.Node) -> bool:
        """Whether tensors stand for batches, or have tangents, where a node is: a trace would not see through them."""
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        self.transforms += name in _ENTER
        inside = self.transforms > 0
        self.transforms -= name in _LEAVE
        return inside

    def _copy(self, node: torch.fx.Node) -> None:
        self.made[node] = self.out.node_copy(node, lambda n: self.made[n])

    def _switch(self, node: torch.fx.Node) -> None:
        """The modes of what follows hold while it is traced."""
        if node.target is torch._C._set_grad_enabled:
            torch._C._set_grad_enabled(bool(node.args[0]))
        elif node.target is torch.amp.autocast_mode._enter_autocast:
            self.switched.append(torch.amp.autocast_mode._enter_autocast(*node.args))
        elif node.target is torch.amp.autocast_mode._exit_autocast and self.switched:
            torch.amp.autocast_mode._exit_autocast(self.switched.pop())

    def _inner(self, node: torch.fx.Node) -> None:
        """The body of a checkpointed region is a graph like this one."""
        if not isinstance(node.target, TagActivationCheckpoint):
            return
        body = node.args[0]
        assert isinstance(body, torch.fx.Node)
        inner = getattr(self.module, str(body.target))
        made = rewrite_graph(inner, self.rewrite)
        if made is not inner:
            self.held[str(body.target)] = made
            self.changed = True

    def _flush(self) -> None:
        """Rewrites the pending nodes, or copies them."""
        nodes, self.pending = self.pending, []
        if not nodes:
            return
        made = None
        segment = _Segment(nodes)
        if segment.whole:
            made = self.rewrite(segment.module(self.module), segment.values)
        if made is None:
            for node in nodes:
                self._copy(node)
        else:
            self._inline(made, segment)

    def _inline(self, made: torch.fx.GraphModule, segment: _Segment) -> None:
        inside: dict[torch.fx.Node, Any] = {}
        given = iter(segment.inputs)
        for node in made.graph.nodes:
            if node.op == "placeholder":
                inside[node] = self.made[next(given)]
            elif node.op == "get_attr":
                name = f"_fusionreg_{len(self.held)}"
                self.held[name] = getattr(made, str(node.target))
                inside[node] = self.out.get_attr(name)
            elif node.op == "output":
                results = torch.fx.map_arg(node.args[0], lambda n: inside[n])
                self.made.update(zip(segment.outputs, results, strict=True))
            else:
                inside[node] = self.out.node_copy(node, lambda n: inside[n])
                inside[node].meta.pop("val", None)  # of another trace
        self.changed = True


class _Segment:
    """Nodes in a row: what they read from outside, and what of them is read there."""

    def __init__(self, nodes: list[torch.fx.Node]) -> None:
        own = set(nodes)
        self.nodes = nodes
        self.inputs = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in own))
        self.outputs = [n for n in nodes if any(u not in own for u in n.users)]
        self.values = [_recorded(n) for n in self.inputs]
        self.whole = all(_known(n) for n in (*self.inputs, *self.outputs))

    def module(self, owner: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """The segment by itself; it gives a tuple of its outputs."""
        graph = torch.fx.Graph()
        made = {n: graph.placeholder(n.name) for n in self.inputs}
        for node in self.nodes:
            made[node] = graph.node_copy(node, lambda n: made[n])
        graph.output(tuple(made[n] for n in self.outputs))
        return torch.fx.GraphModule(owner, graph)


def _idle(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """Switches that change nothing where they stand: gradients off around what reads nothing that has one, and
    autocast off where it is."""
    at = [-1, *(i for i, n in enumerate(nodes) if n.target is torch._C._set_grad_enabled), len(nodes)]
    on, found = torch.is_grad_enabled(), set()
    for i, begin in enumerate(at[1:-1], 1):
        wanted = bool(nodes[begin].args[0])
        if wanted == on or (i < len(at) - 2 and not wanted and not any(map(_records, nodes[begin : at[i + 1]]))):
            found.add(nodes[begin])
        else:
            on = wanted
    entered: list[torch.fx.Node] = []
    for node in nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            kind, _, enabled, *_ = (*node.args, True, True)
            if not enabled and not entered and not torch.is_autocast_enabled(kind):  # type: ignore[arg-type]
                found.add(node)
            else:
                entered.append(node)
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            if node.args[0] in found:
                found.add(node)
            elif node.args[0] in entered:
                entered.remove(node.args[0])  # type: ignore[arg-type]
    return found


def _records(node: torch.fx.Node) -> bool:
    """Whether gradients of what a node reads could be asked for, as far as one can tell."""
    if node.target in _SWITCHES:
        return False
    values = [_recorded(n) for n in node.all_input_nodes]
    return _stands(node) or any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def _stands(node: torch.fx.Node) -> bool:
    """Whether a node must stay what and where it is. Tensors that wrap others have operators of their own (nested ones,
    those that lie on several devices): what they come down to is matched in autograd's graphs."""
    if any(map(is_traceable_wrapper_subclass, tree_leaves([_recorded(n) for n in (node, *node.all_input_nodes)]))):
        return True
    if node.op == "call_module" or (node.op == "call_method" and node.target in ("item", "tolist")):
        return True
    if node.op != "call_function":
        return False
    return isinstance(node.target, torch._ops.HigherOrderOperator) or node.target in _SWITCHES


def _recorded(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _known(node: torch.fx.Node) -> bool:
    value = _recorded(node)
    return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def _attributes(module: torch.fx.GraphModule) -> dict[str, Any]:
    """Everything that the nodes of a module name."""
    found: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            value: Any = module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            found[str(node.target)] = value
    return found


def _hold(root: torch.nn.Module, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for part in parents:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    if isinstance(value, torch.nn.Module):
        root.add_module(name, value)
    elif isinstance(value, torch.nn.Parameter):
        root.register_parameter(name, value)
    elif isinstance(value, torch.Tensor):
        root.register_buffer(name, value, persistent=False)
    else:
        setattr(root, name, value)
