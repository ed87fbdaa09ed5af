"""What happens to a model: ``match``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fusionreg.cli.choices import Policy
from fusionreg.cli.main import NOTHING, app
from fusionreg.cli.output import JSON_HELP, number, print_json, table

if TYPE_CHECKING:
    from fusionreg.core.ir import Graph
    from fusionreg.core.matcher.match import FailedMatch
    from fusionreg.core.planner.plan import Plan


@app.command()
def match(
    model: Annotated[str, typer.Argument(help=".onnx, .pt2 or package.module:callable (which runs that callable)")],
    explain: Annotated[bool, typer.Option("--explain", help="Also what nearly matched, and why it did not.")] = False,
    policy: Annotated[Policy, typer.Option(help="off, conservative, balanced or aggressive")] = Policy.BALANCED,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """What would be fused where, what loses to something better, and what nearly matched."""
    from fusionreg.api import load_registry

    registry = load_registry()
    graph = registry.graph(model)
    found = registry.match(graph, explain=explain)
    plan = registry.plan(graph, policy=policy.value, matches=found)
    if json:
        print_json(
            {
                "model": model,
                "nodes": len(graph.nodes),
                **plan.to_dict(),
                "failures": [f.to_dict() for f in found.failures],
            }
        )
    else:
        show_plan(graph, plan, found.failures)
    if not plan.chosen:
        raise typer.Exit(NOTHING)


def show_plan(graph: Graph, plan: Plan, failures: Sequence[FailedMatch]) -> None:
    """Prints the chosen sites, the losers, and the failed matches that got beyond their first operator."""

    def at(node: str) -> str:
        return graph.node_by_name[node].source or node

    table(
        "fused",
        ("fusion", "operators", "at", "saves µs", "nodes"),
        [
            (m.fusion, len(m.nodes), at(m.root), number(cost.seconds * 1e6), " ".join(m.nodes))
            for m, cost in zip(plan.chosen, plan.savings, strict=True)
        ],
    )
    if plan.losers:
        table(
            "\nnot taken",
            ("fusion", "at", "reason"),
            [(x.match.fusion, at(x.match.root), x.reason) for x in plan.losers],
        )
    deep = [f for f in failures if f.depth > 1]
    if deep:
        table(
            "\nnearly",
            ("fusion", "matched", "at", "why not"),
            [(f.fusion, f.depth, f.source or f.node, f"{f.clause}: {f.found} — {f.expected}") for f in deep],
        )
    if len(deep) < len(failures):
        typer.echo(f"\n{len(failures) - len(deep)} more matched one operator only; --json lists them")
