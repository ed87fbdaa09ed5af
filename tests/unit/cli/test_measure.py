"""``fusionreg bench`` on the command line: results shown without a GPU, and a clear word where there is none."""

from __future__ import annotations

import json
import sys

import plugin_kit
import pytest
import torch

from fusionreg import benching
from fusionreg.core.bench import Ceilings, Outcome, Preparation, Spread, subjects
from fusionreg.core.bench.results import Column, Result, Results, Run
from fusionreg.core.bench.tuning import Tried, Tuned
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.registry.catalog import load

from .conftest import SPEC


def made(status: str = "measured") -> Results:
    time = Spread(median=2.0, min=1.9, p20=1.95, p80=2.1, n=40)
    row = Result(
        fusion="acme.add_relu", workload="small", mode="b", problem="p", digest="0", run=0, status=status, read=1,
        written=1, flops=1, floor_ms=1.0, bound="memory", chosen="plain", reason="" if status == "measured" else "NaN",
        columns=(Column(name="plain", ours=True, time=time), Column(name="eager", time=time)),
    )  # fmt: skip
    rates = Ceilings(copy_rate=4e12, read_rate=4e12, write_rate=3e12)
    return Results(gpu="GPU 9", runs=(Run(date="d", environment={}, ceilings=rates),), rows=(row,))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "gpu-9.json"
    made().write(path)
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(cli, tmp_path) -> None:
    ran = cli("bench", "gemm.bias", "--out", tmp_path)
    assert ran.code == 1 and "finds no CUDA device" in ran.err and "simulator is never" in ran.err
    assert not list(tmp_path.iterdir())


def test_an_unknown_fusion(cli) -> None:
    ran = cli("bench", "gemm.bais")
    assert ran.code == 2 and "gemm.bias" in ran.err


def test_results_are_shown(cli, file) -> None:
    ran = cli("bench", "--results", file)
    assert ran.code == 0 and "acme.add_relu" in ran.out and "50%" in ran.out and "copy 1:1 4.00 TB/s" in ran.out
    assert "acme.add_relu small: measured on other kernels" in ran.out
    assert cli("bench", "--results", file, "--json").json["rows"][0]["chosen"] == "plain"
    assert cli("bench", "--results", file.with_name("none.json")).code == 1


def test_the_page(cli, file, tmp_path, monkeypatch) -> None:
    page = tmp_path / "page.html"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = cli("bench", "--results", file, "--html", page)
    assert ran.code == 1 and "fusionreg[bench]" in ran.err and not page.exists()
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert cli("bench", "--results", file, "--html", page).code == 0 and "acme.add_relu" in page.read_text()


@pytest.mark.parametrize(("status", "code"), [("measured", 0), ("differs", 1), ("failed", 1)])
def test_a_run(cli, monkeypatch, tmp_path, status, code) -> None:
    asked = {}

    def bench(names, **options):
        asked.update(options, names=names)
        results = made(status)
        return Outcome(results, tmp_path / "f.json", results.rows, measured=1, left=2)

    monkeypatch.setattr(benching, "bench", bench)
    ran = cli("bench", "acme.add_relu", "--only", "S8*", "--again", "--time-limit", "60", "--out", tmp_path)
    assert ran.code == code and "1 measured, 0 kept, 2 left (for lack of time)" in ran.out
    assert ("NaN" in ran.out) == (status != "measured")
    assert (asked["names"], asked["only"], asked["again"], asked["time_limit"], asked["out"]) == (
        ["acme.add_relu"], ["S8*"], True, 60.0, tmp_path,
    )  # fmt: skip
    body = json.loads(cli("bench", "--json").out)
    assert body["gpu"] == "GPU 9" and body["format"] == "fusionreg-bench/1"


