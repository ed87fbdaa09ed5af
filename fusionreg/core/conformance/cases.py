"""The cases that every kernel is tried on, derived from the spec; then the spec's own. Floor 7."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from ..errors import SpecError
from ..frozen import FrozenDict
from ..pattern.graph import Input
from ..problem import Candidate, choose, combinations
from ..spec import Case
from . import coverage, values
from .trial import Trial

if TYPE_CHECKING:
    from ..registry.entries import FusionEntry, KernelEntry

#: Part of every evidence digest: raise it when a change here makes old evidence say less than it claims.
VERSION = 1

Extent = Literal["quick", "all"]

#: Rows beyond one per dtype that ``quick`` compiles; ``all`` covers every pair of levels.
QUICK_ROWS = 2
#: Extents of an axis that no parameter tiles, where another one is under test: so few rows that they cost little, and a
#: row longer than a block has threads, whatever it reads at once.
FEW, LONG = 8, 520
#: In ``quick``, the extent of an axis that counts rows, but where it is under test.
ROWS = 9
#: Positions of an iteration space beyond which not all axes are made alike: those that a spec declares short, and those
#: that a kernel is compiled for, stay as they are.
MOST_POSITIONS = 1 << 30
_FEW = ("small", "special")
_ELSEWHERE = ("tails", "overflow")
_QUICK_VALUES = ("special", "denormal", "positive_large", "cancel", "integers")
_ALL_VALUES = (*_QUICK_VALUES, "nan", "inf", "large", "offset", "saturating", "zeros", "small")


def base_axes(entry: FusionEntry) -> FrozenDict[str, int]:
    """The spec's own extents, else distinct multiples of 16, small: what nearly every kernel accepts."""
    told = [axis for axis in entry.axes if axis not in entry.derived]
    return FrozenDict({axis: entry.spec.extents.get(axis, 16 * (i + 2)) for i, axis in enumerate(told)})


def tile_of(params: Mapping[str, Any], axis: str) -> int | None:
    """The tile extent of an axis: the kernel's param ``B<axis>``, where it has one."""
    found = params.get(f"B{axis}")
    return found if type(found) is int else None


def parameters(entry: FusionEntry, kernel: KernelEntry, row: Trial, target: str) -> list[FrozenDict[str, Any]]:
    """Every valid combination of the kernel's tunable parameters on ``row``, defaults first."""
    problem = coverage.problem_of(entry, row, target)
    return [] if problem is None else [c.params for c in combinations(kernel, problem)]


def covered(
    entry: FusionEntry, kernel: KernelEntry, target: str, limit: int | None = None
) -> tuple[FrozenDict[str, int], list[Trial], list[Trial], list[Trial]]:
    """The extents that ``kernel`` is tried on, and what ``coverage.rows`` says of them: the general ones, or, where it
    accepts none of those, the first declared case's that it accepts, with its attributes."""
    base = base_axes(entry)
    plain, further, refused = coverage.rows(entry, kernel, base, target, limit)
    for case in () if plain else entry.cases:
        axes = base | case.axes
        if not _accepted(entry, kernel, case, axes, target):
            continue
        plain, further, _ = coverage.rows(entry, kernel, axes, target, limit, case.attributes)
        if plain:
            return axes, plain, further, []
    return base, plain, further, refused


def _accepted(entry: FusionEntry, kernel: KernelEntry, case: Case, axes: FrozenDict[str, int], target: str) -> bool:
    """Whether the kernel takes a declared case in some dtypes."""
    attributes = {k: v for k, v in case.attributes.items() if k in entry.spec.attributes}
    choices = {k: v for k, v in case.attributes.items() if k in entry.choices}
    layouts: dict[str, str] = {**case.layouts}
    for dtypes in product(*entry.spec.dtypes.values()):
        trial = Trial(
            "", FrozenDict(zip(entry.spec.dtypes, dtypes, strict=True)), axes, case.batch, FrozenDict(attributes),
            FrozenDict(choices), case.absent, layouts=FrozenDict(layouts),
        )  # fmt: skip
        problem = coverage.problem_of(entry, trial, target)
        if problem is not None and isinstance(choose(kernel, problem, pending=True), Candidate):
            return True
    return False


