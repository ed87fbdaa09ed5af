"""Sites of a model as workloads: what dispatch would run there, beside the executor of the rest. Floor 7.

A plan that rests on the model can have those sites measured that it rests on: the rows go to the cache of the machine,
with the extents that they are of, and the next plan finds them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..errors import FusionregError
from ..frozen import EMPTY, FrozenDict
from ..planner.policies import undecided
from ..spec import Record, Workload
from .gains import FACTS, GainRow, absent
from .measure import compete
from .shipped import kernel_digest
from .subject import Subject

if TYPE_CHECKING:
    from ..matcher.match import Match
    from ..planner.plan import Plan
    from ..registry.catalog import Catalog
    from .measure import Bench
    from .subject import Tuning

#: Bytes of a problem up to which it lies in L2 when its kernel starts, as it does in a model that has just written it.
WARM = 48 << 20


class Site(Record):
    """A problem that a model has."""

    fusion: str
    """Of a derived one, that which it was derived from."""
    workload: Workload
    asked: int = 0
    """How many of the outputs, the first of them, the model has; 0: all."""


def site_of(catalog: Catalog, match: Match) -> Site | None:
    """The problem of a match; None where extents are symbolic, or it is none that can be made up."""
    if any(isinstance(d, str) for d in (*match.axes.values(), *match.leading)):
        return None
    entry = catalog.get(match.base or match.fusion)
    if entry is None:
        return None
    names = {*entry.spec.attributes, *entry.choices}
    facts: dict[str, Any] = {
        "axes": {k: v for k, v in match.axes.items() if k in entry.axes},
        "batch": tuple(match.leading),
        "dtypes": dict(match.dtypes),
        "attributes": {k: _plain(v) for k, v in {**match.attributes, **match.choices}.items() if k in names},
        "absent": absent(entry, match),
        "layouts": {n: "channels_last" for n, s in match.strides.items() if n in entry.inputs and _channels_last(s)},
    }
    asked = _asked(tuple(match.outputs), tuple(entry.outputs))
    text = json.dumps([entry.name, facts, asked], sort_keys=True, default=str)
    try:
        name = f"site-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        return Site(fusion=entry.name, workload=Workload(name=name, row="site", mode="g", **facts), asked=asked)
    except ValidationError:  # attributes that are no scalars
        return None


def _asked(given: tuple[str, ...], outputs: tuple[str, ...]) -> int:
    return len(given) if len(given) < len(outputs) and given == outputs[: len(given)] else 0


def _plain(value: Any) -> Any:
    """A number as somebody wrote it, where a model has its nearest one of 32 bits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _channels_last(strides: Sequence[int]) -> bool:
    return len(strides) > 2 and strides[1] == 1


def unmeasured(
    plan: Plan, catalog: Catalog, knows: Callable[[Match, str], bool], also: Sequence[Match] = ()
) -> tuple[Site, ...]:
    """What a plan rests on and nobody has measured on this machine: its sites, and those that only a measurement could
    let in, the largest first: parts of them wait for the next plan. ``knows``: (match, name of its workload) → whether
    there is a row of it; ``also``: further matches."""
    unsure = [x.match for x in plan.losers if undecided(x.reason)]
    sets = [frozenset(m.nodes) for m in (*plan.chosen, *unsure)]
    matches = [*plan.chosen, *(m for m in unsure if not any(s > frozenset(m.nodes) for s in sets)), *also]
    found = ((m, s) for m in matches if not m.captured and (s := site_of(catalog, m)) is not None)
    return tuple(dict.fromkeys(s for m, s in found if not knows(m, s.workload.name)))


def subjects(sites: Sequence[Site], bench: Bench, catalog: Catalog, tuned: Tuning | None) -> Iterator[Subject]:
    """Those that have a kernel to be measured."""
    for site in sites:
        try:
            subject = Subject.of(
                catalog[site.fusion], site.workload, bench.target, catalog.ops, tuned, bench.multiprocessors
            ).asking(site.asked)
        except FusionregError:
            continue
        if subject.chosen is not None:
            yield subject


def measured(sites: Sequence[Site], bench: Bench, catalog: Catalog, tuned: Tuning | None) -> Iterator[GainRow]:
    """A row of each site: our kernel and the peers of ``bench``, once all are held against float64. What cannot be
    measured has a row without competitors: nobody asks for it again; what lacked memory has none."""
    for subject in subjects(sites, bench, catalog, tuned):
        times, reasons = _times(subject, bench)
        if not any("out of memory" in reason for reason in reasons):
            yield row_of(subject, bench, times)
        if bench.lost():
            return


def _times(subject: Subject, bench: Bench) -> tuple[Mapping[str, float], list[str]]:
    """Medians of our kernel and of the peers, and why there are none."""
    assert subject.chosen is not None
    own = subject.chosen.kernel.name
    times: Mapping[str, float] = {}
    reasons: list[str] = []
    if subject.traffic.read + subject.traffic.written > WARM:
        subject = subject.cold()
    try:
        with bench.prepare(subject) as prepared:
            entrants = [e for e in prepared.entrants if not e.ours or e.name == own]
            columns, _ = compete(entrants, own)
            times = {c.name: c.time.median for c in columns if c.time and not c.computes}
            reasons += [c.reason for c in columns]
    except (FusionregError, RuntimeError, MemoryError) as error:
        reasons.append(str(error))
    return times, reasons


def row_of(subject: Subject, bench: Bench, times: Mapping[str, float] = EMPTY) -> GainRow:
    """The row of a site; without competitors where our kernel has no time."""
    assert subject.chosen is not None
    kernel, traffic = subject.chosen.kernel, subject.traffic
    own = times.get(kernel.name)
    peers = {k: ms for k, ms in times.items() if k != kernel.name} if own is not None else {}
    return GainRow(
        fusion=subject.entry.name, workload=subject.workload.name, kernel=kernel.name, digest=kernel_digest(kernel),
        dtypes=subject.problem.dtypes, choices=subject.problem.choices, bytes=traffic.read + traffic.written,
        ms=own or 0.0, peers=FrozenDict(peers), axes=subject.workload.axes, batch=subject.workload.batch,
        absent=tuple(subject.workload.absent),
        facts=FrozenDict({k: bench.environment[k] for k in FACTS if k in bench.environment}),
    )  # fmt: skip


__all__ = ["Site", "measured", "row_of", "site_of", "subjects", "unmeasured"]
