"""NVRTC with no GPU: four architectures, errors at the template's line, whole ELF files, resources, and the cache."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import plugin_kit
import pytest

from fusionreg.core import compiler, headers
from fusionreg.core.cache import Cache
from fusionreg.core.compiler import compile_all, compile_source, explain_miss, nvrtc
from fusionreg.core.compiler.cubin import expected_size, repaired, resources
from fusionreg.core.errors import CompileError, MissingDependencyError
from fusionreg.core.problem import Tensor, bind, select
from fusionreg.core.render import render
from fusionreg.core.targets import SHIPPED

pytest.importorskip("cupy_backends", reason="CuPy brings the binding of NVRTC")

BROKEN = """\
// one
{% if true %}
// three
{% endif %}
{{ signature }} {
  const long long i = M * N;
{% for j in [0, 1] %}
  y[{{ j }}] = x[{{ j }}] + bias[{{ j }}];
{% endfor %}
  y[i] = undefined_thing;
}
"""


def source_of(entry, dtype="float16", target="sm_90a", shape=(4, 8)):
    tensors = {"x": Tensor.contiguous(dtype, shape), "bias": Tensor.contiguous(dtype, shape[-1:])}
    problem = bind(entry, tensors, {}, target)
    candidate = select(entry, problem).accepted[0]
    return render(entry, candidate.kernel, problem, candidate.params)


@pytest.fixture
def entry(tmp_path):
    return plugin_kit.entry(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_shipped_architecture(entry, dtype):
    found = compile_all([source_of(entry, dtype, arch) for arch in SHIPPED])
    for arch, code in zip(SHIPPED, found, strict=True):
        assert not isinstance(code, Exception), code
        assert code.target == arch and code.cubin[:4] == b"\x7fELF" and expected_size(code.cubin) == len(code.cubin)
        assert 0 < code.registers <= 255 and code.spills == 0 and code.seconds > 0 and code.nvrtc == nvrtc.version()
        assert code.entry.encode() in code.cubin
        assert "--ftz=false" in code.options and "--prec-div=true" in code.options and not any(
            "ftz=true" in o or "use_fast_math" in o for o in code.options
        )  # fmt: skip


def test_subnormals_are_not_flushed(entry):
    """CuPy's own path adds -ftz=true silently (cupy#8382); the PTX of ours has no .ftz."""
    source = source_of(entry, "float32")
    binding = nvrtc.binding()
    program = binding.createProgram(source.text, "k.cu", (), ())
    binding.compileProgram(program, ("-arch=compute_90", *(o for o in source.options if "ptxas" not in o)))
    ptx = binding.getPTX(program)
    ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert "add" in ptx and ".ftz" not in ptx


@pytest.mark.parametrize(
    ("literal", "bits"),
    [("0x1p-149f", 1), ("(-0.0f)", 1 << 31), ("__builtin_bit_cast(float, 0x7f800000U)", 0x7F800000)],
)
def test_literals_keep_their_bits_in_the_compiler(entry, literal, bits):
    text = f"static_assert(__builtin_bit_cast(unsigned, {literal}) == {bits}U); __global__ void k() {{}}"
    nvrtc.compile_unit(text, "k.cu", "sm_80", ("--std=c++17",), "literals")


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_points_at_the_template_line(tmp_path):
    entry = plugin_kit.entry(tmp_path, BROKEN)
    with pytest.raises(CompileError) as caught:
        compile_source(source_of(entry))
    facts = caught.value.facts
    assert facts["file"].endswith("k.cu.j2") and facts["line"] == 10 and facts["arch"] == "sm_90a"
    assert (
        "k.cu.j2:10" in str(caught.value) and "undefined_thing" in str(caught.value) and "k.cu.j2(10)" in facts["log"]
    )


def test_an_error_in_a_header_points_there(tmp_path):
    template = '{{ include("inc.cuh") }}\n' + plugin_kit.ADD_RELU
    entry = plugin_kit.entry(tmp_path, template, {"inc.cuh.j2": "// one\n\nint broken = ;\n"})
    with pytest.raises(CompileError) as caught:
        compile_source(source_of(entry))
    assert caught.value.facts["file"].endswith("inc.cuh.j2") and caught.value.facts["line"] == 3


