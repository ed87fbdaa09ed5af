"""Front doors: what turns a model of any kind into a graph. torch and onnx are imported below here only."""

from __future__ import annotations

from fusionreg.integrations.declared import Declared
from fusionreg.integrations.opening import Opened, is_live, open_model

__all__ = ["Declared", "Opened", "is_live", "open_model"]
