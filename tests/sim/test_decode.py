"""Attention for decoding in the simulator: heads that share keys share a tile, and blocks share the keys of a tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from catalogs import shipped

from fusionreg.core.cache import Cache
from fusionreg.core.conformance.cases import derive
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.proof.report import Status

CATALOG = shipped("attention")
FEW = {"B": 1, "H": 8, "G": 2, "Q": 1, "K": 700, "D": 64, "E": 64}


def job(
    fusion: str, axes: dict[str, int], multiprocessors: int, values: dict[str, str] | None = None,
    kernel: str = "decode", **attributes: float,
) -> tuple[Job, SimExecutor]:
    entry, executor = CATALOG[fusion], SimExecutor(Cache(), target="sm_90a", multiprocessors=multiprocessors)
    rows = derive(entry, entry.kernel(kernel), "sm_90a", "quick")
    base = next(t for t in rows if t.dtypes["T"] == "bfloat16" and not t.layouts)
    trial = replace(
        base, axes=FrozenDict({**base.axes, **axes}), values=FrozenDict(values or {}), params=FrozenDict(),
        attributes=base.attributes | {"is_causal": 0, "softcap": 0.0} | attributes,
    )  # fmt: skip
    found = prepare(entry, entry.kernel(kernel), trial, executor)
    assert isinstance(found, Job), found
    return found, executor


@pytest.mark.parametrize(
    ("fusion", "axes", "multiprocessors", "attributes"),
    [
        # a tile to five blocks, one of which has parts of both; more parts than a warp has lanes; three tiles a head
        ("attention.sdpa", {}, 9, {}),
        ("attention.sdpa", {"H": 3, "G": 1, "K": 5000, "D": 32, "E": 16}, 37, {"right_window_size": 4999}),
        ("attention.sdpa", {"B": 3, "Q": 9, "K": 290}, 4, {"left_window_size": 70, "right_window_size": 110}),
        # two tiles to each block, or to all but one: nothing to share
        ("attention.sdpa", {"B": 2, "K": 256}, 2, {}),
        ("attention.sdpa", {"B": 16, "K": 256, "D": 16, "E": 16}, 17, {}),
        ("attention.sdpa_masked", {"Q": 2, "K": 300}, 3, {"softcap": 2.0}),
    ],
)  # fmt: skip
def test_blocks_share_tiles(fusion, axes, multiprocessors, attributes):
    found, executor = job(fusion, FEW | axes, multiprocessors, **attributes)
    assert found.candidate.launch.grid[0] <= multiprocessors
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


@pytest.mark.parametrize(
    ("fusion", "axes", "multiprocessors", "blocks"),
    [
        ("attention.sdpa", {"B": 2, "K": 256}, 2, 2),
        ("attention.sdpa", {"B": 16, "K": 256, "D": 16, "E": 16}, 17, 16),
        ("attention.sdpa_masked", {"Q": 2, "K": 300}, 3, None),  # two tiles, three blocks: they would share
    ],
)
def test_blocks_with_whole_tiles(fusion, axes, multiprocessors, blocks):
    """Without a barrier over the grid, where none is wanted."""
    if blocks is None:
        with pytest.raises(AssertionError, match="does not hold"):
            job(fusion, FEW | axes, multiprocessors, kernel="decode_whole")
        return
    found, executor = job(fusion, FEW | axes, multiprocessors, kernel="decode_whole")
    assert found.candidate.launch.grid[0] == blocks and not found.candidate.launch.workspace
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


@pytest.mark.parametrize(
    ("text", "other", "keys"),
    [
        ("  fr::grid_sync();\n  for", "  for", 333),
        ("p == first ? late : 0", "0", 333),
        ("unit == start ? 0 : 1", "0", 333),
        ("fr::cp_async_wait<STAGES - 1>();", "", 333),
        ("        __syncwarp();\n      }\n", "      }\n", 900),
        ("      __syncthreads();\n      unit += static", "      unit += static", 333),
        ("relative(theirs[w * APART + E], all.top)", "1.0f", 333),
        ("relative(part(p0 + lane)[E], all.top)", "1.0f", 333),
        ("which > high[r])) s +=", "false)) s +=", 69),
        ("tile.shared * group + place % group", "tile.shared * group", 333),
        ("from == 0 && to == length", "false", 333),
    ],
)  # fmt: skip
def test_what_the_kernel_must_not_lack(text, other, keys):
    """Three tiles for two blocks: each has one of its own, and a part of the one between."""
    alike = {"k": "zeros"} if keys == 69 else {}
    found, executor = job("attention.sdpa", FEW | {"H": 12, "G": 3, "K": keys}, 2, alike)
    assert found.candidate.launch.grid[0] == 2 and found.source.text.count(text) == 1
    broken = replace(found, source=changed(found.source, found.source.text.replace(text, other)))
    assert execute(broken, executor, CATALOG.ops, stress="sync" in text).status.failed