def test_a_missing_header_is_named(tmp_path):
    entry = plugin_kit.entry(tmp_path, "#include <cub/not_there.cuh>\n" + plugin_kit.ADD_RELU)
    with pytest.raises(MissingDependencyError, match=r"cub/not_there.cuh.*nvidia-cuda-cccl"):
        compile_source(source_of(entry))


@pytest.mark.parametrize("header", ["vector", "mine/nowhere.h"])
def test_a_header_that_no_wheel_brings_is_the_kernels_fault(tmp_path, header):
    """As a missing dependency it was skipped, and a kernel that no GPU can ever run counted as proven."""
    entry = plugin_kit.entry(tmp_path, f"#include <{header}>\n" + plugin_kit.ADD_RELU)
    with pytest.raises(CompileError, match=rf"k\.cu\.j2:1: .*{header}"):
        compile_source(source_of(entry))


def test_no_headers_at_all(entry, monkeypatch):
    monkeypatch.setattr(headers, "include_directories", lambda: ())
    with pytest.raises(MissingDependencyError, match=r"cuda_fp16.h.*nvidia-cuda-runtime"):
        compile_source(source_of(entry))
    compile_source(source_of(entry, "float32"))  # which needs none


def test_headers_in_a_path_with_spaces_and_umlauts(entry, monkeypatch, tmp_path):
    """cupy#2100; and everything that one folder lacks is found missing, not taken from elsewhere."""
    folder = tmp_path / "my töolkit" / "include"
    folder.mkdir(parents=True)
    for name in ("cuda_fp16.h", "cuda_fp16.hpp", "vector_types.h", "nv", "crt", "vector_functions.h"):
        found = next(d / name for d in headers.include_directories() if (d / name).exists())
        (shutil.copytree if found.is_dir() else shutil.copy)(found, folder / name)
    for found in Path(headers.find("cuda_fp16.h", headers.include_directories())).parent.glob("*.h"):
        shutil.copy(found, folder / found.name)
    monkeypatch.setattr(headers, "include_directories", lambda: (folder,))
    assert compile_source(source_of(entry)).registers > 0


@pytest.mark.parametrize("arch", ["sm_61", "sm_999", "sm_130a"])
def test_an_architecture_that_this_nvrtc_does_not_know(entry, arch):
    """cupy#9475, #1651, #2087: one readable error that names the architecture, NVRTC and what it supports."""
    with pytest.raises(CompileError) as caught:
        compile_source(replace(source_of(entry), target=arch))
    text = str(caught.value)
    assert arch in text and nvrtc.version() in text and "sm_90" in text


def test_a_variant_that_an_older_nvrtc_does_not_know(entry, monkeypatch):
    monkeypatch.setattr(nvrtc, "supported", lambda: frozenset())  # an NVRTC that cannot tell
    with pytest.raises(CompileError, match=rf"NVRTC {nvrtc.version()} does not know sm_901f"):
        compile_source(replace(source_of(entry), target="sm_901f"))


def test_without_cupy(entry, monkeypatch):
    nvrtc.binding.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    try:
        with pytest.raises(MissingDependencyError, match=r"fusionreg\[cuda13\]"):
            compile_source(source_of(entry))
    finally:
        nvrtc.binding.cache_clear()


# --- cubins ----------------------------------------------------------------------------------------------------------


def test_a_dropped_last_byte_is_restored(entry):
    whole = compile_source(source_of(entry)).cubin
    assert whole[-1] == 0 and repaired(whole[:-1]) == whole and repaired(whole) == whole
    with pytest.raises(CompileError, match="cut short"):
        repaired(whole[:-2])
    with pytest.raises(CompileError, match="ELF"):
        repaired(b"not an elf file, by far" * 10)


def test_the_size_is_read_from_the_headers():
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 190, 1, 0, 64, 120, 0, 64, 56, 1, 64, 1, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 0, 0, 0, 0, 0, 0, 8)
    section = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 184, 100, 0, 0, 1, 0)
    assert expected_size(head + segment + section + bytes(100)) == 284


