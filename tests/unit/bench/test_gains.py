"""Times that plugins ship for the planner: written from results, trusted while the kernel is the same, asked for by
what a match is like."""

from __future__ import annotations

import shutil

import pytest
from tuning_kit import FACTS, ROW, TEMPLATE, made, subject_of

from fusionreg.core import doctor
from fusionreg.core.bench.floors import Ceilings
from fusionreg.core.bench.gains import MeasuredGains, keep, path_of, read, ship, stale
from fusionreg.core.bench.results import Column, Result, Results, Run
from fusionreg.core.bench.statistics import spread
from fusionreg.core.cache import Cache
from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.matcher.match import Match
from fusionreg.core.planner.executor import EAGER, INDUCTOR, LIBRARY, ONNXRUNTIME
from fusionreg.core.spec import Workload

SIZE = 4 * (2 * 64 * 256 + 256)  # x, y: [64 256], bias: [256], all float32


def column(name, ms, ours=False, **fields):
    return Column(name=name, ours=ours, time=spread([ms]), **fields)


def results(catalog, *columns, workload="w", status="measured", scale=1, **changes):
    subject = subject_of(catalog, **changes)
    run = Run(date="2026-01-02T03:04:05", environment=FACTS, ceilings=Ceilings(copy_rate=1, read_rate=1, write_rate=1))
    row = Result(
        fusion="acme.add_relu", workload=workload, mode="b", problem="", digest=subject.digest(FACTS), run=0,
        status=status, read=scale * subject.traffic.read, written=scale * subject.traffic.written, flops=1,
        floor_ms=1.0, bound="memory", chosen="plain", columns=columns,
    )  # fmt: skip
    return Results(gpu="Fake GPU", runs=(run,), rows=(row,))


COLUMNS = (
    column("plain", 1.0, ours=True), column("eager", 4.0), column("compile", 1.25),
    column("product", 0.5, computes="the product alone"),
)  # fmt: skip


def site(**changes):
    axes = FrozenDict(M=64, N=256)
    fields = {"dtypes": FrozenDict(T="float32"), "axes": axes, **changes}
    return Match("acme.add_relu", "acme", 0, "r", ("a", "r"), FrozenDict(), FrozenDict(), **fields)


def asked(catalog, size=SIZE, executor=EAGER, kernel="plain", **changes):
    return MeasuredGains(catalog, lambda m: kernel, "sm_90a")(site(**changes), executor, size)


def test_what_is_shipped_is_a_ratio_for_its_executor(tmp_path):
    catalog = made(tmp_path / "plugin")
    assert asked(catalog) is None
    (path,) = ship(results(catalog, *COLUMNS), (), catalog)
    assert path == path_of(catalog["acme.add_relu"].kernels[0].root, "sm_90a")
    (row,) = read(path).rows
    assert (row.bytes, row.ms, row.peers, row.kernel) == (SIZE, 1.0, {"eager": 4.0, "compile": 1.25}, "plain")
    assert row.facts == {"gpu": "Fake GPU", "driver": "13.0", "date": "2026-01-02T03:04:05"}
    found = asked(catalog)
    assert found.ratio == 0.25 and found.source == "acme.add_relu/plain on w: 0.25× eager"
    assert asked(catalog, executor=LIBRARY) == found
    assert asked(catalog, executor=INDUCTOR).ratio == 0.8
    assert asked(catalog, executor=ONNXRUNTIME) is None


def test_the_kernel_that_dispatch_picks_by_now_counts(tmp_path):
    """Another one may have been picked when all of them were measured."""
    catalog = made(tmp_path / "plugin")
    before = results(catalog, column("other", 3.0, ours=True), *COLUMNS)
    row = before.rows[0].model_copy(update={"chosen": "other"})
    (path,) = ship(before.model_copy(update={"rows": (row,)}), (), catalog)
    assert [(r.kernel, r.ms) for r in read(path).rows] == [("plain", 1.0)]
    assert asked(catalog).ratio == 0.25


def test_competitors_that_were_left_out_keep_their_times(tmp_path):
    """They do not know our kernel; what surrounds them, and the problem, do count."""
    catalog = made(tmp_path / "plugin")
    ship(results(catalog, *COLUMNS), (), catalog)
    again = column("plain", 2.0, ours=True), column("eager", 5.0)
    (path,) = ship(results(catalog, *again), (), catalog)
    assert [(r.ms, r.peers) for r in read(path).rows] == [(2.0, {"eager": 5.0, "compile": 1.25})]
    ship(results(catalog, *again, scale=2), (), catalog)
    assert [r.peers for r in read(path).rows] == [{"eager": 5.0}]


