"""Kernels that wait for their predecessor compile everywhere; only where the device can are they launched that way."""

from __future__ import annotations

import dependent_kit
import pytest

from fusionreg.core.compiler import compile_source
from fusionreg.core.problem import Tensor, bind, select
from fusionreg.core.problem.geometry import launch_geometry
from fusionreg.core.render import render
from fusionreg.core.targets import SHIPPED


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    return dependent_kit.chains(tmp_path_factory.mktemp("chains"))


@pytest.mark.parametrize("fusion", ["acme.shift", "acme.rows"])
@pytest.mark.parametrize("target", SHIPPED)
def test_every_way_on_every_target(catalog, target, fusion):
    entry = catalog[fusion]
    tensors = {"x": Tensor.contiguous("bfloat16", (64, 1024)), "bias": Tensor.contiguous("bfloat16", (1024,))}
    problem = bind(entry, {n: tensors[n] for n in entry.inputs}, {}, target)
    compiled = set()
    for found in select(entry, problem).accepted:
        way = found.kernel.spec.name
        source = render(entry, found.kernel, problem, found.params)
        assert compile_source(source, None).cubin
        compiled.add(way)
        launch = launch_geometry(found.kernel, problem, found.params)
        assert launch.programmatic == (way != "plain" and target != "sm_80"), (way, target)
        assert ("fr::grid_dependency_wait();" in source.text.split(source.entry)[-1]) == (way != "plain")
    assert compiled == set(dependent_kit.WAYS)
