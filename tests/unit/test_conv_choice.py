"""Which kernel a layer gets by its estimates, where an H200 has told: the fastest of those that were timed."""

from __future__ import annotations

import pytest
from catalogs import shipped

from fusionreg.core.bench import Subject

CATALOG = shipped("conv")
LAYERS = {w.name: w for w in CATALOG["conv.conv_bn_relu"].spec.workloads}


@pytest.mark.parametrize("name", ["32x64x56-64-1x1", "256x64x56-64-1x1", "32x64x56-64-3x3", "256x256x56-64-1x1"])
def test_layers_of_few_channels_go_to_hopper(name):
    """Of few channels a tile takes longer for its pixels than for its products."""
    subject = Subject.of(CATALOG["conv.conv_bn_relu"], LAYERS[name], "sm_90a", CATALOG.ops, None, 132)
    assert subject.selection.accepted[0].kernel.name == "wgmma"
