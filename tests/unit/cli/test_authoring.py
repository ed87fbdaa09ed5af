"""``validate``, ``new``, ``repro``; and the whole way of an author."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
from catalogs import shipped

GOOD = shipped()["gemm.bias"].spec


def spec(**changes) -> str:
    found = json.loads(GOOD.model_dump_json()) | {"name": "acme.thing", "kernels": []} | changes
    return json.dumps(found)


def test_validate_a_good_spec(cli, tmp_path):
    path = tmp_path / "spec.json"
    path.write_text(spec())
    ran = cli("validate", path)
    assert ran.code == 0 and "acme.thing" in ran.out and "ok" in ran.out
    assert cli("validate", path, "--json").json[0] | {"plugin": ""} == {
        "name": "acme.thing", "status": "ok", "reason": "", "plugin": "", "field": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pattern": "y = MatMull(x, w)"}, "MatMul"),
        ({"pattern": "y = MatMul(x, w"}, "pattern"),
        ({"constraints": "Q % 8 == 0"}, "Q"),
        ({"inputs": {"x": "T[M K]"}}, "w"),
        ({"dtypes": {"T": ["float17"]}}, "float16"),
        ({"surprise": 1}, "surprise"),
        ({"api": 2}, "api"),
        ({"name": "Acme"}, "name"),
        ({"kernels": [{"name": "k", "template": "missing.cu.j2", "grid": "M", "block": "1"}]}, "missing.cu.j2"),
    ],
)
def test_validate_a_bad_spec(cli, tmp_path, changes, says):
    path = tmp_path / "spec.json"
    path.write_text(spec(**changes))
    ran = cli("validate", path)
    assert ran.code == 1 and says in ran.out + ran.err and "Traceback" not in ran.err, ran.out + ran.err
    results = cli("validate", path, "--json").json
    assert "failed" in {r["status"] for r in results} and all(r["reason"] for r in results if r["status"] == "failed")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"text"', "\x00"])
def test_validate_what_is_no_spec(cli, tmp_path, text):
    path = tmp_path / "spec.json"
    path.write_text(text)
    ran = cli("validate", path)
    assert ran.code == 1 and "Traceback" not in ran.err and ran.out + ran.err


def test_validate_of_nothing(cli, tmp_path):
    ran = cli("validate", tmp_path / "none")
    assert ran.code == 1 and "there is no such file or folder" in ran.err


def test_new_refuses_bad_names_and_full_folders(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("acme", "Acme.thing", "acme.", "acme.two.dots", "../up.x", "acme.a-b"):
        assert cli("new", name).code == 1
    assert not list(tmp_path.iterdir())
    assert cli("new", "acme.thing").code == 0 and (tmp_path / "acme" / "pyproject.toml").is_file()
    ran = cli("new", "acme.other")
    assert ran.code == 1 and "not empty" in ran.err
    assert "other" not in (tmp_path / "acme" / "pyproject.toml").read_text()


def test_new_warns_of_a_prefix_that_is_taken(cli, acme, tmp_path):
    ran = cli("new", "acme.other", "--dir", tmp_path / "mine")
    assert ran.code == 0 and "the prefix acme is that of the installed plugin acme" in ran.err
    assert (tmp_path / "mine" / "pyproject.toml").is_file()
    assert not cli("new", "mine.other", "--dir", tmp_path / "other").err


def test_new_then_everything(cli, site, tmp_path, monkeypatch):
    """What ``new`` makes is valid, is found once installed, is listed, shown, proven, and reproduces."""
    ran = cli("new", "shop.square", "--dir", tmp_path / "project")
    assert ran.code == 0 and f"pip install -e {tmp_path / 'project'}" in ran.out
    assert cli("validate", tmp_path / "project").code == 0
    for name in [m for m in sys.modules if m.startswith("fusionreg_shop")]:
        del sys.modules[name]

    site.dist("fusionreg-shop", "shop = fusionreg_shop")  # what `pip install -e` leaves
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "shop")
    assert [r["name"] for r in cli("list", "--json").json] == ["shop.square"]
    assert "bfloat16" in cli("show", "shop.square").out
    assert cli("plugins", "--strict").code == 0
    ran = cli("run", "shop.square", "--device", "sim")
    assert ran.code == 0 and "PASSED" in ran.out, ran.out
    ran = cli("repro", "shop.square", "--kernel", "plain", "--case", "bfloat16-base", "--out", tmp_path / "repro")
    assert ran.code == 0 and f"python {tmp_path / 'repro' / 'run.py'}" in ran.out
    replayed = subprocess.run([sys.executable, str(tmp_path / "repro" / "run.py")], capture_output=True, text=True)
    assert replayed.returncode == 0 and "PASSED" in replayed.stdout, replayed.stderr
    for name in [m for m in sys.modules if m.startswith("fusionreg_shop")]:
        del sys.modules[name]


def test_the_test_that_new_makes_passes(cli, tmp_path, site):
    """``pytest --fusionreg`` in the generated project, in a process of its own: its test and a case each."""
    assert cli("new", "store.square", "--dir", tmp_path / "project").code == 0
    site.dist("fusionreg-store", "store = fusionreg_store")
    path = [str(tmp_path / "project"), str(site.folder), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "FUSIONREG_LOAD_PLUGINS": "store"}
    pytest_ = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n0", "--fusionreg"]
    ran = subprocess.run(pytest_, cwd=tmp_path / "project", capture_output=True, text=True, env=env)
    assert ran.returncode == 0 and "test_square.py::test_square PASSED" in ran.stdout, ran.stdout
    assert int(ran.stdout.rpartition(" passed")[0].split()[-1]) > 20, ran.stdout


def test_repro_of_a_failing_case(cli, wrong_acme, tmp_path):
    key = "acme.add_relu/plain[float32-base]"  # as the table of failures prints it
    folder = tmp_path / "a folder"
    ran = cli("repro", "acme.add_relu", "--kernel", "plain", "--case", key, "--out", folder)
    assert ran.code == 0, ran.err
    assert shlex.split(ran.out.splitlines()[-1]) == ["python", str(folder / "run.py")]
    again = subprocess.run([sys.executable, str(folder / "run.py")], capture_output=True, text=True)
    assert again.returncode == 1 and f"{key} INCORRECT_NUMERICAL" in again.stdout
    ran = cli("repro", "acme.add_relu", "--kernel", "plain", "--case", key, "--out", folder)
    assert ran.code == 1 and "not empty" in ran.err
