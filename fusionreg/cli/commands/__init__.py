"""One module a topic; importing this registers every command."""

from fusionreg.cli.commands import authoring, catalogue, health, measure, models, proof, verification

__all__ = ["authoring", "catalogue", "health", "measure", "models", "proof", "verification"]
