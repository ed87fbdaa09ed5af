"""Which kernel a layer gets by its estimates, where an H200 has told: the fastest of those that were timed."""

from __future__ import annotations

import pytest
from catalogs import shipped

from fusionreg.core.bench import Subject

CATALOG = shipped("conv")


@pytest.mark.parametrize(
    ("fusion", "layer", "tiles"),
    [
        # of few channels a tile takes longer for its pixels than for its products
        ("conv_bn_relu", "32x64x56-64-1x1", {}),
        ("conv_bn_relu", "256x64x56-64-1x1", {}),
        ("conv_bn_relu", "32x64x56-64-3x3", {}),
        ("conv_bn_relu", "256x256x56-64-1x1", {"BK": 64}),
        ("conv_bn_relu", "32x512x14-512-3x3-s2", {"SPLIT": 2}),  # few pixels: a sum is divided
        ("conv_bn_relu", "256x128x28-128-3x3", {"SHARE": 2, "MB": 1}),  # products of 64 rows alone are slow
        ("conv_bn", "256x512x28-1024-1x1-s2-alone", {"SHARE": 2}),  # of both consumers' tiles, too
    ],
)
def test_layers_go_to_hopper(fusion, layer, tiles):
    entry = CATALOG[f"conv.{fusion}"]
    workload = next(w for w in entry.spec.workloads if w.name == layer)
    subject = Subject.of(entry, workload, "sm_90a", CATALOG.ops, None, 132)
    best = subject.selection.accepted[0]
    assert best.kernel.name == "wgmma" and tiles.items() <= dict(best.params).items()
