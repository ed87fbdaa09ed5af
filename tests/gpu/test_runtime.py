"""The runtime on a real device: streams, devices, graphs, lifetimes, sizes. Run on a machine with a GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import plugin_kit
import pytest

from fusionreg.core.cache import Cache
from fusionreg.core.errors import ArgumentError, LaunchError
from fusionreg.core.runtime import Runtime
from fusionreg.core.runtime.dispatch import FallbackWarning
from fusionreg.core.spec import AttributeSpec, KernelSpec

torch = pytest.importorskip("torch", reason="GPU tests use torch's streams and graphs")
pytestmark = pytest.mark.gpu

FUSION = "acme.add_relu"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def runtime(tmp_path, cache):
    return Runtime(plugin_kit.catalog(tmp_path, {"k.cu.j2": plugin_kit.ADD_RELU}, plugin_kit.add_relu()), cache=cache)


def poisoned(*shape, dtype="float16"):
    """Memory like a fresh output's is full of NaN, so that an element left unwritten shows."""
    torch.full(shape, float("nan"), device="cuda", dtype=getattr(torch, dtype))


def right(x, bias):
    return torch.relu(x.double() + bias.double()).to(x.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 1000), (4097, 129)])
def test_values(runtime, dtype, shape):
    x = torch.randn(shape, device="cuda").to(getattr(torch, dtype))
    bias = torch.randn(shape[-1], device="cuda").to(x.dtype)
    poisoned(*shape, dtype=dtype)
    y = runtime.call(FUSION, x, bias)
    assert y.device == x.device and y.shape == x.shape and torch.equal(y, right(x, bias))
    special = torch.full(shape, float("nan"), device="cuda", dtype=x.dtype)
    assert runtime.call(FUSION, special, bias).isnan().all()
    assert runtime.kernels_used == {f"{FUSION}/plain": 2}


def test_cupy_arrays(runtime):
    cupy = pytest.importorskip("cupy")
    x, bias = cupy.random.rand(5, 300).astype("float16"), cupy.random.rand(300).astype("float16")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y = runtime.call(FUSION, x, bias)
    stream.synchronize()
    assert isinstance(y, cupy.ndarray) and bool((y == cupy.maximum(x + bias, 0)).all())
    with pytest.raises(ArgumentError, match="a torch array"):
        runtime.call(FUSION, x, torch.zeros(300, device="cuda", dtype=torch.float16))


def test_cpu_and_gpu_do_not_mix(runtime):
    with pytest.raises(ArgumentError, match="bias is on cpu — cuda:0, as x is"):
        runtime.call(FUSION, torch.zeros(2, 8, device="cuda"), torch.zeros(8))
    with pytest.raises(ArgumentError, match="no backward"):
        runtime.call(FUSION, torch.zeros(2, 8, device="cuda", requires_grad=True), torch.zeros(8, device="cuda"))
    torch.cuda.synchronize()


# --- the caller's stream ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [False, True])
def test_a_non_default_stream_orders_the_kernel(runtime, bound):
    """On stream 0 the kernel would read what was there before the fill (cudnn-frontend PR#483)."""
    x, bias = torch.zeros(64, 4096, device="cuda"), torch.zeros(4096, device="cuda")
    handle = runtime.bind(FUSION, x, bias)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        x.fill_(1)
        y = handle() if bound else runtime.call(FUSION, x, bias)
    stream.synchronize()
    assert (y == 1).all()


def test_two_threads_two_streams(runtime):
    x, bias = [torch.zeros(64, 1024, device="cuda") for _ in range(2)], torch.zeros(1024, device="cuda")
    runtime.call(FUSION, x[0], bias)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(k):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(1, 51):
                torch.cuda._sleep(100_000)
                x[k].fill_(i + k)
                y = runtime.call(FUSION, x[k], bias)
                if not (y == i + k).all():
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_thread_that_never_used_cuda(runtime):
    x, bias = torch.ones(4, 8, device="cuda"), torch.zeros(8, device="cuda")
    handle, found = runtime.bind(FUSION, x, bias), []
    thread = threading.Thread(target=lambda: found.append(handle()))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert len(found) == 1 and (found[0] == 1).all()


# --- devices ---------------------------------------------------------------------------------------------------------