def test_a_preparation(cli, monkeypatch) -> None:
    asked = {}

    def prepare(names, **options):
        asked.update(options, names=names)
        return Preparation(3, 1, 2, ("acme.add_relu small, compile: no",))

    monkeypatch.setattr(benching, "prepare", prepare)
    ran = cli("bench", "acme.add_relu", "--prepare", "--only", "S8", "--peers", "eager", "--time-limit", "9")
    said = ["acme.add_relu small, compile: no", "3 ready, 1 have figures, 2 left"]
    assert ran.code == 0 and ran.out.splitlines() == said and asked["names"] == ["acme.add_relu"]
    assert (asked["only"], asked["peers"], asked["time_limit"]) == (["S8"], ("eager",), 9)
    assert cli("bench", "--prepare", "--json").json["left"] == 2


def test_tune(cli, monkeypatch) -> None:
    asked = {}

    def tune(names, **options):
        asked.update(options, names=names)
        return (
            Tuned("acme.add_relu/plain", "small", FrozenDict(BLOCK=128), 0.5, 0.75, 3, model=0.9, agreement=0.25,
                  trials=(Tried(FrozenDict(BLOCK=64), 0.75, 0.8),)),
            Tuned("acme.add_relu/other", "small", reason="no time left"),
        )

    monkeypatch.setattr(benching, "tune", tune)
    ran = cli("tune", "acme.add_relu", "--only", "s*", "--again", "--time-limit", "9")
    assert ran.code == 0 and "BLOCK=128" in ran.out and "0.75" in ran.out and "no time left" in ran.out
    assert (asked["names"], asked["only"], asked["again"], asked["time_limit"]) == (["acme.add_relu"], ["s*"], True, 9)
    assert "0.25" in ran.out and asked["ship"] is False
    row = cli("tune", "--json", "--ship").json[0]
    assert row["params"] == {"BLOCK": 128} and row["trials"] == [{"params": {"BLOCK": 64}, "ms": 0.75, "model": 0.8}]
    assert asked["ship"] is True and "subject" not in row


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tune_without_a_gpu(cli) -> None:
    ran = cli("tune", "gemm.bias")
    assert ran.code == 1 and "finds no CUDA device" in ran.err


def test_times_are_shipped_from_a_file_of_results(cli, site, monkeypatch, tmp_path) -> None:
    """Without a GPU; what was measured on another kernel than is installed is not."""
    workload = 'workloads=[Workload(name="small", axes={"M": 4, "N": 8}, dtypes={"T": "float32"})], kernels=['
    spec = SPEC.replace("kernels=[", workload).replace("import ", "import Workload, ", 1)
    site.plugin("acme", spec, {"k.cu.j2": plugin_kit.ADD_RELU})
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "acme")
    facts = FrozenDict(target="sm_90a", gpu="GPU 9")
    catalog = load()
    (subject,) = subjects(catalog, "sm_90a", ["acme.add_relu"])
    found = made()
    run = found.runs[0].model_copy(update={"environment": facts})
    digests = subject.kernel_digests(facts)
    columns = tuple(c.model_copy(update={"digest": digests.get(c.name, "")}) for c in found.rows[0].columns)
    row = found.rows[0].model_copy(update={"columns": columns, "read": 160, "written": 128})
    path = tmp_path / "results.json"
    found.model_copy(update={"runs": (run,), "rows": (row,)}).write(path)
    ran = cli("bench", "--results", path, "--ship")
    shipped = site.folder / "fusionreg_acme" / "measured" / "sm_90a.json"
    assert ran.code == 0 and f"shipped: {shipped}" in ran.out.replace("\n", "")
    (times,) = json.loads(shipped.read_text())["rows"]
    assert (times["kernel"], times["bytes"], times["ms"], times["peers"]) == ("plain", 288, 2.0, {"eager": 2.0})
    shipped.unlink()
    site.write({"fusionreg_acme/k.cu.j2": plugin_kit.ADD_RELU.replace("fr::relu(", "0.0f + fr::relu(")})
    assert "shipped: " not in cli("bench", "--results", path, "--ship").out and not shipped.exists()
