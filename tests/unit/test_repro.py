"""``repro``: a case becomes a folder that replays it in a process that has no plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import plugin_kit
import pytest

from fusionreg.core.errors import ArgumentError, UnknownNameError
from fusionreg.core.proof import repro
from fusionreg.core.proof.report import Status
from fusionreg.core.registry.catalog import load
from fusionreg.core.spec import AttributeSpec, Case

WRONG = plugin_kit.ADD_RELU.replace("if (i >= M * N) return;", "if (i >= M * N - 1) return;")
FILES = ["case.json", "expected/y.allowed.npy", "expected/y.chain.npy", "expected/y.exact.npy"]
FILES += ["inputs/bias.npy", "inputs/x.npy", "kernel.cu", "run.py"]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return plugin_kit.catalog(tmp_path_factory.mktemp("right"), {"k.cu.j2": plugin_kit.ADD_RELU}, plugin_kit.add_relu())


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    return plugin_kit.catalog(tmp_path_factory.mktemp("wrong"), {"k.cu.j2": WRONG}, plugin_kit.add_relu())


def write(catalog, folder: Path, case: str = "bfloat16-base", **options) -> Path:
    return repro.write(catalog, "acme.add_relu", "plain", case, folder=folder, **options)


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """``python run.py`` where no plugin is loaded: neither this test's, which is not installed, nor any other."""
    code = (
        "import runpy, sys, fusionreg.core.registry.catalog as r\n"
        "r.load = None\n"  # a replay that asks for a registry fails
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code, str(folder / "run.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_a_passing_case_passes_again(right, tmp_path):
    folder = write(right, tmp_path / "case")
    assert folder == tmp_path / "case" and files(folder) == FILES
    facts = json.loads((folder / "case.json").read_text())
    assert (facts["fusion"], facts["kernel"], facts["case"]) == ("acme.add_relu", "plain", "bfloat16-base")
    assert facts["verdict"]["status"] == "PASSED" and facts["device"] == "sim"
    assert facts["dtypes"] == {"T": "bfloat16"} and facts["inputs"]["x"]["dtype"] == "bfloat16"
    assert facts["unit"]["entry"] in (folder / "kernel.cu").read_text()
    names = [a["name"] for a in facts["unit"]["arguments"]]
    assert names == ["x", "bias", "y", "M", "N"] and facts["launch"]["block"] == [256, 1, 1]
    assert np.load(folder / "inputs/x.npy").dtype == np.uint16  # bfloat16 as its bits
    assert np.load(folder / "expected/y.exact.npy").dtype == np.float64
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert "acme.add_relu/plain[bfloat16-base] PASSED" in done.stdout and "max abs" in done.stdout


def test_a_wrong_kernel_fails_again_until_it_is_mended(wrong, tmp_path):
    folder = write(wrong, tmp_path / "case", "float32-base")
    verdict = json.loads((folder / "case.json").read_text())["verdict"]
    assert verdict["status"] == "INCORRECT_NUMERICAL" and "1 of" in verdict["reason"]
    done = run(folder, "--device", "sim")
    assert done.returncode == 1 and "INCORRECT_NUMERICAL" in done.stdout, done.stderr
    unit = folder / "kernel.cu"
    unit.write_text(unit.read_text().replace("M * N - 1)", "M * N)"))
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    unit.write_text(unit.read_text().replace("return;", "return oops;"))
    done = run(folder)
    assert done.returncode == 1 and "COMPILE_ERROR" in done.stdout and "oops" in done.stdout


@pytest.mark.parametrize(
    "case",
    ["float16-padded-x", "float32-transposed-x", "float32-misaligned-bias", "float32-empty", "float16-led"],
)
def test_layouts_and_shapes_survive(right, tmp_path, case):
    """The replayed inputs have the strides and the alignment of the recorded ones, and the same verdict."""
    cases = (Case(name="empty", axes={"N": 0}), Case(name="led", batch=(2, 3)))
    spec = plugin_kit.add_relu(kernel_strides=("x",), cases=cases)
    catalog = plugin_kit.catalog(tmp_path / "plugin", {"k.cu.j2": plugin_kit.ADD_RELU.replace("x[i]", STRIDED)}, spec)
    folder = write(catalog, tmp_path / "case", case)
    facts = json.loads((folder / "case.json").read_text())
    job = repro._job(facts, repro._source(facts, (folder / "kernel.cu").read_text()), folder)
    for name, row in facts["inputs"].items():
        array = job.arrays[name]
        assert [s // array.itemsize for s in array.strides] == row["strides"] and list(array.shape) == row["shape"]
    assert "misaligned" not in case or job.arrays["bias"].ctypes.data % 256 == 4
    found = repro.replay(folder)
    assert found.status is Status.PASSED, found
    assert found.status == facts["verdict"]["status"] and found.max_abs == facts["verdict"]["max_abs"]
    assert found.digest == repro._source(facts, (folder / "kernel.cu").read_text()).digest


STRIDED = "x[i / N * x_stride_0 + i % N * x_stride_1]"


def test_a_mutant_of_a_right_kernel(right, tmp_path):
    """A unit that is changed after rendering is the unit that the folder holds."""
    from fusionreg.core.conformance.mutants import changed

    def mutate(source):
        return changed(source, source.text.replace("fr::relu(fr", "(fr"))

    folder = write(right, tmp_path / "case", "float32-base", mutate=mutate)
    assert repro.replay(folder).status is Status.INCORRECT_NUMERICAL


def test_a_compilation_is_a_case_too(right, tmp_path):
    folder = repro.write(
        right, "acme.add_relu", "acme.add_relu/plain", "acme.add_relu/plain[compile float16 sm_80]",
        folder=tmp_path / "case",
    )  # fmt: skip
    assert files(folder) == ["case.json", "kernel.cu", "run.py"]
    assert run(folder).returncode == 0
    (folder / "kernel.cu").write_text((folder / "kernel.cu").read_text() + "int x = y;\n")
    done = run(folder)
    assert done.returncode == 1 and "COMPILE_ERROR" in done.stdout
    with pytest.raises(UnknownNameError, match="did you mean compile float16 sm_80"):
        repro.write(right, "acme.add_relu", "plain", "compile float16 sm_81", folder=tmp_path / "other")


@pytest.mark.parametrize(
    ("fusion", "kernel", "case", "offer"),
    [
        ("acme.ad_relu", "plain", "float32-base", "acme.add_relu"),
        ("acme.add_relu", "plane", "float32-base", "plain"),
        ("acme.add_relu", "plain", "float32-bass", "float32-base"),
    ],
)
def test_unknown_names_get_an_offer(right, tmp_path, fusion, kernel, case, offer):
    with pytest.raises(UnknownNameError, match=f"did you mean .*{offer}"):
        repro.write(right, fusion, kernel, case, folder=tmp_path / "case")
    assert not list(tmp_path.iterdir())


def test_nothing_of_the_caller_is_overwritten(right, tmp_path):
    held = tmp_path / "held"
    held.mkdir()
    (held / "thesis.txt").write_text("all of it")
    with pytest.raises(ArgumentError, match="not empty"):
        write(right, held)
    with pytest.raises(ArgumentError, match="it is a file"):
        write(right, held / "thesis.txt")
    assert files(held) == ["thesis.txt"] and (held / "thesis.txt").read_text() == "all of it"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert files(write(right, empty)) == FILES


def test_a_failure_leaves_nothing(right, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(repro.np, "save", full)
    with pytest.raises(ArgumentError, match="No space left"):
        write(right, tmp_path / "case")
    assert not list(tmp_path.iterdir())


def test_a_kernel_that_refuses_the_case(tmp_path):
    spec = plugin_kit.add_relu(kernel_requires="N % 16 == 0", cases=(Case(name="one", axes={"N": 1}),))
    catalog = plugin_kit.catalog(tmp_path / "plugin", {"k.cu.j2": plugin_kit.ADD_RELU}, spec)
    with pytest.raises(ArgumentError, match=r"requires N % 16 == 0 \(N = 1\)"):
        write(catalog, tmp_path / "case", "float32-one")
    assert not (tmp_path / "case").exists()


@pytest.mark.parametrize("harm", ["no case.json", "no kernel.cu", "no input", "bad json", "another format"])
def test_a_folder_that_is_none(right, tmp_path, harm):
    folder = write(right, tmp_path / "case")
    case = folder / "case.json"
    if harm == "bad json":
        case.write_text("{")
    elif harm == "another format":
        case.write_text(case.read_text().replace('"format": 1', '"format": 99'))
    else:
        (folder / {"no input": "inputs/x.npy"}.get(harm, harm.removeprefix("no "))).unlink()
    done = run(folder)
    assert done.returncode == 2 and done.stderr.startswith("error: cannot replay"), done.stderr


def test_values_that_json_lacks(tmp_path):
    """An attribute whose default is infinite comes back as it was."""
    template = "{{ signature }} { const long long i = blockIdx.x * 256LL + threadIdx.x; if (i < N) y[i] = x[i]; }"
    spec = plugin_kit.add_relu(
        name="acme.clip", pattern="y = Elu(x, alpha=alpha)", inputs={"x": "T[N]"}, outputs={"y": "T[N]"},
        dtypes={"T": ("float32",)}, attributes={"alpha": AttributeSpec(type="float", default=float("inf"))},
        kernel_grid="ceildiv(N, 256)",
    )  # fmt: skip
    catalog = plugin_kit.catalog(tmp_path / "plugin", {"k.cu.j2": template}, spec)
    folder = repro.write(catalog, "acme.clip", "plain", "float32-base", folder=tmp_path / "case")
    facts = json.loads((folder / "case.json").read_text())
    job = repro._job(facts, repro._source(facts, (folder / "kernel.cu").read_text()), folder)
    assert job.problem.attributes["alpha"] == float("inf") and job.entry.spec.attributes["alpha"].default == float(
        "inf"
    )


def test_gemm_with_choices_and_parameters(tmp_path):
    """An installed plugin's kernel with dynamic shared memory, choices and tunable parameters."""
    folder = repro.write(load(), "gemm.scale", "tensor_core", "bfloat16-base", folder=tmp_path / "case")
    found = repro.replay(folder)
    assert found.status is Status.PASSED and found.kernel == "tensor_core"
