"""PyTorch: exported programs, ``.pt2`` files and modules into graphs; the original run for reference; fused callables.

Importing this package imports torch.
"""

from __future__ import annotations

from .convert import Imported
from .frontend import export, from_exported, from_module, import_exported, import_pt2, load_pt2

__all__ = ["Imported", "export", "from_exported", "from_module", "import_exported", "import_pt2", "load_pt2"]
