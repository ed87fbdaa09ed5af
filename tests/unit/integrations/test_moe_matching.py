"""Products with the matrices of experts as models spell them: what is found, and that import keeps its meaning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exported import agree, fused
from onnx import helper
from onnx_models import model
from torch import nn

import fusionreg
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.pattern.instantiate import instantiate

GEMV, GROUPED, SELECT, SCATTER = (
    f"moe.{words}" for words in ("expert_gemv", "grouped_gemm", "index_select_gemm", "gemm_scatter_add")
)
FFN, EXPERTS = "moe.routed_ffn", "moe.expert_ffn"
ROUTE = "moe.route"
E, K, D, I = 4, 2, 32, 48


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("moe",), device="sim")


class Experts(nn.Module):
    """The experts of a layer as transformers has them, without its router."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_up = nn.Parameter(0.1 * torch.randn(E, 2 * I, D))
        self.down = nn.Parameter(0.1 * torch.randn(E, D, I))

    def act(self, h):
        gate, up = h.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class Batched(Experts):
    """transformers' batched_mm: the matrices of all rows gathered."""

    def forward(self, x, ids, weights):
        rows, at = x.repeat_interleave(K, dim=0), ids.reshape(-1)
        h = self.act(torch.bmm(self.gate_up[at], rows.unsqueeze(-1)).squeeze(-1))
        share = weights.reshape(-1, 1) if x.dtype == torch.float32 else weights.reshape(-1).unsqueeze(-1)
        y = torch.bmm(self.down[at], h.unsqueeze(-1)).squeeze(-1) * share
        return y.view(x.size(0), K, D).sum(dim=1)


