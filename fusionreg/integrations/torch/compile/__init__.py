"""Graphs that Dynamo captured: what the plugins know is fused, the rest handed to another backend."""

from .backend import FusionWarning, compile_graph
from .options import Options
from .report import FusedSite, LostSite, Report

__all__ = ["FusedSite", "FusionWarning", "LostSite", "Options", "Report", "compile_graph"]
