"""Which combinations of dtypes, choices, attributes, forms and absent inputs a kernel is tried on. Floor 7."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import FusionregError
from ..frozen import FrozenDict
from ..problem import Tensor, bind
from .trial import Trial

if TYPE_CHECKING:
    from ..entries import FusionEntry, KernelEntry

#: Combinations beyond this number are sampled.
EXHAUSTIVE = 4096

Factor = tuple[str, str, tuple[Any, ...]]
"""Kind (dtype, choice, attribute, form, absent), name, levels."""


def factors(entry: FusionEntry) -> list[Factor]:
    """Everything of a fusion that takes one of a few values."""
    spec = entry.spec
    found: list[Factor] = [("dtype", name, levels) for name, levels in spec.dtypes.items()]
    found += [("choice", name, keys) for name, keys in entry.choices.items()]
    for name, attribute in spec.attributes.items():
        levels: tuple[Any, ...] = attribute.choices or ((False, True) if attribute.type == "bool" else ())
        fallback = {"int": 1, "float": 1.0, "str": ""}
        default = attribute.default if attribute.default is not None else fallback.get(attribute.type)
        found.append(("attribute", name, levels or (default,)))
    found += [("form", n, tuple(range(len(t.forms)))) for n, t in entry.inputs.items() if len(t.forms) > 1]
    found += [("absent", name, (False, True)) for name in entry.inputs if name in entry.optional]
    return found


def _row(levels: Sequence[Any], declared: Sequence[Factor], axes: FrozenDict[str, int]) -> Trial:
    picked: dict[str, dict[str, Any]] = {"dtype": {}, "choice": {}, "attribute": {}, "form": {}, "absent": {}}
    for (kind, name, _), level in zip(declared, levels, strict=True):
        picked[kind][name] = level
    return Trial(
        "",
        FrozenDict(picked["dtype"]),
        axes,
        attributes=FrozenDict(picked["attribute"]),
        choices=FrozenDict(picked["choice"]),
        absent=tuple(n for n, gone in picked["absent"].items() if gone),
        forms=FrozenDict(picked["form"]),
    )


def legal(entry: FusionEntry, trial: Trial, target: str) -> bool:
    """Whether the fusion's own contract admits the trial: shapes bind and every constraint holds."""
    tensors = {
        name: Tensor.contiguous(trial.dtype_of(entry, name), shape) for name, shape in trial.shapes(entry).items()
    }
    open_dtypes = {k: v for k, v in trial.dtypes.items() if all(t.dtype != k for t in entry.inputs.values())}
    try:
        bind(entry, tensors, {**trial.keywords, **open_dtypes}, target)
    except FusionregError:
        return False
    return True


def rows(
    entry: FusionEntry, kernel: KernelEntry, axes: FrozenDict[str, int], target: str, limit: int | None
) -> tuple[list[Trial], list[Trial]]:
    """(one plain row per dtype combination, further rows that cover every pair of levels).

    A plain row leaves optional steps out where it can, so that nothing saturates and hides an error. The further rows
    stop at ``limit``; kernels start at different places, so that a family covers what one kernel's few rows do not.
    """
    declared = factors(entry)
    everything = _levels(declared, f"{entry.name}/{kernel.name}")
    legal_rows = [(levels, row) for levels in everything if legal(entry, row := _row(levels, declared, axes), target)]
    turn = zlib.crc32(kernel.key.encode()) % max(len(legal_rows), 1)
    legal_rows = legal_rows[turn:] + legal_rows[:turn]
    plain: list[Trial] = []
    seen: set[tuple[Any, ...]] = set()
    uncovered = set().union(*(_pairs(levels) for levels, _ in legal_rows))
    for dtypes in dict.fromkeys(tuple(r.dtypes.values()) for _, r in sorted(legal_rows, key=lambda p: str(p[1].dtypes))):
        mine = [(levels, r) for levels, r in legal_rows if tuple(r.dtypes.values()) == dtypes]
        levels, row = max(mine, key=lambda p: (_plainness(p[1]), len(_pairs(p[0]) & uncovered)))
        plain.append(row)
        seen.add(levels)
        uncovered -= _pairs(levels)
    further: list[Trial] = []
    while uncovered and (limit is None or len(further) < limit):
        levels, row = max(legal_rows, key=lambda p: len(_pairs(p[0]) & uncovered))
        if levels in seen:
            break
        seen.add(levels)
        uncovered -= _pairs(levels)
        further.append(row)
    return plain, further


def _plainness(row: Trial) -> int:
    return sum(v == "none" for v in row.choices.values()) - len(row.absent)


def _levels(declared: Sequence[Factor], salt: str) -> Iterable[tuple[Any, ...]]:
    sizes = [levels for _, _, levels in declared]
    if prod(map(len, sizes)) <= EXHAUSTIVE:
        return list(product(*sizes))
    rng = random.Random(zlib.crc32(salt.encode()))
    return list(dict.fromkeys(tuple(rng.choice(levels) for levels in sizes) for _ in range(EXHAUSTIVE)))


def _pairs(levels: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    if len(levels) == 1:
        return {(0, levels[0], 0, levels[0])}
    return {(i, levels[i], j, levels[j]) for i, j in combinations(range(len(levels)), 2)}
