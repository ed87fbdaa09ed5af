"""``doctor`` and ``cache``."""

from __future__ import annotations

import pytest

from fusionreg.core import doctor


def test_doctor_looks_at_all_that_is_needed(cli):
    checks = {c["name"]: c for c in cli("doctor", "--json").json}
    assert {"python", "host compiler", "NVRTC", "CUDA headers", "GPU", "cache"} <= checks.keys()
    assert all(c.keys() >= {"name", "status", "found", "advice", "required"} for c in checks.values())
    required = [c for c in checks.values() if c["required"]]
    assert cli("doctor").code == int(any(c["status"] == "missing" for c in required))


def test_doctor_says_what_to_install(cli, monkeypatch):
    monkeypatch.setenv("FUSIONREG_CXX", "/nowhere/g++")
    ran = cli("doctor")
    assert ran.code == 1 and "missing" in ran.out and "/nowhere/g++" in ran.out
    (row,) = (c for c in cli("doctor", "--json").json if c["name"] == "host compiler")
    assert row["status"] == "missing" and "apt-get install g++" in row["advice"] and row["required"]


def test_doctor_survives_everything_missing(cli, monkeypatch, tmp_path):
    """No compiler, no headers, no home: a table and not a traceback."""
    from fusionreg.core import headers

    monkeypatch.setattr(headers, "include_directories", tuple)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("FUSIONREG_CXX", raising=False)
    monkeypatch.setenv("FUSIONREG_CACHE_DIR", "/proc/none")
    ran = cli("doctor")
    assert ran.code == 1 and "Traceback" not in ran.err and "CUDA headers" in ran.out
    assert len(doctor.examine()) == len(cli("doctor", "--json").json)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSIONREG_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_status_why_and_clear(cli, acme, folder):
    """Empty; one kernel compiled for four architectures; why the next would miss; empty again."""
    empty = cli("cache", "status", "--json").json
    assert empty["path"] == str(folder) and empty["entries"] == 0 and empty["limit"] > 0
    (row,) = cli("cache", "why", "acme.add_relu", "--arch", "sm_90a", "--json").json
    assert row["kernel"] == "acme.add_relu/plain" and row["reason"]

    from fusionreg.core.cache import Cache
    from fusionreg.core.proof.prove import compiled
    from fusionreg.core.registry.catalog import load

    entry = load()["acme.add_relu"]
    compiled([(entry, entry.kernels[0])], Cache())
    found = cli("cache", "status", "--json").json
    assert found["entries"] >= 4 and found["cubin entries"] == 4 and found["bytes"] > 0
    assert "it would hit" in cli("cache", "why", "acme.add_relu").out

    path = acme.folder / "fusionreg_acme" / "k.cu.j2"
    path.write_text(path.read_text() + "\n// another text\n")
    (row,) = cli("cache", "why", "acme.add_relu", "--json").json
    assert "source" in row["reason"] or "text" in row["reason"], row

    ran = cli("cache", "clear", "--kind", "cubin")
    assert ran.out.startswith("removed 4 entries, ")
    assert cli("cache", "clear").code == 0
    assert cli("cache", "status", "--json").json["entries"] == 0


def test_cache_without_a_folder(cli, monkeypatch):
    monkeypatch.setenv("FUSIONREG_CACHE_DIR", "/proc/none")
    ran = cli("cache", "status")
    assert ran.code == 0 and "memory alone" in ran.out
    assert cli("cache", "clear").code == 0
