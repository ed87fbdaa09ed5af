"""CUDA's headers: found in wheels or a toolkit, fingerprinted by content, and named when they are missing."""

from __future__ import annotations

import os
import shutil

import pytest

from fusionreg.core import headers
from fusionreg.core.errors import MissingDependencyError


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with neither wheels nor toolkit."""
    monkeypatch.setattr(headers, "find_spec", lambda name: None)
    monkeypatch.setattr(headers.shutil, "which", lambda name: None)
    monkeypatch.setattr(headers, "_DEFAULT_TOOLKIT", str(tmp_path / "no" / "toolkit"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return tmp_path


def tree(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_h", ".h")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("variable", ["CUDA_PATH", "CUDA_HOME"])
def test_a_toolkit_by_environment_and_odd_paths(bare, monkeypatch, variable):
    include = bare / "my toolkit ä" / "include"
    (include / "crt").mkdir(parents=True)
    (include / "crt" / "host_defines.h").write_text("")
    monkeypatch.setenv(variable, str(include.parent))
    assert headers.include_directories() == (include,)


def test_a_folder_without_cuda_headers_is_none(bare, monkeypatch):
    (bare / "usr" / "include").mkdir(parents=True)
    (bare / "usr" / "include" / "stdio.h").write_text("")
    monkeypatch.setenv("CUDA_PATH", str(bare / "usr"))
    assert headers.include_directories() == ()


def test_wheels_come_before_a_toolkit(monkeypatch, tmp_path):
    toolkit = tmp_path / "toolkit" / "include"
    toolkit.mkdir(parents=True)
    (toolkit / "cuda_fp16.h").write_text("")
    monkeypatch.setenv("CUDA_PATH", str(toolkit.parent))
    found = headers.include_directories()
    assert toolkit in found and (found[0] != toolkit or len(found) == 1)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("cuda_fp16.h", "nvidia-cuda-runtime"), ("nv/target", "nvidia-cuda-cccl"),
        ("crt/host_defines.h", "nvidia-cuda-crt"),
        ("vector_types.h", "nvidia-cuda-runtime"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_its_wheel(tmp_path, name, package):
    """The header itself, or one it depends on (cuda-python#844, jitify#56)."""
    everything = {"cuda_fp16.h", "nv/target", "crt/host_defines.h", "vector_types.h"}
    for other in everything - {name}:
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_text("")
    with pytest.raises(MissingDependencyError) as caught:
        headers.check(["cuda_fp16.h"], [tmp_path], "acme.add/plain")
    text = str(caught.value)
    assert name in text and package in text and "fusionreg[cuda13]" in text and "acme.add/plain" in text
    assert caught.value.facts["header"] == name and isinstance(caught.value, ImportError)


def test_the_fingerprint_follows_contents_through_includes(tmp_path):
    folder = tree(
        tmp_path / "a", top_h='#include "mid.h"\n', mid_h="#  include <deep.h>\n#include <none.h>\n", deep_h="1\n"
    )
    first = headers.digest(("top.h",), (folder,))
    copy = tmp_path / "b"
    shutil.copytree(folder, copy)
    assert headers.digest(("top.h",), (copy,)) == first  # the place does not matter
    (copy / "unrelated.h").write_text("x")
    stamp = (copy / "deep.h").stat()
    edited = tmp_path / "c"
    shutil.copytree(copy, edited)
    (edited / "deep.h").write_text("2\n")
    os.utime(edited / "deep.h", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert headers.digest(("top.h",), (edited,)) != first


def test_headers_that_include_each_other_end(tmp_path):
    folder = tree(tmp_path, a_h="#include <b.h>\n", b_h="#include <a.h>\n")
    assert len(headers.digest(("a.h",), (folder,))) == 64
