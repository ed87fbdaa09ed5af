"""The loop: verified before timed, written row by row, resumed, stopped in time; a fake device keeps the clock."""

from __future__ import annotations

import json
import sys

import graphs as kit
import plugin_kit
import pytest
from benches import CEILINGS, FakeBench

from fusionreg.core.bench import Check, Entrant, Preparation, Subject, current, measure, prepare
from fusionreg.core.bench.measure import ROUNDS, compete
from fusionreg.core.bench.results import Results, file_name, read
from fusionreg.core.errors import LaunchError, ModelError
from fusionreg.core.spec import Workload

OPS = kit.vocabulary()
home = sys.modules["fusionreg.core.bench.measure"]  # ``bench.measure`` is the function
SHAPES = {"small": 64, "large": 4096, "wide": 512}


@pytest.fixture
def entry(tmp_path):
    rows = tuple(
        Workload(name=n, row="S8", axes={"M": m, "N": 32}, dtypes={"T": "float32"}, goal="min(eager, best) * 0.5")
        for n, m in SHAPES.items()
    )
    return plugin_kit.entry(tmp_path / "plugin", workloads=rows)


@pytest.fixture
def every(entry):
    return [Subject.of(entry, w, "sm_90a", OPS) for w in entry.spec.workloads]


def go(every, bench, folder, **options):
    return measure(every, bench, folder, clock=bench.clock, **options)


def test_a_row(every, tmp_path) -> None:
    bench = FakeBench()
    found = go(every[:1], bench, tmp_path)
    assert found.ok and (found.measured, found.kept, found.left) == (1, 0, 0)
    row = read(tmp_path / "nvidia-fake-9.json").rows[0]
    assert row == found.rows[0] and row.status == "measured" and row.chosen == "plain" and row.peer == "x"
    assert row.ours_ms == pytest.approx(1.1) and row.ms("eager") == pytest.approx(2.1)
    assert row.columns[0].time.n == 3 * ROUNDS and row.columns[0].error == 1e-3
    assert row.to_best == pytest.approx(1.1 / 2.1) and row.best.name == "eager"
    assert row.goal_ms == pytest.approx(2.1 * 0.5) and row.to_goal == pytest.approx(1.1 / 1.05)
    moved = 2 * (4 * 64 * 32) / 4e12 + 4 * 32 / 4e12
    assert row.floor_ms == pytest.approx(moved * 1e3) and row.bound == "memory"
    assert row.of_floor == pytest.approx(row.floor_ms / 1.1)


def test_everything_is_checked_before_anything_is_timed(every, tmp_path) -> None:
    bench = FakeBench()
    go(every[:1], bench, tmp_path)
    turns = ["glance plain", "glance eager", *["time plain", "time eager"] * ROUNDS]
    assert bench.log == ["ceilings", "small", "check plain", "check eager", *turns, "count small"]


def test_what_is_far_behind_has_a_glance_alone() -> None:
    """A kernel of ours sooner than a competitor; the one that dispatch picks never."""
    theirs, ours = {"near": 2.5, "far": 4.0}, {"fast": 1.0, "close": 1.4, "behind": 2.5}
    entrants = [FakeBench().entrant(name, name in ours, ms) for name, ms in (theirs | ours).items()]

    def turns(chosen: str) -> dict[str, int]:
        columns, refused = compete(entrants, chosen)
        assert not refused and ROUNDS > 1
        return {c.name: c.time.n for c in columns}

    often = 3 * ROUNDS
    assert turns("fast") == {"fast": often, "near": often, "far": 1, "close": often, "behind": 1}
    assert turns("behind")["behind"] == often


def test_kernels_of_several_rows_are_compiled_at_a_time(every, tmp_path, monkeypatch) -> None:
    """What stands already is not compiled."""
    monkeypatch.setattr(home, "AHEAD", 2)
    go(every[1:2], FakeBench(), tmp_path)
    bench = FakeBench()
    go(every, bench, tmp_path)
    assert bench.compiled == [["small"], ["wide"]]
    go(every, bench, tmp_path, again=True)
    assert bench.compiled[2:] == [["small", "large"], ["wide"]]


def test_preparing_compiles_what_has_no_figures(every, tmp_path) -> None:
    go(every[:1], FakeBench(), tmp_path)
    bench = FakeBench()
    bench.remarks = {"large": ("compile: no compiler",)}
    done = prepare(every, bench, tmp_path, clock=bench.clock)
    assert done == Preparation(2, 1, 0, ("acme.add_relu large, compile: no compiler",))
    assert bench.log == ["ready large", "ready wide"]
    bench = FakeBench()
    assert prepare(every, bench, tmp_path, again=True, time_limit=1.0, clock=bench.clock) == Preparation(1, 0, 2)


