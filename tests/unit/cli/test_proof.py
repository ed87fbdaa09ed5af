"""``run`` on fusions."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import plugin_kit
import pytest

from fusionreg.core.proof.report import Status
from fusionreg.core.targets import SHIPPED

FUSION = "acme.add_relu"


def test_run_proves_a_fusion(cli, acme, tmp_path):
    """Compiled for every architecture, executed, and written down, in both formats."""
    report, junit = tmp_path / "made" / "report.json", tmp_path / "report.xml"
    ran = cli("run", FUSION, "--device", "sim", "--report", report, "--junit", junit)
    assert ran.code == 0, ran.out + ran.err
    lines = [line.split()[:5] for line in ran.out.splitlines() if line.startswith(FUSION)]
    assert [line[:4] for line in lines] == [
        [FUSION, "plain", "nvrtc", "PASSED"], [FUSION, "plain", "sim", "PASSED"],
        [FUSION, "plain", "sim", "SKIPPED_UNSUPPORTED"],
    ]  # fmt: skip
    assert ran.out.rstrip().endswith("SKIPPED_UNSUPPORTED on sim") and "x is not contiguous" in ran.out

    found = json.loads(report.read_text())
    assert {"python", "numpy", "fusionreg", "device", "target"} <= found["environment"].keys()
    for row in found["evaluations"]:
        assert {"fusion", "kernel", "case", "status", "max_abs", "max_rel", "device"} <= row.keys()
        assert (row["fusion"], row["kernel"]) == (FUSION, "plain") and row["status"] in set(Status)
    compiled = [r for r in found["evaluations"] if r["device"] == "nvrtc"]
    assert [r["target"] for r in compiled] == list(SHIPPED)
    assert [r["case"] for r in compiled] == [f"compile float32 {t}" for t in SHIPPED]
    executed = [r for r in found["evaluations"] if r["device"] == "sim"]
    passed, skipped = int(lines[1][4]), int(lines[2][4])
    assert len(executed) == passed + skipped and passed > 10 and "float32-base" in {r["case"] for r in executed}
    assert found["counts"] == {"PASSED": len(compiled) + passed, "SKIPPED_UNSUPPORTED": skipped}
    assert found["models"] == []

    suites = ElementTree.parse(junit).getroot()
    assert sum(int(s.get("tests")) for s in suites) == len(found["evaluations"])
    assert sum(int(s.get("failures")) for s in suites) == 0


def test_run_fails_with_each_case_and_its_reason(cli, wrong_acme, tmp_path):
    junit = tmp_path / "report.xml"
    ran = cli("run", FUSION, "--device", "sim", "--junit", junit)
    assert ran.code == 1
    assert f"{FUSION}/plain[float32-base]" in ran.out and "INCORRECT_NUMERICAL" in ran.out
    assert "elements differ" in ran.out and "expected" in ran.out
    failures = ElementTree.parse(junit).getroot().findall(".//failure")
    assert failures and all(f.get("type") == "INCORRECT_NUMERICAL" and f.get("message") for f in failures)


def test_a_kernel_that_does_not_compile(cli, acme, tmp_path):
    acme.write({"fusionreg_acme/k.cu.j2": "{{ signature }} {\n  y[0] = nonsense;\n}\n"})
    ran = cli("run", FUSION, "--device", "sim", "--json")
    assert ran.code == 1
    assert {r["status"] for r in ran.json["evaluations"] if r["device"] == "nvrtc"} == {"COMPILE_ERROR"}
    failed = [r["reason"] for r in ran.json["evaluations"] if r["status"] == "COMPILE_ERROR"]
    assert len(failed) > 4 and all("k.cu.j2" in reason and "nonsense" in reason for reason in failed), failed


def test_a_template_that_does_not_render(cli, acme):
    acme.write({"fusionreg_acme/k.cu.j2": "{{ signature }} {\n  y[0] = {{ nonsense }};\n}\n"})
    ran = cli("run", FUSION, "--device", "sim")
    said = ran.out + ran.err
    assert ran.code == 1 and "nonsense" in said and "k.cu.j2" in said and "Traceback" not in ran.err


def test_a_template_that_does_not_render_costs_no_other_kernel_its_proof(cli, acme):
    acme.write({"fusionreg_acme/bad.cu.j2": "{{ signature }} {\n  y[0] = {{ nonsense }};\n}\n"})
    path = acme.folder / "fusionreg_acme" / "__init__.py"
    good = 'KernelSpec(name="plain", template="k.cu.j2"'
    bad = 'KernelSpec(name="bad", template="bad.cu.j2", grid="1", block="256"), '
    path.write_text(path.read_text().replace(good, bad + good))
    ran = cli("run", FUSION, "--device", "sim", "--json")
    assert ran.code == 1
    rows = [r for r in ran.json["evaluations"] if r["status"] != "SKIPPED_UNSUPPORTED"]
    status = {(r["kernel"], r["device"]): r["status"] for r in rows}
    assert status["plain", "nvrtc"] == status["plain", "sim"] == "PASSED"
    assert status["bad", "nvrtc"] == status["bad", "sim"] == "COMPILE_ERROR"


def test_a_kernel_that_is_lost_says_why(cli, acme):
    path = acme.folder / "fusionreg_acme" / "__init__.py"
    path.write_text(path.read_text().replace("ceildiv(M * N, 256)", "ceildiv(M * K, 256)"))
    ran = cli("run", FUSION, "--device", "sim")
    assert ran.code == 1 and "no kernel" in ran.err and "unknown name 'K'" in ran.err


def changed(acme, *pairs):
    """The plugin's spec with parts of its text exchanged."""
    path = acme.folder / "fusionreg_acme" / "__init__.py"
    text = path.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_a_kernel_of_which_everything_was_skipped_is_not_proven(cli, acme):
    """No shipped architecture, and not the simulator's: its sibling's cases are no proof of it."""
    first = 'KernelSpec(name="plain", template="k.cu.j2", grid="ceildiv(M * N, 256)", block="256")'
    old = 'KernelSpec(name="old", template="k.cu.j2", targets=("sm_86",), grid="ceildiv(M * N, 256)", block="256")'
    changed(acme, (first, f"{first}, {old}"))
    ran = cli("run", FUSION, "--device", "sim")
    assert ran.code == 1 and f"nothing of {FUSION}/old was compiled or executed" in ran.err
    assert "it is for sm_86, not sm_90a" in ran.err and f"{FUSION}/plain" not in ran.err
    found = cli("run", FUSION, "--device", "sim", "--json")
    assert found.code == 1 and found.json["unproven"] == [f"{FUSION}/old"]
    assert cli("run", FUSION, "--device", "sim", "--kernel", "plain").code == 0


