"""One table: aten overload → how it is written in ONNX's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusionreg.core.frozen import FrozenDict

from . import (
    activations,
    attention,
    convolution,
    creation,
    gradients,
    indexing,
    linear,
    losses,
    movement,
    normalization,
    pointwise,
    reductions,
    shapes,
    symbolic,
)

Emit = Callable[..., Any]

_TOPICS = (
    pointwise, activations, linear, attention, convolution, normalization, reductions, shapes, movement, indexing,
    creation, symbolic, gradients, losses,
)  # fmt: skip

#: Overload → ``f(emitter, **arguments by schema name)``; the result is a value, or a tuple of values.
TABLE: FrozenDict[str, Emit] = FrozenDict({name: emit for topic in _TOPICS for name, emit in topic.TABLE.items()})

#: Calls that state what export already knows, or only tell others: nothing to compute.
SILENT = frozenset(
    f"aten.{name}"
    for name in (
        "_assert_tensor_metadata.default", "_assert_async.msg", "_assert_async.default", "_assert_scalar.default",
        "sym_constrain_range.default", "sym_constrain_range_for_size.default", "_functional_assert_async.msg",
        "_functional_sym_constrain_range.default", "_functional_sym_constrain_range_for_size.default",
        "_functional_assert_scalar.default",
    )
)  # fmt: skip

__all__ = ["SILENT", "TABLE", "Emit"]
