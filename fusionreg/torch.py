"""Fusions in PyTorch programs: ``fusionreg.torch.ops.<family>.<fusion>(…)``.

>>> from fusionreg.torch import ops
>>> y, h = ops.norm.residual_rmsnorm(x, residual, scale, epsilon=1e-6)
>>> help(ops.norm.residual_rmsnorm)

They work under autograd, autocast and ``torch.compile``, with any backend. Importing this module imports torch; plugins
are loaded at the first use of ``ops``.
"""

from __future__ import annotations

from fusionreg.api import load_registry
from fusionreg.integrations.torch.operators import Operators
from fusionreg.integrations.torch.operators.namespace import Ops

__all__ = ["Operators", "Ops", "ops"]

ops = Ops(load_registry)
"""The functions of all installed plugins; ``ops.use(registry)`` are those of another registry."""
