"""The host compiler, the cache of units, and the text that is compiled."""

from __future__ import annotations

import gc
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from fusionreg.core import simulator
from fusionreg.core.cache import Cache
from fusionreg.core.errors import MissingDependencyError, SimulatorError
from fusionreg.core.simulator import Checks, toolchain
from fusionreg.core.simulator.elf import Variable, uninitialised
from fusionreg.core.simulator.unit import host_text

KERNEL = 'extern "C" __global__ void k(int* y) { y[threadIdx.x] = threadIdx.x; }'


def body(text: str) -> str:
    """The unit's own lines of the host text."""
    return host_text(text, "k", "sm_80").split('#line 1 "unit.cu"\n')[1].split('#line 1 "driver"')[0].rstrip("\n")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("extern __shared__ float s[];", "static float* const s = reinterpret_cast<float*>(frsim_dynamic);"),
        (
            "extern __shared__ __align__(128) unsigned char smem_[ ] ;",
            "static unsigned char* const smem_ = reinterpret_cast<unsigned char*>(frsim_dynamic);",
        ),
        ("extern __shared__ alignas(16) int4 v[];", "static int4* const v = reinterpret_cast<int4*>(frsim_dynamic);"),
        (
            "extern volatile __shared__ T f[];",
            "static volatile T* const f = reinterpret_cast<volatile T*>(frsim_dynamic);",
        ),
        ("extern __align__(8) __shared__ T s[];", "static T* const s = reinterpret_cast<T*>(frsim_dynamic);"),
        (
            "extern\n  __shared__\n  n::P<int, 3> p[];",
            "static n::P<int, 3>* const p = reinterpret_cast<n::P<int, 3>*>(frsim_dynamic);",
        ),
        ("static __shared__ int a[4];", "__shared__ int a[4];"),
        ("__shared__ static int a[4];", "__shared__ int a[4];"),
        ("__shared__ alignas(16) float a[4];", "__shared__ __align__(16) float a[4];"),
        ("// extern __shared__ float s[];", "// extern __shared__ float s[];"),
        ("/* extern __shared__ float s[]; */", "/* extern __shared__ float s[]; */"),
        ('const char* t = "extern __shared__ float s[];";', 'const char* t = "extern __shared__ float s[];";'),
        ("extern float s[];", "extern float s[];"),
        ("static __device__ int n;", "static __device__ int n = {};"),
        ("__device__ static P<int, 3> n [2] ;", "__device__ static P<int, 3> n [2]  = {};"),
        ("static __device__ float f(float v);", "static __device__ float f(float v);"),
        ("static __device__ int a, b;", "static __device__ int a, b;"),
        ("static __device__ int n = 3;", "static __device__ int n = 3;"),
    ],
)  # fmt: skip
def test_declarations_of_shared_memory(given, expected):
    assert body(given) == expected
    lines = host_text(f"{given}\nlast", "k", "sm_80").splitlines()
    assert lines.index("last") - lines.index('#line 1 "unit.cu"') == given.count("\n") + 2  # where it was


def test_second_time_comes_from_the_cache(tmp_path, geometry):
    cache = Cache(tmp_path)
    first = simulator.compile_text(KERNEL, "k", cache=cache)
    assert not first.prepare("fast").cached
    again = simulator.compile_text(KERNEL, "k", cache=Cache(tmp_path))
    assert again.prepare("fast").cached
    assert again.prepare("fast").digest == first.prepare("fast").digest
    changed = simulator.compile_text(KERNEL.replace("= threadIdx", "= 1 + threadIdx"), "k", cache=cache)
    assert not changed.prepare("fast").cached
    y = np.zeros(32, np.int32)
    for kernel, expected in ((first, 31), (again, 31), (changed, 32)):
        kernel.launch([y], geometry())
        assert y[31] == expected
    kinds = {p.name for p in tmp_path.iterdir()}
    assert kinds == {"sim-fast", "sim-header", "sim-runtime"}


def test_a_kernel_that_nobody_holds_leaves_the_process(sim_cache, geometry):
    """A process has only so many mappings (vm.max_map_count); conformance loads thousands of units."""
    mapped = Path("/proc/self/maps")
    if not mapped.exists():
        pytest.skip("mappings are listed on Linux alone")

    def units() -> int:
        return sum("unit-leaves" in line for line in mapped.read_text().splitlines())

    kernel = simulator.compile_text(KERNEL.replace("k(", "leaves("), "leaves", cache=sim_cache)
    y = np.zeros(32, np.int32)
    kernel.launch([y], geometry())
    assert y[31] == 31 and units() > 0
    del kernel
    gc.collect()
    assert units() == 0


def test_every_part_of_the_toolchain_is_in_the_key(sim_cache, monkeypatch):
    builder = simulator.compile_text(KERNEL, "k", cache=sim_cache, modes=()).builder
    base = dict(builder._base)
    assert set(base) == {"compiler", "shim", "headers"}
    assert builder.compiler.version in base["compiler"] or "clang" in base["compiler"]
    assert len({" ".join(builder.compiler.flags(m)) for m in ("fast", "checked", "sanitize")}) == 3


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(toolchain.COMPILER_VARIABLE, raising=False)
    with pytest.raises(MissingDependencyError, match="apt-get install g"):
        simulator.host_compiler()


def test_a_compiler_that_is_named_and_not_there(monkeypatch):
    monkeypatch.setenv(toolchain.COMPILER_VARIABLE, "/nowhere/g++")
    with pytest.raises(MissingDependencyError, match="/nowhere/g"):
        simulator.host_compiler()


def test_a_program_that_is_no_compiler(monkeypatch, tmp_path):
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingDependencyError):
        simulator.host_compiler()


