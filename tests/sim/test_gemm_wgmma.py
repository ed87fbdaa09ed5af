"""The warp-specialised GEMM: blocks that take several tiles, clusters that share them, pipelines that lack a part."""

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

CATALOG = shipped("gemm")


def job(
    transposed: int, multiprocessors: int, axes: dict[str, int], fusion: str = "gemm.scale_bias", **params: int
) -> tuple[Job, SimExecutor]:
    entry = CATALOG[fusion]
    executor = SimExecutor(Cache(), target="sm_90a", multiprocessors=multiprocessors)
    rows = derive(entry, entry.kernel("wgmma"), executor.target, "quick")
    tails = [t for t in rows if t.name.endswith("-tails") and t.attributes["transB"] == transposed and t.params]
    base = min(tails, key=lambda t: t.dtypes["T"] != "float16")  # which is the more exact
    trial = replace(
        base, axes=FrozenDict(axes), exactly=True,
        params=FrozenDict({"BM": 128, "XT": 0, "SPLIT": 1, **params}),
        layouts=FrozenDict({"x": "transposed"} if params.get("XT") else {}),
    )  # fmt: skip
    found = prepare(entry, entry.kernel("wgmma"), trial, executor)
    assert isinstance(found, Job), found
    return found, executor


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize(
    ("columns", "cluster", "multiprocessors", "tiles"),
    [(64, 1, 2, 3 * 5), (128, 2, 2, 2 * 3), (256, 2, 5, 2 * 2), (256, 1, 1, 3 * 2)],
)
def test_blocks_take_several_tiles(transposed, columns, cluster, multiprocessors, tiles):
    """The stages of one tile go on in the next, with the parity they have."""
    found, executor = job(transposed, multiprocessors, {"M": 300, "K": 200, "N": 264}, BN=columns, CLUSTER=cluster)
    blocks = found.candidate.launch.grid[0]
    assert blocks == multiprocessors // cluster * cluster and blocks // cluster < tiles
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


@pytest.mark.parametrize(("columns", "cluster"), [(160, 2), (224, 1)])
def test_tiles_that_are_stored_by_32_columns(columns, cluster):
    found, executor = job(1, 2, {"M": 300, "K": 296, "N": 456}, BN=columns, CLUSTER=cluster)
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


@pytest.mark.parametrize(("transposed", "columns", "split", "k"), [(0, 128, 2, 328), (1, 256, 2, 456), (1, 64, 2, 40)])
def test_blocks_have_parts_of_k(transposed, columns, split, k):
    """Of one step, a block has none."""
    found, executor = job(transposed, 2, {"M": 300, "K": k, "N": 264}, BN=columns, SPLIT=split, CLUSTER=1)
    assert found.candidate.launch.cluster[0] == split
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


def test_parts_of_k_wait_for_each_other():
    found, executor = job(1, 2, {"M": 40, "K": 328, "N": 72}, BN=128, SPLIT=2, CLUSTER=1)
    text, sync = found.source.text, "fr::cluster_sync();"
    for old, new in ((f"{sync}  // nobody reads them any more", ""), (f"{sync}\n      {sync}", sync)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    broken = replace(found, source=changed(found.source, text))
    assert execute(broken, executor, CATALOG.ops).status.failed


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("if (before >= 0) release(before);\n        before", "before"),  # stages are never given back
        ("fr::mbarrier_wait(full + stage, parity);", ""),
        ("fr::mbarrier_wait(empty + stage, parity ^ 1);", ""),
        ("CONSUMERS * CLUSTER);", "CONSUMERS);"),  # a block's tiles go to others before they are ready
        ("fr::wgmma_wait<0>();", ""),
        ("fr::wgmma_fence();", ""),
        ("fr::store_wait_read<1>()", "(void)0"),
        ("if (++stage == STAGES) stage = 0, parity ^= 1;", "if (++stage == STAGES) stage = 0;"),
        ("tile.row * CLUSTER + rank", "tile.row * CLUSTER"),  # both blocks of a cluster take the upper tile
    ],
)
def test_what_a_pipeline_must_not_lack(text, other):
    found, executor = job(1, 2, {"M": 300, "K": 456, "N": 72}, BN=128, CLUSTER=2)
    assert found.source.text.count(text) >= 1
    broken = replace(found, source=changed(found.source, found.source.text.replace(text, other)))
    assert execute(broken, executor, CATALOG.ops).status.failed


@pytest.mark.parametrize(("rows", "cluster", "split"), [(100, 2, 1), (40, 1, 2), (1, 1, 1)])
def test_fewer_rows_than_a_tile_has(rows, cluster, split):
    found, executor = job(1, 2, {"M": rows, "K": 328, "N": 264}, BN=128, CLUSTER=cluster, SPLIT=split)
    assert found.candidate.maps[0].box == (64, rows)
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result
    text = found.source.text
    assert text.count("full + stage, brought") == 1
    broken = replace(found, source=changed(found.source, text.replace("full + stage, brought", "full + stage, STAGE")))
    assert execute(broken, executor, CATALOG.ops).status.failed


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("cluster", [1, 2])
def test_many_products(transposed, cluster):
    """Tiles of one product follow those of another; rows and columns behind a product's end are the next one's."""
    axes = {"B": 3, "M": 200, "K": 104, "N": 200}
    found, executor = job(transposed, 4, axes, fusion="gemm.batched", BN=128, CLUSTER=cluster)
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


@pytest.mark.parametrize("transposed", [0, 1])
def test_columns_of_x_are_contiguous(transposed):
    found, executor = job(transposed, 2, {"M": 304, "K": 200, "N": 136}, BN=128, CLUSTER=2, XT=1)
    assert found.problem.tensors["x"].strides == (1, 304)
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


@pytest.mark.parametrize(("transposed", "columns", "cluster"), [(1, 256, 2), (0, 128, 1)])
def test_gated_blocks_take_several_tiles(transposed, columns, cluster):
    """A tile has columns of both weights, in clusters each block asks for those of one."""
    axes = {"M": 300, "K": 200, "N": 264}
    found, executor = job(transposed, 2, axes, fusion="gemm.gated", BN=columns, CLUSTER=cluster)
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


NARROW = {"fusion": "gemm.scaled", "BN": 64, "CLUSTER": 1}


def test_e4m3_blocks_take_several_tiles():
    found, executor = job(1, 1, {"M": 200, "K": 2064, "N": 72}, **NARROW)
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


def test_e4m3_sums_are_widened_in_time():
    """The tensor core's own sums keep some 14 bits: over all of k that is not enough."""
    found, executor = job(1, 1, {"M": 40, "K": 4096, "N": 72}, **NARROW)
    assert execute(found, executor, CATALOG.ops).status is Status.PASSED
    text = found.source.text
    for old, new in (("part, a + 2 * k, b + 2 * k, k > 0", "part, a + 2 * k, b + 2 * k, step + k > 0"),
                     ("sum[i] += part[i]", "sum[i] = part[i]"), ("float part[BN / 2];", "")):  # fmt: skip
        assert text.count(old) == 1
        text = text.replace(old, new)
    text = text.replace("float sum[BN / 2] = {};", "float sum[BN / 2] = {}, part[BN / 2];")
    broken = replace(found, source=changed(found.source, text))
    result = execute(broken, executor, CATALOG.ops)
    assert result.status is Status.INCORRECT_NUMERICAL, result
