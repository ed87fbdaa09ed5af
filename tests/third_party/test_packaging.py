"""The distribution itself: sdist → wheel → a fresh environment, with every file that the product needs."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist that is built from this tree."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "-o", str(out), str(ROOT)], check=True)
    assert len(list(out.glob("*.tar.gz"))) == 1
    (made,) = out.glob("*.whl")
    return made


def expected() -> set[str]:
    """Every tracked file that must be in the wheel, by its place there."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    places = set()
    for name in tracked.stdout.splitlines():
        if name.startswith("fusionreg/"):
            places.add(name)
        elif name.startswith("templates/"):
            places.add(f"fusionreg/{name}")
        elif name.startswith("plugins/"):
            places.add(name.split("/", 2)[2])
    return places


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the list of files comes from git")
def test_the_wheel_holds_every_file(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    assert len(expected()) > 200
    assert not expected() - held


def test_nothing_of_the_tests_is_in_the_wheel(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert not tops & {"tests", "docs", "tools", "benchmarks", "examples", "plugins", "templates"}


def test_a_fresh_environment_lists_and_renders(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    packages = next((tmp_path / "venv" / "lib").glob("python3*/site-packages"))
    (packages / "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)

    def run(*args: str) -> str:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env |= {"FUSIONREG_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run([str(python), *args], capture_output=True, text=True, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    home = run("-c", "import fusionreg, fusionreg_gemm; print(fusionreg.__file__, fusionreg_gemm.__file__)")
    assert all(str(packages) in path for path in home.split())
    assert "gemm.scale_bias" in {row["name"] for row in json.loads(run("-m", "fusionreg", "list", "--json"))}
    source = run("-m", "fusionreg", "show", "gemm.bias", "--source", "--kernel", "tensor_core")
    assert "mma_m16n8k16" in source and "namespace fr" in source
