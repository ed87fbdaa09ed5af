"""Exported torch modules as callables, and how results are compared."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.torch import export, import_exported
from fusionreg.integrations.torch.module import ExportedCallable

OPS = default_vocabulary()


def fused(module, args, dynamic_shapes=None):
    """The exported module as a callable, unfused."""
    imported = import_exported(export(module, args, None, dynamic_shapes))
    return ExportedCallable(imported, lambda given: evaluate(imported.graph, given, ops=OPS))


def agree(got, want, tolerance=1e-5):
    for g, w in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        if isinstance(w, torch.Tensor):
            torch.testing.assert_close(g, w.detach(), rtol=tolerance, atol=tolerance)
        else:
            assert g == w and type(g) is type(w)
