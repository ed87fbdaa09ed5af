"""ONNX: read a model into a graph, write a fused graph back, and run the original for reference."""

from __future__ import annotations

from .load import load
from .save import save

__all__ = ["load", "save"]
