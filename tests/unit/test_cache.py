"""The disk cache: atomic, verified, healed, shared; never a reason to fail."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest

from fusionreg.core.cache import Cache, CacheWarning, cache_key
from fusionreg.core.errors import CacheError
from fusionreg.core.places import cache_directory

KEY = cache_key({"source": "a", "arch": "sm_80"})
PARTS = {"source": "a", "options": "-O3", "arch": "sm_80", "nvrtc": "13.0"}


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def entries(cache):
    return [p for p in cache.path.rglob("*") if p.is_file()]


def test_round_trip(cache):
    assert cache.get("cubin", KEY) is None
    cache.put("cubin", KEY, b"\0data\xff" * 1000, {"name": "k", "log": "é"})
    found = Cache(cache.path).entry("cubin", KEY)
    assert found.data == b"\0data\xff" * 1000 and dict(found.meta) == {"name": "k", "log": "é"}
    assert cache.get("sim", KEY) is None and cache.get("cubin", cache_key({})) is None
    assert cache.file("cubin", KEY).read_bytes().startswith(b"\0data")


def test_an_empty_payload_is_an_entry(cache):
    cache.put("cubin", KEY, b"")
    assert cache.get("cubin", KEY) == b""


def test_keys_differ_when_any_part_does():
    assert len({cache_key({**PARTS, k: "other"}) for k in PARTS} | {cache_key(PARTS)}) == 5
    assert cache_key({"a": "bc", "d": ""}) != cache_key({"a": "b", "cd": ""})


# --- damaged entries heal --------------------------------------------------------------------------------------------


def foreign(path, cache):
    other = cache_key({"other": "kernel"})
    cache.put("cubin", other, b"another kernel's code")
    shutil.copy(cache.path / "cubin" / other[:2] / other, path)


def directory(path, cache):
    path.unlink()
    (path / "inside").mkdir(parents=True)


DAMAGE = {
    "empty": lambda p, c: p.write_bytes(b""),
    "half": lambda p, c: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "short": lambda p, c: p.write_bytes(p.read_bytes()[:-1]),
    "first byte": lambda p, c: p.write_bytes(b"X" + p.read_bytes()[1:]),
    "metadata": lambda p, c: p.write_bytes(p.read_bytes().replace(b"kernel_a", b"kernel_b")),
    "footer": lambda p, c: p.write_bytes(p.read_bytes()[:-50] + b"\xff" * 8 + p.read_bytes()[-42:]),
    "longer": lambda p, c: p.write_bytes(b"12345678" + p.read_bytes()),
    "directory": directory,
    "another kernel's bytes": foreign,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_a_miss_and_heals(cache, damage):
    cache.put("cubin", KEY, b"the right code", {"name": "kernel_a"})
    path = cache.path / "cubin" / KEY[:2] / KEY
    DAMAGE[damage](path, cache)
    with pytest.warns(CacheWarning, match="damaged") as caught:
        assert cache.get("cubin", KEY) is None
    assert len(caught) == 1
    cache.put("cubin", KEY, b"the right code", {"name": "kernel_a"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Cache(cache.path).get("cubin", KEY) == b"the right code"


def test_put_replaces_a_directory_in_its_place(cache):
    (cache.path / "cubin" / KEY[:2] / KEY / "x").mkdir(parents=True)
    cache.put("cubin", KEY, b"code")
    assert cache.get("cubin", KEY) == b"code"


# --- many processes --------------------------------------------------------------------------------------------------

WORKER = """
import sys, warnings; warnings.simplefilter("error")
from fusionreg.core.cache import Cache
cache, key, me = Cache(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for i in range(20):
    found = cache.get("cubin", key)
    assert found is None or (len(found) == 200_000 and len(set(found)) == 1), "a torn read"
    cache.put("cubin", key, bytes([me]) * 200_000, {"name": "k"})
    cache.put("cubin", f"{me:02x}{i}" + key, b"own", {})
print("done")
"""


def test_many_processes_share_an_empty_cache(tmp_path):
    """32 writers and readers of one key: no torn read, one valid entry each, no litter (cupy#9463, DeepGEMM#301)."""
    folder = tmp_path / "shared"
    command = [sys.executable, "-c", WORKER, str(folder), KEY]
    running = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in range(32)]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.strip() == b"done", err.decode()
    cache = Cache(folder)
    assert len(cache.get("cubin", KEY)) == 200_000
    assert cache.status().entries == 1 + 32 * 20
    assert not [p for p in entries(cache) if p.name.startswith(".tmp")]


KILLED = """
import sys, os
import fusionreg.core.cache as c
real = os.replace
def stall(*a):
    print("writing", flush=True)
    import time; time.sleep(60)
c.os.replace = stall
c.Cache(sys.argv[1]).put("cubin", sys.argv[2], b"x" * 1_000_000)
"""


def test_a_writer_killed_in_the_middle_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "shared"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), KEY], stdout=subprocess.PIPE)
    assert process.stdout.readline().strip() == b"writing"
    cache = Cache(folder)
    assert len(entries(cache)) == 1 and cache.get("cubin", KEY) is None and cache.status().entries == 0
    cache.put("cubin", "00" + KEY, b"other")  # a living writer's file is left alone
    assert len(entries(cache)) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    Cache(folder).put("cubin", KEY, b"mine")
    assert sorted(p.name for p in entries(cache)) == sorted([KEY, "00" + KEY]) and cache.get("cubin", KEY) == b"mine"


