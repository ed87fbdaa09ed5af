"""Point-wise operators around a match: what a kernel's slots take in front of an input and behind an output. Floor 2.

In front of an input stands whatever point-wise operators compute it for this match alone; behind an output, those that
read it element by element. Both become part of the fusion: its pattern with their program around it.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..frozen import FrozenDict
from ..ir import Graph, Node, Value
from ..spec import BETWEEN, OpSpec, Region
from ..tensors import Form
from .checks import Fusion
from .match import Match
from .regions import MAX_NODES, MAX_TENSORS, Program, Refuses, iteration_space, named_by_contents
from .search import View

#: Operators of an instruction or two.
CHEAP = frozenset({"Add", "Sub", "Mul", "Neg", "Cast", "Identity"})


@dataclass(frozen=True)
class _Slot:
    """A tensor of the fusion that has one: the graph's value, and the form that it took."""

    name: str
    value: Value
    form: Form

    def text(self, value: Value) -> str | None:
        """The tensor text of an operand beside this tensor, None where a kernel could not find its elements.

        A kernel knows an element by its place in the whole tensor and by its coordinates along the named axes: along
        each of those an operand has its whole extent or is repeated.
        """
        shape, whole = value.shape, self.value.shape
        assert whole is not None
        if shape is None or len(shape) > len(whole):
            return None
        if shape == whole:
            return f"{value.dtype}[{self.form}]"
        if all(d == 1 for d in shape):
            return f"{value.dtype}[]"
        missing, folded = len(whole) - len(shape), len(whole) - len(self.form.axes)
        words: list[str] = []
        start = 0
        for i, axis in enumerate(self.form.axes):
            dotted = self.form.leading and i == max(self.form.before - 1, 0)
            end = start + 1 + (folded if dotted else 0)
            mine, full = shape[max(start - missing, 0) : max(end - missing, 0)], whole[start:end]
            if all(d == 1 for d in mine):
                word = "1" if len(mine) == len(full) else ""
            elif mine == full and isinstance(axis, str):
                word = axis
            else:
                return None
            if word:
                words.append((f"{word} ..." if self.form.before else f"... {word}") if dotted else word)
            start = end
        named = next(i for i, w in enumerate(words) if w.strip(". ") != "1")
        if not any("..." in w for w in words[named:]):
            words = words[named:]  # a tensor may have more leading ones than its text
        return f"{value.dtype}[{' '.join(words)}]"


@dataclass(frozen=True)
class _Side:
    """Point-wise operators at one slot, in topological order."""

    slot: _Slot
    nodes: tuple[Node, ...]


def around(
    view: View, ops: Mapping[str, OpSpec], refuses: Refuses, fusion: Fusion, match: Match, slots: Collection[str],
    keeps: Collection[str] = (),
) -> tuple[Region, Match] | None:
    """What the fusion is with all the point-wise operators that the slots take, None where there are none.

    ``slots``: names of tensors; ``keeps``: those among them whose value may be read by others, too. The match comes
    back with the nodes and tensors of the whole, under its own name still.
    """
    graph = view.graph
    places = [s for n in slots if (s := _slot(graph, fusion, match, n)) is not None]
    inside = set(match.nodes)
    front: list[_Side] = []
    behind: list[_Side] = []
    for slot in places:
        if slot.name in match.inputs and (nodes := _front(graph, ops, refuses, slot, inside, slot.name in keeps)):
            front.append(_Side(slot, nodes))
        elif slot.name in match.outputs and not behind and (nodes := _behind(graph, ops, refuses, slot, inside)):
            behind.append(_Side(slot, nodes))  # one output's readers may read another's: one side is taken
        else:
            continue
        inside |= {n.name for n in nodes}
    return _write(view, ops, fusion, match, front, behind) if front or behind else None


def _slot(graph: Graph, fusion: Fusion, match: Match, name: str) -> _Slot | None:
    value = match.inputs.get(name) or match.outputs.get(name)
    if value is None or name not in match.forms or list(match.inputs.values()).count(value) > 1:
        return None
    kind = fusion.inputs.get(name) or fusion.outputs[name]
    return _Slot(name, graph.values[value], kind.forms[match.forms[name]])


def _front(
    graph: Graph, ops: Mapping[str, OpSpec], refuses: Refuses, slot: _Slot, inside: Collection[str], kept: bool
) -> tuple[Node, ...]:
    """What computes the slot's value for the match alone; ``kept``: or for others as well."""
    taken = set(inside)
    found: list[Node] = []
    ready = [slot.value.name]
    while ready:
        producer = graph.producers.get(ready.pop())
        if producer is None or producer.name in taken or len(found) >= MAX_NODES:
            continue
        if _alone(graph, ops, refuses, slot, producer, taken, kept and slot.value.name in producer.outputs):
            taken.add(producer.name)
            found.append(producer)
            ready += [i for i in producer.inputs if i]
    return tuple(sorted(found, key=lambda n: graph.position[n.name]))