def test_other_machines_are_named(monkeypatch):
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "riscv64")
    with pytest.raises(MissingDependencyError, match="riscv64"):
        simulator.host_compiler()


def test_a_compiler_that_cannot_build_the_simulator_is_found_out_once(monkeypatch, tmp_path):
    """It is no kernel's fault: nothing is run, and the compiler is not asked again for each case."""
    from fusionreg.core.conformance import executor_for

    real, log = simulator.host_compiler().path, tmp_path / "log"
    fake = tmp_path / "g++"
    fake.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *runtime.cpp*) echo asked >> {log}; echo "runtime.cpp:3: error: no mutex" >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv(toolchain.COMPILER_VARIABLE, str(fake))
    cache = Cache(tmp_path / "cache")
    for attempt in (lambda: executor_for("sim", cache), lambda: simulator.compile_text(KERNEL, "k", cache=cache)):
        with pytest.raises(MissingDependencyError, match=r"simulator's runtime: .*no mutex") as caught:
            attempt()
        assert "error: no mutex" in caught.value.facts["log"]
    assert log.read_text().splitlines() == ["asked"]


def test_no_headers(monkeypatch, tmp_path):
    from fusionreg.core import headers

    monkeypatch.setattr(headers, "include_directories", lambda: (tmp_path,))
    with pytest.raises(MissingDependencyError, match=r"cuda_fp16\.h"):
        simulator.compile_text(KERNEL, "k", cache=Cache(tmp_path / "cache"))


def test_folders_of_the_build_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    from fusionreg.core.simulator.build import Builder

    builder = Builder(Cache(tmp_path / "cache"))
    assert Path(builder._scratch).is_dir()
    scratch = builder._scratch
    del builder
    assert not os.path.exists(scratch)


def test_shared_variables_are_known_by_name(sim_cache):
    kernel = simulator.compile_text(
        """template <int N> __device__ float f(float v) {
          __shared__ float part[N];
          part[0] = v;
          __syncthreads();
          return part[1];
        }
        extern "C" __global__ void k(float* y) {
          __shared__ __align__(16) int s[3];
          s[0] = y[0];
          __syncthreads();
          y[0] = f<5>(s[1]) + f<7>(s[2]);
        }""",
        "k", cache=sim_cache,
    )  # fmt: skip
    variables = uninitialised(kernel.prepare("fast").data)
    assert sorted((v.name, v.bytes) for v in variables) == [("part", 20), ("part", 28), ("s", 12)]
    assert all(v.local for v in variables)
    assert Variable("_ZZN12_GLOBAL__N_11fIfLi12EEEvT_E3buf_0", 0, 4).name == "buf"
    # the hash at the end of a kernel's name may look like a length that reaches exactly to the symbol's end
    assert Variable("_ZZ35fr_acme_bias_relu2__plain_9c5f7dd92E1s", 0, 4).name == "s"


@pytest.mark.parametrize(
    ("declaration", "fine"), [("int count;", False), ("int count = 0;", True), ("int count[3] = {1, 2, 3};", True)]
)
def test_device_variables(sim_cache, geometry, declaration, fine):
    """Device memory that outlives a block must not be taken for shared memory."""
    kernel = 'extern "C" __global__ void k(int* y) { y[0] = sizeof count + *reinterpret_cast<int*>(&count); }'
    text = f"__device__ {declaration}\n{kernel}"
    if fine:
        y = np.zeros(1, np.int32)
        simulator.compile_text(text, "k", cache=sim_cache).launch([y], geometry(block=(1, 1, 1)))
        assert y[0] in (4, 13)
        return
    with pytest.raises(SimulatorError, match="count") as caught:
        simulator.compile_text(text, "k", cache=sim_cache)
    assert caught.value.facts["detector"] == "unsupported"


@pytest.mark.parametrize("scope", ["inside", "outside"])
@pytest.mark.parametrize("declaration", ["static __device__ int n;", "__device__ static int n;"])
def test_device_variables_of_a_function_are_no_shared_memory(sim_cache, geometry, declaration, scope):
    """One for all blocks, 0 at first; and no reason to speak of shared memory or of a barrier."""
    outside, inside = (declaration, "") if scope == "outside" else ("", declaration)
    text = f"""{outside}
    extern "C" __global__ void k(int* y) {{
      {inside}
      if (threadIdx.x == 0) y[blockIdx.x] = atomicAdd(&n, 1);
    }}"""
    y = np.full(3, -1, np.int32)
    checks = Checks(guard=True, accesses=True, deterministic=False)
    simulator.compile_text(text, "k", cache=sim_cache).launch([y], geometry(grid=(3, 1, 1)), checks=checks)
    assert y.tolist() == [0, 1, 2]


def test_static_shared_memory_has_a_limit(sim_cache, geometry):
    from fusionreg.core.errors import LaunchError

    text = 'extern "C" __global__ void k(int* y) {{ __shared__ int s[{}]; s[0] = 1; __syncthreads(); y[0] = s[0]; }}'
    y = np.zeros(1, np.int32)
    simulator.compile_text(text.format(12288), "k", cache=sim_cache).launch([y], geometry(block=(1, 1, 1)))
    with pytest.raises(LaunchError, match="49156 bytes of static"):
        simulator.compile_text(text.format(12289), "k", cache=sim_cache).launch([y], geometry(block=(1, 1, 1)))
    with pytest.raises(LaunchError, match="sm_120f"):
        kernel = simulator.compile_text(text.format(12288), "k", cache=sim_cache, target="sm_120f")
        kernel.launch([y], geometry(block=(1, 1, 1), shared_memory=60_000))
