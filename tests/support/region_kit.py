"""Point-wise fusions made on the spot from their text, with the kernels of the family ``pointwise``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import fusionreg_pointwise
from fusionreg.core.registry.catalog import Catalog, load
from fusionreg.core.spec import FusionSpec
from fusionreg.hookspecs import hookimpl
from fusionreg_pointwise.kernels import KERNELS

Text = tuple[str, Mapping[str, str], Mapping[str, str]]
"""Pattern, inputs, outputs."""


def catalog(**texts: Text) -> Catalog:
    """``pointwise.<name>`` for each text, every kernel ready to be chosen."""
    kernels = tuple(k.model_copy(update={"pending": ""}) for k in KERNELS)
    fusions = [
        FusionSpec(api=1, name=f"pointwise.{name}", pattern=p, inputs=i, outputs=o, dtypes={}, kernels=kernels)
        for name, (p, i, o) in texts.items()
    ]
    plugin = type(sys)("fusionreg_pointwise")
    plugin.__path__ = [str(Path(fusionreg_pointwise.__file__).parent)]
    plugin.__file__ = fusionreg_pointwise.__file__
    plugin.register_fusions = hookimpl(lambda: fusions)
    made = load(entry_points=(), extra_plugins=[("pointwise", plugin)])
    assert not made.failures, [str(f) for f in made.failures]
    return made
