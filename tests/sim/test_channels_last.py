"""Memory order of outputs, as specs state it: channels last gives channels last, for every array library and every part
that makes outputs; and float attributes that kernels take as double."""

from __future__ import annotations

import numpy as np
import plugin_kit
import pytest
import torch

from fusionreg.core.conformance import derive, run
from fusionreg.core.problem import Tensor, bind
from fusionreg.core.render import render
from fusionreg.core.runtime import Runtime
from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec

LEAKY = """\
{{ signature }} {
  const long long i = blockIdx.x * 256LL + threadIdx.x, n = i / (C * S), c = i / S % C, s = i % S;  // i: [N C S]
  if (i >= N * C * S) return;
  const float v = fr::to_float(x[n * x_stride_0 + c * x_stride_1 + s * x_stride_2]);
  const T result = fr::from_float<T>(v > 0.0f ? v : static_cast<float>(alpha * v));
  y[n * y_stride_0 + c * y_stride_1 + s * y_stride_2] = result;
}
"""
LAST = "S == 1 or C == 1 or stride({0}, 1) == 1"


def catalog(folder, requires=(), **fields):
    spec = FusionSpec(
        api=1,
        name="acme.leaky",
        pattern="y = LeakyRelu(x, alpha=alpha)",
        inputs={"x": "T[N C S ...]"},
        outputs={"y": "T[N C S ...]"},
        dtypes={"T": ("float32",)},
        attributes={"alpha": AttributeSpec(type="float", default=1.0, double=True)},
        layouts={"y": "x"},
        kernels=(
            KernelSpec(
                name="any", template="leaky.cu.j2", strides=("x", "y"), requires=requires,
                grid="max(1, ceildiv(N * C * S, 256))", block="256",
            ),
        ),
        **fields,
    )  # fmt: skip
    return plugin_kit.catalog(folder, {"leaky.cu.j2": LEAKY}, spec)


def images(order):
    return torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5).contiguous(memory_format=order)


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format], ids=str)
def test_a_new_output_lies_as_its_input_does(tmp_path, sim_cache, order):
    runtime, x = Runtime(catalog(tmp_path), device="sim", cache=sim_cache), images(order)
    for given in (x, x.numpy()):
        y = runtime.call("acme.leaky", given)
        strides = y.stride() if isinstance(y, torch.Tensor) else tuple(s // 4 for s in y.strides)
        assert strides == x.stride() and np.array_equal(np.asarray(y), x.numpy())


def test_an_input_with_gaps_gives_a_row_major_output(tmp_path):
    entry, x = catalog(tmp_path)["acme.leaky"], images(torch.channels_last)
    problem = bind(entry, {"x": Tensor("float32", (2, 3, 4, 5), x.stride())}, {}, "sm_90a")
    assert problem.strides == {"y": x.stride()}
    sliced = Tensor("float32", (2, 3, 4, 5), (120, 1, 30, 6))  # three channels of six
    assert not bind(entry, {"x": sliced}, {}, "sm_90a").strides
    brought = bind(entry, {"x": Tensor("float32", (2, 3, 4, 5), x.stride()), "y": sliced}, {}, "sm_90a")
    assert brought.strides == {"y": sliced.strides}


def test_conformance_tries_kernels_for_channels_last_on_such_tensors(tmp_path, sim_cache):
    cases = (Case(name="mine", axes={"N": 2, "C": 5, "S": 7}, layouts={"x": "channels_last"}),)
    extents = {"N": 2, "C": 6, "S": 10}
    found = catalog(tmp_path, (LAST.format("x"), LAST.format("y")), cases=cases, extents=extents)
    entry = found["acme.leaky"]
    trials = derive(entry, entry.kernel("any"), "sm_90a", "quick")
    base = next(t for t in trials if t.name == "float32-base")
    assert dict(base.axes) == extents and dict(base.layouts) == {"x": "channels_last"}
    report = run(found, ["acme.leaky"], device="sim", cases="quick", cache=sim_cache)
    assert report.ok and report.counts["PASSED"] > 10, "\n".join(map(str, report.failures))


def test_a_double_attribute_is_not_rounded(tmp_path, sim_cache):
    """As a float32, 1 + 2^-24 - 2^-40 would be 1, and three times that one step of float32 less."""
    found = catalog(tmp_path)
    entry = found["acme.leaky"]
    problem = bind(entry, {"x": Tensor.contiguous("float32", (1, 2, 3))}, {}, "sm_90a")
    arguments = render(entry, entry.kernel("any"), problem, {}).arguments
    assert [a.ctype for a in arguments if a.name == "alpha"] == ["double"]
    x = np.full((1, 2, 3), -3.0, np.float32)
    y = Runtime(found, device="sim", cache=sim_cache).call("acme.leaky", x, alpha=1.0 + 2.0**-24 - 2.0**-40)
    assert np.array_equal(y, np.full_like(x, -3.0 - 2.0**-22))


@pytest.mark.parametrize(
    "fields", [{"layouts": {"y": "z"}}, {"layouts": {"x": "x"}}, {"extents": {"Q": 4}}, {"extents": {"N": 0}}], ids=str
)
def test_what_the_spec_says_of_memory_is_checked(tmp_path, fields):
    spec = catalog(tmp_path / "good")["acme.leaky"].spec.model_copy(update=fields)
    spec = spec.model_copy(update={"kernels": tuple(k.model_copy(update={"fusion": None}) for k in spec.kernels)})
    with pytest.raises(AssertionError, match=next(iter(fields))):
        plugin_kit.catalog(tmp_path / "bad", {"leaky.cu.j2": LEAKY}, spec)
