"""Operands whose elements lie more than 2^31 elements apart: where kernels take strides, offsets have 64 bits."""

from __future__ import annotations

import mmap
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.conformance.cases import derive
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.runtime import Runtime

#: A kernel of each family, and the operand and axis that are pulled apart.
CASES = [
    ("attention.sdpa", "tensor_core", "k", 2),
    ("attention.sdpa", "wgmma", "q", 0),  # by tensor maps
    ("conv.conv_bn_relu", "tensor_core", "x", 0),
    ("gemm.activation", "plain", "x", 0),
    ("moe.expert_ffn", "plain", "down", 0),
    ("norm.groupnorm", "strided", "x", 1),
]


def apart(a: np.ndarray, axis: int) -> np.ndarray:
    """A copy with ``axis`` outermost, its ends 2^31 elements and more from each other; only pages in use are memory."""
    step = -(-(2**31) // (a.shape[axis] - 1) // 128) * 128 + 128
    inner = [d for i, d in enumerate(a.shape) if i != axis]
    strides = [prod(inner[i + 1 :]) for i in range(len(inner))]
    strides.insert(axis, step)
    size = (step * (a.shape[axis] - 1) + prod(inner)) * a.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    flat = np.frombuffer(memory, a.dtype)
    view = np.lib.stride_tricks.as_strided(flat, a.shape, [s * a.itemsize for s in strides])
    view[...] = a
    return view


@pytest.mark.parametrize(("fusion", "kernel", "operand", "axis"), CASES)
def test_offsets_have_64_bits(fusion, kernel, operand, axis, sim_cache):
    catalog = shipped(fusion.split(".")[0])
    entry = catalog[fusion]
    one = replace(entry, kernels=(entry.kernel(kernel),), members=())
    trials = derive(entry, one.kernels[0], "sm_90a", "quick")
    trial = next(t for t in trials if t.name.endswith(("-tails", "-overflow")))
    arrays = trial.arrays(entry)
    runtime = Runtime(replace(catalog, fusions=FrozenDict({fusion: one})), device="sim", cache=sim_cache)

    def call(**changed):
        return runtime.call(fusion, *((arrays | changed).get(name) for name in entry.inputs), **trial.keywords)

    near, far = call(), call(**{operand: apart(arrays[operand], axis)})
    assert runtime.kernels_used == {f"{fusion}/{kernel}": 2} and not runtime.fallbacks
    np.testing.assert_allclose(far.astype(np.float64), near.astype(np.float64), rtol=2**-7, atol=2**-7)