def derive(entry: FusionEntry, kernel: KernelEntry, target: str, cases: Extent = "all") -> tuple[Trial, ...]:
    """Every trial of ``kernel``, names unique, grouped by compiled variant.

    ``all`` covers every pair of choices, dtypes, attributes and forms, and every edge in every dtype. ``quick``
    compiles few units: it keeps the edges for one dtype, another one for each kernel of a fusion; a tail, an overflow
    and NaN for the rest, with the declared cases that need no further unit; and :data:`QUICK_ROWS` further rows. An
    axis that counts rows is short there but for its own edges.
    Trials that the fusion's own contract excludes are not made. A kernel that accepts none of the general extents is
    tried on those of the first declared case that it accepts, with its attributes.
    """
    quick = cases == "quick"
    base, plain, further, refused = covered(entry, kernel, target, QUICK_ROWS if quick else None)
    found: list[Trial] = [row.with_(f"{row.dtype}-base") for row in refused]
    lead = _lead(entry, kernel, plain)
    defaults: list[Trial] = []
    short: list[dict[str, int]] = []
    for i, row in enumerate(plain):
        default, *others = parameters(entry, kernel, row, target)
        row = row.with_(row.name, params=default)
        few = _fewer(entry, kernel, row, target)
        rows = _rows(entry, kernel, row, target) if quick else {}
        row, few = (row.with_(row.name, axes=rows),) * 2 if rows else (row, few)
        defaults.append(row)
        short.append(rows)
        made = [
            *_shapes(entry, kernel, row, few, rows, quick),
            *_values(entry, row, quick),
            *_layouts(entry, few, quick),
        ]
        if quick and i != lead:
            made = [t for t in made if t.name in _ELSEWHERE or t.name.startswith("special-")]
        elif quick and others:
            others = [others[zlib.crc32(kernel.key.encode()) % len(others)]]
        if i == lead or not quick:
            made += [t for params in others for t in _tiles(entry, kernel, row, params, rows, quick)]
        found += [t.with_(f"{row.dtype}-{t.name}") for t in made]
    for row in further:
        words = [*row.choices.values(), *(f"{k}{v}" for k, v in row.attributes.items())]
        words += [f"{k}.{v}" for k, v in row.forms.items()] + [f"no_{n}" for n in row.absent]
        tag = "-".join([row.dtype, *words])
        axes = {a: e + 8 for a, e in base.items()}
        axes |= _rows(entry, kernel, row, target) if quick else {}
        for name in ("special",) if quick else _FEW:
            found.append(row.with_(f"{tag}-{name}", axes=axes, values=_every(entry, name)))
        found.append(row.with_(f"{tag}-sweep", axes=axes, values=_swept(entry)))
    for case in entry.cases:
        for i, (row, trial) in enumerate(zip(defaults, _declared(entry, case, defaults, short, target), strict=True)):
            if not quick or i == lead or _states_numbers(case) or _same_unit(entry, kernel, row, trial, target):
                found.append(trial)
    return tuple(t for t in found if coverage.problem_of(entry, t, target) is not None)


def _states_numbers(case: Case) -> bool:
    """Whether the case is about the range of one dtype: which one, only all of them together tell."""
    return any(value.lstrip("-")[:1].isdigit() for value in case.values.values())


def _lead(entry: FusionEntry, kernel: KernelEntry, plain: Sequence[Trial]) -> int:
    """Which of the rows has every edge in ``quick``: each kernel of a fusion begins at the next dtypes."""
    names = set(entry.spec.dtypes)
    told = [c for c in entry.constraints if c.names and c.names <= names and not c.predicates]
    every = product(*entry.spec.dtypes.values())
    order = [d for d in every if all(c(dict(zip(entry.spec.dtypes, d, strict=True))) for c in told)]
    alike = [k for k in entry.kernels if (k.library is None) == (kernel.library is None)]
    start = zlib.crc32(entry.name.encode()) + alike.index(kernel)
    turned = [order[(start + i) % len(order)] for i in range(len(order))]
    return min(range(len(plain)), key=lambda i: turned.index(tuple(plain[i].dtypes.values())), default=0)


def _fewer(entry: FusionEntry, kernel: KernelEntry, row: Trial, target: str) -> Trial:
    """``row`` with :data:`FEW` along the first of several axes that no parameter tiles, if it stays the same unit.

    There such an axis counts rows, and a simulated block for each.
    """
    whole = [axis for axis in row.axes if tile_of(row.params, axis) is None]
    few = row.with_(row.name, axes={whole[0]: min(FEW, row.axes[whole[0]])}) if len(whole) > 1 else row
    return few if _same_unit(entry, kernel, row, few, target) else row


