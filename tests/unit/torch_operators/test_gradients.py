"""Operators and their gradients against torch's own operators and autograd; what is saved between the two passes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch_operators import SITES, Site

from fusionreg.core.errors import ArgumentError, UnknownNameError
from fusionreg.core.matcher import find as matcher
from fusionreg.core.pattern.instantiate import instantiate
from fusionreg.core.planner.costs import CostModel
from fusionreg.integrations.torch.operators import autograd

ALL = pytest.mark.parametrize("site", SITES.values(), ids=SITES.keys())


def called(operators, site: Site, tensors):
    found = operators[site.fusion](*tensors.values(), **site.attributes)
    return found if isinstance(found, tuple) else (found,)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def differentiated(outputs, site: Site, inputs):
    """Gradients of random sums of the differentiable outputs."""
    outputs = outputs[: len(outputs) - site.constant]
    generator = torch.Generator().manual_seed(11)
    sums = [(o * torch.randn(o.shape, generator=generator)).sum() for o in outputs]
    return torch.autograd.grad(sum(sums), inputs)


@ALL
def test_values_and_gradients(operators, site):
    tensors = site.tensors(grad=True)
    inputs = [t for t in tensors.values() if t.requires_grad]
    outputs, expected = called(operators, site, tensors), site.expected(tensors)
    for found, right in zip(outputs, expected, strict=True):
        close(found, right)
    for found, right in zip(differentiated(outputs, site, inputs), differentiated(expected, site, inputs), strict=True):
        close(found, right)


@ALL
def test_results_are_laid_out_as_promised(operators, site):
    """What a tracer was told is what a call gives: Inductor computes addresses from it."""
    tensors = site.tensors()
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) for n, t in tensors.items()}
        promised = called(operators, site, fakes)
    for found, right in zip(called(operators, site, tensors), promised, strict=True):
        assert (found.shape, found.stride(), found.dtype) == (right.shape, right.stride(), right.dtype)


@ALL
def test_nothing_is_saved_but_inputs_outputs_and_rng(operators, site):
    """Neither a mask nor an interior value: every saved tensor is one that the caller has anyway."""
    saved = []
    tensors = site.tensors(grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = called(operators, site, tensors)
    known = {t.data_ptr() for t in (*tensors.values(), *outputs)}
    assert saved and {t.data_ptr() for t in saved} <= known
    assert not any(t.dtype in (torch.bool, torch.uint8) for t in saved)


@ALL
@torch.no_grad()
def test_without_a_gradient_nothing_is_recorded(operators, site):
    outputs = called(operators, site, site.tensors(grad=True))
    assert not any(o.requires_grad for o in outputs)


@pytest.mark.parametrize("wanted", ["x", "residual", "scale"])
def test_an_input_that_needs_no_gradient_gets_none(operators, wanted):
    site = SITES["residual_rmsnorm"]
    tensors = {n: t.requires_grad_(n == wanted) for n, t in site.tensors().items()}
    outputs, expected = called(operators, site, tensors), site.expected(tensors)
    (found,), (right,) = (differentiated(o, site, [tensors[wanted]]) for o in (outputs, expected))
    close(found, right)
    sum(o.sum() for o in called(operators, site, tensors)).backward()
    assert [n for n, t in tensors.items() if t.grad is not None] == [wanted]


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_is_not_used_has_gradient_zero(operators, used):
    site = SITES["residual_rmsnorm"]
    tensors = site.tensors(grad=True)
    outputs, expected = called(operators, site, tensors), site.expected(tensors)
    way = torch.randn(outputs[used].shape)
    found = torch.autograd.grad(outputs[used], list(tensors.values()), way)
    right = torch.autograd.grad(expected[used], list(tensors.values()), way, materialize_grads=True)
    for f, r in zip(found, right, strict=True):
        close(f, r)


@pytest.mark.parametrize("way", ["expanded", "transposed"])
@pytest.mark.parametrize("name", ["layernorm", "gelu_dropout_layernorm"])
def test_gradients_that_come_in_another_layout(operators, name, way):
    """The same for each pass over one graph: a second one draws no mask of its own."""
    site = SITES[name]
    tensors = site.tensors(grad=True)
    inputs = [t for t in tensors.values() if t.requires_grad]
    outputs, expected = called(operators, site, tensors)[0], site.expected(tensors)[0]
    turned = torch.randn(outputs.shape[::-1]).permute(*reversed(range(outputs.dim())))
    dy = torch.randn(1).expand(outputs.shape) if way == "expanded" else turned
    found, again = (torch.autograd.grad(outputs, inputs, dy, retain_graph=True) for _ in range(2))
    for f, a, r in zip(found, again, torch.autograd.grad(expected, inputs, dy), strict=True):
        close(f, r)
        assert torch.equal(f, a)


def test_a_gradient_is_laid_out_as_the_map_is():
    """One that was broadcast, as behind a sum over places, and one in another order of maps, as behind a mean."""
    x = torch.randn(2, 6, 3, 5).contiguous(memory_format=torch.channels_last)
    for dy in (torch.randn(2, 6, 1, 1).expand(x.shape), torch.randn(x.shape)):
        assert autograd._laid(dy, [torch.ones(6), x], True).stride() == x.stride()
        assert autograd._laid(dy, [x.contiguous()], True).is_contiguous()
        assert torch.equal(autograd._laid(dy, [x], True), dy)
    assert autograd._laid(x, [x.contiguous()], False) is x, "heads may lie in any order"
    assert autograd._laid(torch.ones(1).expand(4), [x], True).is_contiguous()


def test_running_statistics_are_no_function_to_differentiate(operators):
    site = SITES["batchnorm_relu"]
    outputs = called(operators, site, site.tensors(grad=True))
    assert [o.requires_grad for o in outputs] == [True, False, False, False, False]


def test_parameters_of_a_module_train(operators):
    """A step of descent with the operator is the step with torch's."""
    torch.manual_seed(0)
    x, norm = torch.randn(6, 40), torch.nn.LayerNorm(40)
    twin = torch.nn.LayerNorm(40)
    for weight, bias, make in (
        (norm.weight, norm.bias, operators["norm.layernorm"]),
        (twin.weight, twin.bias, lambda x, s, b: torch.nn.functional.layer_norm(x, (40,), s, b)),
    ):
        make(x, weight, bias).pow(3).sum().backward()
    torch.optim.SGD(norm.parameters(), 0.1).step()
    torch.optim.SGD(twin.parameters(), 0.1).step()
    close(norm.weight, twin.weight)
    close(norm.bias, twin.bias)