class Grouped(Experts):
    """transformers' grouped_mm: rows sorted by expert, how many each has counted by histc."""

    scattered = False

    def forward(self, x, ids, weights):
        sorted_ids, perm = torch.sort(ids.reshape(-1))
        counts = torch.histc(sorted_ids.float(), bins=E, min=0, max=E - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        token = perm // K
        h = self.act(torch._grouped_mm(x[token], self.gate_up.transpose(-2, -1), offs=ends))
        y = torch._grouped_mm(h, self.down.transpose(-2, -1), offs=ends) * weights.reshape(-1)[perm].unsqueeze(-1)
        if self.scattered:
            return torch.zeros_like(x).index_add(0, token, y)
        back = torch.empty_like(perm)
        back[perm] = torch.arange(perm.size(0))
        return y[back].view(x.size(0), K, D).sum(dim=1)


class Scattered(Grouped):
    """The same, with each row's product added to its token."""

    scattered = True


class Rows(nn.Module):
    """A row as a row of a batched product, matrices as they are or transposed."""

    def __init__(self, turned: bool, axis: int = 0):
        super().__init__()
        self.turned, self.axis = turned, axis
        self.w = nn.Parameter(torch.randn((D, D, D) if axis else (E, D, D)))

    def forward(self, x, ids):
        w = torch.index_select(self.w, self.axis, ids)
        return torch.bmm(x.unsqueeze(1), w.transpose(1, 2) if self.turned else w).squeeze(1)


def layer(kind, dtype):
    module = kind().to(dtype).eval()
    x, logits = torch.randn(6, D, dtype=dtype), torch.randn(6, E)
    weights, ids = logits.softmax(-1).topk(K)
    return module, (x, ids, weights.to(dtype))


def found(registry, module, *given):
    return sorted(m.fusion for m in registry.match(module.eval(), *given).matches)


def best(registry, module, *given):
    """The same, of those the larger where one stands within another."""
    names = found(registry, module, *given)
    return [n for n in names if n != GROUPED] if SELECT in names and SCATTER in names else names


@pytest.mark.parametrize(
    ("kind", "dtype", "names"),
    [
        (Batched, torch.float32, [GEMV, GEMV]),
        (Batched, torch.bfloat16, [GEMV, GEMV]),
        (Grouped, torch.bfloat16, [GROUPED, GROUPED, SELECT]),
        (Scattered, torch.bfloat16, [SCATTER, SELECT]),
    ],
)
def test_experts_as_transformers_has_them(registry, kind, dtype, names):
    module, given = layer(kind, dtype)
    with torch.no_grad():
        assert best(registry, module, *given) == names


@pytest.mark.parametrize("kind", [Batched, Grouped, Scattered])
def test_import_keeps_their_meaning(kind):
    dtype = torch.float32 if kind is Batched else torch.bfloat16
    module, given = layer(kind, dtype)
    with torch.no_grad():
        agree(fused(module, given)(*given), module(*given), 1e-5 if kind is Batched else 0.03)


def test_histc_counts_ends_and_leaves_out_what_is_beyond():
    class Count(nn.Module):
        def forward(self, x):
            return torch.histc(x, bins=5, min=-1, max=4)

    x = torch.tensor([-1.5, -1.0, 0.0, 0.999, 1.0, 3.0, 4.0, 4.0, 4.5, float("nan")])
    agree(fused(Count(), (x,))(x), torch.tensor([1.0, 2.0, 1.0, 0.0, 3.0]))


@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_batched_products(registry, turned):
    module, ids = Rows(turned), torch.tensor([0, 3, 1, 1, -1])
    x = torch.randn(5, D)
    (match,) = registry.match(module.eval(), x, ids.clamp(min=0)).matches
    assert match.fusion == GEMV and match.attributes["trans"] == int(turned)
    assert match.choices["indices"] == "FromEnd"  # as indices of torch and of Gather do


def test_matrices_that_are_not_one_behind_the_other(registry):
    x, ids = torch.randn(D, D), torch.randint(0, D, (D,))
    assert found(registry, Rows(False, axis=1), x, ids) == []
    assert found(registry, Rows(False), x[:5], ids[:5] % E) == [GEMV]


def test_products_that_are_read_elsewhere(registry):
    """What index_add adds may be read by nobody else."""

    class Exposed(Grouped):
        def forward(self, x, ends, token):
            y = torch._grouped_mm(x[token], self.gate_up.transpose(-2, -1), offs=ends)
            return torch.zeros(6, 2 * I, dtype=x.dtype).index_add(0, token, y), y

    module = Exposed().bfloat16()
    given = (torch.randn(6, D).bfloat16(), torch.tensor([1, 4, 6, 12], dtype=torch.int32), torch.randint(0, 6, (12,)))
    assert found(registry, module, *given) == [GROUPED, SELECT]


class Layer(Batched):
    """A layer whole, as Mixtral and Qwen have it; ``parts`` may be replaced."""

    def __init__(self, **parts):
        super().__init__()
        self.router = nn.Parameter(torch.randn(E, D))
        self.parts = {
            "scores": lambda s: s.float().softmax(-1),
            "choose": lambda s: s.topk(K),
            "renormalise": lambda w: w / w.sum(-1, keepdim=True),
            "cast": lambda w, x: w.to(x.dtype),
        } | parts

    def forward(self, x):
        part = self.parts
        weights, ids = part["choose"](part["scores"](nn.functional.linear(x, self.router)))
        return super().forward(x, ids, part["cast"](part["renormalise"](weights), x)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("parts", "renormalise"),
    [
        ({}, 1),
        ({"renormalise": lambda w: w}, 0),
        ({"cast": lambda w, x: w}, 1),
        ({"act": "gelu"}, 1),
    ],
)
def test_layers_whole(registry, dtype, parts, renormalise):
    module = Layer(**parts).to(dtype).eval()
    if "act" in parts:

        def act(h):
            gate, up = h.chunk(2, dim=-1)
            return nn.functional.gelu(gate) * up

        module.act = act
    with torch.no_grad():
        (match,) = [m for m in registry.match(module, torch.randn(6, D, dtype=dtype)).matches if m.fusion == FFN]
    assert (match.attributes["top_k"], match.attributes["renormalise"]) == (K, renormalise)
    assert match.choices["activation"] == ("Gelu" if "act" in parts else "Swish")


def test_a_layer_computes_what_the_fusion_means(registry):
    module, x = Layer().eval(), torch.randn(5, D)
    with torch.no_grad():
        operands = [t.numpy() for t in (x, x @ module.router.T, module.gate_up, module.down)]
        entry = registry.catalog[FFN]
        sizes = {"x": (5, D), "logits": (5, E), "gate_up": (E, 2 * I, D), "down": (E, D, I)}
        graph = instantiate(
            entry.patterns[0], entry.spec, dtypes={"T": "float32", "L": "float32"}, shapes=sizes, absent=("bias",),
            ops=registry.catalog.ops, choices={"activation": "Swish"}, attributes={"top_k": K, "renormalise": 1},
        )  # fmt: skip
        y = evaluate(graph, dict(zip(sizes, operands, strict=True)), ops=registry.catalog.ops)
        torch.testing.assert_close(torch.from_numpy(next(iter(y.values()))), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "parts",
    [
        {"choose": lambda s: s.topk(K, largest=False)},
        {"scores": lambda s: s.float().softmax(0)},
        {"scores": lambda s: s.float().sigmoid()},
        {"renormalise": lambda w: w / w.sum(0, keepdim=True)},
        {"renormalise": lambda w: w / w.sum(-1)},  # of as many tokens as experts are chosen: another sum
        {"renormalise": lambda w: w / (w.sum(-1, keepdim=True) + 1e-6)},
    ],
    ids=["least", "over_tokens", "sigmoid", "over_rows", "without_axis", "epsilon"],
)
def test_layers_that_route_otherwise(registry, parts):
    with torch.no_grad():
        names = found(registry, Layer(**parts), torch.randn(K, D))
    assert names == [EXPERTS]


def chain(*steps):
    """Nodes of ONNX from (operator, inputs, outputs, attributes)."""
    return [helper.make_node(op, i.split(), o.split(), **a) for op, i, o, a in steps]


def test_rows_as_onnx_has_them(registry):
    nodes = chain(
        ("Gather", "w ids", "m", {}),
        ("Unsqueeze", "x two", "c", {}),
        ("MatMul", "m c", "h", {}),
        ("Squeeze", "h two", "y", {}),
    )
    inputs = {"x": (6, D), "w": (E, I, D), "ids": ((6,), "int64")}
    (match,) = registry.match(model(nodes, inputs, ["y"], {"two": np.array([2])})).matches
    assert match.fusion == GEMV and match.attributes["trans"] == 1


@pytest.mark.parametrize("largest", [1, 0])
def test_a_layer_as_onnx_has_it(registry, largest):
    nodes = chain(
        ("Softmax", "logits", "s", {}),
        ("TopK", "s k", "v ids", {"largest": largest}),
        ("ReduceSum", "v last", "n", {}),
        ("Div", "v n", "weights", {}),
        ("Reshape", "ids flat", "at", {}),
        ("Unsqueeze", "x one", "u", {}),
        ("Expand", "u times", "t", {}),
        ("Reshape", "t rows", "r", {}),
        ("Gather", "gate_up at", "m", {}),
        ("Unsqueeze", "r two", "c", {}),
        ("MatMul", "m c", "hc", {}),
        ("Squeeze", "hc two", "h", {}),
        ("Split", "h halves", "gate up", {"axis": -1}),
        ("Sigmoid", "gate", "g", {}),
        ("Mul", "gate g", "a", {}),
        ("Mul", "a up", "b", {}),
        ("Gather", "down at", "m2", {}),
        ("Unsqueeze", "b two", "c2", {}),
        ("MatMul", "m2 c2", "dc", {}),
        ("Squeeze", "dc two", "d", {}),
        ("Reshape", "weights flat", "f", {}),
        ("Unsqueeze", "f one", "fc", {}),
        ("Mul", "d fc", "z", {}),
        ("Reshape", "z tokens", "p", {}),
        ("ReduceSum", "p one", "y", {"keepdims": 0}),
    )
    constants = {
        "k": [K], "last": [-1], "flat": [-1], "one": [1], "two": [2], "times": [1, K, 1], "rows": [-1, D],
        "halves": [I, I], "tokens": [-1, K, D],
    }  # fmt: skip
    inputs = {"x": (6, D), "logits": (6, E), "gate_up": (E, 2 * I, D), "down": (E, D, I)}
    proto = model(nodes, inputs, ["y"], {n: np.array(v) for n, v in constants.items()})
    names = sorted(m.fusion for m in registry.match(proto).matches)
    assert names == ([EXPERTS, ROUTE, FFN] if largest else [EXPERTS])
