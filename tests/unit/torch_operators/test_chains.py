"""Gradients of fusions that name no backward fusion: those of torch's own operators, from inputs and outputs alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fusionreg.core.errors import ArgumentError

ACTIVATIONS = {
    "Relu": torch.relu, "Gelu": F.gelu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Swish": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "none": lambda x: x,
}  # fmt: skip
ALL = pytest.mark.parametrize("activation", ACTIVATIONS)


def layer(activation):
    def unfused(x, w, scale, bias):
        return ACTIVATIONS[activation](x @ w * scale + bias)

    return unfused


def inputs(dtype=torch.float32, grad=True):
    torch.manual_seed(1)
    made = torch.randn(2, 3, 16), torch.randn(16, 8) / 4, torch.rand(1) + 0.5, torch.randn(8)
    return [t.to(dtype).requires_grad_(grad) for t in made]


@pytest.fixture
def fused(operators):
    def bind(activation):
        return lambda *tensors: operators["gemm.scale_bias"](*tensors, activation=activation)

    return bind


def slopes(f, tensors, way, dtype=None):
    """Value and gradients of ``f``, in another dtype if one is given."""
    given = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    y = f(*given)
    return [y, *torch.autograd.grad(y, given, way.to(y.dtype))]


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_keep_the_numeric_contract(fused, activation, dtype):
    """Against float64: no more than twice the error of the unfused chain at these dtypes, and one ulp."""
    tensors = inputs(dtype)
    way = torch.randn(2, 3, 8).to(dtype)
    exact = slopes(layer(activation), tensors, way, torch.float64)
    chain = slopes(layer(activation), tensors, way)
    for got, own, right in zip(slopes(fused(activation), tensors, way), chain, exact, strict=True):
        assert got.dtype == dtype and got.shape == right.shape
        ulp = torch.finfo(dtype).eps * right.abs().clamp(min=torch.finfo(dtype).tiny)
        allowed = 2 * (own.double() - right).abs().max() + ulp
        assert bool(((got.double() - right).abs() <= allowed).all())


@ALL
def test_saved_are_inputs_and_outputs_alone(fused, activation):
    saved, tensors = [], inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = fused(activation)(*tensors)
    known = {t.data_ptr(): n for n, t in zip(("x", "w", "scale", "bias", "y"), (*tensors, y), strict=True)}
    names = [known[t.data_ptr()] for t in saved]
    from_result = {"Relu", "Sigmoid", "Tanh"}
    if activation in from_result:
        assert names == ["x", "w", "scale", "y"], "x @ w is in the gradient of its scale"
    else:
        assert names == ["x", "w", "scale"] + ["bias"] * (activation != "none")


def test_nothing_is_multiplied_again_where_the_result_tells(operators):
    """Without a scale, two products in the backward pass: those of the gradients."""
    x, w, _, bias = inputs()

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
            return func(*args, **(kwargs or {}))

    for activation, expected in (("Relu", 2), ("Tanh", 2), ("Gelu", 3)):
        y = operators["gemm.bias"](x, w, bias, activation=activation)
        with Products() as seen:
            y.sum().backward()
        assert seen.count == expected, activation


def test_special_values_are_those_of_the_unfused_chain(operators):
    op = operators["gemm.bias"]
    x = torch.tensor([[1.0, 0.0], [float("nan"), 0.0], [float("inf"), 0.0], [-3.0, 0.0]])
    w, bias = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([0.0, -2.0])
    for activation in ("Relu", "Sigmoid", "Gelu"):
        way = torch.ones(4, 2)
        found = slopes(lambda *t, a=activation: op(*t, activation=a), (x, w, bias), way)
        right = slopes(lambda x, w, b, a=activation: ACTIVATIONS[a](x @ w + b), (x, w, bias), way)
        assert not bool((right[0].isfinite() & found[0].isnan()).any())
        for f, r in zip(found[1:], right[1:], strict=True):
            torch.testing.assert_close(f, r, equal_nan=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3)])
def test_only_gradients_that_are_wanted(fused, wanted):
    tensors = [t.requires_grad_(k in wanted) for k, t in enumerate(inputs(grad=False))]
    y, right = fused("Gelu")(*tensors), layer("Gelu")(*tensors)
    asked = [tensors[k] for k in wanted]
    for f, r in zip(torch.autograd.grad(y.sum(), asked), torch.autograd.grad(right.sum(), asked), strict=True):
        torch.testing.assert_close(f, r, rtol=2e-5, atol=2e-5)
    fused("Gelu")(*tensors).sum().backward()
    assert [k for k, t in enumerate(tensors) if t.grad is not None] == list(wanted)


@pytest.mark.parametrize("activation", ["Relu", "Swish", "Gelu", "Tanh"])
def test_second_derivatives(fused, activation):
    def second(f):
        given = [t.detach().requires_grad_() for t in inputs()]
        first = torch.autograd.grad(f(*given).pow(3).sum(), given, create_graph=True)
        return torch.autograd.grad(sum((g / 16).sin().sum() for g in first), given)  # so small that sines are no noise

    for f, r in zip(second(fused(activation)), second(layer(activation)), strict=True):
        torch.testing.assert_close(f, r, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x, *t: torch.func.grad(lambda *a: f(*a).pow(2).sum(), argnums=(0, 1, 2, 3))(x, *t),
        lambda f, x, *t: torch.func.vjp(f, x, *t)[1](torch.ones(2, 3, 8)),
        lambda f, x, *t: torch.vmap(torch.func.grad(lambda v: f(v, *t).sum()))(x),
        lambda f, x, *t: torch.vmap(f, (0, None, None, None))(x, *t),
        lambda f, x, *t: torch.func.grad(lambda v: torch.func.grad(lambda u: f(u, *t).pow(2).sum())(v).sum())(x),
    ],
    ids=["grad", "vjp", "per_sample", "vmap", "second"],
)
def test_transforms(fused, transform):
    tensors = inputs(grad=False)
    found, right = (transform(f, *tensors) for f in (fused("Gelu"), layer("Gelu")))
    for f, r in zip(*(v if isinstance(v, tuple) else (v,) for v in (found, right)), strict=True):
        torch.testing.assert_close(f, r, rtol=5e-5, atol=5e-5)


def test_modes(fused):
    tensors = inputs()
    with torch.no_grad():
        assert not fused("Relu")(*tensors).requires_grad
    with torch.inference_mode():
        assert fused("Relu")(*tensors).is_inference()
    kept = checkpoint(lambda *t: fused("Gelu")(*t).sin(), *tensors, use_reentrant=False)
    right = torch.autograd.grad(layer("Gelu")(*tensors).sin().sum(), tensors)
    for f, r in zip(torch.autograd.grad(kept.sum(), tensors), right, strict=True):
        torch.testing.assert_close(f, r, rtol=2e-5, atol=2e-5)


def test_autocast_of_the_backward_pass_changes_nothing(fused):
    """The fused call was cast as its rule says; what its gradients compute again is of those dtypes."""
    tensors = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fused("Gelu")(*tensors)
        assert y.dtype == torch.bfloat16
        inside = torch.autograd.grad(y.float().sum(), tensors, retain_graph=True)
    outside = torch.autograd.grad(y.float().sum(), tensors)
    for a, b, t in zip(inside, outside, tensors, strict=True):
        assert a.dtype == t.dtype and torch.equal(a, b)
    plain = inputs()
    y = fused("Gelu")(*plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(y.sum(), plain, retain_graph=True)
    for a, b in zip(inside, torch.autograd.grad(y.sum(), plain), strict=True):
        assert torch.equal(a, b)


def channel_affine(x, scale, shift):
    return F.silu(x * scale + shift)


def twelve(x, gain, limit, mask):
    a = x.to(gain.dtype) * gain + 0.5
    clipped = torch.clamp(torch.erf(a), -0.75, 0.75)
    e = torch.exp(torch.where(a > limit, clipped, -clipped))
    return torch.maximum(e, x.to(gain.dtype) * gain).to(x.dtype)


def modulated(a, gate, scale, bias, gain, shift):
    x = a * torch.sigmoid(gate)
    return F.layer_norm(x, (x.shape[-1],), scale, bias, 1e-5) * gain + shift


REGIONS = {
    "pointwise.region.channel_affine": (channel_affine, "bfloat16", [(2, 3, 8), (3, 1), (3, 1)]),
    "pointwise.region.twelve": (twelve, "float16", [(4, 8), (8,), (), (4, 1)]),
    "norm.layernorm.modulated": (modulated, "bfloat16", [(3, 40), (3, 40), (40,), (40,), (40,), (3, 1)]),
}


@pytest.mark.parametrize("name", REGIONS)
def test_regions_and_slots(operators, name):
    """Operands that are broadcast get gradients of their own shapes; bools, and outputs that are, have none."""
    reference, kind, shapes = REGIONS[name]
    entry, generator = operators.registry.catalog[name], torch.Generator().manual_seed(2)
    tensors = []
    for tensor, shape in zip(entry.inputs.values(), shapes, strict=True):
        dtype = getattr(torch, kind if tensor.dtype in entry.spec.dtypes else tensor.dtype)
        x = torch.randn(shape, generator=generator)
        tensors.append(x > 0 if dtype == torch.bool else x.to(dtype).requires_grad_())
    found = operators[name](*tensors)
    outputs = found if isinstance(found, tuple) else (found,)
    assert [o.requires_grad for o in outputs] == [o.is_floating_point() for o in outputs]
    y = outputs[-1]
    wide = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    way = torch.randn(y.shape, generator=generator)
    asked = [t for t in tensors if t.requires_grad]
    got = torch.autograd.grad(y, asked, way.to(y.dtype), allow_unused=True)
    right = torch.autograd.grad(reference(*wide), [t for t in wide if t.requires_grad], way.double(), allow_unused=True)
    rounding = 8 * torch.finfo(getattr(torch, kind)).eps
    for f, r, t in zip(got, right, asked, strict=True):
        assert f.shape == t.shape and f.dtype == t.dtype
        right_one = torch.zeros_like(t).double() if r is None else r
        torch.testing.assert_close(f.double(), right_one, rtol=rounding, atol=rounding * 4)


def test_a_backward_fusion_has_no_second_derivative(operators):
    with pytest.raises(ArgumentError, match=r"no derivative of fusionreg::LayerNormalizationGrad is known"):
        operators["norm.layernorm_backward"](torch.randn(4, 8, requires_grad=True), torch.randn(4, 8), torch.ones(8))


def test_tracers_take_it(fused):
    arguments = tuple(inputs())
    op = torch.ops.fusionreg.gemm_scale_bias.default
    found = torch.library.opcheck(op, arguments, {"activation": "Gelu"})
    assert set(found.values()) == {"SUCCESS"} and len(found) == 4


def test_a_result_that_has_no_derivative_needs_none(operators):
    """The limit is only compared with: as torch has it, what comes of that is no function to differentiate."""
    x, gain, limit = torch.randn(4, 8).half(), torch.randn(8), torch.randn((), requires_grad=True)
    keep, y = operators["pointwise.region.twelve"](x, gain, limit, torch.ones(4, 1, dtype=torch.bool))
    assert not y.requires_grad and not keep.requires_grad
    assert not twelve(x, gain, limit, None).requires_grad