def test_saved_tensors_may_be_kept_elsewhere(operators):
    """``save_on_cpu`` packs what is saved and gives copies back."""
    site = SITES["gelu_dropout_layernorm"]
    tensors = site.tensors(grad=True)
    inputs = [t for t in tensors.values() if t.requires_grad]
    with torch.autograd.graph.save_on_cpu():
        outputs = called(operators, site, tensors)
    for found, right in zip(
        differentiated(outputs, site, inputs), differentiated(site.expected(tensors), site, inputs), strict=True
    ):
        close(found, right)


def test_passes_in_several_threads(operators):
    site = SITES["residual_rmsnorm"]

    def train(seed):
        tensors = {n: (t.detach() * (1 + seed)).requires_grad_() for n, t in site.tensors().items()}
        return tensors, differentiated(called(operators, site, tensors), site, list(tensors.values()))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(train, range(8)))
    for tensors, found in results:
        for f, r in zip(found, differentiated(site.expected(tensors), site, list(tensors.values())), strict=True):
            torch.testing.assert_close(f, r, rtol=5e-5, atol=5e-4)


# --- what cannot be had ------------------------------------------------------------------------------------------


def test_second_derivatives_are_an_error_and_never_zero(operators):
    site = SITES["layernorm"]
    tensors = site.tensors(grad=True)
    (first,) = torch.autograd.grad(called(operators, site, tensors)[0].pow(2).sum(), tensors["x"], create_graph=True)
    close(first, torch.autograd.grad(site.expected(tensors)[0].pow(2).sum(), tensors["x"])[0])
    with pytest.raises(ArgumentError, match="a second derivative is wanted"):
        torch.autograd.grad(first.sum(), tensors["x"])


def test_a_gradient_that_the_backward_fusion_does_not_give(operators):
    site = SITES["batchnorm_relu"]
    tensors = site.tensors(grad=True)
    tensors["mean"].requires_grad_()
    with pytest.raises(ArgumentError, match=r"norm.batchnorm_relu_backward gives no gradient of mean"):
        called(operators, site, tensors)


def site(operators, fusion, shapes, **choices):
    """A match of a fusion by itself, and the graph that it is in: its own pattern."""
    entry = operators.registry.catalog[fusion]
    dtypes = {v: allowed[-1] for v, allowed in entry.spec.dtypes.items()}
    graph = instantiate(
        entry.patterns[0], entry.spec, dtypes=dtypes, shapes=shapes, choices=choices,
        ops=operators.registry.catalog.ops, absent=[n for n in entry.inputs if n not in shapes],
    )  # fmt: skip
    found = matcher.find(graph, [entry], operators.registry.catalog.ops)
    return max(found, key=lambda m: len(m.nodes)), graph


@pytest.mark.parametrize(
    ("fusion", "shapes", "choices", "wanted", "answer"),
    [
        ("norm.layernorm", {"x": (2, 8), "scale": (8,), "bias": (8,)}, {}, "x scale bias", "norm.layernorm_backward"),
        ("gemm.bias", {"x": (2, 8), "w": (8, 4), "bias": (4,)}, {"activation": "Relu"}, "x", "from w, y"),
        ("gemm.bias", {"x": (2, 8), "w": (8, 4), "bias": (4,)}, {"activation": "none"}, "bias", "from the gradient"),
        ("gemm.activation", {"x": ("B", 8), "w": (8, 4)}, {"activation": "Gelu"}, "w", "computes MatMul again"),
        (
            "norm.swish_dropout", {"x": (2, 8), "rng": (2,)}, {}, "x rng",
            "norm.swish_dropout_backward gives no gradient of rng",
        ),
        (
            "norm.swish_dropout_backward", {"dy": (2, 8), "x": (2, 8), "rng": (2,)}, {}, "dy",
            "no derivative of fusionreg::SwishGrad is known",
        ),
    ],
)  # fmt: skip
def test_a_plan_is_told_how_gradients_are_computed(operators, fusion, shapes, choices, wanted, answer):
    match, graph = site(operators, fusion, shapes, **choices)
    found = operators.backward(match, graph, wanted.split())
    if not isinstance(found, str):
        found = found.describe(CostModel(operators.registry.catalog.ops)).partition(",  ")[0]
    assert found.startswith(answer)


def test_unknown_and_open_fusions(operators):
    with pytest.raises(UnknownNameError, match=r"did you mean norm\.layernorm"):
        operators["norm.layernrom"]
    with pytest.raises(ArgumentError, match="an open fusion has no tensors of its own"):
        operators["pointwise.region"]
