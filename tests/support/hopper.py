"""Units over the Hopper part of the device library: tensor maps as arguments, tiles, swizzled layouts."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fusionreg.core.problem import TensorMapLayout
from fusionreg.core.render import shared_library
from fusionreg.core.simulator.tensor_map import MapArgument

HEADERS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cuda_fp8.h>\n"
PARTS = ("fusionreg", "cluster", "mbarrier", "tma", "wgmma", "warpgroup", "swizzle", "bulk_once", "prefetch")
TYPES = {
    "__half": np.dtype(np.float16),
    "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16),
    "__nv_fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float": np.dtype(np.float32),
}


def unit(parameters: str, body: str, threads: int | str = 128, parts: tuple[str, ...] = PARTS) -> str:
    library = "".join((shared_library() / f"{p}.cuh.j2").read_text() for p in parts)
    head = f'extern "C" __global__ void __launch_bounds__({threads}) k({parameters})'
    return f"{HEADERS}{library}\n{head} {{\n{body}\n}}\n"


def tensor_map(array: np.ndarray, box: tuple[int, ...], swizzle: int = 0, fill: str = "zeros") -> MapArgument:
    """The map of a NumPy array; ``box``: its tile, the last axis first, as coordinates are."""
    strides = tuple(reversed(array.strides))[1:]
    dims = tuple(reversed(array.shape))
    return MapArgument(TensorMapLayout("m", "x", array.dtype.name, dims, strides, box, swizzle, 0, fill), array)


def swizzled(tile: np.ndarray, swizzle: int) -> np.ndarray:
    """The bytes of a tile as they lie in shared memory: PTX ISA, "Shared Memory Matrix Layout"."""
    plain = np.ascontiguousarray(tile).view(np.uint8).reshape(-1)
    at = np.arange(plain.size)
    if swizzle:
        at = at ^ ((at >> 7 & (swizzle // 16 - 1)) << 4)
    out = np.zeros_like(plain)
    out[at] = plain
    return out
