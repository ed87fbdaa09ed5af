"""A third-party plugin as a real distribution: built, installed into a fresh environment, found, run."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from fusionreg.core.scaffold import create

ACME = Path(__file__).parent / "acme"
SOURCES = (".toml", ".py", ".j2")


def files(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): p.read_text()
        for p in sorted(folder.rglob("*"))
        if p.suffix in SOURCES and "build" not in p.parts
    }


def test_it_is_what_the_scaffold_makes(tmp_path: Path) -> None:
    assert files(create("acme.bias_relu2", tmp_path / "made")) == files(ACME)


def test_it_is_at_most_45_lines() -> None:
    lines = [line for name, text in files(ACME).items() if "test_" not in name for line in text.splitlines()]
    assert 20 < len(lines) <= 45


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that sees our dependencies and has the wheel of the plugin installed by pip."""
    root = tmp_path_factory.mktemp("third_party")
    environment = root / "venv"
    venv.create(environment, with_pip=False)
    interpreter = environment / "bin" / "python"
    packages = next((environment / "lib").glob("python3*/site-packages"))
    repository = Path(__file__).parents[2]
    links = [*site.getsitepackages(), str(repository), str(repository / "plugins" / "gemm")]
    (packages / "outer.pth").write_text("\n".join(links) + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = root / "acme"
    for name, text in files(ACME).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(root), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = root.glob("*.whl")
    subprocess.run([*pip, "--python", str(interpreter), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    return interpreter


def ran_in(python: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A module of the environment, which has a cache of its own; beside the plugin, one family is loaded."""
    root = python.parents[2]
    env = {**os.environ, "FUSIONREG_CACHE_DIR": str(root / "cache"), "FUSIONREG_LOAD_PLUGINS": "acme, gemm"}
    return subprocess.run(
        [str(python), "-m", *command], capture_output=True, text=True, env=env, timeout=240, cwd=root
    )


def test_installed_it_is_listed_and_proven(python: Path, tmp_path: Path) -> None:
    listed = ran_in(python, "fusionreg", "list", "--json")
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert rows["acme.bias_relu2"]["plugin"] == "acme"
    assert "gemm.scale_bias" in rows

    report = tmp_path / "report.json"
    ran = ran_in(python, "fusionreg", "run", "acme.bias_relu2", "--device", "sim", "--report", str(report))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    evaluations = json.loads(report.read_text())["evaluations"]
    passed = [e for e in evaluations if e["status"] == "PASSED"]
    assert len(passed) >= 5 and {e["device"] for e in passed} == {"sim"}


def test_its_own_test_passes(python: Path) -> None:
    """``fusionreg new`` is green as generated: its generated test passes where the plugin is installed."""
    ran = ran_in(python, "pytest", "-q", "-p", "no:cacheprovider", str(ACME / "test_bias_relu2.py"))
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr
