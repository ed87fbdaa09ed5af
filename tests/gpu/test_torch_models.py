"""PyTorch models on a GPU: graphs on CUDA tensors against the eager module there, and fused end to end."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch_blocks  # noqa: E402
import torch_zoo  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import fusionreg  # noqa: E402
from fusionreg.core.errors import ArgumentError  # noqa: E402
from fusionreg.core.evaluate.evaluator import Evaluator  # noqa: E402
from fusionreg.core.ops import default_vocabulary  # noqa: E402
from fusionreg.integrations.torch import export, import_exported  # noqa: E402
from fusionreg.integrations.torch.module import ExportedCallable  # noqa: E402

pytestmark = pytest.mark.gpu

OPS = default_vocabulary()
EXAMPLE = Path(__file__).parents[2] / "examples" / "transformer_encoder.py"
#: Makes tensors on the CPU inside the module, whatever device its arguments are on.
ON_CPU = ("creation", "t5_ffn", "gpt2_block", "llama_block", "casts", "pools_and_pads")


@pytest.fixture(autouse=True)
def full_precision():
    """TF32 off: the eager module is the reference."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("name", [n for n in torch_zoo.names() if n not in ON_CPU])
def test_values_on_cuda(name):
    """CUDA in, CUDA out, the eager module's values; the program is the one exported on the CPU."""
    module, args = torch_zoo.build(name)
    imported = import_exported(export(module, args))
    run = Evaluator(imported.graph, ops=OPS)
    call = ExportedCallable(imported, run.run)
    given = pytree.tree_map(lambda t: t.cuda() if isinstance(t, torch.Tensor) else t, args)
    with torch.no_grad():
        want = pytree.tree_leaves(module.cuda()(*copy.deepcopy(given)))
    got = pytree.tree_leaves(call(*copy.deepcopy(given)))
    for g, w in zip(got, want, strict=True):
        if isinstance(g, torch.Tensor) and w.is_cuda:
            assert g.device == w.device and g.dtype == w.dtype
            torch.testing.assert_close(g.double(), w.double(), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_the_encoder_fused_on_cuda():
    """Fused on the GPU through real kernels, called like the module, within bf16 of eager."""
    spec = importlib.util.spec_from_file_location("transformer_encoder_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    module, (x,) = example.build()
    call = fusionreg.load_registry().fuse(module, x)
    module, x = module.cuda(), x.cuda()
    with torch.no_grad():
        got, want = call(x), module(x)
    assert got.is_cuda and got.dtype == torch.bfloat16
    assert (got - want).abs().max() < 0.1
    assert [s.status for s in call.sites].count("fused") >= 8


def test_a_module_that_lives_on_cuda():
    module, x = torch_blocks.VitBlock().eval().cuda(), torch.randn(2, 3, 8, 12, device="cuda")
    imported = import_exported(export(module, (x,)))
    call = ExportedCallable(imported, Evaluator(imported.graph, ops=OPS).run)
    with torch.no_grad():
        torch.testing.assert_close(call(x), module(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="mixed devices"):
        fn = torch_zoo.Fn(lambda a, b: a + b)
        both = import_exported(export(fn, (torch.randn(3), torch.randn(3))))
        ExportedCallable(both, Evaluator(both.graph, ops=OPS).run)(torch.randn(3), torch.randn(3, device="cuda"))
