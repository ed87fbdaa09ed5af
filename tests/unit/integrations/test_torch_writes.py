"""Programs that write: in-place operators, views, buffers, arguments."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_zoo import Fn

from fusionreg.core.errors import ModelError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.torch import export, import_exported, import_pt2, reference
from fusionreg.integrations.torch.convert import convert
from fusionreg.integrations.torch.functionalize import functionalize
from fusionreg.integrations.torch.module import ExportedCallable
from fusionreg.integrations.torch.read_fx import read
from fusionreg.integrations.torch.schemas import written

OPS = default_vocabulary()


def routes(module, args, tmp_path, dynamic_shapes=None):
    """The callable by both ways in; the .pt2 holds the program with its writes."""
    ep = export(module, args, None, dynamic_shapes)
    torch.export.save(ep, tmp_path / "w.pt2")
    for imported in (import_exported(ep), import_pt2(tmp_path / "w.pt2")):
        yield ExportedCallable(imported, lambda given, g=imported.graph: evaluate(g, given, ops=OPS))


def close(got, want):
    got, want = (v if isinstance(v, tuple) else (v,) for v in (got, want))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w.detach(), rtol=1e-5, atol=1e-5)


def after_product(x, w, b):
    h = x @ w
    h.add_(1)
    return torch.relu(h + b)


def before_bias(x, w, b):
    h = x @ w
    x.mul_(2)
    return torch.relu(h + b) + x.sum()


def weight_in_place(x, w, b):
    h = x @ w
    w.add_(1)
    return torch.relu(h + b), x @ w


def through_alias(x, w, b):
    h = x @ w
    v = h.view(-1)
    v[0] = 5
    return torch.relu(h + b), v


def written_later(x, w, b):
    y = torch.relu(x @ w + b)
    z = y * 2
    y.zero_()
    return y, z


def copied_back(x, w, b):
    y = torch.relu(x @ w + b)
    x.copy_(y[:, :4] - 1)
    return y


def view_of_view(x, w, b):
    h = x @ w
    block = h[1:, ::2].transpose(0, 1)
    block[0].mul_(3)
    h[0].sub_(1)
    return h + b, block, h.unflatten(1, (2, 2))[:, 1]


def pieces(x, w, b):
    h = x @ w
    left, right = h.chunk(2, dim=1)
    left += right
    for row in h.unbind(0):
        row[0] = 1
    h.narrow(1, 1, 2).clamp_(min=0)
    return h, left, right


def expanded(x, w, b):
    e = b.expand(3, 4)
    b.mul_(2)
    return e + x @ w, F.relu_(x + b)


CASES = [
    after_product, before_bias, weight_in_place, through_alias, written_later, copied_back, view_of_view, pieces,
    expanded,
]  # fmt: skip


@pytest.mark.parametrize("fn", CASES, ids=[f.__name__ for f in CASES])
def test_writes_are_values(fn, tmp_path):
    """pt PR#130584: eager's values, in the results and in every argument it wrote."""
    args = (torch.randn(3, 4), torch.randn(4, 4), torch.randn(4))
    want_args = copy.deepcopy(args)
    want = fn(*want_args)
    for call in routes(Fn(fn), args, tmp_path):
        assert not any(n.mutates for n in call.imported.graph.nodes)
        given = copy.deepcopy(args)
        close(call(*given), want)
        close(given, want_args)


def test_the_write_stands_between_product_and_bias():
    """Add(1) lies between MatMul and Add(b) in the graph, so no match of product and bias reaches over it."""
    graph = import_exported(export(Fn(after_product), (torch.randn(3, 4), torch.randn(4, 4), torch.randn(4)))).graph
    matmul, one, bias, relu = graph.nodes
    assert [n.op for n in graph.nodes] == ["MatMul", "Add", "Add", "Relu"]
    assert one.inputs[0] == matmul.outputs[0] and bias.inputs[0] == one.outputs[0] and relu.inputs[0] == bias.outputs[0]


