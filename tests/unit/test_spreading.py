"""Work on workers: all of it once, what a dead worker had again, and reports as those of one process."""

from __future__ import annotations

import json
import sys

import pytest
import spread_work

from fusionreg import spreading
from fusionreg.core.conformance import executor_for, runner
from fusionreg.core.conformance.cases import derive
from fusionreg.core.conformance.execute import Job, prepare
from fusionreg.core.errors import ArgumentError, MissingDependencyError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.proof import evidence as proofs
from fusionreg.core.proof.prove import prove
from fusionreg.core.proof.report import Evaluation, Report, Status
from fusionreg.core.registry.catalog import load
from fusionreg.spreading import Lost, work, workers
from fusionreg.spreading.workers import DaskWorkers, LocalWorkers, visible_devices

FUSION = "norm.swish_dropout"


def test_every_item_once() -> None:
    found = LocalWorkers([{}, {}]).map(spread_work.square, [(i,) for i in range(5)])
    assert dict(found) == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16}


def test_each_worker_has_its_device() -> None:
    on = LocalWorkers([{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}])
    seen = {r for _, r in on.map(spread_work.environment, [("CUDA_VISIBLE_DEVICES", 1.0)] * 2)}
    assert seen == {"3", "5"}


def test_what_a_dead_worker_had_is_done_again(tmp_path) -> None:
    items = [(str(tmp_path / "died"), i) for i in range(3)]
    assert dict(LocalWorkers([{}]).map(spread_work.dies_once, items)) == {0: 0, 1: 1, 2: 2}


def test_what_kills_every_worker_is_lost_and_the_rest_is_done() -> None:
    found = dict(LocalWorkers([{}]).map(spread_work.dies, [(i,) for i in range(3)]))
    assert (found[0], found[2]) == (0, 2)
    assert found[1] == Lost("2 worker processes died of it")


def test_an_error_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no 4"):
        list(LocalWorkers([{}]).map(spread_work.fails, [(4,)]))


@pytest.mark.parametrize(
    "text", ["", "gpu", "processes", "processes:0", "processes:x", "dask", "dask:", "gpus:x", "gpus:1x0"]
)
def test_unknown_executors(text) -> None:
    with pytest.raises(ArgumentError, match=r"unknown executor.*processes:N"):
        workers(text)


class Driver:
    def device_count(self) -> int:
        return 4


def test_gpus_of_this_host(monkeypatch) -> None:
    monkeypatch.setattr("fusionreg.core.runtime.driver.driver", Driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices() == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,2,7")
    assert [e["CUDA_VISIBLE_DEVICES"] for e in workers("gpus:3").environments] == ["GPU-a", "GPU-b", "2"]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in workers("gpus:2x3").environments] == ["GPU-a", "GPU-b"] * 3
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    threads = {t: workers(t).environments[0]["TORCHINDUCTOR_COMPILE_THREADS"] for t in ("gpus:2x3", "processes:40")}
    assert threads == {"gpus:2x3": "2", "processes:40": "1"}
    with pytest.raises(ArgumentError, match="4 GPUs are here"):
        workers("gpus:5")


def test_no_scheduler() -> None:
    with pytest.raises(MissingDependencyError, match="a scheduler that answers"):
        DaskWorkers("nowhere")


@pytest.fixture
def cluster(monkeypatch):
    import dask
    from distributed import LocalCluster

    monkeypatch.setattr("sys.path", [*sys.path])  # where a worker's folder would stay
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None) as made,
    ):
        yield made


def test_dask(cluster, tmp_path) -> None:
    on = workers(f"dask:{cluster.scheduler_address}")
    assert on.count == 1
    assert dict(on.map(pow, [(i, 2) for i in range(4)])) == {0: 0, 1: 1, 2: 4, 3: 9}
    found = dict(on.map(spread_work.dies_once, [(str(tmp_path / "died"), 5)]))
    assert found == {0: 5}
    on.client.close()


def parts(report: Report) -> dict[str, Status]:
    return {e.key: e.status for e in report.evaluations}


def test_a_run_on_workers_is_the_run_of_one_process() -> None:
    """Cases of few kernels are spread, too; units for other architectures are compiled once."""
    alone = prove(load(), (FUSION,), device="sim", cases="quick")
    own = {"FUSIONREG_LOAD_PLUGINS": FUSION.split(".")[0]}
    spread = spreading.run(LocalWorkers([own, own]), (FUSION,), device="sim", cases="quick")
    assert parts(spread) == parts(alone)
    assert len(spread.evaluations) == len(alone.evaluations)
    assert spread.ok
    assert spread.environment["target"] == alone.environment["target"]


