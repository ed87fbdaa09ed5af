"""The family's fusions of attention as one operator, with kernels awake that no GPU has run yet."""

from __future__ import annotations

from dataclasses import replace

from catalogs import shipped

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.registry.catalog import Catalog


def awake(*kernels: str) -> Catalog:
    """``kernels``: only those; the catalog is without other fusions."""
    catalog = shipped("attention")

    def chosen(entry):
        return tuple(
            replace(k, spec=k.spec.model_copy(update={"pending": ""}))
            for k in entry.kernels
            if k.spec.name in kernels
        )

    found = {n: replace(e, kernels=chosen(e)) for n, e in catalog.fusions.items() if "sdpa" in n}
    return replace(catalog, fusions=FrozenDict(found))
