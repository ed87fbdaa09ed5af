"""``bench`` and ``tune`` on workers: one file of results, one set of parameters, whoever answered first."""

from __future__ import annotations

import pytest

from fusionreg import spreading
from fusionreg.core.bench import Preparation, Results
from fusionreg.core.bench.results import read
from fusionreg.core.bench.subject import Subject
from fusionreg.core.bench.tuned import kept, key_of, tuning_environment
from fusionreg.core.bench.tuning import Tuned
from fusionreg.core.cache import Cache
from fusionreg.core.errors import ArgumentError, FusionregError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.registry.catalog import load
from fusionreg.spreading import Lost

FUSION = "gemm.scale_bias"
OPTIONS = ("8192x8192x8192-bf16", "16x14336x4096-bf16")


class Answers:
    """Workers that give what a test wants, the last item first; each item alone."""

    count = 2

    def __init__(self, answer) -> None:
        self.answer, self.asked = answer, []

    def map(self, work, items):
        self.asked = list(items)
        for i in reversed(range(len(items))):
            yield i, self.answer(*items[i])


@pytest.fixture
def one_each(monkeypatch) -> None:
    monkeypatch.setattr("fusionreg.spreading.work.AT_ONCE", 1)


def part(found: Results, workloads) -> Results:
    """As a worker would have measured them; its own runs."""
    return found.model_copy(update={"rows": tuple(r for r in found.rows if r.workload in workloads)})


def test_one_file_of_all_rows(found, one_each, tmp_path) -> None:
    on = Answers(lambda fusion, workloads, known, options: part(found, workloads).model_dump_json())
    outcome = spreading.bench(on, (FUSION,), only=OPTIONS, out=tmp_path)
    there = read(outcome.path)
    assert {r.workload: r.ours_ms for r in there.rows} == {OPTIONS[0]: 2.0, OPTIONS[1]: 0.04}
    assert (outcome.measured, outcome.left, outcome.lost) == (2, 0, "")
    assert [item[2] for item in on.asked] == ["", ""]  # no file was there

    again = Answers(lambda fusion, workloads, known, options: known)
    assert read(spreading.bench(again, (FUSION,), only=OPTIONS, out=tmp_path).path) == there
    assert [[r.workload for r in Results.model_validate_json(item[2]).rows] for item in again.asked] == [
        [r.workload] for r in sorted(there.rows, key=lambda r: [i[1] for i in again.asked].index([r.workload]))
    ]


def test_rows_of_a_lost_worker_are_left(found, one_each, tmp_path) -> None:
    def answer(fusion, workloads, known, options):
        return Lost("2 died") if workloads == [OPTIONS[1]] else part(found, workloads).model_dump_json()

    outcome = spreading.bench(Answers(answer), (FUSION,), only=OPTIONS, out=tmp_path)
    assert [r.workload for r in read(outcome.path).rows] == [OPTIONS[0]]
    assert (outcome.measured, outcome.left) == (1, 1)
    assert "2 died" in outcome.lost
    with pytest.raises(FusionregError, match="2 died"):
        spreading.bench(Answers(lambda *_: Lost("2 died")), (FUSION,), only=OPTIONS, out=tmp_path / "none")


def test_workloads_are_prepared_one_by_one(found, tmp_path) -> None:
    found.write(tmp_path / "nvidia.json")
    (tmp_path / "launch.json").write_text("{}")  # of something else

    def answer(fusion, workloads, known, options):
        if workloads == [OPTIONS[1]]:
            return Lost("2 died")
        return Preparation(ready=1, remarks=(Results.model_validate_json(known).rows[0].workload,))

    on = Answers(answer)
    done = spreading.prepare(on, (FUSION,), only=OPTIONS, out=tmp_path, peers=("eager",))
    assert done == Preparation(1, 0, 1, (f"{FUSION} {OPTIONS[1]}: 2 died", OPTIONS[0]))
    assert [item[1] for item in on.asked] == [[o] for o in OPTIONS]
    assert all(item[3] == {"again": False, "frozen": False, "peers": ("eager",)} for item in on.asked)


def test_another_gpu(found, one_each, tmp_path) -> None:
    def answer(fusion, workloads, known, options):
        gpu = f"NVIDIA {workloads[0][0]}"
        return part(found, workloads).model_copy(update={"gpu": gpu}).model_dump_json()

    with pytest.raises(ArgumentError, match="workers differ in their GPU"):
        spreading.bench(Answers(answer), (FUSION,), only=OPTIONS, out=tmp_path)


ENVIRONMENT = {"gpu": "NVIDIA X", "driver": "580", "nvrtc": "13"}
DEVICE = {"target": "sm_90a", "multiprocessors": 132, "environment": ENVIRONMENT}


def test_parameters_are_kept_here_too(one_each, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FUSIONREG_CACHE_DIR", str(tmp_path))
    best = FrozenDict({"BM": 64, "BN": 64})

    def answer(fusion, workloads, again):
        return DEVICE, [
            Tuned(f"{fusion}/tensor_core", workloads[0], best, ms=1.0, default_ms=2.0, tried=3),
            Tuned(f"{fusion}/plain", workloads[0], reason="no time left"),
        ]

    found = spreading.tune(Answers(answer), (FUSION,), only=OPTIONS[:1])
    assert [(t.kernel, t.ms, t.reason) for t in found] == [
        (f"{FUSION}/tensor_core", 1.0, ""), (f"{FUSION}/plain", None, "no time left")
    ]  # fmt: skip
    entry = load()[FUSION]
    workload = next(w for w in entry.spec.workloads if w.name == OPTIONS[0])
    subject = Subject.of(entry, workload, "sm_90a", load().ops, None, 132)
    for kernel, params in (("tensor_core", best), ("plain", None)):
        key = key_of(entry, entry.kernel(kernel), subject.problem, tuning_environment(ENVIRONMENT))
        known = kept(Cache(), key)
        assert (known and known["params"]) == params
