"""Proof: ``run`` on fusions and on models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusionreg.cli.app import FAILED, USAGE, app
from fusionreg.cli.choices import EXECUTOR_HELP, INPUT_HELP, MODEL_HELP, Cases, Device, Policy, declared
from fusionreg.cli.output import console, foreign_code, number, print_json, progress, short, table, writable

if TYPE_CHECKING:
    from fusionreg.api import Registry
    from fusionreg.core.proof.report import Report
    from fusionreg.integrations import Declared

#: Suffixes of model files of any kind: a fusion's name has none of them.
MODEL_SUFFIXES = (".onnx", ".pt2", ".pt", ".pth", ".pb", ".tflite", ".safetensors", ".engine", ".mlmodel")


@app.command()
def run(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help=f"fusions, all by default; or models: each {MODEL_HELP}"),
    ] = None,
    input: Annotated[list[str] | None, typer.Option(help=INPUT_HELP)] = None,
    device: Annotated[Device, typer.Option(help="sim, cuda, or auto: a GPU where there is one")] = Device.AUTO,
    cases: Annotated[Cases, typer.Option(help="quick, or all of the derived cases")] = Cases.QUICK,
    kernel: Annotated[list[str] | None, typer.Option(help="only these kernels (name or fusion/name)")] = None,
    policy: Annotated[
        Policy, typer.Option(help="of the planner: off, conservative, balanced, aggressive")
    ] = Policy.BALANCED,
    explain: Annotated[bool, typer.Option("--explain", help="Of models, also what nearly matched.")] = False,
    expect: Annotated[
        str, typer.Option(help="Fail unless a kernel like this ran at a model's site, e.g. */tensor_core")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of a model's inputs; 0: those that it brings, if it brings any.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write all results as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write all results as JUnit XML.")] = None,
    evidence: Annotated[
        Path | None, typer.Option(help="Write the evidence of a GPU run (needs --device cuda).")
    ] = None,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="In the simulator, also AddressSanitizer and UBSan builds.")
    ] = False,
    executor: Annotated[str, typer.Option(help=EXECUTOR_HELP)] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Fail when a plugin failed to load.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report instead of tables.")] = False,
) -> None:
    """Proves fusions (validate, render, compile for every target, execute, compare with float64) and models.

    A model is matched, planned, run fused, and compared with its original artefact on the same inputs.
    """
    from fusionreg.api import load_registry

    if evidence and device is not Device.CUDA:
        typer.echo("error: --evidence records a GPU run: add --device cuda", err=True)
        raise typer.Exit(USAGE)
    if sanitize and executor:
        typer.echo("error: --sanitize runs in this process alone: leave out --executor", err=True)
        raise typer.Exit(USAGE)
    types = declared(input)
    for path in filter(None, (report, junit, evidence)):
        writable(path)
    registry = load_registry(strict=strict, device=device.value)
    models = [t for t in targets or () if _is_model(t)]
    fusions = [t for t in targets or () if not _is_model(t)]
    found = _checked_models(registry, models, device, policy, seed, explain, types, quiet=json)
    if fusions or not models:
        with progress("proving", quiet=json) as tell:
            proven = _proven(
                registry, fusions, executor, sanitize, device=device.value, cases=cases.value, kernels=kernel,
                progress=lambda done, total, e: tell(done, total, f"{e.fusion}/{e.kernel} {e.case}"), evidence=evidence,
            )  # fmt: skip
        found = proven + found
        for failure in registry.failures:  # of what was asked for, a part that could not even be loaded
            if not fusions or failure.fusion.rpartition("/")[0] in fusions:
                typer.echo(f"warning: not proven, since it did not load: {failure}", err=True)
    if report:
        found.write_json(report)
    if junit:
        found.write_junit(junit)
    if json:
        print_json(found.to_json())
    elif found.evaluations:
        show_evaluations(found)
    ran = [site["kernel"] for row in found.models for site in row.sites]
    if expect and not any(fnmatch(k, expect) for k in ran):
        typer.echo(f"error: no site ran a kernel like {expect}: {sorted(set(ran))}", err=True)
        raise typer.Exit(FAILED)
    if not found.ok:
        raise typer.Exit(FAILED)


def _proven(registry: Registry, fusions: list[str], executor: str, sanitize: bool, **options: Any) -> Report:
    if executor:
        from fusionreg import spreading

        return spreading.run(spreading.workers(executor), fusions, **options)
    from fusionreg.core.proof.prove import prove

    return prove(registry.catalog, fusions, sanitize=sanitize, **options)


def _is_model(target: str) -> bool:
    """Whether it looks like a file or an import path: then what is wrong with it is told as of a model."""
    return ":" in target or os.sep in target or Path(target).suffix in MODEL_SUFFIXES or Path(target).is_file()


def _checked_models(
    registry: Registry, models: list[str], device: Device, policy: Policy, seed: int, explain: bool,
    types: Sequence[Declared], quiet: bool,
) -> Report:  # fmt: skip
    from fusionreg.cli.commands.models import show_plan, tell_nothing
    from fusionreg.core.proof.report import Report
    from fusionreg.integrations import is_live

    rows = []
    for target in models:
        from fusionreg.checking import check_model

        with progress(f"running {Path(target).name}", quiet=quiet), foreign_code():
            checked = check_model(
                registry,
                target,
                device=device.value,
                seed=seed,
                policy=policy.value,
                explain=explain,
                declared=types,
            )
        rows.append(checked.row)
        if not quiet:
            row = checked.row
            console().rule(f"{Path(target).name}: {row.nodes} nodes", align="left")
            show_plan(checked.graph, checked.plan, checked.failures, code=explain and is_live(target))
            table(
                "\nran",
                ("fusion", "kernel", "status", "nodes", "reason"),
                [(s["fusion"], s["kernel"], s["status"], len(s["nodes"]), s["reason"]) for s in row.sites],
                status=2,
            )
            table(
                "\nagainst the original",
                ("status", "max abs", "max rel", "reason"),
                [(row.status, number(row.max_abs), number(row.max_rel), row.reason)],
                status=0,
            )
        if not checked.plan.chosen:
            tell_nothing(target, policy, explain)
    return Report((), tuple(rows))


def show_evaluations(found: Report) -> None:
    """One line per kernel and status, then each failure with its reason."""
    groups: dict[tuple[str, str, str, str], list] = {}
    for e in found.evaluations:
        groups.setdefault((e.fusion, e.kernel, e.device, e.status), []).append(e)
    table(
        "",
        ("fusion", "kernel", "device", "status", "cases", "max abs", "max rel", "reason"),
        [
            (
                *key,
                len(group),
                number(max(e.max_abs for e in group)),
                number(max(e.max_rel for e in group)),
                short("; ".join(sorted({e.reason for e in group if e.reason}))) if key[3] != "PASSED" else "",
            )
            for key, group in sorted(groups.items())
        ],
        status=3,
    )
    if found.failures:
        table(
            "\nfailures", ("case", "status", "reason"), [(e.key, e.status, e.reason) for e in found.failures], status=1
        )
    for kernel in found.unproven:
        why = next(e.reason for e in found.evaluations if f"{e.fusion}/{e.kernel}" == kernel)
        typer.echo(f"nothing of {kernel} was compiled or executed, so that it is not proven: {short(why)}", err=True)
    counts = ", ".join(f"{n} {status}" for status, n in found.counts.items())
    device = found.environment.get("device", "")
    typer.echo(f"\n{counts} on {device}")
