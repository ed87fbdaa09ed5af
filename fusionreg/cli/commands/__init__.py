"""One module a topic; importing this registers every command."""

from fusionreg.cli.commands import (
    authoring,
    bisection,
    catalogue,
    health,
    inspection,
    measure,
    models,
    proof,
    verification,
)

__all__ = ["authoring", "bisection", "catalogue", "health", "inspection", "measure", "models", "proof", "verification"]