class Counter(nn.Module):
    """A buffer that every call writes, one in part and one as a whole."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3, 4))

    def forward(self, x):
        self.steps += 1
        self.cache[1:2] = x
        self.cache.mul_(2)
        return self.cache.sum(0) * self.steps


def test_buffers_live_in_the_callable(tmp_path):
    """The module and its buffers stay as they were; the callable's own advance as the eager module's would."""
    module, x = Counter(), torch.randn(1, 4)
    for call in routes(module, (x,), tmp_path):
        twin = Counter()
        for _step in range(3):
            x = torch.randn(1, 4)
            close(call(x), twin(x))
        assert torch.equal(call.buffers["steps"], twin.steps) and torch.allclose(call.buffers["cache"], twin.cache)
    assert module.steps == 0 and not module.cache.any()


def test_batch_norm_in_training_writes_its_statistics(tmp_path):
    """The schema of batch_norm does not say that it writes: running averages are updated exactly as unfused."""
    module = nn.Sequential(nn.BatchNorm2d(3, momentum=0.3), nn.BatchNorm2d(3, affine=False)).train()
    x = torch.randn(2, 3, 4, 5) * 2 + 1
    for call in routes(copy.deepcopy(module), (x,), tmp_path):
        twin = copy.deepcopy(module)
        for _step in range(2):
            x = torch.randn(2, 3, 4, 5) * 2 + 1
            close(call(x), twin(x))
        for name, buffer in twin.named_buffers():
            torch.testing.assert_close(call.buffers[name], buffer, rtol=1e-5, atol=1e-6)
    assert module[0].num_batches_tracked == 0


def test_symbolic_views_are_written_too(tmp_path):
    def f(x):
        h = x * 2
        h.view(-1)[0] = 7
        h[1:, 0].add_(1)
        h.transpose(0, 1)[1].zero_()
        return h

    for call in routes(Fn(f), (torch.randn(3, 4),), tmp_path, (({0: torch.export.Dim.AUTO},),)):
        for n in (3, 5):
            x = torch.randn(n, 4)
            close(call(x), f(x))


def test_a_reshape_that_copies_is_no_view(tmp_path):
    """Writing to the reshape of a transposed tensor leaves the tensor alone; to that of a contiguous one does not."""

    def f(x):
        h, k = (x + 1).t(), x + 2
        copy_, view = h.reshape(-1), k.reshape(-1)
        copy_.zero_()
        view.zero_()
        return h, k, copy_

    x = torch.randn(3, 4)
    for call in routes(Fn(f), (x,), tmp_path):
        close(call(x), f(x))


def test_a_write_whose_sharing_is_not_decidable_is_refused_or_traced():
    """Symbolic extents: whether reshape copies is unknown to the record. torch's own functionalisation decides."""

    def f(x):
        h = x * 2
        h.reshape(-1).zero_()
        return h

    ep = export(Fn(f), (torch.randn(3, 4),), None, (({0: torch.export.Dim.AUTO},),))
    program = read(ep)
    assert any(written(c.target) for c in program.calls if c.target.startswith("aten."))
    with pytest.raises(ModelError, match="may or may not copy"):
        functionalize(program)
    imported = import_exported(ep)
    x = torch.randn(5, 4)
    call = ExportedCallable(imported, lambda given: evaluate(imported.graph, given, ops=OPS))
    close(call(x), f(x))


def test_functional_programs_are_left_alone():
    program = read(export(nn.Linear(4, 3), (torch.randn(2, 4),)))
    assert functionalize(program) is program
    assert [n.op for n in convert(program).graph.nodes] == ["MatMul", "Add"]


@pytest.mark.parametrize("fn", CASES, ids=[f.__name__ for f in CASES])
def test_the_reference_interpreter_writes_copies(fn):
    args = (torch.randn(3, 4), torch.randn(4, 4), torch.randn(4))
    program = read(export(Fn(fn), args))
    given, want_args = copy.deepcopy(args), copy.deepcopy(args)
    want = fn(*want_args)
    outcome = reference.execute(program, given)
    close(outcome.leaves, want)
    close(given, args)
    close(tuple(outcome.inputs.values()), want_args)
