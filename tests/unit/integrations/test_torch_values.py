"""Every module of the zoo, by both ways in: the graph against the eager module, and the reference interpreter too."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_blocks
import torch_zoo
from torch.utils import _pytree as pytree

from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.torch import export, import_exported, import_pt2, reference
from fusionreg.integrations.torch.arrays import from_numpy
from fusionreg.integrations.torch.module import ExportedCallable

OPS = default_vocabulary()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
#: Compared in another way than with float64 constants: their results are integers picked by rounded values.
INEXACT = ("casts", "t5_ffn", "creation", "data_dependent")


def callable_of(imported, mode="step"):
    return ExportedCallable(imported, lambda given: evaluate(imported.graph, given, ops=OPS, mode=mode))


def same_types(got, want):
    assert [(g.dtype, g.shape) for g in got] == [(w.dtype, w.shape) for w in want]


def close(got, want, tolerance):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        message = lambda m, i=i: f"result {i}: {m}"  # noqa: E731
        torch.testing.assert_close(g.double(), w.double(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", torch_zoo.names())
def test_values(name, dtype, tmp_path):
    """fx and .pt2 give the eager module's values, dtypes, shapes and nesting; so does the reference interpreter."""
    module, args = torch_zoo.build(name, dtype)
    ep = export(module, args)
    with torch.no_grad():
        want = module(*copy.deepcopy(args))
    leaves, structure = pytree.tree_flatten(want)
    path = tmp_path / "model.pt2"
    torch.export.save(ep, path)
    for imported in (import_exported(ep), import_pt2(path)):
        got = pytree.tree_flatten(callable_of(imported)(*copy.deepcopy(args)))
        assert got[1] == structure
        same_types(got[0], leaves)
        close(got[0], leaves, TOLERANCE[dtype])
        flat = imported.program.call_structure.flatten_call(args, {}, (), name)
        run = reference.execute(imported.program, flat)
        same_types(run.leaves, leaves)
        close(run.leaves, leaves, 1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", [n for n in torch_zoo.names() if n not in INEXACT])
def test_exact_values(name):
    """In float64 throughout, the graph is the module in float64: nothing but rounding lies between them."""
    module, args = torch_zoo.build(name)
    imported = import_exported(export(module, args))
    given = imported.inputs(pytree.tree_leaves(copy.deepcopy(args)))
    found = evaluate(imported.graph, {k: v.numpy() for k, v in given.items()}, ops=OPS, mode="exact")
    wide, wide_args = torch_zoo.build(name)
    wide, wide_args = wide.double(), pytree.tree_map(torch_zoo.doubled, wide_args)
    with torch.no_grad():
        want = pytree.tree_leaves(wide(*wide_args))
    got = [from_numpy(found[imported.graph.outputs[r.index]]) for r in imported.results]
    close(got, want, 1e-6)


def test_the_zoo_is_the_promised_size():
    assert len(torch_zoo.names()) >= 25
    assert torch_blocks.LlamaBlock and len(torch_zoo.names()) == len(set(torch_zoo.names()))