def test_resources_are_those_of_the_kernel(tmp_path):
    template = """\
{{ signature }} {
  __shared__ float buffer[3000];
  float local[64];
  for (int i = 0; i < 64; ++i) local[(i * (int)N) % 64] = x[i];
  buffer[threadIdx.x] = local[(int)M % 64];
  __syncthreads();
  y[threadIdx.x] = buffer[255 - threadIdx.x] + float(bias[0]);
}
"""
    code = compile_source(source_of(plugin_kit.entry(tmp_path, template), "float32"))
    assert code.shared == 12_000 and code.local >= 256 and code.registers > 0
    log = (
        code.log + "ptxas info    : Compiling entry function 'other' for 'sm_90a'\nptxas info    : Used 99 registers\n"
    )
    assert resources(log, code.entry).registers == code.registers and resources(log, "other").registers == 99


# --- the cache -------------------------------------------------------------------------------------------------------


def test_a_second_compile_is_a_hit(entry, tmp_path, monkeypatch):
    cache, seen = Cache(tmp_path / "cache"), []
    first = compile_source(source_of(entry), cache, [seen.append])
    monkeypatch.setattr(nvrtc, "compile_unit", lambda *a: pytest.fail("compiled again"))
    again = compile_source(source_of(entry, shape=(100, 24)), Cache(tmp_path / "cache"), [seen.append])
    assert again.cached and not first.cached and seen == [first]
    assert again == replace(first, cached=True)


def test_a_cubin_without_a_log_is_compiled_anew(entry, monkeypatch):
    """NVRTC may have it in a cache of its own; without the log a launch would not know of its shared memory."""
    first, compiled = compile_source(source_of(entry)), nvrtc.compile_unit

    def kept(text, name, arch, options, whom):
        cubin, log = compiled(text, name, arch, options, whom)
        return cubin, log if "--no-cache" in options else ""

    monkeypatch.setattr(nvrtc, "compile_unit", kept)
    again = compile_source(source_of(entry))
    assert again.registers == first.registers > 0 and again.shared == first.shared


def test_a_damaged_cubin_is_compiled_anew(entry, tmp_path):
    cache = Cache(tmp_path / "cache")
    first = compile_source(source_of(entry), cache)
    path = cache.file("cubin", first.digest)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="damaged"):
        again = compile_source(source_of(entry), cache)
    assert not again.cached and again.cubin == first.cubin
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_source(source_of(entry), cache).cached


def test_why_a_kernel_was_compiled_again(entry, tmp_path):
    cache = Cache(tmp_path / "cache")
    source = source_of(entry)
    assert "nothing is cached" in explain_miss(source, cache)
    compile_source(source, cache)
    assert explain_miss(source, cache) == ""
    assert "differs in options" in explain_miss(replace(source, options=(*source.options, "-G")), cache)
    assert "source" in explain_miss(replace(source, text=source.text + "\n"), cache)


def test_a_changed_header_of_cuda_is_a_miss(entry, tmp_path, monkeypatch):
    """cupy#8588: the compiler's own headers are part of the key, by content."""
    source = source_of(entry)
    before = compiler.key_parts(source)
    folder = tmp_path / "include"
    folder.mkdir()
    real = headers.find("cuda_fp16.h", headers.include_directories())
    (folder / "cuda_fp16.h").write_bytes(real.read_bytes() + b"\n// patched\n")
    others = headers.include_directories()
    monkeypatch.setattr(headers, "include_directories", lambda: (folder, *others))
    after = compiler.key_parts(source)
    assert [k for k in before if before[k] != after[k]] == ["headers"]


PROCESS = """
import pickle, sys, warnings; warnings.simplefilter("error")
from fusionreg.core.cache import Cache
from fusionreg.core.compiler import compile_source, nvrtc
source = pickle.load(open(sys.argv[2], "rb"))
code = compile_source(source, Cache(sys.argv[1]))
print(code.cached, len(code.cubin), code.digest)
"""


def test_many_processes_compile_one_kernel(entry, tmp_path):
    """16 processes, an empty cache (cupy#9463): all succeed, one entry; a 17th compiles nothing (cupy#10173)."""
    kept = tmp_path / "source.pickle"
    kept.write_bytes(pickle.dumps(source_of(entry)))
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "cache"), str(kept)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) for _ in range(16)]
    answers = [p.communicate(timeout=200) for p in running]
    assert all(p.returncode == 0 for p in running), answers[0][1].decode()
    assert len({out.split()[2] for out, _ in answers}) == 1
    assert Cache(tmp_path / "cache").status().kinds["cubin"][0] == 1
    last = subprocess.run(command, capture_output=True, env=env, text=True)
    assert last.stdout.startswith("True"), last.stderr
