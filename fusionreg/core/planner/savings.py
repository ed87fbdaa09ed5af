"""What a match saves on a graph: the executor's kernels with and without it. Floor 4."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..ir import Graph
from ..matcher.match import Match
from .costs import ROUTED, SELECTING, Cost, CostModel, Gain
from .executor import PRODUCTS
from .grouping import Grouping, group, pieces

#: A win of a smaller share of what the nodes cost unfused is none: measurements of one kernel scatter as much.
MARGIN = 0.03

#: Up to so many times the model's time, what a kernel says of its own tells no more than that the model is nominal.
SLOW = 1.5

#: A product whose arithmetic takes a larger part of the time that its bytes take is no mere stream of them.
PART = 0.1

ESTIMATED = "model"


@dataclass(frozen=True, slots=True)
class Saving:
    """What a match saves.

    Attributes:
        cost: bytes, operations, launches and seconds less; negative where it is more.
        share: the seconds over what its nodes cost unfused.
        basis: what that rests on: ``model``, ``estimate of its plugin``, or the measurement.
        gain: how the like of it measured against this executor; None where nobody measured.
        unsure: whether it rests on the model, and the rate of its products counts: how near to the device's a kernel
            comes is what the model does not know.
    """

    cost: Cost
    share: float
    basis: str = ESTIMATED
    gain: Gain | None = None
    unsure: bool = False

    @property
    def measured(self) -> bool:
        """Whether it was measured against this executor."""
        return self.gain is not None

    @property
    def wins(self) -> bool:
        """Whether it saves more time than measurements scatter."""
        return self.share > MARGIN


class GraphCosts:
    """A cost model on one graph.

    The executor's kernels are found once. A match takes nodes out of some of them; what is left of those runs on, in
    as many kernels as it falls into, and has to write and read what used to stay inside. So a saving is the difference
    of two ways to run the touched kernels, and what fusing takes from its neighbours is part of it.
    """

    def __init__(self, model: CostModel, graph: Graph) -> None:
        self.model, self.graph = model, graph
        self._kernels: dict[tuple[str, ...], Cost] = {}
        self._busy: dict[str, tuple[int, float]] = {}
        self._sizes: dict[str, int] = {}
        self._readers: dict[str, tuple[set[str], bool]] = {}

    @cached_property
    def grouping(self) -> Grouping:
        """The kernels that the executor makes of the graph."""
        return group(self.graph, self.model.ops, self.model.executor, self.model.extent)

    def unfused(self, nodes: Iterable[str]) -> Cost:
        """The nodes as the executor runs them, the rest of the graph aside."""
        by_kernel: dict[int, list[str]] = {}
        for n in nodes:
            if n in self.grouping.of:
                by_kernel.setdefault(self.grouping.of[n], []).append(n)
        total = Cost()
        for k, inside in by_kernel.items():
            members, mine = self.grouping.kernels[k], set(inside)
            total += self._sum(pieces(self.graph, self.grouping, members, [m for m in members if m not in mine]))
        return total

    def fused(self, match: Match) -> Cost:
        """The match as one kernel: reads its inputs and writes its outputs once. Seconds of the plugin, or a model's;
        a kernel that says itself that it takes much longer is taken at its word."""
        seconds = self.model.measured(match)
        moved = self.moved(match)
        flops = [self._work(n) for n in match.nodes]
        if seconds is None:
            seconds = self.model.seconds(moved, sum([busy for _, busy in flops]))
            own = self.model.kernels(match)
            if own is not None and own > SLOW * seconds:
                seconds = own
        return Cost(moved, sum([f for f, _ in flops]), 1, seconds)

    def moved(self, match: Match) -> int:
        """Bytes of all inputs and outputs; of a table, those that are looked up."""
        selected = self._selected(match.nodes)
        names = {*match.inputs.values(), *match.outputs.values()}
        return sum([selected.get(name, self._size(name)) for name in names])

    def _selected(self, nodes: Iterable[str]) -> dict[str, int]:
        """Bytes that are read of values that nodes only select from."""
        named = self.graph.node_by_name
        choosing = [node for n in nodes if (node := named[n]).op in SELECTING | ROUTED]
        if not choosing:
            return {}
        found: dict[str, int] = {}
        for node in choosing:
            table = node.inputs[0 if node.op in SELECTING else 1]
            found[table] = found.get(table, 0) + self.model.read(self.graph, node, table)
        whole = {i for n in nodes for k, i in enumerate(named[n].inputs) if not _selects(named[n].op, k)}
        return {i: min(size, self._size(i)) for i, size in found.items() if i not in whole}

    def saved(self, match: Match, without: Collection[str] = (), extra: Cost | None = None) -> Saving:
        """What fusing saves, where the nodes ``without`` are fused into something else already, and it costs ``extra``
        elsewhere."""
        before = after = Cost()
        mine = {*match.taken}
        touched = dict.fromkeys(k for n in match.taken if (k := self.grouping.of.get(n)) is not None)
        for k in touched:
            members = self.grouping.kernels[k]
            gone = [n for n in members if n in without] if without else ()
            before += self._sum(pieces(self.graph, self.grouping, members, gone))
            after += self._sum(pieces(self.graph, self.grouping, members, mine.union(gone)))
        alone = before if not after.launches else self.unfused(match.nodes)
        fused = self.fused(match)
        basis = ESTIMATED
        gain = self.model.gains(match, self.model.executor, fused.bytes)
        unfused = alone.seconds
        if gain is not None:
            # Nothing beats the model: where its time of the nodes is so short that ours, by the measured ratio, would,
            # it is the executor that is slower, and what else its kernel holds does not make it faster.
            least = self.model.seconds(fused.bytes, sum([self._work(n)[1] for n in match.nodes]))
            own = max(gain.ratio * unfused, least)
            unfused = own / gain.ratio
            fused = replace(fused, seconds=own)
            before = replace(before, seconds=max(before.seconds, unfused))
            basis = gain.source
        elif self.model.measured(match) is not None:
            basis = "estimate of its plugin"
        cost = before - after - fused - (extra or Cost())
        share = cost.seconds / unfused if unfused else (-1.0 if cost.seconds < 0 else 0.0)
        return Saving(cost, share, basis, gain, basis == ESTIMATED and self._arithmetic(match, fused.bytes))

    def _arithmetic(self, match: Match, moved: int) -> bool:
        """Whether the rate of a match's products counts: where their arithmetic takes longer than their bytes, or
        those longer than a launch. Small products are no more than what they move; beside an executor that runs every
        operator by itself, large ones with little arithmetic are a mere stream, too."""
        named = self.graph.node_by_name
        busy = sum([self._work(n)[1] for n in match.nodes if named[n].op in PRODUCTS])
        idle, device = moved / self.model.device.bandwidth, self.model.device
        if idle <= device.launch:
            return busy > idle
        return busy > (PART * idle if self.model.executor.alone else 0.0)

    # ---- kernels of the executor ------------------------------------------------------------------------------------

    def _sum(self, kernels: Sequence[tuple[str, ...]]) -> Cost:
        return sum([self._kernel(k) for k in kernels], Cost())

    def _kernel(self, members: tuple[str, ...]) -> Cost:
        known = self._kernels.get(members)
        if known is None:
            cost = self._alone(members[0]) if len(members) == 1 else self._several(members)
            slow = self.model.executor.slow
            times = max([slow.get(self.graph.node_by_name[n].op, 1.0) for n in members]) if slow else 1.0
            known = self._kernels[members] = replace(cost, seconds=cost.seconds * times) if times > 1.0 else cost
        return known

    def _alone(self, name: str) -> Cost:
        node = self.graph.node_by_name[name]
        if self.model.executor.chains and name in self.grouping.spaces:
            return self._several((name,))
        return self.model.node(self.graph, node)

    def _several(self, members: tuple[str, ...]) -> Cost:
        """One kernel: reads what comes from outside, twice where a long reduction is followed by work on its elements;
        writes what is read outside; an operator that is several kernels adds those."""
        model, graph, sources = self.model, self.graph, self.grouping.sources
        inside = set(members)
        nodes = [graph.node_by_name[n] for n in members]
        made = {o for n in nodes for o in n.outputs if o}
        read: dict[str, int] = {}
        for n in nodes:
            for i in filter(None, n.inputs):
                source = sources.get(i, i)
                if source not in made:
                    size = model.read(graph, n, i) if n.op in SELECTING else self._size(i)
                    read[source] = max(read.get(source, 0), min(size, self._size(source)))
        written = sum([self._size(o) for n in nodes for o in n.outputs if o and self._visible(o, inside)])
        moved = sum(read.values()) * (2 if self._again(members) else 1) + written
        launches = 1
        for n in nodes:
            more = model.executor.passes.get(n.op, 1) - 1
            launches += more
            moved += more * sum([self._size(v) for v in {*n.inputs, *n.outputs} if v])
        work = [self._work(n) for n in members]
        seconds = model.seconds(moved, sum([busy for _, busy in work])) + (launches - 1) * model.device.launch
        return Cost(moved, sum([flops for flops, _ in work]), launches, seconds)

    def _again(self, members: tuple[str, ...]) -> bool:
        """Whether rows too long to be kept are read once to be reduced and once more for what follows."""
        full = 0
        for name in members:
            found = self.grouping.spaces.get(name)
            if found is None:
                continue
            if found.length > self.model.executor.persistent:
                full = found.elements
                if found.whole:
                    return True
            elif full and found.elements == full:
                return True
        return False

    def _visible(self, value: str, inside: set[str]) -> bool:
        """Whether a kernel has to write a value that it makes."""
        readers, output = self._read_by(value)
        return output or not readers <= inside

    def _read_by(self, value: str) -> tuple[set[str], bool]:
        """Nodes that read a value, through views too, and whether it is an output."""
        known = self._readers.get(value)
        if known is None:
            readers: set[str] = set()
            output = value in self.graph.output_names
            for reader in self.graph.consumers.get(value, ()):
                if reader.op in self.model.executor.free and reader.inputs[:1] == (value,):
                    for out in filter(None, reader.outputs):
                        more, too = self._read_by(out)
                        readers |= more
                        output = output or too
                else:
                    readers.add(reader.name)
            known = self._readers[value] = (readers, output)
        return known

    def _work(self, name: str) -> tuple[int, float]:
        """Operations of a node, and the seconds that they alone take."""
        known = self._busy.get(name)
        if known is None:
            node = self.graph.node_by_name[name]
            flops = 0 if node.op in self.model.free else self.model.flops(self.graph, node)
            known = self._busy[name] = (flops, self.model.busy(self.graph, node, flops))
        return known

    def _size(self, value: str) -> int:
        known = self._sizes.get(value)
        if known is None:
            known = self._sizes[value] = self.model.size(self.graph.values[value])
        return known


def _selects(op: str, index: int) -> bool:
    """Whether an operator only selects from its operand of that index."""
    return index == 0 if op in SELECTING else index == 1 and op in ROUTED
