"""Transforms of ``torch.func``, forward mode, subclasses, foreign devices: right, or an error that says why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusionreg.core.errors import ArgumentError


@pytest.fixture
def op(operators):
    return operators["norm.layernorm"]


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(4, 48), torch.rand(48) + 0.5, torch.randn(48)


def reference(x, scale, bias):
    return F.layer_norm(x, (48,), scale, bias)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=5e-5, atol=5e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x, s, b: torch.vmap(f, (0, None, None))(torch.stack([x, x * 2]), s, b),
        lambda f, x, s, b: torch.vmap(f, (1, None, None), out_dims=1)(torch.stack([x, x * 2], 1), s, b),
        lambda f, x, s, b: torch.func.grad(lambda *a: f(*a).pow(2).sum(), argnums=(0, 1, 2))(x, s, b),
        lambda f, x, s, b: torch.func.vjp(f, x, s, b)[1](x.cos()),
        lambda f, x, s, b: torch.func.jacrev(f, argnums=1)(x, s, b),
        lambda f, x, s, b: torch.vmap(torch.func.grad(lambda v: f(v[None], s, b).pow(3).sum()))(x),
    ],
    ids=["vmap", "vmap_inner", "grad", "vjp", "jacrev", "per_sample"],
)
def test_transforms(op, data, transform):
    found, expected = transform(op, *data), transform(reference, *data)
    for f, e in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, expected)), strict=True):
        close(f, e)


def tangent(op, x, s, b):
    with forward_ad.dual_level():
        return op(forward_ad.make_dual(x, x), s, b)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda op, x, s, b: torch.func.grad(lambda v: torch.func.grad(lambda u: op(u, s, b).pow(3).sum())(v).sum())(x),
        lambda op, x, s, b: torch.func.hessian(lambda v: op(v, s, b).sum())(x),
        lambda op, x, s, b: torch.func.jvp(lambda v: op(v, s, b), (x,), (x,)),
        lambda op, x, s, b: torch.func.jacfwd(lambda v: op(x, v, b))(s),
        tangent,
    ],
    ids=["second", "hessian", "jvp", "jacfwd", "dual"],
)
def test_derivatives_that_nobody_has_are_errors(op, data, derivative):
    with pytest.raises(ArgumentError, match=r"second derivative|forward-mode tangent"):
        derivative(op, *data)


def test_forward_mode_of_other_tensors_is_no_concern(op, data):
    with forward_ad.dual_level():
        close(op(*data), reference(*data))


def test_subclasses_that_hold_tensors(op, data):
    """Each of the two gets its own call, gradients too."""
    x, scale, bias = data
    two = TwoTensor(x, x * 3).requires_grad_()
    y = op(two, TwoTensor(scale, scale), TwoTensor(bias, bias))
    close(y.a, reference(x, scale, bias))
    close(y.b, reference(x * 3, scale, bias))
    (grad,) = torch.autograd.grad(y.pow(3).sum(), two)
    for half, value in ((grad.a, x), (grad.b, x * 3)):
        v = value.clone().requires_grad_()
        close(half, torch.autograd.grad(reference(v, scale, bias).pow(3).sum(), v)[0])


def test_modes_see_the_operator(op, data):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **(kwargs or {}))

    names = []
    x = data[0].clone().requires_grad_()
    with Seen():
        y = op(x, *data[1:])
    assert op in names
    close(y, reference(*data))


def test_lazy_negatives_are_resolved(op, data):
    x, scale, bias = data
    close(op(torch._neg_view(x), scale, bias), reference(-x, scale, bias))


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn], ids=["sparse", "mkldnn"])
def test_other_layouts_are_refused(op, data, make):
    x, scale, bias = data
    with pytest.raises((NotImplementedError, ArgumentError), match=r"fusionreg::norm_layernorm|layout"):
        op(make(x), scale, bias)


def test_inference_tensors(op, data):
    with torch.inference_mode():
        y = op(*(t.clone() for t in data))
    assert y.is_inference()
    close(y.clone(), reference(*data))