def _behind(
    graph: Graph, ops: Mapping[str, OpSpec], refuses: Refuses, slot: _Slot, inside: Collection[str]
) -> tuple[Node, ...]:
    """What reads the slot's value element by element."""
    taken, made = set(inside), {slot.value.name}
    first = min(graph.position[n] for n in inside)
    found: list[Node] = []
    queue = [(graph.position[r.name], r.name) for r in graph.consumers.get(slot.value.name, ())]
    heapq.heapify(queue)
    seen: set[str] = set()
    while queue and len(found) < MAX_NODES:
        _, name = heapq.heappop(queue)
        if name in seen or name in taken:
            continue
        seen.add(name)
        node = graph.node_by_name[name]
        if iteration_space(graph, ops, refuses, node) != slot.value.shape:
            continue
        others = [i for i in node.inputs if i and i not in made]
        if any(slot.text(graph.values[i]) is None for i in others) or _depends(graph, others, taken, first):
            continue
        taken.add(name)
        found.append(node)
        made.update(o for o in node.outputs if o)
        for out in filter(None, node.outputs):
            for reader in graph.consumers.get(out, ()):
                heapq.heappush(queue, (graph.position[reader.name], reader.name))
    sides = [i for n in found for i in n.inputs if i and i not in made]
    while sides:  # what computes the values that it meets, for it alone
        producer = graph.producers.get(sides.pop())
        if producer is None or producer.name in taken or len(found) >= MAX_NODES:
            continue
        if any(r.name in inside for o in producer.outputs if o for r in graph.consumers.get(o, ())):
            continue  # the match reads it, too: it is needed before the slot's value is there
        if _alone(graph, ops, refuses, slot, producer, taken) and not _depends(graph, producer.inputs, taken, first):
            taken.add(producer.name)
            found.append(producer)
            sides += [i for i in producer.inputs if i]
    return tuple(sorted(found, key=lambda n: graph.position[n.name]))


def _alone(
    graph: Graph, ops: Mapping[str, OpSpec], refuses: Refuses, slot: _Slot, node: Node, inside: Collection[str],
    kept: bool = False,
) -> bool:
    """Whether a node works over the slot's elements, or cheaply over fewer, on operands that fit, for nodes inside
    alone; ``kept``: or for others as well."""
    space = iteration_space(graph, ops, refuses, node)
    if space is None or (space != slot.value.shape and not _repeated(graph, slot, node)):
        return False
    outputs = [o for o in node.outputs if o]
    if not (kept and len(outputs) == 1) and any(
        o in graph.output_names or any(r.name not in inside for r in graph.consumers.get(o, ())) for o in outputs
    ):
        return False
    return all(slot.text(graph.values[i]) is not None for i in node.inputs if i)


def _repeated(graph: Graph, slot: _Slot, node: Node) -> bool:
    """Whether a node's results are such that computing one again for each element costs less than keeping it."""
    return node.op in CHEAP and all(slot.text(graph.values[o]) is not None for o in node.outputs if o)


def _depends(graph: Graph, values: Sequence[str], nodes: Collection[str], first: int) -> bool:
    """Whether any of the values is computed from one of the nodes, the first of which stands at ``first``."""
    stack = [p for v in values if (p := graph.producers.get(v)) is not None]
    seen: set[str] = set()
    while stack:
        node = stack.pop()
        if node.name in nodes:
            return True
        if node.name in seen or graph.position[node.name] < first:
            continue
        seen.add(node.name)
        stack += [p for r in node.reads if (p := graph.producers.get(r)) is not None]
    return False


def _write(
    view: View, ops: Mapping[str, OpSpec], fusion: Fusion, match: Match, front: Sequence[_Side], behind: Sequence[_Side]
) -> tuple[Region, Match] | None:
    graph = view.graph
    nodes = [n for side in (*front, *behind) for n in side.nodes]
    union = sorted((*(n.name for n in nodes), *match.nodes), key=graph.position.__getitem__)
    made = {o for n in nodes for o in n.outputs}
    program = Program(graph, ops, frozenset(union), _suffix(fusion.patterns[0].text))
    program.names.update({v: n for n, v in (*match.inputs.items(), *match.outputs.items())})
    inputs = {n: v for n, v in match.inputs.items() if v not in made}
    types = {n: fusion.inputs[n].text for n in fusion.inputs if n in inputs or n not in match.inputs}
    open_ = {side.slot.name for side in behind}  # what kernels hold there need not be written; all else they write
    outputs = {n: v for n, v in match.outputs.items() if n not in open_ or program.visible(v)}
    results = {n: fusion.outputs[n].text for n in outputs}
    lines: list[list[str]] = []
    for sides in (front, behind):
        start = len(program.lines)
        for side in sides:
            known = {*program.inputs, *program.outputs}
            for node in side.nodes:
                program.add(node)
            for name, value in program.inputs.items():
                if name not in known:
                    types[name], inputs[name] = str(side.slot.text(graph.values[value])), value
            for name, value in program.outputs.items():
                if name not in known:
                    results[name], outputs[name] = f"{graph.values[value].dtype}[{side.slot.form}]", value
        lines.append(program.lines[start:])
    for side in front:
        if program.visible(side.slot.value.name):
            results[side.slot.name] = fusion.inputs[side.slot.name].text
            outputs[side.slot.name] = side.slot.value.name
    if not outputs or len(types) + len(results) > MAX_TENSORS:
        return None
    if view.legality.check([graph.node_by_name[n] for n in union], inputs.values(), frozenset(outputs.values())):
        return None
    region = named_by_contents(
        Region(
            name="r",
            pattern="\n".join((*lines[0], BETWEEN, *lines[1])),
            inputs=types,
            outputs=results,
            dtypes={v: (match.dtypes.get(v, choices[0]),) for v, choices in fusion.spec.dtypes.items()},
            slots=tuple(side.slot.name for side in (*front, *behind)),
        )
    )
    forms = {n: match.forms.get(n, 0) for n in (*types, *results)}
    grown = replace(
        match, nodes=tuple(union), root=union[-1], inputs=FrozenDict(inputs), outputs=FrozenDict(outputs), spelling=0,
        forms=FrozenDict(forms), around=len(nodes),
    )  # fmt: skip
    return region, grown


def _suffix(pattern: str) -> str:
    """What keeps the program's names apart from those of the pattern."""
    suffix = ""
    while re.search(rf"\b(in|out|v)\d+{suffix}\b", pattern):
        suffix += "_"
    return suffix