def test_a_second_run_measures_nothing(every, tmp_path) -> None:
    go(every, FakeBench(), tmp_path)
    before = (tmp_path / file_name(FakeBench.gpu)).read_bytes()
    bench = FakeBench()
    found = go(every, bench, tmp_path, count=False)
    assert (found.measured, found.kept, len(found.rows)) == (0, 3, 3) and bench.log == []
    assert (tmp_path / file_name(FakeBench.gpu)).read_bytes() == before


def test_again_and_another_environment_measure_anew(every, tmp_path) -> None:
    go(every, FakeBench(), tmp_path)
    assert go(every, FakeBench(), tmp_path, again=True).measured == 3
    changed = go(every[:1], FakeBench(torch="3"), tmp_path)
    assert changed.measured == 1
    runs = changed.results.runs
    assert runs[changed.rows[0].run].environment["torch"] == "3"
    by_name = {r.workload: runs[r.run].environment for r in changed.results.rows}
    assert by_name["small"] == {"driver": "1", "torch": "3"} and by_name["large"] == {"driver": "1"}
    go(every, FakeBench(torch="3"), tmp_path)
    runs = read(tmp_path / file_name(FakeBench.gpu)).runs
    assert [r.environment["torch"] for r in runs] == ["3"] * len(runs)  # the first run has no row left


def test_a_changed_kernel_is_measured_anew(tmp_path) -> None:
    rows = (Workload(name="w", axes={"M": 8, "N": 32}, dtypes={"T": "float32"}),)
    digests = set()
    for i, text in enumerate((plugin_kit.ADD_RELU, plugin_kit.ADD_RELU.replace("256LL", "256LL + 0LL"))):
        entry = plugin_kit.entry(tmp_path / str(i), text, workloads=rows)
        digests.add(Subject.of(entry, rows[0], "sm_90a", OPS).digest({}))
    slower = plugin_kit.entry(tmp_path / "3", workloads=rows, kernel_grid="ceildiv(M * N, 256) + 1")
    digests.add(Subject.of(slower, rows[0], "sm_90a", OPS).digest({}))
    again = plugin_kit.entry(tmp_path / "4", workloads=rows)
    same = Subject.of(again, rows[0], "sm_90a", OPS)
    assert len(digests) == 3 and same.digest({}) in digests and same.digest({"gpu": "x"}) not in digests


def test_the_time_limit_stops_between_rows(every, tmp_path) -> None:
    bench = FakeBench()
    found = go(every, bench, tmp_path, time_limit=1.5)
    assert (found.measured, found.left) == (2, 1)
    assert [r.workload for r in read(found.path).rows] == ["small", "large"]
    found = go(every, FakeBench(), tmp_path, time_limit=0.5)
    assert (found.measured, found.kept, found.left) == (1, 2, 0)
    assert go(every, FakeBench(), tmp_path, again=True, time_limit=0.0).left == 3


