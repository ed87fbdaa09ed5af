"""The manifest behind ``list``: right after every change, quick when there is none, never in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from fusionreg.core import manifest
from fusionreg.core.registry.catalog import load

PLUGIN = """\
from fusionreg import FusionSpec, KernelSpec, hookimpl
SPEC = FusionSpec(api=1, name="acme.relu", summary="SUMMARY", pattern="y = Relu(x)", inputs={"x": "T[M]"},
                  outputs={"y": "T[M]"}, dtypes={"T": ("float32",)}, tags=("S8",), version="2.0.0",
                  kernels=[KernelSpec(name="k", template="k.cu.j2", grid="1", block="32", targets=("sm_90a",))])
@hookimpl
def register_fusions():
    return [SPEC]
"""


@pytest.fixture
def acme(site, tmp_path, monkeypatch):
    monkeypatch.setenv("FUSIONREG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "acme")
    site.plugin("acme", PLUGIN, {"k.cu.j2": "{{ signature }} {}"})
    return site


@pytest.fixture
def loads(monkeypatch):
    """Counts how often the registry was loaded."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr("fusionreg.core.registry.catalog.load", counted)
    return calls


def files(tmp_path):
    return sorted((tmp_path / "cache" / "manifest").glob("*"))


def touch(path, text=None):
    """Changes a file so that its size or time differs for certain."""
    path.write_text(path.read_text() + "\n" if text is None else text)
    os.utime(path, (time.time() + 5, time.time() + 5))


def test_rows(acme):
    assert manifest.read() == [
        {
            "name": "acme.relu",
            "plugin": "acme",
            "version": "2.0.0",
            "summary": "SUMMARY",
            "tags": ["S8"],
            "kernels": [{"name": "k", "targets": ["sm_90a"], "plugin": "acme", "pending": ""}],
            "evidence": False,
        }
    ]
    json.dumps(manifest.read(), allow_nan=False)


def test_the_second_read_loads_nothing_and_says_the_same(acme, loads, tmp_path):
    first = manifest.read()
    assert len(loads) == 1 and len(files(tmp_path)) == 1
    assert manifest.read() == first and len(loads) == 1


@pytest.mark.parametrize(
    "change", ["code", "template", "new_file", "version", "new_plugin", "deny", "removed", "same_time"]
)
def test_any_change_is_seen(acme, loads, tmp_path, monkeypatch, change):
    manifest.read()
    package = acme.folder / "fusionreg_acme"
    if change == "code":
        touch(package / "__init__.py")
    elif change == "same_time":  # as a tool that restores modification times would leave it
        path = package / "__init__.py"
        stat = path.stat()
        path.write_text(path.read_text().replace("SUMMARY", "YRAMMUS"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "template":
        touch(package / "k.cu.j2")
    elif change == "new_file":
        (package / "more.txt").write_text("")
    elif change == "version":
        (acme.folder / "fusionreg_acme-1.0.dist-info" / "METADATA").write_text("Name: fusionreg-acme\nVersion: 1.1\n")
    elif change == "new_plugin":
        monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "acme,zeta")
        acme.plugin("zeta", PLUGIN.replace("acme.", "zeta."), {"k.cu.j2": "{{ signature }} {}"})
    elif change == "deny":
        monkeypatch.setenv("FUSIONREG_DISABLE_PLUGINS", "acme")
    else:
        (acme.folder / "fusionreg_acme-1.0.dist-info" / "entry_points.txt").unlink()
    rows = manifest.read()
    assert len(loads) == 2
    assert len(rows) == {"new_plugin": 2, "deny": 0, "removed": 0}.get(change, 1)


def test_compiled_files_do_not_count(acme, loads):
    manifest.read()
    (acme.folder / "fusionreg_acme" / "__pycache__").mkdir(exist_ok=True)
    (acme.folder / "fusionreg_acme" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"x")
    manifest.read()
    assert len(loads) == 1


@pytest.mark.parametrize("damage", ["empty", "half", "flip", "garbage", "other_key", "rows", "list", "folder", "deep"])
def test_a_damaged_manifest_is_built_anew(acme, loads, tmp_path, damage):
    first = manifest.read()
    (path,) = files(tmp_path)
    data = path.read_bytes()
    content = {
        "empty": b"",
        "half": data[: len(data) // 2],
        "flip": data.replace(b"SUMMARY", b"SUMMERY"),
        "garbage": b"\xff\xfe\x00",
        "other_key": json.dumps({**json.loads(data), "key": "other"}).encode(),
        "rows": json.dumps({**json.loads(data), "rows": 3}).encode(),
        "list": b"[]",
        "deep": b"[" * 100_000,
    }
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(content[damage])
    assert manifest.read() == first and len(loads) == 2
    if damage != "folder":
        assert manifest.read() == first and len(loads) == 2  # it was repaired
    assert not list(path.parent.glob(".tmp-*"))


def test_a_cache_that_cannot_be_written(acme, loads, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FUSIONREG_CACHE_DIR", str(blocked))
    assert len(manifest.read()) == 1 and len(manifest.read()) == 1 and len(loads) == 2
    assert blocked.read_text() == ""


def test_no_home(acme, loads, monkeypatch):
    import platformdirs

    def homeless(*args, **kwargs):
        raise RuntimeError("no home")

    monkeypatch.delenv("FUSIONREG_CACHE_DIR")
    monkeypatch.setattr(platformdirs, "user_cache_dir", homeless)
    assert len(manifest.read()) == 1


def test_nothing_is_kept_while_a_plugin_fails(acme, loads, tmp_path, monkeypatch):
    acme.plugin("lame", "import not_yet_installed")
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "acme,lame")
    assert len(manifest.read()) == 1 and files(tmp_path) == []
    acme.write({"not_yet_installed.py": ""})  # the environment key cannot know of this one
    manifest.read()
    assert len(loads) == 2


@pytest.mark.parametrize(
    ("content", "proven"),
    [
        ('{"kernels": [{"kernel": "acme.relu/k", "digest": "1"}]}', True),
        ('{"kernels": [{"kernel": "acme.relu/other"}]}', False),
        ('{"kernels": [{"fusion": "acme.relu/k"}]}', False),
        ('["acme.relu/k"]', False),
        ("{", False),
    ],
)
@pytest.mark.parametrize("beside", [True, False])
def test_evidence(acme, content, proven, beside):
    assert manifest.read()[0]["evidence"] is False
    folder = (acme.folder if beside else acme.folder / "fusionreg_acme") / "evidence"
    folder.mkdir()
    (folder / "h200.json").write_text(content)
    assert manifest.read()[0]["evidence"] is proven


def test_a_cold_read_imports_nothing_heavy_and_is_quick(acme):
    manifest.read()
    code = (
        "import time, sys; t = time.process_time(); from fusionreg.core import manifest; rows = manifest.read();"
        "print(len(rows), time.process_time() - t, [m for m in ('torch', 'onnx', 'cupy', 'numpy', 'pydantic', 'pluggy',"
        " 'jinja2', 'fusionreg_acme') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(acme.folder), os.environ.get("PYTHONPATH", "")])}
    seconds = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
        count, spent, heavy = out.split(maxsplit=2)
        assert count == "1" and heavy.strip() == "[]"
        seconds.append(float(spent))
    assert min(seconds) < 0.35
