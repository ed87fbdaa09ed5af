"""The process that launches kernels once each under a profiler: here in the simulator, with a profiler's stand-in."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("torch")

import graphs as kit
from catalogs import shipped

from fusionreg.core.bench import Subject
from fusionreg.core.errors import FusionregError
from fusionreg.core.spec import Workload
from fusionreg.integrations.torch import counting
from fusionreg.integrations.torch.counting import Job, executed, main

OPS = kit.vocabulary()


def job(index: int, **changes) -> dict:
    entry = shipped()["norm.rmsnorm"]
    subject = Subject.of(entry, entry.spec.workloads[0], "sm_90a", OPS)
    return {"index": index, **asdict(Job.of(subject)), **changes}


def test_what_dispatch_picks_is_the_job() -> None:
    found = job(0)
    assert found["fusion"] == "norm.rmsnorm" and found["kernel"] == "norm.rmsnorm/rows" and found["params"]
    assert (found["target"], found["multiprocessors"]) == ("sm_90a", 132)


def test_every_job_is_launched_once_and_failures_are_left_out(tmp_path, monkeypatch) -> None:
    small = Workload(name="small", axes={"M": 4, "N": 256}, dtypes={"T": "float32"})
    monkeypatch.setattr(counting, "load", lambda: _with(small))
    jobs = [job(3, workload="small"), job(4, workload="lost"), job(5, fusion="norm.lost"), job(6, kernel="lost")]
    jobs.append(job(8, workload="small"))
    (tmp_path / "jobs").write_text(json.dumps(jobs))
    main(str(tmp_path / "jobs"), str(tmp_path / "done"), "cpu")
    done = json.loads((tmp_path / "done").read_text())
    assert [index for index, _ in done] == [3, 8] and all(name.startswith("fr_norm_rmsnorm__rows_") for _, name in done)


def _with(workload):
    from dataclasses import replace

    from fusionreg.core.frozen import FrozenDict

    catalog = shipped()
    entry = catalog["norm.rmsnorm"]
    spec = entry.spec.model_copy(update={"workloads": (workload,)})
    return replace(catalog, fusions=FrozenDict({"norm.rmsnorm": replace(entry, spec=spec)}))


def test_counts_belong_to_the_launches(monkeypatch) -> None:
    def profiled(command, timeout):
        asked = json.loads(Path(command[3]).read_text())
        Path(command[4]).write_text(json.dumps([[j["index"], f"fr_{j['index']}"] for j in asked[1:]]))
        return [(f"fr_{j['index']}", 100 + j["index"]) for j in asked[1:]]

    monkeypatch.setattr(counting, "profile", profiled)
    jobs = [Job("f", "w", "k", {}, "sm_90a", 132) for _ in range(3)]
    assert executed([jobs[0], None, jobs[1], jobs[2]]) == [None, None, 102, 103]
    monkeypatch.setattr(counting, "profile", lambda command, timeout: [("fr_9", 1)])
    with pytest.raises(FusionregError, match="1 kernels were counted"):
        executed(jobs)
