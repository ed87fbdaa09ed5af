"""Host cost of a warm launch: bare CuPy, bare cuda.core, a bound handle, and a call by name; and of the first call of
a runtime whose kernel is in the disk cache.

    python benchmarks/launch.py [--calls 2000] [--json FILE]

One small kernel, one process; each row is the median over batches of the time per launch, enqueued back to back and
synchronised between batches so that the queue never fills. Needs a GPU, CuPy, cuda.core and torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusionreg.core.cache import Cache
from fusionreg.core.registry.catalog import load
from fusionreg.core.runtime import Runtime

#: M, K, N: small, so that the host is what is measured; K is odd for the kernel without dynamic shared memory.
FUSION, SHAPE = "gemm.bias", (16, 63, 64)
BATCHES = 41


def median_us(launch: Callable[[], Any], synchronise: Callable[[], Any], calls: int) -> float:
    """Microseconds per launch: median over batches of ``calls / BATCHES`` launches each."""
    each = max(10, calls // BATCHES)
    for _ in range(3 * each):
        launch()
    synchronise()
    found = []
    for _ in range(BATCHES):
        started = time.perf_counter()
        for _ in range(each):
            launch()
        found.append((time.perf_counter() - started) / each * 1e6)
        synchronise()
    return statistics.median(found)


def measure(calls: int) -> dict[str, Any]:
    import cupy
    import torch

    with tempfile.TemporaryDirectory() as folder:
        catalog = load()
        runtime = Runtime(catalog, "cuda", Cache(folder))
        m, k, n = SHAPE
        x, w = torch.randn(m, k, device="cuda").half(), torch.randn(k, n, device="cuda").half()
        bias = torch.randn(n, device="cuda").half()
        started = time.perf_counter()
        y = runtime.call(FUSION, x, w, bias, activation="Relu")
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        expected = torch.relu(x.double() @ w.double() + bias.double())
        assert (y.double() - expected).abs().max() < 0.1
        bound = runtime.bind(FUSION, x, w, bias, activation="Relu")
        prepared = next(iter(runtime._prepared.values()))  # what the call above prepared: geometry and parameters
        loaded = next(iter(runtime.kernels._loaded.values()))
        rows = {
            "fusionreg bound()": lambda: bound(),
            "fusionreg call(name)": lambda: runtime.call(FUSION, x, w, bias, activation="Relu"),
            "torch.relu(x) (for scale)": lambda: torch.relu(x),
            **cupy_rows(cupy, loaded, prepared, (x, w, bias, y)),
            **core_rows(loaded, prepared, (x, w, bias, y)),
        }
        cached = []
        for _ in range(5):
            another = Runtime(catalog, "cuda", Cache(folder))
            started = time.perf_counter()
            another.call(FUSION, x, w, bias, activation="Relu")
            cached.append(time.perf_counter() - started)
            torch.cuda.synchronize()
        result = {name: median_us(launch, torch.cuda.synchronize, calls) for name, launch in rows.items()}
        return {
            "gpu": torch.cuda.get_device_name(),
            "versions": {p: _version(p) for p in ("torch", "cupy-cuda13x", "cuda-core", "cuda-bindings")},
            "python": sys.version.split()[0],
            "kernel": bound.kernel,
            "first_call_s": first,
            "first_call_from_disk_s": statistics.median(cached),
            "us_per_launch": result,
        }


def _values(prepared: Any, arrays: tuple[Any, ...]) -> list[tuple[bool, Any]]:
    """The kernel's parameters as (whether it is a pointer, value), for the bare launches."""
    pointers = iter(a.data_ptr() for a in arrays)
    return [(a.pointer, next(pointers) if a.pointer else prepared.values[a.parameter]) for a in prepared.arguments]


def cupy_rows(cupy: Any, loaded: Any, prepared: Any, arrays: tuple[Any, ...]) -> dict[str, Any]:
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(loaded.code.cubin)
        kernel = cupy.RawModule(path=str(path)).get_function(loaded.code.entry)
    launch = prepared.launch
    arguments = tuple(np.uint64(v) if pointer else np.int64(v) for pointer, v in _values(prepared, arrays))
    if launch.shared_memory > 49_152:
        kernel.max_dynamic_shared_size_bytes = launch.shared_memory
    grid, block, shared = launch.grid, launch.block, launch.shared_memory
    return {"CuPy RawKernel": lambda: kernel(grid, block, arguments, shared_mem=shared)}


def core_rows(loaded: Any, prepared: Any, arrays: tuple[Any, ...]) -> dict[str, Any]:
    import ctypes

    try:
        from cuda.core import Device, LaunchConfig, ObjectCode, launch
    except ImportError:  # before 1.0
        from cuda.core.experimental import Device, LaunchConfig, ObjectCode, launch
    device = Device()
    device.set_current()
    kernel = ObjectCode.from_cubin(loaded.code.cubin).get_kernel(loaded.code.entry)
    found = prepared.launch
    configuration = LaunchConfig(grid=found.grid, block=found.block, shmem_size=found.shared_memory)
    values = [v if pointer else ctypes.c_longlong(v) for pointer, v in _values(prepared, arrays)]
    stream = device.default_stream
    return {"cuda.core launch": lambda: launch(stream, configuration, kernel, *values)}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    found = measure(options.calls)
    print(
        f"{found['gpu']}, {found['kernel']}, first call {found['first_call_s']:.2f} s, from disk "
        f"{found['first_call_from_disk_s'] * 1e3:.1f} ms"
    )
    for name, us in found["us_per_launch"].items():
        print(f"  {name:28} {us:7.2f} us")
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
