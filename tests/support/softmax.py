"""Softmax of scores by its definition, and the family's fusions with all of their kernels awake."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from catalogs import shipped

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.registry.catalog import Catalog


def awake(*kernels: str) -> Catalog:
    """The family's softmax fusions; ``kernels``: only those of their kernels. None is pending."""
    return ready("softmax", *kernels)


def ready(word: str, *kernels: str) -> Catalog:
    """The same of fusions whose name has ``word``."""
    catalog = shipped("attention")

    def chosen(entry):
        return tuple(
            replace(k, spec=k.spec.model_copy(update={"pending": ""}))
            for k in entry.kernels
            if not kernels or k.spec.name in kernels
        )

    found = {n: replace(e, kernels=chosen(e)) for n, e in catalog.fusions.items() if word in n}
    return replace(catalog, fusions=FrozenDict(found))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    with np.errstate(invalid="ignore"):
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)


def gradient(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of scores, y being their softmax."""
    return y * (dy - (dy * y).sum(axis=-1, keepdims=True))


def visible(queries: int, keys: int, diagonal: int = 0) -> np.ndarray:
    """Which keys a query sees: those up to q + diagonal."""
    return np.tri(queries, keys, diagonal, dtype=bool)