def test_rows_are_there_when_the_next_one_is_interrupted(every, tmp_path) -> None:
    bench = FakeBench()
    bench.fail["large"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        go(every, bench, tmp_path)
    assert [r.workload for r in read(tmp_path / file_name(bench.gpu)).rows] == ["small"]


def test_a_failed_workload_is_a_row_and_the_next_one_runs(every, tmp_path) -> None:
    bench = FakeBench()
    bench.fail["small"] = LaunchError("cannot launch", "plain", "too much shared memory")
    bench.fail["large"] = RuntimeError("CUDA out of memory\nmore")
    found = go(every, bench, tmp_path)
    assert [r.status for r in found.rows] == ["failed", "failed", "measured"] and not found.ok
    assert "too much shared memory" in found.rows[0].reason and found.rows[1].reason.endswith("CUDA out of memory")


def test_a_kernel_that_differs_refuses_the_comparison(every, tmp_path) -> None:
    bench = FakeBench()
    bench.errors["plain"] = 0.3
    found = go(every[:1], bench, tmp_path)
    row = found.rows[0]
    assert row.status == "differs" and not found.ok and not any(x.startswith("time") for x in bench.log)
    assert "0.3" in row.reason and row.ours_ms is None and row.goal_ms is None and row.to_best is None
    assert all(c.time is None and c.reason for c in row.columns)


def test_a_peer_that_differs_is_not_timed(every, tmp_path) -> None:
    bench = FakeBench()
    bench.errors["eager"] = float("nan")
    row = go(every[:1], bench, tmp_path).rows[0]
    assert row.status == "measured" and row.ours_ms and row.ms("eager") is None
    assert "nan" in row.columns[1].reason and "time eager" not in bench.log and row.goal_ms is None


def test_compete_keeps_each_reason() -> None:
    def broken() -> Check:
        raise ValueError("no such op\ndetails")

    def stops() -> list[float]:
        raise RuntimeError("lost")

    good = {"check": lambda: Check(0, 1), "sample": lambda: [1.0]}
    columns, refused = compete(
        [
            Entrant("k", True, **good),
            Entrant("a", reason="not installed"),
            Entrant("b", check=broken),
            Entrant("c", check=lambda: Check(0, 1, "3 elements are NaN")),
            Entrant("d", check=lambda: Check(0, 1), sample=stops),
            Entrant("e", computes="x @ w", **good),
        ],
        "k",
    )
    reasons = {c.name: c.reason for c in columns}
    assert not refused and reasons["k"] == reasons["e"] == ""
    assert reasons["a"] == "not installed" and reasons["b"] == "ValueError: no such op"
    assert reasons["c"] == "3 elements are NaN" and reasons["d"] == "RuntimeError: lost"
    assert [c.name for c in columns if c.time] == ["k", "e"]


def test_a_pending_kernel_stands_for_the_fusion_where_there_is_no_other(tmp_path) -> None:
    rows = (Workload(name="w", axes={"M": 8, "N": 32}, dtypes={"T": "float32"}),)
    entry = plugin_kit.entry(tmp_path / "plugin", workloads=rows, kernel_pending="not proven")
    found = go([Subject.of(entry, rows[0], "sm_90a", OPS)], FakeBench(), tmp_path)
    assert found.rows[0].chosen == "plain" and found.rows[0].ours_ms


def test_an_anchor_is_no_best(every, tmp_path) -> None:
    bench = FakeBench()
    row = go(every[:1], bench, tmp_path).rows[0]
    eager = row.columns[1]
    anchor = eager.model_copy(update={"name": "product", "computes": "x @ w alone"})
    fast = anchor.model_copy(update={"time": eager.time.model_copy(update={"median": 0.1})})
    assert row.model_copy(update={"columns": (*row.columns, fast)}).best.name == "eager"


def test_files_that_are_no_results(every, tmp_path) -> None:
    path = tmp_path / file_name(FakeBench.gpu)
    for text in ("{", "[]", '{"format": "other", "gpu": "x"}', "\0"):
        path.write_text(text)
        with pytest.raises(ModelError, match="cannot read results"):
            go(every, FakeBench(), tmp_path)
        assert path.read_text() == text
    go(every, FakeBench(), tmp_path / "fine")
    body = json.loads((tmp_path / "fine" / path.name).read_text())
    body["rows"][0]["run"] = 7
    path.write_text(json.dumps(body))
    with pytest.raises(ModelError, match="names no run"):
        read(path)
    with pytest.raises(ModelError):
        read(tmp_path / "none.json")


def test_results_round_trip(every, tmp_path) -> None:
    found = go(every, FakeBench(), tmp_path)
    assert read(found.path) == found.results == Results.model_validate_json(found.path.read_text())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_row_measured_against_fewer_is_measured_anew(every, tmp_path) -> None:
    bench = FakeBench()
    bench.peers = ()
    assert go(every[:1], bench, tmp_path).rows[0].peers == ()
    bench.peers = ("eager", "compile")
    assert go(every[:1], bench, tmp_path).measured == 1
    bench.peers = ("compile",)
    found = go(every[:1], bench, tmp_path)
    assert found.kept == 1 and found.rows[0].peers == ("eager", "compile")


def test_instructions_are_counted_once(every, tmp_path) -> None:
    """64 x 32 elements: 2048 of them and 320 warp instructions are 5 for each element."""
    bench = FakeBench()
    bench.counts = {"small": 320, "wide": 10**9}
    rates = CEILINGS.model_copy(update={"issue_rate": 1e12})
    bench.ceilings = lambda: rates
    go(every, bench, tmp_path)
    rows = {r.workload: r for r in read(tmp_path / file_name(bench.gpu)).rows}
    small, wide = rows["small"], rows["wide"]
    assert (small.elements, small.instructions, small.counted_by, small.per_element) == (2048, 320, "ncu", 5.0)
    assert small.issue_ms == pytest.approx(320 / 1e12 * 1e3) and wide.issue_binds
    assert rows["large"].instructions is None and rows["large"].per_element is None and not rows["large"].issue_binds
    bench.log.clear()
    bench.counts = {"large": 5}
    found = go(every, bench, tmp_path)
    assert bench.log == ["count large"] and found.kept == 3 and found.rows[1].instructions == 5
    assert go(every, bench, tmp_path).kept == 3 and bench.log == ["count large"]


def test_nothing_is_counted_when_the_time_is_over(every, tmp_path) -> None:
    bench = FakeBench()
    go(every, bench, tmp_path, time_limit=0.5)
    go(every, bench, tmp_path, count=False)
    assert not any(x.startswith("count") for x in bench.log)


def test_a_lost_device_ends_the_run(every, tmp_path) -> None:
    """An illegal access fails its own row alone: the next ones are not begun, and all of them are tried again."""
    bench = FakeBench()
    go(every[:1], bench, tmp_path)
    bench.deadly = "plain"
    found = go(every, bench, tmp_path)
    assert (found.measured, found.kept, found.left) == (1, 1, 1) and not found.ok and "illegal" in found.lost
    assert [(r.workload, r.status) for r in found.rows] == [("small", "measured"), ("large", "failed")]
    assert found.rows[1].reason == "plain: RuntimeError: CUDA error: an illegal memory access"
    assert not any(c.time for c in found.rows[1].columns) and bench.log[-1] == "check eager"
    again = go(every, FakeBench(), tmp_path)
    assert (again.measured, again.kept) == (2, 1) and again.ok and not again.lost


def test_rows_of_other_kernels_are_outdated(tmp_path) -> None:
    """What a row stands for is worked out again in the environment that it was measured in."""
    rows = (Workload(name="w", axes={"M": 8, "N": 32}, dtypes={"T": "float32"}),)
    facts = {"target": "sm_90a", "multiprocessors": "132", "gpu": "NVIDIA Fake 9"}

    def made(folder, text=plugin_kit.ADD_RELU, workloads=rows):
        return plugin_kit.catalog(tmp_path / folder, {"k.cu.j2": text}, plugin_kit.add_relu(workloads=workloads))

    catalog = made("a")
    subject = Subject.of(catalog["acme.add_relu"], rows[0], "sm_90a", OPS, multiprocessors=132)
    found = go([subject], FakeBench(**facts), tmp_path / "out").results

    def outdated(catalog):
        return current(found, catalog)[1]

    assert outdated(catalog) == frozenset() and outdated(made("same")) == frozenset()
    key = {("acme.add_relu", "w")}
    assert outdated(made("b", plugin_kit.ADD_RELU.replace("256LL", "256LL + 0LL"))) == key
    assert outdated(made("c", workloads=())) == key
    wider = rows[0].model_copy(update={"axes": {"M": 16, "N": 32}})
    assert outdated(made("d", workloads=(wider,))) == key
    assert outdated(plugin_kit.catalog(tmp_path / "e", {}, prefix="other")) == key


def test_the_kernel_that_dispatch_picks_now_stands_for_us(tmp_path) -> None:
    """Two kernels were timed, one of them pending; once it is not, its own figure is what counts."""
    rows = (Workload(name="w", axes={"M": 8, "N": 32}, dtypes={"T": "float32"}),)
    facts = {"target": "sm_90a", "multiprocessors": "132", "gpu": "NVIDIA Fake 9"}

    def made(folder, pending):
        spec = plugin_kit.add_relu(workloads=rows)
        (plain,) = spec.kernels
        other = plain.model_copy(update={"name": "fast", "estimate": "1e-9", "pending": pending})
        spec = spec.model_copy(update={"kernels": (plain.model_copy(update={"estimate": "1e-3"}), other)})
        return plugin_kit.catalog(tmp_path / folder, {"k.cu.j2": plugin_kit.ADD_RELU}, spec)

    before, after = made("a", "not proven yet"), made("b", "")
    subject = Subject.of(before["acme.add_relu"], rows[0], "sm_90a", OPS, multiprocessors=132)
    (row,) = (found := go([subject], FakeBench(**facts), tmp_path / "out").results).rows
    assert row.chosen == "plain" and {c.name for c in row.columns if c.ours} == {"plain", "fast"}
    for catalog, name in ((before, "plain"), (after, "fast")):
        now, outdated = current(found, catalog)
        assert now.rows[0].chosen == name and outdated == frozenset()
    changed = tuple(c.model_copy(update={"digest": "0" * 64}) if c.name == "fast" else c for c in row.columns)
    stale = found.model_copy(update={"rows": (row.model_copy(update={"columns": changed}),)})
    assert current(stale, after)[1] == {row.key} and current(stale, before)[1] == frozenset()
