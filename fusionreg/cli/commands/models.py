"""What happens to a model: ``match``."""

from __future__ import annotations

from typing import Annotated

import typer

from fusionreg.cli.main import NOTHING, app
from fusionreg.cli.output import JSON_HELP, print_json, table


@app.command()
def match(
    model: Annotated[str, typer.Argument(help=".onnx, .pt2 or package.module:callable (which runs that callable)")],
    explain: Annotated[bool, typer.Option("--explain", help="Also what nearly matched, and why it did not.")] = False,
    policy: Annotated[str, typer.Option(help="off, conservative, balanced or aggressive")] = "balanced",
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """What would be fused where, what loses to something better, and what nearly matched."""
    from fusionreg.api import load_registry

    registry = load_registry()
    graph = registry.graph(model)
    found = registry.match(graph, explain=explain)
    plan = registry.plan(graph, policy=policy, matches=found)
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
        show_plan(plan, found.failures if explain else ())
    if not plan.chosen:
        raise typer.Exit(NOTHING)


def show_plan(plan, failures) -> None:
    """Prints the chosen sites, the losers and the failed matches."""
    table(
        "fused",
        ("fusion", "operators", "at", "nodes"),
        [(m.fusion, len(m.nodes), m.source, " ".join(m.nodes)) for m in plan.chosen],
    )
    if plan.losers:
        table(
            "\nnot taken", ("fusion", "at", "reason"), [(x.match.fusion, x.match.root, x.reason) for x in plan.losers]
        )
    if failures:
        table(
            "\nnearly", ("fusion", "at", "matched", "why not"), [(f.fusion, f.node, f.depth, str(f)) for f in failures]
        )
