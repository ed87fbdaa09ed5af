"""Operators before a tracer: opcheck, ``torch.compile`` with static and dynamic shapes, fake tensors."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import LocalSource
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch_operators import SITES

from fusionreg.core.errors import ArgumentError

ALL = pytest.mark.parametrize("site", SITES.values(), ids=SITES.keys())

#: What opcheck is to see beside the differentiable sites: forms, an attribute that a site must give, a derived fusion,
#: strides that are copied, an empty tensor.
INFERENCE = {
    "gemm": ("gemm.scale_bias", [(2, 3, 8), (8, 16), (1,), (16,)], {"activation": "Relu"}),
    "gemm_transposed": ("gemm.scale_bias", [(3, 16), (16, 16), (), (3, 1)], {"activation": "gelu_tanh", "transB": 1}),
    "gemm_activation": ("gemm.activation", [(3, 8), (8, 8)], {"activation": "Tanh"}),
    "region": ("pointwise.region.channel_affine", [(2, 3, 8), (3, 1), (3, 1)], {}),
    "slots": ("norm.layernorm.modulated", [(3, 40), (3, 40), (40,), (40,), (40,), (3, 1)], {}),
    "empty": ("norm.layernorm", [(0, 40), (40,), (40,)], {}),
}


def compiled(f, graphs=None, **options):
    """``f`` through Dynamo, AOTAutograd and its partitioner; the graphs go into a list."""

    def keep(graph, inputs):
        if graphs is not None:
            graphs.append(graph)
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    return torch.compile(f, backend=backend, fullgraph=True, **options)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@ALL
def test_opcheck(operators, site):
    """Schema, aliasing, autograd registration, fake tensors, AOTAutograd with dynamic shapes."""
    arguments = tuple(site.tensors(grad=True).values())
    found = torch.library.opcheck(operators[site.fusion], arguments, site.attributes)
    assert set(found.values()) == {"SUCCESS"} and len(found) == 4


@pytest.mark.parametrize("case", INFERENCE.values(), ids=INFERENCE.keys())
def test_opcheck_of_inference(operators, case):
    fusion, shapes, attributes = case
    dtype = torch.float32 if fusion != "norm.layernorm.modulated" else torch.bfloat16
    dtype = torch.bfloat16 if fusion.startswith("pointwise") else dtype
    found = torch.library.opcheck(operators[fusion], tuple(torch.randn(s).to(dtype) for s in shapes), attributes)
    assert set(found.values()) == {"SUCCESS"}


def test_strided_inputs_under_opcheck(operators):
    x = torch.randn(40, 6).t().requires_grad_()
    scale, bias = torch.randn(80)[::2].requires_grad_(), torch.randn(40, requires_grad=True)
    assert set(torch.library.opcheck(operators["norm.layernorm"], (x, scale, bias)).values()) == {"SUCCESS"}


@ALL
def test_gradients_through_compilation(operators, site):
    op = operators[site.fusion]

    def f(*tensors):
        found = op(*(t * 1 if t.is_floating_point() else t for t in tensors), **site.attributes)
        return [o * 2 for o in (found if isinstance(found, tuple) else (found,))]

    tensors = list(site.tensors(grad=True).values())
    inputs = [t for t in tensors if t.requires_grad]
    results = []
    for g in (f, compiled(f)):
        outputs = g(*tensors)
        kept = [o for o in outputs if o.requires_grad]
        results.append([*outputs, *torch.autograd.grad(kept, inputs, [torch.ones_like(o) for o in kept])])
    for eager, made in zip(*results, strict=True):
        close(made, eager)


def test_the_graphs_hold_the_two_operators(operators):
    graphs = []
    f = compiled(operators["norm.layernorm"], graphs)
    f(*SITES["layernorm"].tensors(grad=True).values()).sum().backward()
    forward, backward = ([n.target for n in g.graph.nodes if n.op == "call_function"] for g in graphs)
    assert forward == [operators["norm.layernorm"]]
    assert operators["norm.layernorm_backward"] in backward


def test_one_graph_for_ten_batches(operators):
    graphs, op = [], operators["norm.layernorm"]
    f = compiled(lambda x, s, b: op(x, s, b) * x.shape[0], graphs, dynamic=True)
    scale, bias = torch.randn(40), torch.randn(40)
    for rows in range(2, 12):
        x = torch.randn(rows, 40)
        close(f(x, scale, bias), torch.nn.functional.layer_norm(x, (40,), scale, bias) * rows)
    assert len(graphs) == 1


def test_a_symbolic_size_in_every_axis(operators):
    """Both rows and columns vary in one graph; channels last stays channels last."""
    graphs, op = [], operators["norm.groupnorm_swish"]
    f = compiled(lambda x, s, b: op(x, s, b, groups=2).mul(1), graphs, dynamic=True)
    for n, c, h, w in ((2, 4, 3, 5), (3, 6, 4, 3), (2, 8, 5, 7)):
        x = torch.randn(n, c, h, w).to(memory_format=torch.channels_last)
        y = f(x, torch.ones(c), torch.zeros(c))
        close(y, torch.nn.functional.silu(torch.nn.functional.group_norm(x, 2)))
        assert y.is_contiguous(memory_format=torch.channels_last)
    assert len(graphs) == 1


def test_a_symbolic_number_as_an_attribute(operators):
    op = operators["norm.groupnorm_swish"]
    f = compiled(lambda x, s: op(x, s, s, groups=x.shape[1] // 4) * 1, dynamic=True)
    for channels in (8, 16, 24):
        x, scale = torch.randn(2, channels, 6), torch.rand(channels)
        right = torch.nn.functional.group_norm(x, channels // 4, scale, scale)
        close(f(x, scale), torch.nn.functional.silu(right))


def test_guards_say_no_more_than_the_shapes_must(operators):
    """Two symbols that a tensor text writes alike become one; nothing is specialised to a number."""
    env = ShapeEnv()
    mode = torch._subclasses.FakeTensorMode(shape_env=env)

    def symbolic(name, *shape):
        sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
        return mode.from_tensor(torch.randn(shape), symbolic_context=sizes, source=LocalSource(name))

    x, scale = symbolic("x", 3, 5, 40), symbolic("scale", 40)
    with mode:
        y = operators["norm.rmsnorm"](x, scale)
    assert [str(d) for d in y.shape] == [str(d) for d in x.shape] and len({*map(str, y.shape)}) == 3
    last, own = (t.shape[-1].node._expr for t in (x, scale))
    assert [g.expr for g in env.guards] in ([sympy.Eq(last, own)], [sympy.Eq(own, last)])


def test_sizes_that_data_decides(operators):
    """An extent that nobody knows before the call: no question is asked of it."""
    op = operators["norm.layernorm"]
    f = compiled(lambda x, m, s, b: op(x[m], s, b))
    x, scale, bias = torch.randn(6, 40), torch.randn(40), torch.randn(40)
    mask = torch.tensor([True, False, True, True, False, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        close(f(x, mask, scale, bias), torch.nn.functional.layer_norm(x[mask], (40,), scale, bias))


def test_what_a_call_refuses_a_trace_refuses(operators):
    with torch._subclasses.FakeTensorMode():
        with pytest.raises(ArgumentError, match="scale has shape"):
            operators["norm.layernorm"](torch.empty(3, 40), torch.empty(39), torch.empty(40))
        with pytest.raises(ArgumentError, match="scale is float32 — bfloat16"):
            operators["norm.layernorm"](torch.empty(3, 40).bfloat16(), torch.empty(40), torch.empty(40))
        with pytest.raises(ArgumentError, match="groups"):
            operators["norm.groupnorm_swish"](torch.empty(1, 6, 4), torch.empty(6), torch.empty(6), groups=4)


def test_meta_tensors(operators):
    tensors = [t.to("meta") for t in SITES["batchnorm_add_relu_last"].tensors().values()]
    outputs = operators["norm.batchnorm_add_relu"](*tensors)
    assert [o.device.type for o in outputs] == ["meta"] * 5
    assert outputs[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_autograd(operators, backend):
    """The backward pass of the whole program in one graph."""
    first, second = operators["norm.layernorm"], operators["norm.residual_rmsnorm"]
    x, scale, bias = (torch.randn(s, requires_grad=True) for s in ((4, 40), (40,), (40,)))

    def gradients():
        y, h = second(first(x, scale, bias).sin(), x, scale)
        return torch.autograd.grad((y * h).pow(2).sum(), (x, scale, bias))

    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        found = gradients()
    close(found, gradients())


def test_exported_programs(operators):
    """``torch.export`` keeps the operator and the symbol of its rows."""
    op, scale, bias = operators["norm.layernorm"], torch.rand(40), torch.randn(40)

    class Norm(torch.nn.Module):
        def forward(self, x):
            return op(x, scale, bias)

    program = torch.export.export(Norm(), (torch.randn(3, 40),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert op in [n.target for n in program.graph.nodes]
    x = torch.randn(7, 40)
    assert torch.equal(program.module()(x), op(x, scale, bias))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gelu_dropout_layernorm", "groupnorm_swish_dropout_last"])
def test_inductor(operators, name):
    """Its C++ code around the operators, channels last or not, gives the values and gradients of eager."""
    site, op = SITES[name], operators[SITES[name].fusion]

    def f(*tensors):
        x, *rest = tensors
        return op((x * 2).sin(), *rest, **site.attributes).pow(2) + 1

    tensors = list(site.tensors(grad=True).values())
    inputs = [t for t in tensors if t.requires_grad]
    torch._dynamo.reset()
    results = []
    for g in (f, torch.compile(f, fullgraph=True)):
        y = g(*tensors)
        results.append([y, *torch.autograd.grad(y.sum(), inputs)])
    for eager, made in zip(*results, strict=True):
        close(made, eager)
        assert made.stride() == eager.stride()