def test_a_kernel_that_did_not_load_is_told_beside_its_siblings(cli, acme):
    first = 'KernelSpec(name="plain", template="k.cu.j2", grid="ceildiv(M * N, 256)", block="256")'
    lost = 'KernelSpec(name="lost", template="k.cu.j2", targets=("sm_999",), grid="M", block="256")'
    changed(acme, (first, f"{first}, {lost}"))
    for asked in ((FUSION,), ()):
        ran = cli("run", *asked, "--device", "sim")
        assert ran.code == 0 and f"{FUSION}/lost" in ran.err and "matches no known architecture" in ran.err
    assert cli("run", FUSION, "--device", "sim", "--strict").code == 1


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("M * N - 500", "extents are not positive"),
        ("ceildiv(M * N, 256) + 0.5", "grid0 is 6.5"),
        ("256 // (M - 32)", "modulo by zero"),
    ],
)
def test_a_grid_that_cannot_be_is_the_kernels_fault(cli, acme, grid, said):
    """Not a problem that the kernel does not take: it said it takes them all."""
    changed(acme, ('grid="ceildiv(M * N, 256)"', f'grid="{grid}"'))
    ran = cli("run", FUSION, "--device", "sim", "--json")
    assert ran.code == 1
    failed = [r for r in ran.json["evaluations"] if r["status"] == "RUNTIME_ERROR"]
    assert failed and all("its launch cannot be" in r["reason"] for r in failed)
    assert any(said in r["reason"] for r in failed), failed[0]