def test_the_current_device_stays(runtime):
    before = torch.cuda.current_device()
    runtime.call(FUSION, torch.zeros(2, 8, device="cuda"), torch.zeros(8, device="cuda"))
    with pytest.raises(ArgumentError):
        runtime.call(FUSION, torch.zeros(2, 8, device="cuda"), torch.zeros(9, device="cuda"))
    assert torch.cuda.current_device() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current(runtime):
    x, bias = torch.full((64, 128), 2.0, device="cuda:1"), torch.zeros(128, device="cuda:1")
    for _ in range(2):
        y = runtime.call(FUSION, x, bias)
        assert torch.cuda.current_device() == 0 and y.device == x.device and (y == 2).all()
    with pytest.raises(ArgumentError, match="bias is on cuda:0"):
        runtime.call(FUSION, x, bias.to("cuda:0"))
    assert torch.cuda.current_device() == 0


def test_kernels_that_stay_spare_multiprocessors():
    from fusionreg.core.registry.catalog import load

    catalog, rows, grids = load(allow=("moe",), deny=()), 4096, []
    x, w = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((rows, 64), (2, 256, 64)))
    ends = torch.tensor([rows // 2, rows], device="cuda", dtype=torch.int32)
    for spare in (0, 16, 10_000):
        run = Runtime(catalog, "cuda", spare=spare)
        y = run.call("moe.grouped_gemm", x, w, ends, trans=1)
        torch.testing.assert_close(y, torch.cat([h @ m.T for h, m in zip(x.chunk(2), w, strict=True)]))
        (prepared,) = run._prepared.values()
        grids.append(prepared.launch.grid[0])
    assert grids[0] - grids[1] == 16 and grids[2] == 1, grids


def test_import_and_discovery_leave_cuda_alone():
    code = (
        "import fusionreg, os\nr = fusionreg.load_registry()\nimport torch\nassert not torch.cuda.is_initialized()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    print(int(torch.ones(3, device='cuda').sum())); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "3", done.stderr


# --- CUDA graphs -----------------------------------------------------------------------------------------------------


def test_the_first_call_inside_a_capture_is_a_clear_error(runtime):
    x, bias = torch.ones(8, 8, device="cuda"), torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(LaunchError, match="captured into a CUDA graph"), torch.cuda.graph(graph):
        runtime.call(FUSION, x, bias)
    torch.cuda.synchronize()
    assert (runtime.call(FUSION, x, bias) == 1).all()  # the process is as usable as before


@pytest.mark.parametrize("bound", [False, True])
def test_replay_reads_new_values(runtime, bound):
    x, bias = torch.ones(64, 128, device="cuda"), torch.zeros(128, device="cuda")
    runtime.call(FUSION, x, bias)
    handle = runtime.bind(FUSION, x, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = handle() if bound else runtime.call(FUSION, x, bias)
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert (y == value).all()


def test_a_warm_call_synchronises_and_allocates_nothing_of_its_own(runtime, alone):
    """Alone, since what is free on the device is everybody's."""
    x, bias = torch.ones(64, 128, device="cuda"), torch.zeros(128, device="cuda")
    handle = runtime.bind(FUSION, x, bias)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runtime.call(FUSION, x, bias)
        handle()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    for _ in range(1000):
        runtime.call(FUSION, x, bias)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free and torch.cuda.memory_reserved() == reserved


# --- lifetimes -------------------------------------------------------------------------------------------------------


def test_temporaries_on_side_streams(runtime):
    """Inputs die right after the launch, under churn of the allocator (cutile-python#88)."""
    bias = torch.zeros(2048, device="cuda")
    runtime.call(FUSION, torch.zeros(64, 2048, device="cuda"), bias)
    torch.cuda.synchronize()
    stream, kept = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for i in range(1000):
            y = runtime.call(FUSION, torch.full((64, 2048), float(i), device="cuda"), bias)
            torch.full((64, 2048), -1.0, device="cuda")
            if i % 100 == 0:
                kept.append((i, y))
    stream.synchronize()
    assert all((y == i).all() for i, y in kept)


def test_memory_stays_flat(runtime):
    x, bias = torch.zeros(256, 1024, device="cuda"), torch.zeros(1024, device="cuda")
    runtime.call(FUSION, x, bias)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(300):
        runtime.call(FUSION, x, bias)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (3, 0, 96)])
def test_empty_leaves_no_error_behind(runtime, shape):
    y = runtime.call(FUSION, torch.zeros(shape, device="cuda"), torch.zeros(shape[-1], device="cuda"))
    assert y.shape == shape
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.parametrize("batch", [65_535, 65_536, 70_000])
def test_large_batches_reach_the_last_item(runtime, batch):
    x, bias = torch.ones(batch, 1, 8, device="cuda"), torch.arange(8.0, device="cuda")
    poisoned(batch, 1, 8, dtype="float32")
    assert torch.equal(runtime.call(FUSION, x, bias)[-1, 0], 1 + bias)


def test_more_than_2_to_the_31_elements(runtime):
    """4.3 GiB of fp16: rows around 2**31 elements and the last one (onnxruntime#32299)."""
    rows = 2**21 + 3
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    x = torch.zeros(rows, 1024, device="cuda", dtype=torch.float16)
    at = [0, 2**21 - 1, 2**21, rows - 1]
    for i, row in enumerate(at):
        x[row] = i + 1
    bias = torch.arange(1024, device="cuda", dtype=torch.float16) / 1024
    y = runtime.call(FUSION, x, bias)
    for i, row in enumerate(at):
        assert torch.equal(y[row], right(x[row], bias)), i
    assert torch.equal(y[12345], bias)


# --- launch attributes -----------------------------------------------------------------------------------------------

CLUSTER = """\
#include <cooperative_groups.h>
{{ signature }} {
  namespace cg = cooperative_groups;
  extern __shared__ float room[];
  cg::cluster_group cluster = cg::this_cluster();
  room[threadIdx.x] = fr::to_float(x[blockIdx.x * 256LL + threadIdx.x]);
  cluster.sync();
  float* other = cluster.map_shared_rank(room, cluster.block_rank() ^ 1);  // the neighbour's tile
  const float b = fr::to_float(bias[threadIdx.x % N]) * (M > 0);
  y[blockIdx.x * 256LL + threadIdx.x] = fr::from_float<T>(other[threadIdx.x] + b);
  cluster.sync();
}
"""

COOPERATIVE = """\
#include <cooperative_groups.h>
{{ signature }} {
  const long long i = blockIdx.x * 256LL + threadIdx.x;
  float* sums = reinterpret_cast<float*>(workspace);  // one per block
  if (threadIdx.x == 0) sums[blockIdx.x] = fr::to_float(x[i]) + fr::to_float(bias[0]) * alpha;
  cooperative_groups::this_grid().sync();
  float total = 0.0f;
  for (unsigned b = 0; b < gridDim.x; ++b) total += sums[b];
  if (i < M * N) y[i] = fr::from_float<T>(total);
}
"""


def special_runtime(tmp_path, cache, template, **kernel):
    spec = KernelSpec(name="special", template="k.cu.j2", block="256", **kernel)
    attributes = {"alpha": AttributeSpec(type="float", default=1.0)} if "alpha" in template else {}
    pattern = "y = Swish(Add(x, bias), alpha=alpha)" if attributes else "y = Relu(Add(x, bias))"
    fusion = plugin_kit.add_relu(kernels=[spec], attributes=attributes, pattern=pattern)
    return Runtime(plugin_kit.catalog(tmp_path, {"k.cu.j2": template}, fusion), cache=cache)


def test_clusters_and_large_shared_memory(tmp_path, cache):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need compute capability 9.0")
    runtime = special_runtime(
        tmp_path, cache, CLUSTER, targets="sm_90+", grid="M", cluster=("2", "1", "1"), shared_memory="100000",
        requires="N == 256",
    )  # fmt: skip
    x = torch.arange(4.0, device="cuda").repeat_interleave(256).reshape(4, 256)
    y = runtime.call(FUSION, x, torch.zeros(256, device="cuda"))
    assert y[:, 0].tolist() == [1, 0, 3, 2] and runtime.kernels_used


def test_cooperative_grids_and_workspace(tmp_path, cache):
    options = {"grid": "ceildiv(M * N, 256)", "cooperative": True, "workspace": "ceildiv(M * N, 256) * 4"}
    runtime = special_runtime(tmp_path, cache, COOPERATIVE, **options)
    x, bias = torch.ones(64, 256, device="cuda"), torch.ones(256, device="cuda")
    assert (runtime.call(FUSION, x, bias, alpha=0.5) == 64 * 1.5).all()
    with pytest.warns(FallbackWarning, match="a cooperative grid of 1000000 blocks"):  # more than can be resident
        y = runtime.call(FUSION, torch.ones(10**6, 256, device="cuda"), bias)
    torch.testing.assert_close(y, torch.nn.functional.silu(torch.full_like(y, 2.0)))
    torch.cuda.synchronize()
    assert (runtime.call(FUSION, x, bias) == 128).all()


def test_programmatic_launches_stay_ordered(tmp_path, cache):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    template = '{{ include("programmatic.cuh") }}\n' + plugin_kit.ADD_RELU.replace(
        "{\n", "{\n  fr::grid_dependency_wait();\n", 1
    )
    runtime = special_runtime(
        tmp_path, cache, template, targets="sm_90+", grid="ceildiv(M * N, 256)", programmatic=True
    )
    y, bias = torch.zeros(512, 512, device="cuda"), torch.ones(512, device="cuda")
    for _ in range(100):
        y = runtime.call(FUSION, y, bias)
    assert (y == 100).all()