def _rows(entry: FusionEntry, kernel: KernelEntry, row: Trial, target: str) -> dict[str, int]:
    """:data:`ROWS` along the axis that counts rows, where the kernel runs ``row`` with as few: along the first one,
    unless a parameter tiles it."""
    first = next(iter(row.axes), "")
    if len(row.axes) < 2 or tile_of(row.params, first) is not None or row.axes[first] <= ROWS:
        return {}
    found = parameters(entry, kernel, row.with_(row.name, axes={first: ROWS}), target)
    return {first: ROWS} if (row.params in found if row.params else found) else {}


def _same_unit(entry: FusionEntry, kernel: KernelEntry, row: Trial, trial: Trial, target: str) -> bool:
    """Whether ``trial`` runs the unit that is compiled for ``row``."""
    static = [name for name, attribute in entry.spec.attributes.items() if attribute.static]
    alike = (trial.forms, trial.choices, trial.absent) == (row.forms, row.choices, row.absent)
    alike = alike and all(trial.attributes.get(name) == row.attributes.get(name) for name in static)
    problem = coverage.problem_of(entry, trial, target) if alike else None
    if problem is None:
        return False
    chosen = choose(kernel, problem, pending=True)
    return isinstance(chosen, Candidate) and chosen.params == row.params


def _every(entry: FusionEntry, name: str) -> FrozenDict[str, str]:
    return FrozenDict(dict.fromkeys(entry.inputs, name))


def _tiles(
    entry: FusionEntry, kernel: KernelEntry, row: Trial, params: FrozenDict[str, Any], rows: dict[str, int], quick: bool
) -> list[Trial]:
    """Tails and more tiles than one, at other parameters than the default ones."""
    tag = ".".join(f"{k}{v}" for k, v in params.items())
    found = []
    for name, times, more in (("tails", 1, 8), ("odd", 1, 1), ("long", 6, 8)):
        if name == "tails" or not quick:
            axes = {a: times * min(tile_of(params, a) or 32, 64 if times > 1 else 256) + more for a in row.axes}
            axes = _affordable(entry, kernel, axes | rows)
            found.append(row.with_(f"{tag}-{name}", axes=axes, params=params, exactly=True, stem=name))
    return found


def _swept(entry: FusionEntry) -> dict[str, str]:
    """The first input sweeps; what is added to it is zero, everything else one."""
    found: dict[str, str] = {}
    for name in entry.inputs:
        added = any(Input(name) in s.operands and set(s.ops) & {"Add", "Sub"} for s in entry.patterns[0].steps)
        found[name] = "zeros" if added else "ones"
    return {**found, next(iter(entry.inputs)): "sweep"}


def _shapes(
    entry: FusionEntry, kernel: KernelEntry, row: Trial, few: Trial, rows: dict[str, int], quick: bool
) -> list[Trial]:
    """Edges of every axis alone, the others as in ``few``; then of all together but for ``rows``, and of the leading
    axes."""
    base = row.axes
    found = [row.with_("base")]

    def add(name: str, axes: dict[str, int], **changes) -> None:
        found.append(few.with_(name, axes=axes, **changes))

    for axis in base:
        tile = tile_of(row.params, axis)
        edges = [0, 1, tile - 1, tile + 1, tile + 8] if tile else [0, 1, 33]
        if not quick:
            edges += [2, 3, tile, tile - 8, 2 * tile + 8] if tile else [2, 3, 31, 32, 127, 129, 255, 256, 257, 1025]
        if tile and tile <= 64:
            edges.append(6 * tile + 8)  # more tiles than a pipeline has stages
        for extent in sorted({e for e in edges if e >= 0}):
            add(f"{axis}{extent}", {axis: extent})
    whole = [axis for axis in base if tile_of(row.params, axis) is None]
    if whole:
        last = whole[-1]
        add(f"{last}{LONG}", {**dict.fromkeys(whole, 3), last: LONG})
    add("ones", dict.fromkeys(base, 1))
    add("square", _affordable(entry, kernel, dict.fromkeys(base, 48)))
    add("odd", _affordable(entry, kernel, {a: (tile_of(row.params, a) or 32) + 1 for a in base} | rows))
    add("tails", _affordable(entry, kernel, {a: (tile_of(row.params, a) or 32) + 8 for a in base} | rows))
    if any(t.leading for t in entry.inputs.values()):
        small = dict.fromkeys(base, 8)
        for leading in ((2, 3), (0,)) if quick else ((2, 3), (0,), (1,), (3, 1, 2), (3, 0)):
            add("leading" + "x".join(map(str, leading)), small, leading=leading)
    return found


