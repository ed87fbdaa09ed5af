"""Gradients of a fusion that names no backward fusion: those of the operators that its pattern stands for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fusionreg.core.errors import FusionregError
from fusionreg.core.ir import Graph
from fusionreg.core.ops import Vocabulary
from fusionreg.core.pattern.instantiate import instantiate
from fusionreg.core.registry.entries import FusionEntry

from .. import schemas
from ..derivatives.chain import Chain

#: Layouts of one fusion whose chains are kept.
_KEPT = 256


class Chains:
    """The chains of a fusion's calls; those of calls with plain numbers are kept."""

    def __init__(self, entry: FusionEntry, ops: Vocabulary) -> None:
        self.entry, self.ops = entry, ops
        self._names = tuple(entry.inputs)
        self._kept: dict[Any, Chain | str] = {}

    def of(
        self, tensors: Sequence[Any], attributes: Mapping[str, Any], wanted: Sequence[bool]
    ) -> tuple[Chain | str, Mapping[str, Any]]:
        """The chain of a call, or why there is none, and its symbolic extents by the text that the chain has for them.

        Args:
            tensors: as the operator gets them; absent ones are None or missing at the end.
            attributes: attributes and choices.
            wanted: for each tensor, whether its gradient is.
        """
        types = tuple([None if t is None else (t.dtype, t.shape) for t in tensors])
        key: Any = (types, tuple(attributes.items()), tuple(wanted))
        try:
            found = self._kept.get(key)
        except TypeError:  # symbolic numbers are no keys
            found, key = None, None
        extents: dict[str, Any] = {}
        if found is None:
            given = {n: t for n, t in zip(self._names, tensors, strict=False) if t is not None}
            shapes = {n: tuple([_extent(d, extents) for d in t.shape]) for n, t in given.items()}
            dtypes = {n: schemas.dtype_name(t.dtype) for n, t in given.items()}
            asked = [n for n, w in zip(self._names, wanted, strict=False) if w]
            found = self.made(dtypes, shapes, {k: _plain(v) for k, v in attributes.items()}, asked)
            if key is not None and not extents:
                if len(self._kept) >= _KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = found
        return found, extents

    def made(
        self,
        dtypes: Mapping[str, str],
        shapes: Mapping[str, Sequence[Any]],
        keywords: Mapping[str, Any],
        wanted: Collection[str],
    ) -> Chain | str:
        """The chain of a call with inputs of these dtypes and shapes, or why there is none."""
        try:
            graph = operators_of(self.entry, self.ops, dtypes, shapes, keywords)
        except FusionregError as error:
            return str(error)
        if any(v.shape is None or None in v.shape for v in graph.values.values()):
            return "extents between its operators are not known when it is compiled"
        chain = Chain(graph, wanted, self.ops)
        return chain.refusal or chain


def operators_of(
    entry: FusionEntry,
    ops: Vocabulary,
    dtypes: Mapping[str, str],
    shapes: Mapping[str, Sequence[Any]],
    keywords: Mapping[str, Any],
) -> Graph:
    """What a fused call stands for: its pattern as a graph; :class:`FusionregError` where there is none of the call.

    Args:
        entry: the fusion.
        ops: the vocabulary.
        dtypes, shapes: of its inputs, by name; others are absent.
        keywords: attributes, choices and dtypes of the call, by name; None counts as not given.
    """
    spec, said = entry.spec, {k: v for k, v in keywords.items() if v is not None}
    variables = {k: v[0] for k, v in spec.dtypes.items() if len(v) == 1}
    variables |= {entry.inputs[n].dtype: d for n, d in dtypes.items()}
    return instantiate(
        entry.patterns[0], spec, ops=ops, dtypes=variables | {k: v for k, v in said.items() if k in spec.dtypes},
        shapes={n: tuple(s) for n, s in shapes.items()},
        choices={k: v for k, v in said.items() if k in entry.choices},
        attributes={k: v for k, v in said.items() if k in spec.attributes},
        absent=[n for n in entry.inputs if n not in shapes],
    )  # fmt: skip


def _extent(extent: Any, known: dict[str, Any]) -> int | str:
    if isinstance(extent, int):
        return extent
    if extent.node.constant is not None or extent.node.is_constant():
        return int(extent)
    text = str(extent)
    known[text] = extent
    return text


def _plain(value: Any) -> Any:
    """A symbolic number as the one that it stands for: attributes are constants of a graph of operators."""
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat) else value


__all__ = ["Chains", "operators_of"]
