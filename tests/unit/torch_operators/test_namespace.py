"""``fusionreg.torch.ops``: names, signatures, docstrings, and the seeds that a call draws."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from catalogs import FAMILIES
from torch_operators import SEED, SITES

import fusionreg
from fusionreg.core.errors import UnknownNameError
from fusionreg.integrations.torch.operators import Ops


@pytest.fixture(scope="module")
def ops(registry):
    return fusionreg.torch.ops.use(registry)


def test_importing_is_lazy():
    """No torch with the package, no plugin with the module."""
    code = """
import sys, fusionreg
print("torch" in sys.modules)
import fusionreg.torch
print("torch" in sys.modules, "fusionreg_norm" in sys.modules)
print(fusionreg.torch.ops)
"""
    env = {**os.environ, "FUSIONREG_LOAD_PLUGINS": "norm, pointwise"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    assert said.splitlines() == ["False", "True False", "<ops: norm, pointwise>"]


def test_names(ops, operators):
    assert dir(ops) == [*FAMILIES, "use"]
    assert "layernorm" in dir(ops.norm) and dir(ops.pointwise) == ["region"]
    members = operators.registry["pointwise.region"].members
    assert dir(ops.pointwise.region) == sorted(m.name.rpartition(".")[2] for m in members)
    assert ops.norm.layernorm is ops["norm.layernorm"] is ops.norm.layernorm
    assert repr(ops.pointwise) == "<pointwise: region>" and repr(ops) == f"<ops: {', '.join(FAMILIES)}>"
    x = torch.randn(3, 4)
    assert torch.equal(ops.pointwise.region.add_mul(x, x, x), (x + x) * x)
    assert torch.equal(ops["pointwise.region.add_mul"](x, x, x), (x + x) * x)


@pytest.mark.parametrize(
    ("look_up", "words"),
    [
        (lambda ops: ops.norms, "unknown family of fusions: 'norms' — did you mean norm"),
        (lambda ops: ops.norm.layernrom, "unknown fusion of norm: 'layernrom' — did you mean layernorm"),
        (lambda ops: ops.pointwise.region.add_mull, "unknown fusion of pointwise.region: .* did you mean add_mul"),
        (lambda ops: ops["norm.layernrom"], "did you mean norm.layernorm"),
    ],
)
def test_wrong_names_offer_right_ones(ops, look_up, words):
    with pytest.raises(UnknownNameError, match=words):
        look_up(ops)


def test_python_may_ask_for_anything(ops):
    assert not hasattr(ops, "nothing") and not hasattr(ops.norm, "nothing") and not hasattr(ops.norm, "__wrapped__")


def test_signatures(ops):
    assert str(inspect.signature(ops.norm.layernorm)) == (
        "(x: 'Tensor', scale: 'Tensor', bias: 'Tensor', *, epsilon: 'float' = 1e-05) -> 'Tensor'"
    )
    assert str(inspect.signature(ops.norm.groupnorm_swish_dropout)) == (
        "(x: 'Tensor', scale: 'Tensor', bias: 'Tensor', *, rng: 'Tensor | None' = None, groups: 'int', "
        "p: 'float' = 0.5, epsilon: 'float' = 1e-05) -> 'Tensor'"
    )
    assert str(inspect.signature(ops.norm.swish_dropout_backward)) == (
        "(dy: 'Tensor', x: 'Tensor', rng: 'Tensor', *, p: 'float' = 0.5) -> 'Tensor'"
    )
    assert inspect.signature(ops.norm.residual_rmsnorm).return_annotation == "tuple[Tensor, Tensor]"


def test_docstrings(ops, registry):
    for name in registry:
        if not registry[name].spec.open:
            text = ops[name].__doc__
            for tensor, shape in (registry[name].inputs | registry[name].outputs).items():
                assert f"{tensor}: {shape}" in text
            for attribute in (*registry[name].spec.attributes, *registry[name].choices):
                assert f"\n    {attribute}: " in text
    text = ops.norm.gelu_dropout_layernorm.__doc__
    assert text.startswith("LayerNorm of dropout(gelu(x))")
    assert "y = LayerNormalization(v, scale, bias, epsilon=epsilon)" in text
    assert "rng: int64[2]: seed and offset, by name; drawn from torch's generator" in text
    assert "approximate: str = none; one of none, tanh; which GELU" in text
    assert "the gradients are those of norm.gelu_dropout_layernorm_backward" in text
    assert "drawn" not in ops.norm.swish_dropout_backward.__doc__
    assert "the gradients are those of its operators" in ops.gemm.bias.__doc__
    assert "inputs that require a gradient are refused" in ops.norm.swish_dropout_backward.__doc__


def test_calls_by_position_and_by_name(ops):
    site = SITES["gelu_dropout_layernorm"]
    x, rng, scale, bias = site.tensors().values()
    f = ops.norm.gelu_dropout_layernorm
    expected = site.expected(site.tensors())[0]
    for y in (
        f(x, scale, bias, rng=rng, **site.attributes),
        f(x, scale=scale, bias=bias, rng=rng, **site.attributes),
        f(bias=bias, rng=rng, x=x, scale=scale, **site.attributes),
    ):
        torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


def test_seeds_that_are_left_out(ops):
    """Drawn anew for each call from torch's generator; the gradient has the mask of its own call."""
    x = torch.ones(64, 40, requires_grad=True)
    torch.manual_seed(1)
    a, b = ops.norm.swish_dropout(x, p=0.5), ops.norm.swish_dropout(x=x, p=0.5)
    torch.manual_seed(1)
    again = ops.norm.swish_dropout(x, p=0.5)
    assert torch.equal(a, again) and not torch.equal(a, b)
    assert 0.4 < (a == 0).float().mean() < 0.6
    (grad,) = torch.autograd.grad(b.sum(), x)
    assert torch.equal(grad == 0, b == 0)
    with torch.inference_mode():
        assert not torch.equal(ops.norm.swish_dropout(x, p=0.5), a)


def test_gradients_never_draw(ops):
    with pytest.raises(RuntimeError, match="rng"):
        ops.norm.swish_dropout_backward(torch.ones(4, 8), torch.ones(4, 8), p=0.5)
    assert ops.norm.swish_dropout_backward(torch.ones(4, 8), torch.ones(4, 8), SEED, p=0.5).shape == (4, 8)


def test_compiled_functions_look_names_up(registry):
    """The first use of a name may be inside of a compiled function; two calls there have two masks."""
    ops = Ops(lambda: registry)
    x, s, b = torch.randn(16, 64), torch.ones(64), torch.zeros(64)

    def f(x):
        first = ops.norm.gelu_dropout_layernorm(x, s, b, p=0.5)
        return first, ops.norm.gelu_dropout_layernorm(x, s, b, p=0.5), ops.norm.rmsnorm(x, s)

    torch._dynamo.reset()
    torch.manual_seed(3)
    found = torch.compile(f, backend="aot_eager", fullgraph=True)(x)
    torch.manual_seed(3)
    for a, e in zip(found, f(x), strict=True):
        torch.testing.assert_close(a, e)
    assert not torch.equal(found[0], found[1])


PAGE = (Path(__file__).parents[3] / "docs" / "torch-operators.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_page_on_it(number, capsys):
    """Its examples run, and print what their comments say."""
    exec(compile(EXAMPLES[number], f"example {number}", "exec"), {})
    said = re.findall(r"^print\(.*\)  # (.*)$", EXAMPLES[number], re.M)
    assert capsys.readouterr().out.splitlines() == said
