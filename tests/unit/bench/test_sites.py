"""Sites of a model as workloads: what a plan rests on is measured, kept with its extents, and asked for again."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tuning_kit import made

from fusionreg import measuring
from fusionreg.core.bench.gains import Gains, MeasuredGains, keep_rows, path_of
from fusionreg.core.bench.measure import Check, Entrant, Prepared
from fusionreg.core.bench.sites import Site, measured, site_of, unmeasured
from fusionreg.core.cache import Cache
from fusionreg.core.errors import LaunchError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.matcher.match import Match
from fusionreg.core.planner.executor import EAGER, INDUCTOR
from fusionreg.core.planner.plan import Loser, Plan
from fusionreg.core.planner.policies import UNSURE
from fusionreg.core.turns import turn

INPUTS = FrozenDict(x="x", bias="b")


class FakeBench:
    """Our kernel takes a millisecond, eager two; both are as exact as they say."""

    target, multiprocessors, environment = "sm_90a", 132, FrozenDict(gpu="Fake GPU")

    def __init__(self, error=0.0):
        self.error, self.fail, self.log, self.wrong = error, set(), [], "an illegal address"

    @contextmanager
    def prepare(self, subject):
        if subject.workload.name in self.fail:
            raise RuntimeError(self.wrong)
        self.log.append(subject.workload.mode)
        ours = self.entrant("plain", 1.0, Check(self.error, 0.5), ours=True)
        yield Prepared((ours, self.entrant("eager", 2.0, Check(0.0, 0.5))))

    def entrant(self, name, ms, check, ours=False):
        def sample():
            self.log.append(name)
            return [ms]

        return Entrant(name, ours, check=lambda: check, sample=sample)

    def lost(self):
        return ""


def match(m=64, n=256, **changes):
    fields = {"dtypes": FrozenDict(T="float32"), "axes": FrozenDict(M=m, N=n), **changes}
    return Match("acme.add_relu", "acme", 0, "r", ("a", "r"), INPUTS, FrozenDict(y="y"), **fields)


def plan(*chosen, losers=()):
    return Plan(chosen, (), losers, "balanced", basis=("model",) * len(chosen))


@pytest.fixture
def catalog(tmp_path):
    return made(tmp_path / "plugin")


def size(m, n):
    return 4 * (2 * m * n + n)


def test_a_site_is_the_problem_of_its_match(catalog):
    site = site_of(catalog, match())
    assert site.fusion == "acme.add_relu" and site.workload.dtypes == {"T": "float32"}
    assert site.workload.axes == {"M": 64, "N": 256}
    assert site == site_of(catalog, match()) != site_of(catalog, match(m=65))
    assert Site.model_validate(json.loads(site.model_dump_json())) == site
    assert site_of(catalog, match(m="s0")) is None
    other = site_of(catalog, Match("acme.add_relu.r1", "acme", 0, "r", (), INPUTS, FrozenDict(), base="acme.add_relu",
                                   dtypes=FrozenDict(T="float32"), axes=FrozenDict(M=64, N=256, R1=3)))  # fmt: skip
    assert other == site, "of a derived fusion, the one that it is of"


def test_what_a_plan_rests_on(catalog):
    losers = (Loser(match(m=3), UNSURE), Loser(match(m=4), "saves nothing"), Loser(match(m=5, captured=True), UNSURE))
    found = unmeasured(plan(match(), match(), losers=losers), catalog, lambda *_: False)
    assert [s.workload.axes["M"] for s in found] == [64, 3]
    found = unmeasured(plan(match(), losers=losers), catalog, lambda *_: False, also=[match(m=9), match()])
    assert [s.workload.axes["M"] for s in found] == [64, 3, 9]
    assert unmeasured(plan(match()), catalog, lambda m, name: name == found[0].workload.name) == ()
    parts = (Loser(replace(match(m=3), nodes=("a",)), UNSURE), Loser(match(m=4), UNSURE))
    found = unmeasured(plan(losers=parts), catalog, lambda *_: False)
    assert [s.workload.axes["M"] for s in found] == [4], "a part of it waits"
    found = unmeasured(plan(losers=parts[:1]), catalog, lambda *_: False)
    assert [s.workload.axes["M"] for s in found] == [3]


def test_rows_of_sites_are_kept_and_come_before_the_like(catalog, tmp_path):
    sites = [site_of(catalog, match()), site_of(catalog, match(m=128, n=128)), site_of(catalog, match(m=7))]
    bench = FakeBench()
    bench.fail.add(sites[2].workload.name)
    rows = list(measured(sites, bench, catalog, None))
    assert [(r.ms, dict(r.peers)) for r in rows] == [(1.0, {"eager": 2.0}), (1.0, {"eager": 2.0}), (0.0, {})]
    assert rows[0].bytes == size(64, 256) and rows[0].axes == {"M": 64, "N": 256}
    cache = Cache(tmp_path / "cache")
    keep_rows("sm_90a", [rows[0].model_copy(update={"ms": 4.0}), *rows[1:]], catalog, cache)
    gains = MeasuredGains(catalog, lambda m: "plain", "sm_90a", cache)
    assert gains(match(), EAGER, size(64, 256)).ratio == 2.0
    assert gains(match(m=128, n=128), EAGER, size(64, 256)).ratio == 0.5, "its own extents"
    assert gains(match(m=70), EAGER, size(70, 256)) is None, "no other ones"
    assert gains(match(), INDUCTOR, size(64, 256)) is None
    assert all(gains.knows(match(), s.workload.name) for s in sites), "what failed is not tried again"
    shipped = path_of(catalog["acme.add_relu"].kernels[0].root, "sm_90a")
    shipped.parent.mkdir()
    shipped.write_text(Gains(target="sm_90a", rows=tuple(rows)).model_dump_json())
    asked = match(), sites[0].workload.name
    assert MeasuredGains(catalog, lambda m: "plain", "sm_90a").knows(*asked)
    gains = MeasuredGains(catalog, lambda m: "newer", "sm_90a")
    assert gains(match(), EAGER, size(64, 256)) is None and not gains.knows(*asked), "it is measured anew"
    bench.wrong = "CUDA out of memory. Tried to allocate 2 GiB"
    assert len(list(measured(sites, bench, catalog, None))) == 2, "what there was no room for is"


def test_a_kernel_that_differs_is_no_measurement(catalog):
    bench = FakeBench(error=1.0)
    (row,) = measured([site_of(catalog, match())], bench, catalog, None)
    assert row.peers == {} and bench.log == ["g"]


def test_what_does_not_fit_into_l2_is_measured_cold(catalog):
    bench = FakeBench()
    (row,) = measured([site_of(catalog, match(m=1 << 16))], bench, catalog, None)
    assert bench.log[0] == "b" and row.peers


def test_one_process_at_a_time_measures(tmp_path):
    cache = Cache(tmp_path / "cache")
    cache.put("kind", "key", b"1")
    refused = pytest.raises(LaunchError, match="cannot measure on device-0: others do")
    with turn(cache, "device-0", 1.0), turn(cache, "device-1", 1.0), refused:
        turn(cache, "device-0", 0.1).__enter__()
    with turn(cache, "device-0", 0.0):
        assert cache.prune() == 0 and cache.get("kind", "key") == b"1", "a lock is no entry"


def test_a_process_that_cannot_measure_is_told_of(catalog, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    measurer, sites = measuring.Measurer(), [site_of(catalog, match())]
    for _ in range(2):  # the process lives on
        with pytest.raises(LaunchError, match=r"cannot measure 1 sites: .*(CUDA|GPU)"):
            measurer.measure(sites, 0, 60.0)
    first = measurer._timing._process
    assert first.poll() is None
    first.stdin.close()
    assert first.wait(60) == 0, "it ends when nobody can ask any more"
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(LaunchError, match="exit status 1"):
        measurer.measure(sites, 0, 60.0)


class Clock:
    """Time passes only where somebody says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class FakeProcess:
    """Starts in 5 seconds, compiles a site in 10 and times it in 2, unless ``slow`` says otherwise (None: it dies at
    once)."""

    def __init__(self, clock, log, slow):
        self.clock, self.log, self.slow, self.dead = clock, log, slow, False

    def ask(self, job, seconds):
        what = (job["do"], *(s["workload"]["axes"]["M"] for s in job["sites"]))
        takes = self.slow.get(what, {"start": 5, "compile": 10, "measure": 2, "write off": 1}[job["do"]])
        self.log.append(what)
        self.clock.now += min(takes or 0, seconds)
        return None if takes is None or takes > seconds else ""

    def failure(self):
        return "exit status 1"


