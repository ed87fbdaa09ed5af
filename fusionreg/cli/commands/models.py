"""What happens to a model: ``match``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusionreg.cli.app import FAILED, NOTHING, USAGE, app
from fusionreg.cli.choices import INPUT_HELP, MODEL_HELP, Executor, Policy, declared
from fusionreg.cli.output import JSON_HELP, code_at, near, number, print_json, table, writable

if TYPE_CHECKING:
    from fusionreg.core.ir import Graph
    from fusionreg.core.matcher.match import FailedMatch
    from fusionreg.core.planner.plan import Plan


@app.command()
def match(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    input: Annotated[list[str] | None, typer.Option(help=INPUT_HELP)] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also what nearly matched, and why it did not.")] = False,
    policy: Annotated[Policy, typer.Option(help="off, conservative, balanced or aggressive")] = Policy.BALANCED,
    executor: Annotated[
        Executor, typer.Option(help="Who runs what is not fused: what a fusion saves depends on it.")
    ] = Executor.LIBRARY,
    expect: Annotated[
        Path | None, typer.Option(help="A coverage lock: fail where a site in it fuses no longer.")
    ] = None,
    write_expect: Annotated[Path | None, typer.Option(help="Write what fuses as a coverage lock.")] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """What would be fused where, what loses to something better, and what nearly matched.

    Exit status: 0, 5 where nothing is fused, 1 where a site of --expect was lost.
    """
    from fusionreg.api import load_registry
    from fusionreg.integrations import is_live, open_model
    from fusionreg.verifying.lock import Lock

    if expect and write_expect:
        typer.echo("error: --expect reads a lock and --write-expect writes one: give one of them", err=True)
        raise typer.Exit(USAGE)
    types = declared(input)
    lock = Lock.read(expect) if expect else None
    if write_expect:
        writable(write_expect)
    registry = load_registry()
    opened = open_model(model, ops=registry.catalog.ops, declared=types)
    graph = opened.graph
    found = registry.match(graph, explain=explain or lock is not None)
    plan = registry.plan(opened, policy=policy.value, executor=executor.value, matches=found)
    failures = found.failures if explain else ()
    outcome = lock.compare(graph, plan, found.failures) if lock else None
    if write_expect:
        Lock.of(model, graph, plan).write(write_expect)
    if json:
        near_misses = [f.to_dict() for f in failures]
        facts = {"model": model, "nodes": len(graph.nodes), **plan.to_dict(), "failures": near_misses}
        print_json({**facts, "expect": outcome.to_dict()} if outcome else facts)
    else:
        show_plan(graph, plan, failures, code=explain and is_live(model))
        if outcome:
            typer.echo("\n".join(("", f"against {expect}: {outcome.kept} kept", *outcome.lines())))
    if outcome and not outcome.ok:
        lost = sum(x.count for x in outcome.lost)
        typer.echo(f"error: of the sites in {expect}, {lost} {'is' if lost == 1 else 'are'} no longer fused", err=True)
        raise typer.Exit(FAILED)
    if not plan.chosen:
        tell_nothing(model, policy, explain)
        raise typer.Exit(NOTHING)


def tell_nothing(model: str, policy: Policy, explained: bool = False) -> None:
    """Nothing is fused: what to do now, on stderr."""
    advice = "" if explained else f"; `fusionreg match {model} --explain` says why"
    if policy is not Policy.OFF:
        typer.echo(f"nothing in {model} is fused{advice}", err=True)


def show_plan(graph: Graph, plan: Plan, failures: Sequence[FailedMatch], code: bool = False) -> None:
    """Prints the chosen sites, the losers, and the failed matches that got beyond their first operator; those that
    begin and fail in one chosen site tell nothing and are counted.

    ``code``: also the line of code of each, which is read from the file that the model names.
    """

    def at(node: str) -> str:
        return place(graph.node_by_name[node].source or node)

    def place(source: str) -> str:
        line = code_at(source) if code else ""
        return f"{near(source)}\n  {line}" if line else near(source)

    table(
        "fused",
        ("fusion", "operators", "at", "saves µs", "by", "nodes"),
        [
            (m.fusion, len(m.nodes), at(m.root), number(cost.seconds * 1e6), by, " ".join(m.nodes))
            for m, cost, by in zip(plan.chosen, plan.savings, plan.basis, strict=True)
        ],
    )
    if plan.moved:
        typer.echo(f"\nmoved to channels last: {', '.join(plan.moved)}")
    if plan.losers:
        table(
            "\nnot taken",
            ("fusion", "at", "reason"),
            [(x.match.fusion, at(x.match.root), x.reason) for x in plan.losers],
        )
    owner = {n: m for m in plan.chosen for n in m.nodes}
    loose = [f for f in failures if f.root not in owner or owner[f.root] is not owner.get(f.node)]
    deep = [f for f in loose if f.depth > 1]
    if deep:
        table(
            "\nnearly",
            ("fusion", "matched", "at", "why not"),
            [(f.fusion, f.depth, place(f.source or f.node), f"{f.clause}: {f.found} — {f.expected}") for f in deep],
        )
    if len(deep) < len(loose):
        typer.echo(f"\n{len(loose) - len(deep)} more matched one operator only; --json lists them")
    if len(loose) < len(failures):
        typer.echo(f"\n{len(failures) - len(loose)} more failed within a site that is fused; --json lists them")
