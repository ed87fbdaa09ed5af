"""``torch.compile(model, backend="fusionreg")``: fuses what the plugins know, and hands the rest to another backend."""

from .backend import FusionWarning, backend
from .options import Options
from .report import FusedSite, LostSite, Report

__all__ = ["FusedSite", "FusionWarning", "LostSite", "Options", "Report", "backend"]
