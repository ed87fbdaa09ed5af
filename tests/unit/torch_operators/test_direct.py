"""Calls that take no turn through torch's dispatcher, and those that must."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusionreg.core.errors import ArgumentError
from fusionreg.integrations.torch.operators.direct import direct


class Op:
    """Stands where an operator would; ``refuses``: what its runtime says of every call."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses

    def __call__(self, *tensors, **attributes):
        return "dispatched"

    def _fusionreg_plain(self, tensors, attributes):
        if self.refuses:
            raise ArgumentError("cannot call", "a.fusion", "an integer", "a float")
        return "at once"


class Told(torch.Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


X = torch.ones(3)
CALL = direct(Op(), ["x", "bias"])


@pytest.mark.parametrize("given", [(X,), (X, None, torch.nn.Parameter(X)), ()], ids=["one", "absent", "none"])
@pytest.mark.parametrize("grad", [True, False])
def test_plain_tensors_go_at_once(given, grad):
    with torch.set_grad_enabled(grad):
        assert CALL(*given, epsilon=1e-5, activation="Relu", axis=1, causal=True) == "at once"
    with torch.inference_mode():
        assert CALL(*given) == "at once"


@pytest.mark.parametrize(
    "seen",
    [
        Functions, Dispatched, FakeTensorMode, lambda: torch.autocast("cpu", torch.bfloat16), torch.profiler.profile,
        forward_ad.dual_level, lambda: torch.device("cpu"),
    ],
    ids=["functions", "dispatch", "fake", "autocast", "profiler", "forward-mode", "device"],
)  # fmt: skip
def test_what_wants_to_see_calls_does(seen):
    with seen():
        assert CALL(X) == "dispatched"
    assert CALL(X) == "at once"


def test_transforms_and_tracing():
    said = []

    def f(x):
        said.append(CALL(x))
        return x + 1

    torch.vmap(f)(X)
    torch.func.grad(lambda x: f(x).sum())(X)
    torch.jit.trace(f, X, check_trace=False)
    assert set(said) == {"dispatched"} and len(said) >= 3


@pytest.mark.parametrize(
    ("tensors", "named"),
    [((X.as_subclass(Told),), {}), ((3.0,), {}), ((X,), {"bias": X}), ((X,), {"epsilon": torch.tensor(1.0)})],
    ids=["subclass", "number", "by-name", "tensor-for-number"],
)
def test_torch_says_what_becomes_of_other_arguments(tensors, named):
    assert CALL(*tensors, **named) == "dispatched"


def test_what_the_runtime_refuses_is_for_torch_to_judge():
    assert direct(Op(refuses=True), ["x"])(X) == "dispatched"


@pytest.mark.parametrize("context", [nullcontext, Functions], ids=["at-once", "dispatched"])
def test_both_ways_are_one(operators, context):
    op = operators["norm.layernorm"]
    x, scale, bias = (t.requires_grad_() for t in (torch.randn(4, 16), torch.ones(16), torch.zeros(16)))
    with context():
        y = op._fusionreg_call(x, scale, bias, epsilon=1e-3)
        y.square().sum().backward()
    wanted = torch.nn.functional.layer_norm(x, (16,), scale, bias, 1e-3)
    grads = torch.autograd.grad(wanted.square().sum(), (x, scale, bias))
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close((x.grad, scale.grad, bias.grad), grads, atol=1e-4, rtol=1e-4)


def test_lazy_negatives_are_made_real(operators):
    x = torch.randn(4, 16, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    args = torch.ones(16), torch.zeros(16)
    wanted = torch.nn.functional.layer_norm(x.resolve_neg(), (16,), *args)
    torch.testing.assert_close(operators["norm.layernorm"]._fusionreg_call(x, *args), wanted, atol=1e-5, rtol=1e-5)
