"""One backward pass over a chain: gradients from the last node to the first, other values as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fusionreg.core.ir import Node

from .. import schemas
from . import RULES
from .rule import Formula, Rule

if TYPE_CHECKING:
    from .chain import Chain

#: Operators beside the point-wise ones that repeat operands along axes of extent 1; where a gradient has an extent 1
#: already, a sum over it is none.
BROADCASTING = frozenset({"MatMul", "Gemm", "Expand"})


@dataclass(frozen=True)
class Part:
    """The gradients that one formula gives of one node."""

    node: Node
    rule: Rule
    formula: Formula
    wanted: tuple[bool, ...]


class Pass:
    """One backward pass."""

    def __init__(self, chain: Chain, saved: Mapping[str, torch.Tensor], extents: Mapping[str, Any]) -> None:
        self.chain, self.graph, self.extents = chain, chain.graph, extents
        self.values: dict[str, Any] = dict(saved)
        self.like = next(iter(saved.values()), None)

    def run(self, slopes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = dict(slopes)
        like = next(iter(slopes.values()))
        if self.like is None:
            self.like = like
        for part in self.chain.parts:
            outputs = zip(self.chain.results(part.node), part.node.outputs, strict=False)
            mine = {f"d{n}": found[o] for n, o in outputs if o in found}
            if not mine:
                continue
            gives = part.formula.gives
            results = part.formula.call(*self._operands(part, mine), **self._keywords(part))
            if gives == ("args",):
                targets: Sequence[str] = part.node.inputs
            else:
                targets = [self.chain.value_of(part.node, n) for n in gives]
                results = results if len(gives) > 1 else (results,)
            for target, result, wanted in zip(targets, results, part.wanted, strict=True):
                if wanted and result is not None:
                    result = self._fitted(result, part.node, target)
                    found[target] = found[target] + result if target in found else result
        return {name: found[name] if name in found else self._zeros(name, like) for name in self.chain.wanted}

    def _zeros(self, name: str, like: torch.Tensor) -> torch.Tensor:
        dtype = schemas.torch_dtype(self.graph.values[name].dtype)
        return like.new_zeros(self._shape(name), dtype=dtype)

    def _operands(self, part: Part, slopes: Mapping[str, torch.Tensor]) -> list[Any]:
        found: list[Any] = []
        for name in part.formula.reads:
            if name in slopes:
                found.append(slopes[name])
            elif name == "args":
                found.append([self.value(i) for i in part.node.inputs])
            else:
                value = self.chain.value_of(part.node, name)
                found.append(self.value(value) if value else None)
        return found

    def _keywords(self, part: Part) -> dict[str, Any]:
        first = part.node.inputs[0] if part.formula.gives == ("args",) else ""
        first = first or self.chain.value_of(part.node, part.formula.gives[0])
        return self._facts(part.node, part.formula, first, part.wanted)

    def _facts(self, node: Node, formula: Formula, of: str, wanted: tuple[bool, ...] = ()) -> dict[str, Any]:
        attributes = self.chain.attributes[node.name]
        facts: dict[str, Any] = {}
        for name in formula.keywords:
            if name == "shape":
                facts[name] = self._shape(of)
            elif name == "dtype":
                facts[name] = self.graph.values[of].dtype
            elif name == "result":
                facts[name] = self._shape(node.outputs[0])
            elif name == "wanted":
                facts[name] = wanted
            else:
                facts[name] = attributes[name]
        return facts

    def value(self, name: str) -> Any:
        """A value of the graph: saved, a constant, or computed again."""
        if name not in self.values:
            if name in self.graph.constants:
                self.values[name] = self._constant(name)
            else:
                node = self.graph.producers[name]
                operands = [self.value(i) if i else None for i in node.inputs]
                formula = RULES[node.op].value
                made = formula.call(*operands, **self._facts(node, formula, node.inputs[0]))
                several = made if isinstance(made, tuple | list) else (made,)
                self.values.update({o: v for o, v in zip(node.outputs, several, strict=False) if o})
        return self.values[name]

    def _constant(self, name: str) -> Any:
        array = self.graph.constants[name]
        if array.dtype.kind in "iu" and array.ndim:
            return tuple(int(v) for v in array.reshape(-1))
        assert self.like is not None
        if array.size == 1:
            number = array.reshape(-1)[0].item() if array.dtype.kind in "biuf" else float(array.reshape(-1)[0])
            if not array.ndim:
                return number
            dtype = schemas.torch_dtype(self.graph.values[name].dtype)
            return torch.full(array.shape, number, dtype=dtype, device=self.like.device)
        dtype = schemas.torch_dtype(self.graph.values[name].dtype)
        return torch.tensor(array.astype("float64").tolist(), dtype=dtype, device=self.like.device)

    def _shape(self, name: str) -> tuple[Any, ...]:
        shape = self.graph.values[name].shape
        assert shape is not None, name
        return tuple(d if isinstance(d, int) else self.extents[d] for d in shape)

    def _fitted(self, gradient: torch.Tensor, node: Node, target: str) -> torch.Tensor:
        """The gradient of an operand that was broadcast: summed over what it was repeated along."""
        if node.op not in BROADCASTING and not self.chain.ops[node.op].pointwise:
            return gradient
        out, own = self.graph.values[node.outputs[0]].shape, self.graph.values[target].shape
        if out == own:
            return gradient
        assert out is not None and own is not None, node
        lead = gradient.dim() - len(own)
        over = [lead + i for i, (d, e) in enumerate(zip(own, out[len(out) - len(own) :], strict=True)) if d == 1 != e]
        if over:
            gradient = gradient.sum(over, keepdim=True)
        return gradient.sum(list(range(lead))) if lead else gradient