def test_parts_compile_few_units_twice() -> None:
    entry, on = load()["attention.cross_entropy_backward"], executor_for("sim", None)
    kernel = entry.kernel("rows")
    jobs = [prepare(entry, kernel, trial, on) for trial in derive(entry, kernel, on.target, "all")]
    parts = [runner._part(jobs, (i, 5)) for i in range(5)]
    units = [{job.source.digest for job in part if isinstance(job, Job)} for part in parts]
    assert sorted(id(job) for part in parts for job in part) == sorted(map(id, jobs))
    assert len(set.union(*units)) > 5 and sum(map(len, units)) <= len(set.union(*units)) + 4


def test_the_first_part_tells_the_digest() -> None:
    """Of what may become evidence: of all cases, and once."""
    entry = load()[FUSION]
    kernel = entry.kernels[0].name
    assert work.proof(FUSION, kernel, "sim", "all", (0, 60))[1] == proofs.digest(entry, entry.kernels[0])
    assert work.proof(FUSION, kernel, "sim", "all", (1, 60))[1] == ""
    assert work.proof(FUSION, kernel, "sim", "quick", (0, 60))[1] == ""


class Answers:
    """Workers that give what a test wants."""

    count = 2
    here = False

    def __init__(self, answer) -> None:
        self.answer = answer

    def map(self, work, items):
        self.items = items
        for i in reversed(range(len(items))):
            yield i, self.answer(*items[i])


def gpu_report(fusion, kernel, part, **facts):
    environment = {"device": "NVIDIA X", "gpu": "NVIDIA X", "driver": "580", "nvrtc": "13.0", "target": "sm_90a"}
    evaluation = Evaluation(fusion, kernel, f"case {part[0]}", "float16", Status.PASSED, device="NVIDIA X")
    return Report((evaluation,), (), FrozenDict({**environment, "cases": "all", **facts}))


def test_a_lost_part_fails() -> None:
    kernel = load()[FUSION].kernels[0].name

    def answer(fusion, kernel, device, cases, part):
        return Lost("2 died") if part[0] == 1 else (gpu_report(fusion, kernel, part), "")

    found = spreading.run(Answers(answer), (FUSION,), device="cuda", kernels=[kernel])
    assert [(e.case, e.status) for e in found.evaluations][:2] == [
        ("case 0", Status.PASSED), ("part 2 of 4", Status.RUNTIME_ERROR)
    ]  # fmt: skip
    assert not found.ok


def test_workers_that_differ() -> None:
    def answer(fusion, kernel, device, cases, part):
        return gpu_report(fusion, kernel, part, driver=f"58{part[0]}"), ""

    with pytest.raises(ArgumentError, match="workers differ in their driver"):
        spreading.run(Answers(answer), (FUSION,), device="cuda")


def test_no_evidence_of_another_version(tmp_path) -> None:
    def answer(fusion, kernel, device, cases, part):
        return gpu_report(fusion, kernel, part), "another digest"

    path = tmp_path / "evidence.json"
    with pytest.raises(ArgumentError, match="another version of it than is here"):
        spreading.run(Answers(answer), (FUSION,), device="cuda", cases="all", evidence=path)
    assert not path.exists()


def test_what_took_long_is_cut_and_begins_first_and_evidence_comes_as_kernels_end(tmp_path, monkeypatch) -> None:
    entry = load()["attention.softmax"]
    first, *others = entry.kernels
    assert others
    seconds = {k.key: 3.0 for k in others} | {first.key: 5.0 * len(others)}
    monkeypatch.setattr(work, "_seconds", lambda _, kernel: seconds[kernel.key])
    path = tmp_path / "evidence.json"
    there = []

    def answer(fusion, kernel, device, cases, part):
        there.append(len(json.loads(path.read_text())["kernels"]) if path.exists() else 0)
        return gpu_report(fusion, kernel, part), f"digest of {kernel}" if part[0] == 0 else ""

    on = Answers(answer)
    on.here = True
    spreading.run(on, (entry.name,), device="cuda", cases="all", evidence=path)
    rows = json.loads(path.read_text())["kernels"]
    parts = {first.key: 3} | {k.key: max(1, -(-12 // (8 * len(others)))) for k in others}
    assert {r["kernel"]: r["passed"] for r in rows} == parts
    assert {r["digest"] for r in rows} == {f"digest of {k.name}" for k in entry.kernels}
    assert [i[1] for i in on.items[:3]] == [first.name] * 3
    assert there[len(others) * parts[others[0].key]] == len(others)


def test_what_a_kernel_took_is_read_from_its_evidence(monkeypatch) -> None:
    entry = load()[FUSION]
    kernel = entry.kernels[0]
    rows = proofs.held(entry)[kernel.name]
    assert rows
    assert work._seconds(entry, kernel) == max(r.seconds for r in rows)
    monkeypatch.setattr(proofs, "held", lambda _: {kernel.name: (), "slow": rows, "quick": rows[:0]})
    assert work._seconds(entry, kernel) == max(r.seconds for r in rows)
    monkeypatch.setattr(proofs, "held", lambda _: {kernel.name: ()})
    assert work._seconds(entry, kernel) == work.SECONDS