def _affordable(entry: FusionEntry, kernel: KernelEntry, axes: dict[str, int]) -> dict[str, int]:
    """``axes``, some with the extents that the spec declares where there would be :data:`MOST_POSITIONS` in all."""
    kept = {a: e for a, e in entry.spec.extents.items() if e < FEW or a in kernel.spec.specialize}
    return {**axes, **kept} if prod(axes.values()) > MOST_POSITIONS else axes


def _values(entry: FusionEntry, row: Trial, quick: bool) -> list[Trial]:
    """The first input from each generator, then all inputs: a NaN in every operand leaves little to compare."""
    first, *rest = (n for n in entry.inputs if n not in row.absent)
    overflow = {first: "positive_large", **{n: "0.001" if i else "positive_large" for i, n in enumerate(rest)}}
    found = [row.with_("overflow", values=overflow)]  # of what a chain holds between two operators, not of the result
    for name in _QUICK_VALUES if quick else _ALL_VALUES:
        alone = {first: name, **dict.fromkeys(rest, "ones" if name in ("cancel", "denormal") else "normal")}
        found.append(row.with_(f"{name}-{first}", values=alone))
        if not quick:
            if name != "saturating":  # products of those are a few huge terms: any order of a sum is as wrong
                found.append(row.with_(f"{name}-all", values=_every(entry, name)))
            found += [row.with_(f"{name}-{n}", values={n: name}) for n in rest if name in ("special", "denormal")]
    return found


def _layouts(entry: FusionEntry, row: Trial, quick: bool) -> list[Trial]:
    """Every input in every layout, one at a time."""
    found = []
    for name, shape in row.shapes(entry).items():
        layouts = ["misaligned"] + (["padded", "transposed"] if len(shape) >= 2 else [])
        if not quick:
            layouts += ["padded_odd", "expanded"] if len(shape) >= 2 else []
        found += [row.with_(f"{layout}-{name}", layouts={name: layout}) for layout in layouts]
    return found


def _declared(
    entry: FusionEntry, case: Case, plain: list[Trial], short: list[dict[str, int]], target: str
) -> list[Trial]:
    """A case of the spec in every dtype, each input in the first form that the case's axes and attributes admit.

    :class:`SpecError` when the fusion's contract admits none: a case that is silently never run proves nothing.
    """
    for name in case.values.values():
        values.check(name)
    found = []
    unsaid = {
        n: a.default
        for n, a in entry.spec.attributes.items()
        if a.default is not None and not a.choices and a.type != "bool"
    }
    several = {n: range(len(t.forms)) for n, t in entry.inputs.items() if len(t.forms) > 1 and n not in case.absent}
    for row, rows in zip(plain, short, strict=True):
        trial = row.with_(
            f"{row.dtype}-{case.name}",
            axes={**base_axes(entry), **case.axes},
            leading=case.batch,
            attributes={**unsaid, **{k: v for k, v in case.attributes.items() if k in entry.spec.attributes}},
            choices={k: v for k, v in case.attributes.items() if k in entry.choices},
            absent=case.absent,
            values=case.values,
            layouts=case.layouts,
        )
        forms = [trial.forms, *(dict(zip(several, f, strict=True)) for f in product(*several.values()))]
        fewer = [trial.with_(trial.name, axes={**rows, **case.axes})] if rows.keys() - case.axes.keys() else []
        made = (t.with_(t.name, forms=f) for t in (*fewer, trial) for f in forms)
        fitting = (t for t in made if coverage.problem_of(entry, t, target) is not None)
        chosen = next(fitting, None)
        if chosen is None:
            raise SpecError(
                "unusable case", f"{case.name!r} of {entry.name}", f"axes {dict(case.axes)}",
                "what the fusion's constraints admit", fusion=entry.name, field="cases",
            )  # fmt: skip
        found.append(chosen)
    return found
