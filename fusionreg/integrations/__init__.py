"""Front doors: what turns a model of any kind into a graph. torch and onnx are imported below here only."""

from __future__ import annotations

from fusionreg.integrations.opening import Opened, open_model

__all__ = ["Opened", "open_model"]
