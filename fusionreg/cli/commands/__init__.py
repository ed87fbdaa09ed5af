"""One module a topic; importing this registers every command."""

from fusionreg.cli.commands import authoring, catalogue, health, models, proof

__all__ = ["authoring", "catalogue", "health", "models", "proof"]