def test_what_a_message_advises_can_be_done(cli, acme):
    """No call of the Python interface, no attribute of an exception: those the command line does not have."""
    template = plugin_kit.ADD_RELU
    for broken in (
        template.replace("if (i >= M * N) return;", ""),
        template.replace("y[i] =", "y[i + M * N] ="),
        template.replace("fr::relu(", "fr::rleu("),
    ):
        acme.write({"fusionreg_acme/k.cu.j2": broken})
        ran = cli("run", FUSION, "--device", "sim")
        assert ran.code == 1 and "facts[" not in ran.out and "Checks" not in ran.out
        assert "k.cu.j2:" in ran.out


@pytest.mark.parametrize("option", ["--report", "--junit"])
def test_a_report_that_cannot_be_written_is_told_before_the_work(cli, acme, tmp_path, monkeypatch, option):
    monkeypatch.setattr("fusionreg.core.proof.prove.prove", lambda *a, **k: pytest.fail("it ran first"))
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "report", tmp_path, "/proc/report"):
        ran = cli("run", FUSION, "--device", "sim", option, path)
        assert ran.code == 1 and f"cannot use {path}" in ran.err.replace("/file:", "/file/report:"), ran.err


def test_without_a_compiler_nothing_counts_as_proven(cli, acme, monkeypatch):
    """Compiled for four architectures, executed nowhere: that is a failure, with what to install."""
    monkeypatch.setenv("FUSIONREG_CXX", "/nowhere/g++")
    ran = cli("run", FUSION, "--device", "sim")
    assert ran.code == 1 and not ran.out
    assert "no C++ compiler (/nowhere/g++)" in ran.err and "apt-get install g++" in ran.err
    monkeypatch.delenv("FUSIONREG_CXX")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    ran = cli("run", FUSION, "--device", "sim")
    assert ran.code == 1 and "no C++ compiler (g++, clang++, c++)" in ran.err


def test_without_headers_nothing_counts_as_proven(cli, acme, monkeypatch, tmp_path):
    from fusionreg.core import headers

    monkeypatch.setenv("FUSIONREG_CACHE_DIR", str(tmp_path / "cache"))  # as in a process that has compiled nothing yet
    monkeypatch.setattr(headers, "include_directories", tuple)
    ran = cli("run", FUSION, "--device", "sim")
    assert ran.code == 1 and "pip install" in ran.err and "Traceback" not in ran.err


def test_a_gpu_that_is_not_there(cli, acme, monkeypatch):
    from fusionreg.core.conformance import gpu
    from fusionreg.core.errors import MissingDependencyError

    def none(*args):
        raise MissingDependencyError("cannot use", "a GPU", "the driver finds none", "a CUDA device")

    monkeypatch.setattr(gpu.GpuExecutor, "__init__", none)
    ran = cli("run", FUSION, "--device", "cuda")
    assert ran.code == 1 and "cannot use a GPU" in ran.err and not ran.out
    assert cli("run", FUSION, "--device", "auto").out.rstrip().endswith("on sim")


def test_evidence_needs_a_gpu(cli, acme, tmp_path):
    for device in ("sim", "auto"):
        ran = cli("run", FUSION, "--device", device, "--evidence", tmp_path / "e.json")
        assert ran.code == 2 and "--device cuda" in ran.err and not (tmp_path / "e.json").exists()


@pytest.mark.parametrize("kernel", ["plain", "acme.add_relu/plain"])
def test_one_kernel(cli, acme, kernel):
    rows = cli("run", "--device", "sim", "--kernel", kernel, "--json").json["evaluations"]
    assert rows and {r["kernel"] for r in rows} == {"plain"}


def test_no_fusion_at_all(cli, monkeypatch):
    """An empty registry proves nothing, and says so."""
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "nobody")
    ran = cli("run", "--device", "sim")
    assert ran.code == 1 and "nothing to prove: no plugin has a fusion" in ran.err and not ran.out


def test_a_fusion_without_a_kernel(cli, acme):
    path = acme.folder / "fusionreg_acme" / "__init__.py"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if "kernels=" not in line))
    ran = cli("run", FUSION, "--device", "sim")
    assert ran.code == 1 and f"nothing to prove {FUSION}: no kernel" in ran.err
