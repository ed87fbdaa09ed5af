"""Which combinations of dtypes, choices, attributes, forms and absent inputs a kernel is tried on. Floor 7."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, product
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import FusionregError
from ..frozen import EMPTY, FrozenDict
from ..problem import Problem, Tensor, bind, fits
from .trial import Trial

if TYPE_CHECKING:
    from ..registry.entries import FusionEntry, KernelEntry

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


@lru_cache(maxsize=1)
def _known(entry: FusionEntry) -> dict[tuple[Any, ...], Problem | None]:
    """Problems of the fusion's trials: its kernels are tried on the same ones, one kernel after the other."""
    return {}


def problem_of(
    entry: FusionEntry, trial: Trial, target: str, multiprocessors: int | None = None
) -> Problem | None:
    """The trial's problem on contiguous tensors, or such as are channels last; None where the fusion's own contract
    excludes it. It is the same whatever the values and the kernel's parameters.

    ``multiprocessors``: as for ``problem.bind``.
    """
    told = multiprocessors is not None or any(c.features for c in entry.constraints)
    apart = target if told else ""  # what a target has counts for nothing else
    key = (
        trial.dtypes, trial.axes, trial.leading, trial.attributes, trial.choices, trial.absent, trial.forms,
        trial.layouts, apart, multiprocessors,
    )  # fmt: skip
    known = _known(entry)
    if key not in known:
        try:
            known[key] = bind(entry, tensors_of(entry, trial), trial.passed(entry), target, multiprocessors)
        except FusionregError:
            known[key] = None
    found = known[key]
    return found if found is None or found.target == target else found.with_target(target)


def tensors_of(entry: FusionEntry, trial: Trial) -> dict[str, Tensor]:
    """The inputs as they lie in memory, contiguous where they are not channels last."""
    found = {}
    for name, shape in trial.shapes(entry).items():
        tensor = Tensor.contiguous(trial.dtype_of(entry, name), shape)
        if trial.layouts.get(name) == "channels_last" and len(shape) > 2:
            batch, *places, channel = Tensor.contiguous(tensor.dtype, (shape[0], *shape[2:], shape[1])).strides
            tensor = Tensor(tensor.dtype, shape, (batch, channel, *places))
        found[name] = tensor
    return found


def _channels_last(entry: FusionEntry, row: Trial) -> Trial:
    """The row with every input that has places behind its channels stored channels last."""
    names = [n for n, shape in row.shapes(entry).items() if len(shape) > 2]
    return row.with_(row.name, layouts=dict.fromkeys(names, "channels_last"))


def rows(
    entry: FusionEntry,
    kernel: KernelEntry,
    axes: FrozenDict[str, int],
    target: str,
    limit: int | None,
    attributes: Mapping[str, Any] = EMPTY,
) -> tuple[list[Trial], list[Trial], list[Trial]]:
    """Combinations on contiguous tensors of extents ``axes``, or on tensors that are channels last where the kernel
    accepts no others: (plain, further, refused).

    plain: one per dtype combination that the kernel accepts; it leaves optional steps out where it can, so that nothing
    saturates and hides an error. further: more of them, until every pair of levels is covered or ``limit`` is reached;
    kernels start at different places, so that a family covers what one kernel's few rows do not. refused: one per
    dtype combination that the fusion has and the kernel does not accept. ``attributes``: those that all rows have.
    """
    fixed: FrozenDict[str, Any] = FrozenDict({n: v for n, v in attributes.items() if n in entry.spec.attributes})
    accepted: list[tuple[tuple[Any, ...], Trial]] = []
    refused: dict[tuple[Any, ...], Trial] = {}
    for levels, row in _tried(entry, kernel.key, axes, fixed):
        problem = problem_of(entry, row, target)
        if problem is None:
            continue
        found = row if fits(kernel, problem) else None
        if found is None and kernel.spec.strides:
            last = _channels_last(entry, row)
            problem = problem_of(entry, last, target) if last.layouts else None
            found = last if problem is not None and fits(kernel, problem) else None
        if found is not None:
            accepted.append((levels, found))
        else:
            refused.setdefault(tuple(row.dtypes.values()), row)
    accepted.sort(key=lambda p: tuple(p[1].dtypes.values()))  # stable
    turn = zlib.crc32(kernel.key.encode()) % max(len(accepted), 1)
    turned = accepted[turn:] + accepted[:turn]
    pairs = {levels: _pairs(levels) for levels, _ in accepted}
    uncovered = set().union(*pairs.values())
    plain: list[Trial] = []
    for dtypes in dict.fromkeys(tuple(r.dtypes.values()) for _, r in accepted):
        mine = [p for p in turned if tuple(p[1].dtypes.values()) == dtypes]
        levels, row = max(mine, key=lambda p: (_plainness(p[1]), len(pairs[p[0]] & uncovered)))
        plain.append(row)
        uncovered -= pairs[levels]
    further: list[Trial] = []
    while uncovered and (limit is None or len(further) < limit):
        levels, row = max(turned, key=lambda p: len(pairs[p[0]] & uncovered))
        uncovered -= pairs[levels]
        further.append(row)
    return plain, further, [r for d, r in refused.items() if all(tuple(p.dtypes.values()) != d for p in plain)]


@lru_cache(maxsize=2)
def _tried(
    entry: FusionEntry, salt: str, axes: FrozenDict[str, int], fixed: FrozenDict[str, Any]
) -> list[tuple[tuple[Any, ...], Trial]]:
    """Rows that the fusion may admit, with their levels: they are tried on one target after the other."""
    declared = factors(entry)
    found = []
    for levels in _levels(declared, salt):
        row = _row(levels, declared, axes)
        if fixed:
            row = row.with_("", attributes=fixed)
        if not _repeated(entry, row) and _admitted(entry, row):
            found.append((levels, row))
    return found


def _admitted(entry: FusionEntry, row: Trial) -> bool:
    """Whether the fusion's constraints on dtypes and absent inputs hold: told long before there is a problem."""
    env = {**row.dtypes, "present": lambda name: name not in row.absent}
    return all(c(env) for c in entry.constraints if c.names <= row.dtypes.keys() and c.predicates <= {"present"})


def _repeated(entry: FusionEntry, row: Trial) -> bool:
    """Whether the row is another one but for the dtype of inputs that it leaves out."""
    present = {t.dtype for n, t in entry.tensors.items() if n not in row.absent}
    return any(d not in present and level != entry.spec.dtypes[d][0] for d, level in row.dtypes.items())


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