@pytest.mark.parametrize(
    ("seconds", "slow", "done", "took", "written_off"),
    [
        (100, {}, 3, 5 + 3 * 10 + 3 * 2, []),
        (100, {("measure", 64): None}, 3, 5 + 30 + 2 * 2 + 1, [64]),  # it dies there
        (100, {("measure", 64): 1e9}, 3, 5 + 30 + 45 + 2 * 2 + 1, [64]),  # it hangs
        (37, {("measure", 64): 1e9}, 0, 37, []),  # the time is over: not the fault of the site
        (50, {("compile", 64): 1e9}, 3, 5 + 25 + 3 * 2, []),  # timed last, compiled then
        (12, {}, 2, 12, []),
    ],
)
def test_measuring_ends_with_its_time(catalog, monkeypatch, seconds, slow, done, took, written_off):
    monkeypatch.setattr(measuring, "COMPILING", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(measuring, "ThreadPoolExecutor", InOrder)
    clock, log, made = Clock(), [], []
    measurer = measuring.Measurer(clock, lambda: made.append(FakeProcess(clock, log, slow)) or made[-1])
    sites = [site_of(catalog, match(m=m)) for m in (64, 65, 66)]
    assert measurer.measure(sites, 0, seconds) == done
    assert clock.now <= max(seconds, took) + 1e-6 and clock.now == pytest.approx(took, abs=2.0)
    assert [what[1] for what in log if what[0] == "write off"] == written_off
    measurer.measure(sites, 0, seconds)
    assert len(made) == 3, "one that times and two that compile, the next time as well"


class InOrder:
    """A pool that does what it is given at once."""

    def __init__(self, count):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, f, *given):
        found = f(*given)
        return SimpleNamespace(result=lambda: found)

    def map(self, f, given):
        return [f(g) for g in given]
