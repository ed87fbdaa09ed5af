"""Evidence: which kernels ran right on which GPU, kept beside the plugin, void as soon as a kernel changes. Floor 7.

A digest covers everything that can break a kernel: the rendered units of its shipped variants (without comments and
line marks), compiler options, launch expressions, argument order, ``requires``, and the version of the conformance set.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conformance import cases, coverage
from ..errors import FusionregError, ModelError
from ..frozen import FrozenDict
from ..problem import combinations
from ..render import KernelSource, render, variant
from ..render.source import symbol
from ..targets import SHIPPED, accepts, target
from .report import Report, Status

if TYPE_CHECKING:
    from ..registry.entries import FusionEntry, KernelEntry

FORMAT = 1

_NOISE = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/|^[ \t]*#line[^\n]*$', re.S | re.M)


@dataclass(frozen=True)
class Evidence:
    """One kernel's proof on one GPU.

    Attributes:
        kernel: ``fusion/kernel``.
        digest: see :func:`digest`.
        target, gpu, driver, nvrtc: what it ran on.
        date: UTC, to the second.
        passed, skipped: numbers of cases; none failed.
        max_abs, max_rel: largest error against float64.
        seconds: wall time of the run of all its cases.
        library: version of the library that it calls, "" where it calls none.
    """

    kernel: str
    digest: str
    target: str
    gpu: str
    driver: str
    nvrtc: str
    date: str
    passed: int
    skipped: int
    max_abs: float
    max_rel: float
    seconds: float
    library: str = ""


def digest(entry: FusionEntry, kernel: KernelEntry) -> str:
    """SHA-256 over everything that can break ``kernel``; the same on every machine.

    :class:`FusionregError` where a variant cannot be rendered: a kernel that does not render has no digest.
    """
    spec = kernel.spec
    parts: list[Any] = [FORMAT, cases.VERSION, entry.spec.pattern, dict(entry.spec.inputs), dict(entry.spec.outputs)]
    parts += [spec.requires, spec.valid, spec.grid, spec.block, spec.cluster, spec.shared_memory, spec.workspace]
    parts += [spec.cooperative, spec.programmatic, spec.rounding, spec.strides, spec.min_blocks, spec.max_registers]
    parts += [
        {k: list(v) for k, v in spec.params.items()},
        dict(spec.constants),
        spec.specialize,
        entry.spec.constraints,
    ]
    if spec.tensor_maps:
        parts.append([m.model_dump(mode="json") for m in spec.tensor_maps])
    names = [t for t in SHIPPED if any(accepts(d, target(t)) for d in spec.targets)]
    base = cases.base_axes(entry)
    rows = {name: coverage.rows(entry, kernel, base, name, None)[:2] for name in names}
    if not any(plain for plain, _ in rows.values()):  # then it is tried on extents of a declared case
        rows = {name: cases.covered(entry, kernel, name)[1:3] for name in names}
    units: dict[Any, tuple[KernelSource, str]] = {}  # by variant but for the target: nothing else of a unit tells it
    for name, (plain, further) in rows.items():
        for i, trial in enumerate((*plain, *further)):
            problem = coverage.problem_of(entry, trial, name)
            assert problem is not None, "coverage only makes rows that the fusion admits"
            variants = list(combinations(kernel, problem))  # all of them once per dtype, the defaults for other rows
            for chosen in variants if i < len(plain) else variants[:1]:
                own = variant(entry, kernel, problem, chosen.params)
                alike = own[0], *own[2:]
                if kernel.library is not None or alike not in units:
                    made = render(entry, kernel, problem, chosen.params, located=False)
                    units[alike] = made, stripped(made.text)
                source, text = units[alike]
                if source.entry:
                    text = text.replace(source.entry, symbol(entry, kernel, own))
                parts += [text, source.options, [(a.kind, a.name, a.ctype) for a in source.arguments]]
                parts.append(asdict(chosen.launch))
                parts += [asdict(m) for m in chosen.maps]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()


def stripped(text: str) -> str:
    """A unit without comments, line marks and spacing: an edit of those leaves the evidence standing."""
    return " ".join(_NOISE.sub(lambda m: m[1] or " ", text).split())


def collect(
    report: Report, entries: Iterable[FusionEntry], digests: Mapping[str, str] = FrozenDict()
) -> list[Evidence]:
    """Evidence from a report of all cases on a GPU: for every kernel with a passed case and no failed one.

    ``digests``: by ``fusion/kernel``, where they are known already.

    :class:`FusionregError` for a report of the simulator, or of the quick cases alone.
    """
    facts = report.environment
    if facts.get("device", "sim") == "sim":
        raise FusionregError("no evidence", "from this report", "it ran in the simulator", "a run on a GPU")
    if facts.get("cases") != "all":
        raise FusionregError("no evidence", "from this report", f"it ran the {facts.get('cases')} cases", "all cases")
    found = []
    for entry in entries:
        for kernel in entry.kernels:
            rows = [e for e in report.evaluations if (e.fusion, e.kernel) == (entry.name, kernel.name)]
            passed = [e for e in rows if e.status is Status.PASSED]
            if not passed or any(e.status.failed for e in rows):
                continue
            found.append(
                Evidence(
                    kernel.key,
                    digests.get(kernel.key) or digest(entry, kernel),
                    str(facts["target"]),
                    str(facts["gpu"]),
                    str(facts["driver"]),
                    str(facts["nvrtc"]),
                    datetime.now(UTC).isoformat(timespec="seconds"),
                    len(passed),
                    len(rows) - len(passed),
                    max(e.max_abs for e in passed),
                    max(e.max_rel for e in passed),
                    round(sum(e.seconds for e in rows), 3),
                    kernel.library.version() if kernel.library is not None else "",
                )
            )
    return found


def write(path: Path, found: Iterable[Evidence]) -> None:
    """A file of evidence; rows of kernels that the run did not cover stay as they were."""
    rows = {e.kernel: e for e in read(path)} if path.exists() else {}
    rows |= {e.kernel: e for e in found}
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"format": FORMAT, "conformance": cases.VERSION, "kernels": [_row(rows[k]) for k in sorted(rows)]}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def _row(evidence: Evidence) -> dict[str, Any]:
    return {k: v for k, v in asdict(evidence).items() if k != "library" or v}


def read(path: Path) -> list[Evidence]:
    """The rows of a file; :class:`ModelError` when it is no file of evidence."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']}")
        return [Evidence(**row) for row in body["kernels"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ModelError(
            "cannot read evidence", str(path), f"{type(e).__name__}: {e}", "a file of `run --evidence`"
        ) from None


def files(kernel: KernelEntry) -> list[Path]:
    """The evidence files of the plugin that ships ``kernel``: ``evidence/*.json`` in its package or beside it."""
    return sorted(p for place in (kernel.root, kernel.root.parent) for p in (place / "evidence").glob("*.json"))


def held(entry: FusionEntry) -> Mapping[str, tuple[Evidence, ...]]:
    """Kernel name → its rows in the plugin's files, whatever their digests."""
    found: dict[str, tuple[Evidence, ...]] = {}
    for kernel in entry.kernels:
        rows = [row for path in files(kernel) for row in read(path)]
        found[kernel.name] = tuple(r for r in rows if r.kernel == kernel.key)
    return found


def state(entry: FusionEntry, kernel: KernelEntry) -> str:
    """``pending`` by its spec, ``proven`` by a row of the present digest, ``stale`` by older rows, or ``none``.

    A kernel of an open fusion is as good as the worst of its members' kernels.
    """
    if kernel.spec.pending:
        return "pending"
    if entry.spec.open:
        states = {state(member, member.kernel(kernel.name)) for member in entry.members}
        return next((word for word in ("none", "stale") if word in states), "proven")
    rows = held(entry)[kernel.name]
    if not rows:
        return "none"
    now = digest(entry, kernel)
    return "proven" if any(r.digest == now for r in rows) else "stale"
