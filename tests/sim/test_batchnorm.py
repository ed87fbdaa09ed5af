"""Batch normalisation in training: values and gradients against torch, in both memory orders, and what went wrong in
public: variances that cancel, statistics of one element, momenta at their ends.

Calls go through the runtime, in the simulator; where it matters which kernel runs, the test asks.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from catalogs import shipped

from fusionreg.core.conformance import run, run_mutants
from fusionreg.core.conformance.cases import derive
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import edit
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime import Runtime

F16, BF16, F32 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("float32")
CATALOG = shipped("norm")
BATCH = sorted(name for name in CATALOG.fusions if name.startswith("norm.batchnorm_"))
#: Kernels whose slots are those of the same kernels without the sum.
SAME = [f"norm.batchnorm_add_relu{d}.gated/channels_last" for d in ("", "_backward")]
LAYOUTS = pytest.mark.parametrize("last", [True, False], ids=["nhwc", "nchw"])
ADDS = pytest.mark.parametrize("add", [False, True], ids=["relu", "add_relu"])
MOMENTUM = {"momentum": 0.9, "unbiased": 1}


@pytest.fixture(scope="module")
def runtime(sim_cache):
    return Runtime(CATALOG, device="sim", cache=sim_cache)


def maps(count, shape, last, kind=torch.float32, seed=0):
    """Random tensors of a shape [N C H W], channels last or not."""
    made = torch.Generator().manual_seed(seed)
    order = torch.channels_last if last else torch.contiguous_format
    found = [torch.randn(shape, generator=made).to(kind).contiguous(memory_format=order) for _ in range(count)]
    return found if count > 1 else found[0]


def parameters(channels, kind=torch.float32, seed=1):
    """Scale, bias, running mean and variance."""
    made = torch.Generator().manual_seed(seed)
    scale, bias, mean, var = torch.randn(4, channels, generator=made)
    return [v.to(kind) for v in (scale, bias, mean, var.abs() + 0.5)]


def forward(runtime, x, given, residual=None, **attributes):
    name = "norm.batchnorm_relu" if residual is None else "norm.batchnorm_add_relu"
    return runtime.call(name, x, *given, *([] if residual is None else [residual]), **attributes)


def torch_forward(x, given, residual=None, momentum=0.1, eps=1e-5):
    """What torch gives for the same: y and the new running statistics."""
    scale, bias, mean, var = given
    mean, var = mean.clone(), var.clone()
    z = torch.batch_norm(x, scale, bias, mean, var, True, momentum, eps, False)
    return torch.relu(z if residual is None else z + residual), mean, var


def kernel_of(runtime, name):
    """The kernel that the last calls of a fresh runtime took."""
    return {k.split("/")[1] for k in runtime.kernels_used if k.startswith(f"{name}/")}


@pytest.mark.parametrize("fusion", BATCH)
def test_conforms(fusion, sim_cache):
    every = [k.key for e in CATALOG.entries([fusion]) for k in e.kernels]
    kernels = [k for k in every if k not in SAME]
    report = run(CATALOG, [fusion], device="sim", cases="quick", kernels=kernels, cache=sim_cache)
    assert report.ok, "\n".join(map(str, report.failures))


#: Kernel → faults: what its slot is told of an element.
AT = "image, c, place + at + u * 32 * VEC"
FAULTS = {
    "planes": [
        edit("first_channel", AT, AT.replace(" c,", " 0,")),
        edit("first_chunk", AT, AT.replace("place + at", "at")),
        edit("another_element", f"start + at + u * 32 * VEC, {AT}", f"start + at, {AT}"),
    ],
    "channels_last": [
        edit("first_channel", "at / S, c, at % S", "at / S, 0, at % S"),
        edit("first_place", "at / S, c, at % S", "at / S, c, 0"),
        edit("another_element", "at * y_pitch + c", "row * y_pitch + c"),
    ],
}


@pytest.mark.parametrize("kernel", FAULTS)
def test_what_stands_behind_an_output_gets_its_own_elements(kernel, sim_cache):
    wrong, names = FAULTS[kernel], [m.name for m in FAULTS[kernel]]
    fusion = "norm.batchnorm_relu.gated"
    verdicts = run_mutants(
        CATALOG, [fusion], device="sim", kernels=[kernel], extra=wrong, only=names, cache=sim_cache
    )
    assert len(verdicts) == len(wrong) and all(v.applies and not v.survived for v in verdicts), verdicts


@LAYOUTS
@ADDS
@pytest.mark.parametrize("shape", [(3, 16, 5, 6), (2, 37, 3, 3), (2, 520, 2, 2), (5, 3, 1, 1), (1, 8, 40, 41)])
def test_as_torch(sim_cache, last, add, shape):
    runtime = Runtime(CATALOG, device="sim", cache=sim_cache)
    (x, residual), given = maps(2, shape, last), parameters(shape[1])
    residual = residual if add else None
    y, mean, var, saved_mean, saved_inverse = forward(runtime, x, given, residual, **MOMENTUM)
    for got, want in zip((y, mean, var), torch_forward(x, given, residual), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
    rows = x.double().transpose(0, 1).reshape(shape[1], -1)
    torch.testing.assert_close(saved_mean.double(), rows.mean(1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(saved_inverse.double(), (rows.var(1, unbiased=False) + 1e-5).rsqrt(), rtol=1e-6, atol=0)
    assert y.stride() == x.stride()
    if shape[2] > 1:
        name = "norm.batchnorm_add_relu" if add else "norm.batchnorm_relu"
        assert kernel_of(runtime, name) <= {"channels_last" if last else "planes", "plain"}


@pytest.mark.parametrize(
    ("last", "kernel"), [(True, "channels_last"), (False, "planes")], ids=["channels_last", "planes"]
)
def test_large_maps_take_their_own_kernel_without_a_copy(sim_cache, last, kernel):
    runtime = Runtime(CATALOG, device="sim", cache=sim_cache)
    x, given = maps(1, (8, 64, 16, 16), last, torch.float16), parameters(64)
    y = forward(runtime, x, given, **MOMENTUM)[0]
    assert kernel_of(runtime, "norm.batchnorm_relu") == {kernel} and y.stride() == x.stride()
    torch.testing.assert_close(y, torch_forward(x.float(), given)[0].half(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("fusion", [name for name in BATCH if "." not in name[5:]])
def test_more_tiles_than_stay_in_shared_memory(fusion, sim_cache):
    entry, executor = CATALOG[fusion], SimExecutor(sim_cache, target="sm_90a", multiprocessors=1)
    trials = derive(entry, entry.kernel("channels_last"), "sm_90a", "quick")
    base = next(t for t in trials if t.dtypes["T"] == "float16" and t.name.endswith("slices"))
    trial = replace(base, axes=FrozenDict({**base.axes, "N": 17, "C": 32, "S": 245}), leading=(1,), params=FrozenDict())
    found = prepare(entry, entry.kernel("channels_last"), trial, executor)
    assert isinstance(found, Job) and found.candidate.params["PINNED"] > 0, found
    result = execute(found, executor, CATALOG.ops)
    assert result.status is Status.PASSED, result


@LAYOUTS
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "alike"])
def test_sixteen_bits(runtime, last, kind, mixed):
    """Parameters and statistics in float32, or in the dtype of the map; those of the batch are float32 in both."""
    x, given = maps(1, (4, 24, 7, 5), last, kind), parameters(24, torch.float32 if mixed else kind)
    found = forward(runtime, x, given, **MOMENTUM)
    assert [v.dtype for v in found] == [kind, given[2].dtype, given[3].dtype, torch.float32, torch.float32]
    wanted = torch_forward(x.float(), [v.float() for v in given])
    for got, want in zip(found, wanted, strict=False):
        tolerance = 2e-6 if got.dtype == torch.float32 else 2 * float(torch.finfo(kind).eps)
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


@LAYOUTS
@ADDS
@pytest.mark.parametrize("shape", [(3, 16, 5, 6), (2, 37, 3, 3), (4, 8, 16, 17)])
def test_gradients_as_autograd(runtime, last, add, shape):
    x, dy, residual = maps(3, shape, last)
    given = parameters(shape[1])
    y, _, _, mean, inverse = forward(runtime, x, given, residual if add else None, **MOMENTUM)
    leaves = [v.double().requires_grad_() for v in (x, given[0], given[1], residual)]
    z = torch.nn.functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True, 0.1, 1e-5)
    torch.relu(z + leaves[3] if add else z).backward(dy.double())
    if add:
        found = runtime.call("norm.batchnorm_add_relu_backward", dy, x, y, given[0], mean, inverse)
        wanted = [leaves[i].grad for i in (0, 3, 1, 2)]
    else:
        found = runtime.call("norm.batchnorm_relu_backward", dy, x, *given[:2], mean, inverse)
        wanted = [leaf.grad for leaf in leaves[:3]]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
        assert got.ndim < 4 or got.stride() == x.stride()


@LAYOUTS
@pytest.mark.parametrize(("at", "step"), [(2e4, 0.25), (1e4, 1.0)])
def test_variance_does_not_cancel(runtime, last, at, step):
    """pytorch#54293: E[x^2] - E[x]^2 loses all of it."""
    x = (at + step * (torch.arange(4 * 8 * 6 * 6) // 8 % 4)).reshape(4, 6, 6, 8).permute(0, 3, 1, 2)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    ones, zeros = torch.ones(8), torch.zeros(8)
    y, _, var, _, inverse = forward(runtime, x, (ones, zeros, zeros, ones), epsilon=0.0, momentum=0.0)
    wanted = x.double().var((0, 2, 3), unbiased=False)
    torch.testing.assert_close(var.double(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(inverse.double(), wanted.rsqrt(), rtol=1e-5, atol=0)
    assert float(y.max()) == pytest.approx(1.3416408, rel=1e-4)


@LAYOUTS
@pytest.mark.parametrize("unbiased", [0, 1])
def test_one_element_a_channel(runtime, last, unbiased):
    """Its variance is 0 and y is relu(bias); torch's running variance, of 0 / 0, is NaN, ONNX's is not."""
    x, given = maps(1, (1, 8, 1, 1), last), parameters(8)
    y, mean, var, saved_mean, inverse = forward(runtime, x, given, momentum=0.75, unbiased=unbiased)
    torch.testing.assert_close(y[0, :, 0, 0], torch.relu(given[1]))
    torch.testing.assert_close(mean, 0.75 * given[2] + 0.25 * x[0, :, 0, 0])
    torch.testing.assert_close(saved_mean, x[0, :, 0, 0])
    torch.testing.assert_close(inverse, torch.full((8,), 1e-5).rsqrt())
    torch.testing.assert_close(var, torch.full((8,), torch.nan) if unbiased else 0.75 * given[3], equal_nan=True)


@pytest.mark.parametrize("momentum", [0.0, 1.0, 0.1, 0.99])
def test_momentum_to_its_ends(runtime, momentum):
    """torch's momentum is what the batch adds; 1 - 0.9 in float32 is off by two units of the last place, and must not
    be taken there."""
    x, given = maps(1, (4, 8, 5, 5), True), parameters(8)
    given[2:] = [torch.zeros(8), torch.zeros(8)]
    _, mean, var, *_ = forward(runtime, x, given, momentum=1.0 - momentum, unbiased=1)
    rows = x.double().transpose(0, 1).reshape(8, -1)
    torch.testing.assert_close(mean.double(), momentum * rows.mean(1), rtol=3e-7, atol=1e-9)
    torch.testing.assert_close(var.double(), momentum * rows.var(1), rtol=3e-7, atol=0)


def test_cumulative_average(runtime):
    """torch's momentum=None: the n-th batch counts 1 / n, so the averages are those of all batches."""
    given = parameters(8)
    norm = torch.nn.BatchNorm2d(8, momentum=None)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    for n in range(1, 4):
        x = maps(1, (3, 8, 4, 4), True, seed=n) + n
        norm(x)
        _, mean, var, *_ = forward(runtime, x, (*given[:2], mean, var), momentum=1.0 - 1.0 / n, unbiased=1)
    torch.testing.assert_close(mean, norm.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(var, norm.running_var, rtol=1e-6, atol=1e-6)


@LAYOUTS
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 2.0])
def test_epsilon(runtime, last, epsilon):
    """A channel of equal elements has variance 0; with an epsilon of 0, which torch refuses, it is 0 times infinity."""
    x, given = maps(1, (2, 4, 3, 3), last), parameters(4)
    x[:, 1] = 3.0
    y, *_, inverse = forward(runtime, x, given, **MOMENTUM, epsilon=epsilon)
    wanted = torch_forward(x, given, eps=epsilon)[0]
    if epsilon == 0.0:
        assert torch.isnan(y[:, 1]).all() and torch.isinf(inverse[1])
        y[:, 1] = wanted[:, 1] = 0.0
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


@LAYOUTS
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_channel_alone(runtime, last, kind, odd):
    x, given = maps(1, (3, 24, 5, 5), last, kind), parameters(24)
    x[1, 5, 2, 3] = odd
    y, mean, var, saved_mean, inverse = forward(runtime, x, given, **MOMENTUM)
    assert torch.isnan(y[:, 5]).all() and torch.isnan(var[5]) and torch.isnan(inverse[5])
    torch.testing.assert_close(saved_mean[5], torch.tensor(odd), equal_nan=True)
    torch.testing.assert_close(mean[5], torch.tensor(odd), equal_nan=True)
    others = [c for c in range(24) if c != 5]
    assert all(torch.isfinite(v).all() for v in (y[:, others], mean[others], var[others], inverse[others]))


@LAYOUTS
def test_squares_that_overflow(runtime, last):
    """pytorch#162489: deviations of 1e30 have squares beyond float32, and a value of their own all the same."""
    x = maps(1, (2, 4, 5, 5), last).sign() * 1e30
    given = [torch.ones(4), torch.zeros(4), torch.zeros(4), torch.ones(4)]
    y, mean, var, _, inverse = forward(runtime, x, given, **MOMENTUM)
    rows = x.double()
    centred = rows - rows.mean((0, 2, 3), keepdim=True)
    wanted = torch.relu(centred * rows.var((0, 2, 3), unbiased=False, keepdim=True).rsqrt())
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mean.double(), 0.1 * rows.mean((0, 2, 3)), rtol=1e-5, atol=0)
    assert torch.isinf(var).all() and (inverse > 0).all()


def test_channels_of_a_larger_map(runtime):
    """A slice of the channels of a map that is channels last is read where it lies."""
    whole, given = maps(1, (3, 48, 4, 5), True), parameters(16)
    x = whole[:, 16:32]
    y = forward(runtime, x, given, **MOMENTUM)[0]
    torch.testing.assert_close(y, torch_forward(x, given)[0], rtol=2e-5, atol=2e-6)


def test_large_maps_of_any_memory_order(sim_cache):
    """A block has a whole channel: its threads' own sums of so many elements would be off in single precision."""
    x = 1.1 * maps(1, (2, 96, 96, 8), False).sign().half().permute(3, 0, 1, 2)  # images last; the same error each time
    given = [torch.ones(2), torch.zeros(2), torch.zeros(2), torch.ones(2)]
    runtime = Runtime(CATALOG, device="sim", cache=sim_cache)
    *_, mean, inverse = forward(runtime, x, given, **MOMENTUM)
    assert kernel_of(runtime, "norm.batchnorm_relu") == {"plain"}
    rows = x.double()
    var = rows.var((0, 2, 3), unbiased=False)
    torch.testing.assert_close(inverse.double(), (var + 1e-5).rsqrt(), rtol=1.2e-7, atol=0)
    torch.testing.assert_close(mean.double(), rows.mean((0, 2, 3)), rtol=1e-7, atol=1e-9)


def test_a_map_without_places_and_one_without_images(runtime):
    given = parameters(8)
    for shape in ((3, 8, 0, 4), (0, 8, 4, 4)):
        y, mean, var, saved_mean, _ = forward(runtime, torch.empty(shape), given, **MOMENTUM)
        assert y.shape == shape and all(torch.isnan(v).all() for v in (mean, var, saved_mean))