def test_it_tells_of_its_like_alone(tmp_path):
    catalog = made(tmp_path / "plugin")
    ship(results(catalog, *COLUMNS), (), catalog)
    assert asked(catalog, size=4 * SIZE) and asked(catalog, size=SIZE // 4)
    assert asked(catalog, size=4 * SIZE + 4) is None and asked(catalog, size=SIZE // 4 - 4) is None
    assert asked(catalog, dtypes=FrozenDict(T="float16")) is None
    assert asked(catalog, kernel="other") is None
    unknown = {"axes": FrozenDict(M="B", N=256)}  # nobody knows its size: any
    assert asked(catalog, **unknown, size=400 * SIZE) and not asked(catalog, **unknown).sure and asked(catalog).sure
    assert asked(catalog, base="acme.add_relu")
    assert MeasuredGains(catalog, lambda m: "plain", "sm_80")(site(), EAGER, SIZE) is None


def test_dtypes_that_tell_of_each_other(tmp_path):
    """Halves of one width do, and those of vectors do not count: a model in bfloat16 is one that was measured in
    float16 beside normalisation in float32."""
    half = FrozenDict(T="float16", B="float32")
    catalog = made(
        tmp_path / "plugin", workloads=(ROW.model_copy(update={"dtypes": half}),),
        inputs={"x": "T[M N]", "bias": "B[N]"},
        dtypes={"T": ("float16", "bfloat16", "float32"), "B": ("float16", "bfloat16", "float32")},
    )  # fmt: skip
    ship(results(catalog, *COLUMNS, dtypes=half), (), catalog)
    for kind in ({"T": "float16", "B": "float16"}, {"T": "bfloat16", "B": "bfloat16"}, {"T": "bfloat16"}):
        assert asked(catalog, dtypes=FrozenDict(kind)), kind
    assert asked(catalog, dtypes=FrozenDict(T="float32", B="float32")) is None


def test_the_nearest_of_several_counts(tmp_path):
    folder = tmp_path / "plugin"
    large = ROW.model_copy(update={"name": "large", "axes": FrozenDict(M=192, N=256)})
    catalog = made(folder, workloads=(ROW, Workload.model_validate(large.model_dump())))
    ship(results(catalog, *COLUMNS), (), catalog)
    slower = column("plain", 3.0, ours=True), column("eager", 6.0)
    ship(results(catalog, *slower, workload="large", scale=3), (), catalog)
    assert asked(catalog, size=SIZE).ratio == 0.25
    assert asked(catalog, size=3 * SIZE).ratio == 0.5
    assert asked(catalog, size=int(1.7 * SIZE)).ratio == 0.25 and asked(catalog, size=int(1.8 * SIZE)).ratio == 0.5


def test_only_what_was_measured_on_the_kernel_there_is(tmp_path):
    folder = tmp_path / "plugin"
    catalog = made(folder)
    key = ("acme.add_relu", "w")
    assert ship(results(catalog, *COLUMNS), {key}, catalog) == ()
    assert ship(results(catalog, *COLUMNS, status="differs"), (), catalog) == ()
    assert ship(results(catalog, COLUMNS[0]), (), catalog) == ()  # nobody to compare with
    assert ship(results(catalog, *COLUMNS, workload="gone"), (), catalog) == ()
    ship(results(catalog, *COLUMNS), (), catalog)
    assert stale(catalog) == (1, []) and doctor.shipped_times(catalog).status == "ok"
    edited = made(folder, TEMPLATE.replace("fr::relu(", "fr::relu(0.0f + "))
    old, new = (c["acme.add_relu"].kernels[0].root for c in (catalog, edited))
    if old != new:
        shutil.copytree(old / "measured", new / "measured")
    assert asked(edited) is None
    good, wrong = stale(edited)
    assert good == 0 and "acme.add_relu/plain on w for sm_90a: another kernel" in wrong[0]
    assert doctor.shipped_times(edited).status == "absent"
    assert ship(results(edited, *COLUMNS), {key}, edited) == ()  # nothing new, and what is stale goes
    assert stale(edited) == (0, []) and not path_of(new, "sm_90a").exists()


def test_what_was_measured_here_comes_first(tmp_path):
    catalog, cache = made(tmp_path / "plugin"), Cache(tmp_path / "cache")
    ship(results(catalog, *COLUMNS), (), catalog)
    keep(results(catalog, column("plain", 3.0, ours=True), column("eager", 4.0)), (), catalog, cache)
    assert asked(catalog).ratio == 0.25
    keep(results(catalog, column("plain", 5.0, ours=True), COLUMNS[1], workload="gone"), (), catalog, cache)
    here = MeasuredGains(catalog, lambda m: "plain", "sm_90a", cache)
    assert here(site(), EAGER, SIZE).ratio == 0.75 and here(site(), INDUCTOR, SIZE) is None


def test_files_that_are_something_else(tmp_path):
    catalog = made(tmp_path / "plugin")
    (path,) = ship(results(catalog, *COLUMNS), (), catalog)
    path.write_text(path.read_text().replace("measured/1", "measured/9"))
    with pytest.raises(ModelError, match="format"):
        read(path)
    assert asked(catalog) is None and "format" in stale(catalog)[1][0]
    with pytest.raises(ModelError, match="format"):  # nobody's file is overwritten
        ship(results(catalog, *COLUMNS), (), catalog)
