"""``FusionSpec.backward``: what it may name, what it resolves to, and what a wrong one costs."""

from __future__ import annotations

import re

import pytest
from registry_kit import module, only, spec

from fusionreg import KernelSpec, load_registry
from fusionreg.core.spec import AttributeSpec, Backward, FusionSpec
from fusionreg.core.validate.gradients import Source, gradients

EPSILON = {"epsilon": AttributeSpec(type="float", default=1e-5)}
FORWARD = {
    "name": "acme.norm", "pattern": "h = Add(x, residual)\ny = RMSNormalization(h, scale, epsilon=epsilon)",
    "inputs": {"x": "T[M N]", "residual": "T[M N]", "scale": "T[N]"}, "outputs": {"y": "T[M N]", "h": "T[M N]"},
    "attributes": EPSILON, "backward": Backward(fusion="acme.norm_backward", gradients={"residual": "dx"}),
}  # fmt: skip
BACKWARD = {
    "name": "acme.norm_backward",
    "pattern": "r, dscale = fusionreg.RMSNormalizationGrad(dy, h, scale, epsilon=epsilon)\ndx = Add(r, dh)",
    "inputs": {"dy": "T[M N]", "dh": "T[M N]", "h": "T[M N]", "scale": "T[N]"},
    "outputs": {"dx": "T[M N]", "dscale": "T[N]"}, "attributes": EPSILON,
}  # fmt: skip


def catalog(forward=(), backward=()):
    specs = [spec(**{**FORWARD, **dict(forward)}), spec(**{**BACKWARD, **dict(backward)})]
    return only(("acme", module(register_fusions=specs)))


def test_what_it_resolves_to():
    found = gradients(catalog()["acme.norm"], catalog().fusions)
    assert found.fusion == "acme.norm_backward" and found.attributes == ("epsilon",)
    assert found.sources == {
        "dy": Source("gradient", "y", 0), "dh": Source("gradient", "h", 1), "h": Source("output", "h", 1),
        "scale": Source("input", "scale", 2),
    }  # fmt: skip
    assert found.results == {"x": "dx", "residual": "dx", "scale": "dscale"} and found.outputs == ("dx", "dscale")
    assert found.differentiable == {"y", "h"}
    assert gradients(catalog()["acme.norm_backward"], catalog().fusions) is None


def test_an_output_whose_gradient_is_not_read():
    changed = {"inputs": {n: t for n, t in BACKWARD["inputs"].items() if n != "dh"},
               "pattern": "dx, dscale = fusionreg.RMSNormalizationGrad(dy, h, scale, epsilon=epsilon)"}  # fmt: skip
    loaded = catalog(backward=changed)
    assert not loaded.failures
    assert gradients(loaded["acme.norm"], loaded.fusions).differentiable == {"y"}


def test_inputs_of_another_name():
    """The backward fusion's ``mean`` is not the forward one's, which is the running mean."""
    loaded = load_registry(allow=("norm",))
    found = gradients(loaded["norm.batchnorm_relu"], loaded.catalog.fusions)
    assert found.sources["mean"] == Source("output", "saved_mean", 3)
    assert found.results == {"x": "dx", "scale": "dscale", "bias": "dbias"}
    assert found.refusal({"x", "var"}) == "norm.batchnorm_relu_backward gives no gradient of var"


def test_what_left_out_attributes_mean():
    """A call that leaves an attribute out means the forward fusion's default in both passes."""
    other = {"attributes": {"epsilon": AttributeSpec(type="float", default=1e-6)}}
    assert gradients(catalog()["acme.norm"], catalog().fusions).defaults == {}
    loaded = catalog(backward=other)
    assert gradients(loaded["acme.norm"], loaded.fusions).defaults == {"epsilon": 1e-5}


def test_every_backward_fusion_that_ships_is_named():
    loaded = load_registry()
    named = {f.spec.backward.fusion for f in loaded.values() if f.spec.backward is not None}
    # gradients behind a Dropout, which is no part of the fusion that they belong to: matched in graphs alone
    dropped = {f"attention.{mask}softmax_dropout_backward" for mask in ("", "mask_", "causal_")}
    assert {n for n in loaded if n.endswith("_backward")} - named == dropped


def test_an_absent_input_that_the_gradients_need():
    loaded = catalog(
        forward={"pattern": "h = optional(Add)(x, residual)\ny = RMSNormalization(h, scale, epsilon=epsilon)"},
        backward={
            "inputs": {**BACKWARD["inputs"], "residual": "T[M N]"},
            "pattern": "r, dscale = fusionreg.RMSNormalizationGrad(dy, h, scale, epsilon=epsilon)\n"
            "s = Add(r, dh)\nz = Mul(residual, 0.0)\ndx = Add(s, z)",
        },
    )
    assert not loaded.failures
    found = gradients(loaded["acme.norm"], loaded.fusions)
    assert found.refusal({"x"}) is None
    assert found.refusal({"x"}, {"residual"}) == "acme.norm_backward needs residual, which is absent"
    assert found.refusal((), {"residual"}) is None


@pytest.mark.parametrize(
    ("forward", "backward", "words"),
    [
        ({"backward": Backward(fusion="acme.norm_backwards")}, {}, "did you mean acme.norm_backward"),
        ({"backward": Backward(fusion="acme.norm_backward", gradients={"resid": "dx"})}, {}, "unknown 'resid'"),
        ({"backward": Backward(fusion="acme.norm_backward", gradients={"x": "dxx"})}, {}, "unknown 'dxx'"),
        ({"backward": Backward(fusion="acme.norm_backward", inputs={"hh": "h"})}, {}, "unknown 'hh'"),
        ({"backward": Backward(fusion="acme.norm_backward", inputs={"h": "hh"})}, {}, "nothing that the forward"),
        ({"backward": Backward(fusion="acme.norm_backward", inputs={"h": "scale"})}, {}, r"it is T\[M N\] — T\[N\]"),
        ({"backward": Backward(fusion="acme.norm_backward", gradients={"scale": "dx"})}, {}, r"dx is T\[M N\]"),
        ({"attributes": {}, "pattern": FORWARD["pattern"].replace(", epsilon=epsilon", "")},
         {"attributes": {"epsilon": AttributeSpec(type="float")}}, "needs epsilon"),
        ({}, {"dtypes": {"T": ("float16",)}}, "has no T = float32"),
        ({"backward": Backward(fusion="acme.norm")}, {}, "reads no gradient.*gives y, h — d<input> among"),
    ],
)  # fmt: skip
def test_wrong_ones_are_not_loaded(forward, backward, words):
    """A row names the field; the fusion is lost with its kernels, and nothing else."""
    loaded = catalog(forward, backward)
    assert "acme.norm" not in loaded.fusions and "acme.norm_backward" in loaded.fusions
    assert [f.fusion for f in loaded.failures] == ["acme.norm"] * len(loaded.failures)
    assert all(f.stage == "validate" and f.field.startswith("backward") for f in loaded.failures)
    assert re.search(words, " ".join(f.reason for f in loaded.failures))


def test_kernels_of_a_lost_fusion_are_no_second_failure():
    kernel = KernelSpec(name="plain", template="k.cu.j2", grid="M", block="32")
    loaded = catalog(forward={"backward": Backward(fusion="acme.nothing"), "kernels": (kernel,)})
    assert [f.fusion for f in loaded.failures] == ["acme.norm"]


def test_it_survives_json():
    made = FusionSpec(**{"api": 1, "dtypes": {"T": ("float32",)}, **FORWARD})
    assert FusionSpec.model_validate_json(made.model_dump_json()) == made
