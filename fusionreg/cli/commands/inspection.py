"""What kernels take of a multiprocessor: ``inspect``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusionreg.cli.app import FAILED, app
from fusionreg.cli.choices import assignments
from fusionreg.cli.output import JSON_HELP, number, print_json, progress, short, table

if TYPE_CHECKING:
    from fusionreg.core.inspection import SharedMemory, Variant


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="a fusion, or one of its kernels: fusion/kernel", metavar="TARGET")],
    against: Annotated[list[str] | None, typer.Option(help="Another fusion or kernel, set beside it.")] = None,
    params: Annotated[
        list[str] | None, typer.Option(help="Parameters, as in BM=64,BN=128; once for each variant.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every valid combination of parameters.")] = False,
    workload: Annotated[str, typer.Option(help="The problem: a workload of the fusion, by name or row.")] = "",
    axes: Annotated[str, typer.Option(help="Other extents than the workload's, as in M=16,N=4096.")] = "",
    dtype: Annotated[str, typer.Option(help="Other dtypes: bfloat16, or of variables, as in T=bfloat16.")] = "",
    attributes: Annotated[str, typer.Option(help="Other attributes and choices, as in activation=Gelu.")] = "",
    arch: Annotated[str, typer.Option(help="architecture")] = "sm_90a",
    banks: Annotated[
        bool, typer.Option(help="Run each variant in the simulator and count shared-memory bank conflicts.")
    ] = True,
    results: Annotated[
        list[Path] | None, typer.Option(help="Files of results with measured times (default: those of ./benchmarks).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Registers, spills, shared memory and occupancy of compiled kernels, and their shared-memory bank conflicts.

    Needs no GPU: NVRTC compiles, the occupancy follows from NVIDIA's rules, and the simulator counts conflicts on a
    problem of a few blocks. Of two variants the change from one to the other is shown.
    """
    from fusionreg.inspecting import inspect as look

    with progress("inspecting", quiet=json) as tell:
        found, failed = look(
            [target, *(against or ())], params=[assignments("--params", p) for p in params or ()], every=every,
            workload=workload, axes=assignments("--axes", axes), dtypes=_dtypes(dtype),
            attributes=assignments("--attributes", attributes), arch=arch, banks=banks, results=results, progress=tell,
        )  # fmt: skip
    if json:
        print_json([v.model_dump(mode="json") for v in found])
    else:
        show_variants(found)
    for name, error in failed:
        typer.echo(f"error: {name}: {error}", err=True)
    if failed:
        raise typer.Exit(FAILED)


def _dtypes(text: str) -> dict[str, Any]:
    return assignments("--dtype", text) if "=" in text or not text else {"": text}


def show_variants(found: Sequence[Variant]) -> None:
    """What each takes; of two, side by side with the change; then each one's shared memory."""
    for problem, _ in groupby(found, key=lambda v: v.problem):
        typer.echo(problem)
    if len(found) == 2:
        table("", ("", *map(_name, found), "change"), [_beside(*row) for row in zip(*map(_facts, found), strict=True)])
    else:
        columns = [name for name, _, _ in _facts(found[0])] if found else []
        table("", ("kernel", *columns), [(_name(v), *(text for _, text, _ in _facts(v))) for v in found])
    for v in found:
        if v.shared is not None:
            show_shared(_name(v), v.shared)


def _name(v: Variant) -> str:
    return " ".join([v.kernel, *(f"{k}={value}" for k, value in v.params.items())])


def _facts(v: Variant) -> Iterator[tuple[str, str, float | None]]:
    """Name, text and number (where a change of it says something) of each fact; times in milliseconds."""
    yield "regs", str(v.registers), v.registers
    yield "spills", str(v.spills), v.spills
    yield "shared", f"{v.static_shared + v.dynamic_shared}", v.static_shared + v.dynamic_shared
    yield "threads", "×".join(map(str, (n for n in v.block if n > 1))) or "1", None
    yield "blocks", str(v.blocks), v.blocks
    yield "warps", f"{v.warps}/{v.most}", v.warps
    yield "limit", ", ".join(v.limiting), None
    yield "waves", f"{v.waves:.2f}", v.waves
    yield "instr.", str(v.instructions), v.instructions
    yield "model", f"{v.model:.0%}", v.model
    yield "estimate", number(v.estimate_ms), v.estimate_ms
    yield "measured", number(v.measured.ms) + _stale(v) if v.measured else "–", v.measured.ms if v.measured else None
    if v.shared is not None:
        conflicts = "–" if v.shared.reason else f"{v.shared.conflicts}/{v.shared.wavefronts}"
        yield "conflicts", conflicts, None if v.shared.reason else v.shared.conflicts


def _stale(v: Variant) -> str:
    return "" if v.measured is None or v.measured.current else " (older)"


def _beside(a: tuple[str, str, float | None], b: tuple[str, str, float | None]) -> tuple[str, str, str, str]:
    old, new = a[2], b[2]
    change = "" if not old or new is None or old == new else f"{new / old - 1:+.0%}"
    return a[0], a[1], b[1], change


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]}–{numbers[-1]}"


def show_shared(name: str, shared: SharedMemory) -> None:
    """The sites with conflicts, then the load of the banks; banks in a row with about the same load are one."""
    if shared.reason:
        typer.echo(f"\n{name}: bank conflicts not counted: {short(shared.reason)}")
        return
    if not shared.sites:
        typer.echo(f"\n{name}: no access to shared memory on {shared.problem}")
        return
    sites = [s for s in shared.sites if s.conflicts]
    said = f"{len(shared.sites)} places access shared memory, {len(sites) or 'none'} with bank conflicts"
    typer.echo(f"\n{name}: {said}, on {shared.problem}")
    if sites:
        places = [(s.where, s.instructions, f"{s.passes:.3g}", f"{s.least:.3g}", s.conflicts) for s in sites]
        table("", ("place", "accesses", "wavefronts each", "ideal", "conflicts"), places)
    rows: list[tuple[str, str, str]] = []
    for weight, run in groupby(enumerate(shared.load()), key=lambda pair: f"{pair[1][1]:.1f}"):
        banks = list(run)
        rows.append((_span([bank for bank, _ in banks]), _span(sorted({words for _, (words, _) in banks})), weight))
    table("", ("bank", "accesses", "weight"), rows)
