"""One mask for one seed and offset: whatever the kernel, its parameters, the memory order, and the pass."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.conformance.coverage import problem_of
from fusionreg.core.conformance.execute import Job, prepare
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.conformance.trial import Trial
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ops import default_vocabulary, numpy_backend
from fusionreg.core.problem import combinations
from fusionreg.core.runtime import Runtime

F16, BF16, F32 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("float32")
CATALOG = shipped("norm")
FORWARD, BACKWARD = "norm.dropout_residual_layernorm", "norm.dropout_residual_layernorm_backward"
P, RNG = 0.3, np.array([-7, 1 << 35])
SCALE = 65536 / (65536 - 19661)


def kept(shape, p=P):
    meaning = default_vocabulary()["fusionreg::Dropout"].meaning
    return meaning(numpy_backend(), np.ones(shape), RNG, p=p) > 0


def launched(fusion, kernel, params, shape, executor, arrays):
    """The outputs of exactly this kernel and these parameters on ``arrays``."""
    entry = CATALOG[fusion]
    trial = Trial(
        "mask", FrozenDict(T="float16"), FrozenDict(zip("MN", shape, strict=True)),
        attributes=FrozenDict(p=P, epsilon=1e-5), params=params, exactly=True,
    )  # fmt: skip
    job = prepare(entry, entry.kernel(kernel), trial, executor)
    assert isinstance(job, Job), job.reason
    for name, array in arrays.items():
        job.arrays[name][...] = array
    return executor.launch(executor.compile(job.source), job, float("nan"))


def few(kernel, problem):
    """Combinations of parameters in which each level of each parameter stands at least once."""
    left = {(k, v) for c in combinations(kernel, problem) for k, v in c.params.items()}
    for candidate in combinations(kernel, problem):
        if left & set(candidate.params.items()):
            left -= set(candidate.params.items())
            yield candidate.params


@pytest.mark.parametrize("fusion", [FORWARD, BACKWARD])
def test_every_configuration_of_every_kernel_drops_the_same_elements(fusion, sim_cache):
    shape, entry, executor = (5, 72), CATALOG[fusion], SimExecutor(sim_cache, ahead=False)
    x = 1 + np.random.default_rng(0).random(shape)
    arrays = {"x": x, "rng": RNG, "residual": 0.0, "scale": 1.0}
    arrays |= {"bias": 0.0} if fusion == FORWARD else {"dy": np.random.default_rng(1).standard_normal(shape)}
    tried = []
    for kernel in entry.kernels:
        trial = Trial("", FrozenDict(T="float16"), FrozenDict(M=5, N=72), attributes=FrozenDict(p=P, epsilon=1e-5))
        problem = problem_of(entry, trial, executor.target)
        for params in few(kernel, problem):
            found = launched(fusion, kernel.spec.name, params, shape, executor, arrays)
            if fusion == FORWARD:  # what was dropped is the least of its row
                y = found["y"].astype(np.float64)
                mask = y > y.min(axis=-1, keepdims=True)
            else:
                mask = found["dx"] != 0
            np.testing.assert_array_equal(mask, kept(shape), err_msg=f"{kernel.key} {dict(params)}")
            tried.append(params)
    assert len(tried) > 5


@pytest.fixture(scope="module")
def runtime(sim_cache):
    return Runtime(CATALOG, device="sim", cache=sim_cache)


def views(shape):
    """Arrays of equal values in other memory orders."""
    x = 1 + np.random.default_rng(2).random(shape).astype(F32)
    wide = np.full((shape[0], 2 * shape[1]), np.nan, F32)
    wide[:, ::2] = x
    return {"transposed": np.asfortranarray(x), "every second column": wide[:, ::2], "backwards": x[::-1].copy()[::-1]}


@pytest.mark.filterwarnings("ignore::fusionreg.core.runtime.FallbackWarning")
def test_the_memory_order_of_the_operands_moves_no_mask(runtime):
    """Also where no kernel takes the view and the unfused operators run, and for the gradient that comes in."""
    shape = (6, 40)
    one, zero = np.ones(40, F32), np.zeros(40, F32)
    for name, x in views(shape).items():
        y = runtime.call(FORWARD, x, RNG, np.zeros(shape, F32), one, zero, p=P)
        np.testing.assert_array_equal(y > y.min(axis=-1, keepdims=True), kept(shape), err_msg=name)
        dense = np.ascontiguousarray(x)
        np.testing.assert_allclose(y, runtime.call(FORWARD, dense, RNG, 0 * dense, one, zero, p=P), atol=1e-5)
        dx, *_ = runtime.call(BACKWARD, x - 1.5, dense, RNG, 0 * dense, one, p=P)
        np.testing.assert_array_equal(dx != 0, kept(shape), err_msg=name)


@pytest.mark.filterwarnings("ignore::fusionreg.core.runtime.FallbackWarning")
def test_elements_of_an_expanded_operand_are_dropped_one_by_one(runtime):
    x = np.broadcast_to(1 + np.arange(64, dtype=F32) / 64, (32, 64))
    y = runtime.call("norm.swish_dropout", x, RNG, p=P)
    np.testing.assert_array_equal(y != 0, kept(x.shape))
    assert len({row.tobytes() for row in y != 0}) == 32


@pytest.mark.parametrize("kind", [F16, BF16, F32], ids=str)
def test_what_is_kept_is_scaled_by_the_quantised_probability(runtime, kind):
    """From 40 on Swish is the identity: each value is 0 or x / (1 - p), rounded once."""
    x = np.linspace(40, 90, 6 * 72).reshape(6, 72).astype(kind)
    y = runtime.call("norm.swish_dropout", x, RNG, p=P)
    want = np.where(kept(x.shape), x.astype(np.float64) * SCALE, 0).astype(kind)
    ulp = np.abs(y.astype(np.float64) - want.astype(np.float64)) / np.spacing(want.astype(np.float32) + 1)
    if kind == F32:
        assert ulp.max() <= 1
    else:
        np.testing.assert_array_equal(y, want)


def test_a_fused_chain_is_one_rounding_from_the_unfused_one(runtime):
    """bf16 x · sigmoid(x): rounded once and twice differ by at most one step of bf16, in about a quarter."""
    x = np.random.default_rng(5).standard_normal((64, 64)).astype(BF16)
    y = runtime.call("norm.swish_dropout", x, RNG, p=0.0)
    wide = x.astype(np.float64)
    once = (wide / (1 + np.exp(-wide))).astype(BF16)
    twice = (wide * (1 / (1 + np.exp(-wide))).astype(BF16).astype(np.float64)).astype(BF16)
    np.testing.assert_array_equal(y, once)
    steps = np.abs(y.view(np.int16).astype(int) - twice.view(np.int16))
    assert steps.max() == 1 and 0.1 < (steps > 0).mean() < 0.4
