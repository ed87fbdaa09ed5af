"""Gradients of routed experts in the simulator, against torch's of float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from catalogs import shipped
from torch.nn import functional as F

from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.conformance.trial import Trial
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.problem import Tensor, bind, select
from fusionreg.core.runtime import Runtime
from fusionreg.core.simulator import Checks

CATALOG = shipped("moe")
FUSION = "moe.routed_ffn_backward"
ACTIVATIONS = {
    "Swish": F.silu, "Gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}  # fmt: skip


def exact(inputs, bias, *, top_k, scoring="softmax", renormalise=0, scale=1.0, activation="Swish"):
    """Of dy, x, logits, gate_up and down: the gradients of all but dy."""
    dy, *leaves = (torch.from_numpy(v.astype(np.float64)) for v in inputs)
    x, logits, gate_up, down = (t.requires_grad_() for t in leaves)
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    ids = (logits if bias is None else scores + torch.from_numpy(bias)).topk(top_k).indices
    weights = logits.gather(1, ids).softmax(-1) if scoring == "softmax_after" else scores.gather(1, ids)
    weights = scale * (weights / weights.sum(-1, keepdim=True) if renormalise else weights)
    y = torch.zeros_like(x)
    for j in range(top_k):
        gate, up = torch.einsum("md,mjd->mj", x, gate_up[ids[:, j]]).chunk(2, -1)
        y = y + weights[:, j, None] * torch.einsum("mi,mdi->md", ACTIVATIONS[activation](gate) * up, down[ids[:, j]])
    return [g.numpy() for g in torch.autograd.grad(y, (x, logits, gate_up, down), dy)]


def operands(tokens, channels, hidden, experts, dtype, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape, size=1.0):
        values = torch.from_numpy(size * rng.standard_normal(shape)).to(getattr(torch, dtype))
        return values.float().numpy().astype(_NUMPY[dtype])

    return [
        draw(tokens, channels), draw(tokens, channels), rng.standard_normal((tokens, experts)).astype(np.float32),
        draw(experts, 2 * hidden, channels, size=channels**-0.5), draw(experts, channels, hidden, size=hidden**-0.5),
    ]  # fmt: skip


_NUMPY = {"float16": np.float16, "float32": np.float32}


def runtime(kernel, cache):
    """Dispatch that takes this kernel."""
    return Runtime(CATALOG, "sim", cache, Checks.guarded(), measured={f"{FUSION}/{kernel}": 1e-9})


def close(got, wanted, dtype):
    eps = {"float16": 2**-8, "float32": 2**-18}[dtype]
    for mine, right in zip(got, wanted, strict=True):
        assert np.abs(mine.astype(np.float64) - right).max() <= eps * (0.1 + np.abs(right).max())


@pytest.mark.parametrize(
    ("kernel", "dtype", "attributes"),
    [
        ("plain", "float32", {"scoring": "softmax", "activation": "Gelu"}),
        ("plain", "float32", {"scoring": "sigmoid", "renormalise": 1, "scale": 2.5, "activation": "relu2"}),
        ("tensor_core", "float16", {"scoring": "softmax", "renormalise": 1, "activation": "Swish"}),
        ("tensor_core", "float16", {"scoring": "softmax_after", "activation": "gelu_tanh"}),
        ("wgmma", "float16", {"scoring": "softmax", "renormalise": 1, "activation": "Swish"}),
    ],
)
def test_gradients_are_those_of_the_layer(kernel, dtype, attributes, sim_cache):
    inputs = operands(11, 64, 104 if kernel == "wgmma" else 24, 5, dtype)  # behind 104 is most of a tile
    bias = np.linspace(0.3, -0.3, 5).astype(np.float32) if attributes["scoring"] == "sigmoid" else None
    run = runtime(kernel, sim_cache)
    got = run.call(FUSION, *inputs, bias, top_k=3, **attributes)
    assert run.kernels_used == {f"{FUSION}/{kernel}": 1}
    close(got, exact(inputs, bias, top_k=3, **attributes), dtype)


@pytest.mark.parametrize("kernel", ["wgmma", "tensor_core", "plain"])
def test_experts_without_tokens_have_gradients_of_zero(kernel, sim_cache):
    """All tokens meet in one expert, more than a tile holds; NaN stands in every expert that no token has. The same
    bits again, and of no token zeros."""
    dtype = "float32" if kernel == "plain" else "float16"
    inputs = operands(150, 72, 40, 4, dtype)
    inputs[2][:, 2] += 30
    others = [0, 1, 3]
    finite = [v.copy() for v in inputs]
    inputs[3][others], inputs[4][others] = np.nan, np.nan
    run = runtime(kernel, sim_cache)
    given = {"top_k": 1, "activation": "Swish"}
    got = run.call(FUSION, *inputs, None, **given)
    close(got, exact(finite, None, **given), dtype)
    assert not got[2][others].any() and not got[3][others].any()
    for mine, again in zip(got, run.call(FUSION, *inputs, None, **given), strict=True):
        assert mine.tobytes() == again.tobytes()
    none = run.call(FUSION, *(v[:0] for v in inputs[:3]), *inputs[3:], None, **given)
    assert [v.shape for v in none[:2]] == [(0, 72), (0, 4)] and not none[2].any() and not none[3].any()


@pytest.mark.parametrize("kernel", ["wgmma", "tensor_core"])
def test_blocks_take_tile_after_tile(kernel, sim_cache):
    entry = CATALOG[FUSION]
    executor = SimExecutor(sim_cache, ahead=False)
    executor.multiprocessors = 2
    attributes = {n: a.default for n, a in entry.spec.attributes.items()} | {"renormalise": 1}
    trial = Trial(
        "tiles", FrozenDict(T="float16", L="float32"), FrozenDict(M=200, D=264, E=2, J=272, I=136),
        attributes=FrozenDict(attributes), choices=FrozenDict(activation="Swish"), absent=("bias",),
    )  # fmt: skip
    job = prepare(entry, entry.kernel(kernel), trial, executor)
    assert isinstance(job, Job), job.reason
    assert job.candidate.launch.cooperative and job.candidate.launch.blocks == 2
    found = execute(job, executor, CATALOG.ops)
    assert found.status.name == "PASSED", found.reason


def candidates(experts, hidden):
    """Kernels that take 4096 tokens, and their launches, the first one first."""
    shapes = {
        "dy": (4096, 2048), "x": (4096, 2048), "logits": (4096, experts), "gate_up": (experts, 2 * hidden, 2048),
        "down": (experts, 2048, hidden),
    }  # fmt: skip
    tensors = {n: Tensor("bfloat16", s, _strides(s)) for n, s in shapes.items()}
    problem = bind(CATALOG[FUSION], tensors, {"top_k": 8, "activation": "Swish"}, "sm_90a", 132)
    return {c.kernel.name: c.launch for c in select(CATALOG[FUSION], problem, pending=True).accepted}


def test_memory_is_of_rows_alone():
    """What the workspace takes: some numbers of each row of an expert, nothing of tokens and all experts."""

    def workspace(experts):
        return {name: launch.workspace for name, launch in candidates(experts, 768).items()}

    rows, few, many = 4096 * 8, workspace(128), workspace(512)
    numbers = rows * (2 * (2048 + 1536 + 768) + 4 * 12 + 16)
    assert few["tensor_core"] < numbers + 2**20 and many["tensor_core"] - few["tensor_core"] < 2**20
    tile = 128 * 2 * (1536 + 768)  # of each expert, as rows are kept in whole tiles
    assert few["wgmma"] < numbers + 2**20 + 128 * tile and many["wgmma"] - few["wgmma"] < 384 * (tile + 1000)


def _strides(shape):
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