def test_an_entry_that_vanishes_is_a_miss(cache):
    cache.put("cubin", KEY, b"x")
    (cache.path / "cubin" / KEY[:2] / KEY).unlink()
    assert cache.get("cubin", KEY) is None


# --- unusable folders ------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_memory_with_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.warns(CacheWarning) as caught:
        cache.put("cubin", KEY, b"x", {"a": 1})
        cache.put("cubin", "0" + KEY, b"y")
    assert len(caught) == 1 and cache.get("cubin", KEY) == b"x" and cache.file("cubin", KEY) is None
    assert cache.status().path is None and cache.status().reason and cache.status().entries == 2
    assert cache.clear() == (0, 0) and cache.get("cubin", KEY) is None


def test_a_folder_that_refuses_writing_is_memory_with_one_warning(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")
    cache.put("cubin", "00" + KEY, b"old")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)  # root may write anywhere, so a mode bit would not do
    with pytest.warns(CacheWarning, match="Permission denied") as caught:
        cache.put("cubin", KEY, b"x")
        cache.put("cubin", "1" + KEY, b"y")
    assert len(caught) == 1 and cache.get("cubin", KEY) == b"x" and cache.get("cubin", "00" + KEY) == b"old"


def test_no_home(monkeypatch, tmp_path):
    code = "from fusionreg.core.cache import Cache; c = Cache(); c.put('k', 'ab', b'1'); print(c.get('k', 'ab'))"
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "FUSIONREG_CACHE_DIR")}
    for home in ("/nonexistent/home", "/proc/nowhere"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env={**env, "HOME": home}, capture_output=True
        )
        assert done.stdout.strip() == b"b'1'", done.stderr
    monkeypatch.setenv("FUSIONREG_CACHE_DIR", str(tmp_path / "ä b"))
    assert cache_directory() == tmp_path / "ä b"
    Cache().put("cubin", KEY, b"x")
    assert Cache().get("cubin", KEY) == b"x"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FUSIONREG_CACHE_DIR", "~/kept")  # as a service file sets it: no shell has read the ~
    assert cache_directory() == tmp_path / "kept"


# --- housekeeping ----------------------------------------------------------------------------------------------------


def age(cache, key, seconds):
    then = time.time() - seconds
    os.utime(cache.path / "cubin" / key[:2] / key, (then, then))


def test_status_and_clear(cache):
    for i in range(3):
        cache.put("cubin", f"{i:064x}", b"x" * 100)
    cache.put("sim", KEY, b"y")
    age(cache, f"{0:064x}", 5000)
    status = cache.status()
    assert status.kinds["cubin"][0] == 3 and status.kinds["sim"][0] == 1 and status.bytes > 300
    assert 4990 < status.oldest < 5100 and status.newest < 60
    assert cache.clear(older_than=4000)[0] == 1 and cache.status().entries == 3
    assert cache.clear(kind="sim")[0] == 1 and cache.status().entries == 2
    removed, freed = cache.clear()
    assert removed == 2 and freed > 200 and cache.status().entries == 0


def test_the_size_is_bounded_and_the_least_used_go_first(tmp_path):
    cache = Cache(tmp_path / "c", limit=10_000)
    keys = [f"{i:064x}" for i in range(8)]
    for i, key in enumerate(keys):
        cache.put("cubin", key, b"x" * 2000)
        age(cache, key, 100_000 - i)
    assert cache.get("cubin", keys[0]) is not None  # used now
    assert cache.prune() > 0
    assert cache.status().bytes <= 10_000
    assert cache.get("cubin", keys[0]) is not None and cache.get("cubin", keys[1]) is None
    assert cache.get("cubin", keys[7]) is not None


def test_reading_writes_nothing(cache):
    """A shared cache is read-mostly: a hit leaves the entry's time alone, unless it is hours old (cupy#10173)."""
    cache.put("cubin", KEY, b"x")
    before = (cache.path / "cubin" / KEY[:2] / KEY).stat().st_mtime_ns
    cache.get("cubin", KEY)
    assert (cache.path / "cubin" / KEY[:2] / KEY).stat().st_mtime_ns == before


@pytest.mark.parametrize("part", PARTS)
def test_why_a_key_missed(cache, part):
    assert "nothing is cached" in str(cache.explain_miss("cubin", "gemm.bias/plain", PARTS))
    cache.put("cubin", cache_key(PARTS), b"x", {"name": "gemm.bias/plain", "parts": PARTS})
    far = dict.fromkeys(PARTS, "far")
    cache.put("cubin", cache_key(far), b"x", {"name": "gemm.bias/plain", "parts": far})
    miss = cache.explain_miss("cubin", "gemm.bias/plain", {**PARTS, part: "new"})
    assert miss.differs == (part,) and part in str(miss) and miss.nearest == cache_key(PARTS)
    assert "nothing is cached for other" in str(cache.explain_miss("cubin", "other", PARTS))


@pytest.mark.parametrize("text", ["4G", "-1", "0", "1e9", "none"])
def test_a_size_that_is_no_number_of_bytes(tmp_path, monkeypatch, text):
    monkeypatch.setenv("FUSIONREG_CACHE_SIZE", text)
    with pytest.raises(CacheError, match="FUSIONREG_CACHE_SIZE"):
        Cache(tmp_path)
    assert Cache(tmp_path, limit=5).limit == 5
    for good, limit in (("4096", 4096), ("", 4 << 30), (" 8 ", 8)):
        monkeypatch.setenv("FUSIONREG_CACHE_SIZE", good)
        assert Cache(tmp_path).limit == limit
