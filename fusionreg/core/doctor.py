"""What this machine can do, and what to install for the rest. Floor 7.

Every probe is one function that returns a :class:`Check`; none raises, and none creates a CUDA context.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from . import headers
from .cache import Cache
from .compiler import nvrtc
from .errors import FusionregError
from .simulator.toolchain import host_compiler

if TYPE_CHECKING:
    from .registry.catalog import Catalog


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what.
        status: ``ok``, ``missing`` or ``absent`` (not there and not needed for the simulator).
        found: what was there.
        advice: what to do; empty when nothing.
        required: whether ``doctor`` fails without it.
    """

    name: str
    status: Literal["ok", "missing", "absent"]
    found: str
    advice: str = ""
    required: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> tuple[Check, ...]:
    """All checks, in the order a newcomer needs them."""
    from .registry.catalog import load

    probes: tuple[Callable[[], Check], ...] = (
        _python, _host_compiler, _nvrtc, _headers, _gpu, _launcher, _cache,
        lambda: _package("torch", "torch", "PyTorch models"),
        lambda: _package("onnx_ir", "onnx", "ONNX models"),
        lambda: _package("onnxruntime", "onnx", "the reference of ONNX models"),
        lambda: shipped_parameters(load()),
        lambda: shipped_times(load()),
    )  # fmt: skip
    return tuple(probe() for probe in probes)


def shipped_parameters(catalog: Catalog) -> Check:
    """What plugins ship of tuned parameters, and what of it no longer belongs to its kernel."""
    from .bench.shipped import stale

    good, wrong = stale(catalog)
    advice = "They are not used. On such a GPU, `fusionreg tune --again --ship` finds new ones"
    return _shipped("tuned parameters", f"{good} for kernels as they are", wrong, advice)


def shipped_times(catalog: Catalog) -> Check:
    """What plugins ship of measured times, and what of it is of other kernels than there are now."""
    from .bench.gains import stale

    good, wrong = stale(catalog)
    advice = "The planner ignores them. On such a GPU, `fusionreg bench --again --ship` measures again"
    return _shipped("measured times", f"{good} of kernels as they are", wrong, advice)


def _shipped(name: str, found: str, wrong: Sequence[str], advice: str) -> Check:
    if not wrong:
        return Check(name, "ok", found)
    said = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    return Check(name, "absent", f"{found}, {len(wrong)} stale: {said}", advice)


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.machine()}"
    good = sys.version_info >= (3, 11)
    return Check("python", "ok" if good else "missing", found, "" if good else "Install Python 3.11 or later", True)


def _host_compiler() -> Check:
    try:
        compiler = host_compiler()
    except FusionregError as error:
        return Check("host compiler", "missing", error.found, error.next_step, True)
    return Check("host compiler", "ok", f"{compiler.path} {compiler.version}", required=True)


def _nvrtc() -> Check:
    try:
        version = nvrtc.version()
    except FusionregError as error:
        return Check("NVRTC", "missing", error.found, error.next_step, True)
    return Check("NVRTC", "ok", version, required=True)


def _headers() -> Check:
    try:
        folders = headers.include_directories()
        headers.check(["cuda_fp16.h", "cuda_bf16.h"], folders)
    except FusionregError as error:
        return Check("CUDA headers", "missing", error.found, error.next_step, True)
    return Check("CUDA headers", "ok", ", ".join(map(str, folders)), required=True)


def _gpu() -> Check:
    try:
        from cuda.bindings import driver
    except ImportError:
        return Check("GPU", "absent", "cuda-bindings is not installed", "pip install 'fusionreg[cuda13]'")
    try:
        (status,) = driver.cuInit(0)
        if int(status) != 0:
            return Check("GPU", "absent", f"the driver answers {status.name}", "Kernels run in the simulator here")
        count = driver.cuDeviceGetCount()[1]
        names = [driver.cuDeviceGetName(80, driver.cuDeviceGet(i)[1])[1].split(b"\0")[0].decode() for i in range(count)]
        version = driver.cuDriverGetVersion()[1]
    except (RuntimeError, OSError) as error:  # no libcuda on this machine
        return Check("GPU", "absent", str(error).splitlines()[0], "Kernels run in the simulator here")
    return Check("GPU", "ok", f"{', '.join(names)}; driver for CUDA {version // 1000}.{version % 1000 // 10}")


def _launcher() -> Check:
    return _package("cuda.bindings", "cuda13", "launching on a GPU", distribution="cuda-bindings")


def _cache() -> Check:
    status = Cache().status()
    found = f"{status.path} ({status.entries} entries)" if not status.reason else status.reason
    advice = "Set FUSIONREG_CACHE_DIR to a writable folder; until then nothing is kept" if status.reason else ""
    return Check("cache", "absent" if status.reason else "ok", found, advice)


def _package(module: str, extra: str, use: str, distribution: str = "") -> Check:
    name = distribution or module.replace("_", "-")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "absent", f"not installed; needed for {use}", f"pip install 'fusionreg[{extra}]'")
    return Check(name, "ok", version)


def environment() -> dict[str, str]:
    """Facts for reports: versions, platform, cache folder. Values are plain words."""
    facts = {"python": platform.python_version(), "platform": platform.platform(), "cpus": str(os.cpu_count())}
    for name in ("fusionreg", "numpy", "cupy-cuda13x", "cuda-bindings", "nvidia-cuda-nvrtc", "torch", "onnxruntime"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    for check in (_host_compiler(), _nvrtc(), _gpu()):
        facts[check.name] = check.found
    return facts
