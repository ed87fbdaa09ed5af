"""Routed experts in the simulator, against float64 products of NumPy, token by token and expert by expert."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.conformance.coverage import problem_of
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.conformance.trial import Trial
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.problem import select
from fusionreg.core.runtime import Runtime
from fusionreg.core.simulator import Checks

CATALOG = shipped("moe")
FUSION = "moe.routed_ffn"
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
ACTIVATIONS = {
    "Swish": lambda v: v / (1 + np.exp(-v)),
    "Gelu": lambda v: np.vectorize(lambda a: a / 2 * (1 + math.erf(a / math.sqrt(2))))(v),
    "gelu_tanh": lambda v: v / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "relu2": lambda v: np.maximum(v, 0) ** 2,
}


def choices(logits, k, scoring, renormalise, scale, bias):
    """Experts of a token and their weights, by sorting (score, -index)."""
    shifted = np.exp(logits - logits.max())
    scores = 1 / (1 + np.exp(-logits)) if scoring == "sigmoid" else shifted / shifted.sum()
    ranked = logits if bias is None else scores + bias
    best = sorted(range(len(logits)), key=lambda e: (-ranked[e], e))[:k]
    weights = shifted[best] / shifted[best].sum() if scoring == "softmax_after" else scores[best]
    return best, scale * (weights / weights.sum() if renormalise else weights)


def exact(x, logits, gate_up, down, bias=None, *, k=2, scoring="softmax", renormalise=0, scale=1.0, activation="Swish"):
    x, logits, gate_up, down = (v.astype(np.float64) for v in (x, logits, gate_up, down))
    y, hidden = np.zeros_like(x), gate_up.shape[1] // 2
    for m in range(len(x)):
        for e, weight in zip(*choices(logits[m], k, scoring, renormalise, scale, bias), strict=True):
            both = gate_up[e] @ x[m]
            y[m] += weight * (down[e] @ (ACTIVATIONS[activation](both[:hidden]) * both[hidden:]))
    return y


def operands(tokens, channels, hidden, experts, dtype, logits="float32", seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape, size=1.0, kind=dtype):
        return (size * rng.standard_normal(shape)).astype(KINDS[kind])

    return (
        draw(tokens, channels),
        draw(tokens, experts, kind=logits),
        draw(experts, 2 * hidden, channels, size=channels**-0.5),
        draw(experts, channels, hidden, size=hidden**-0.5),
    )


def runtime(kernel, cache, *, checked=True, **params):
    """Dispatch that takes this kernel, with these parameters."""
    key = f"{FUSION}/{kernel}"
    checks = Checks.full() if checked else Checks.guarded()
    return Runtime(CATALOG, "sim", cache, checks, measured={key: 1e-9}, tuned={key: FrozenDict(params)})


def close(got, wanted, dtype):
    eps = {"float16": 2**-9, "bfloat16": 2**-6, "float32": 2**-18}[dtype]
    assert np.abs(got.astype(np.float64) - wanted).max() <= eps * (1 + np.abs(wanted).max())


@pytest.mark.parametrize(
    ("kernel", "dtype", "attributes"),
    [
        ("plain", "float32", {"scoring": "softmax", "renormalise": 1}),
        ("plain", "float16", {"scoring": "softmax_after", "activation": "gelu_tanh"}),
        ("plain", "float32", {"scoring": "sigmoid", "renormalise": 1, "scale": 2.5, "activation": "relu2"}),
        ("wgmma", "bfloat16", {"scoring": "softmax", "activation": "Gelu"}),
        ("wgmma", "float16", {"scoring": "sigmoid", "renormalise": 1, "scale": 2.5}),
        ("decode", "float16", {"scoring": "softmax", "renormalise": 1, "activation": "relu2"}),
        ("token", "float16", {"scoring": "sigmoid", "renormalise": 1, "scale": 2.5}),
    ],
)
def test_tokens_go_to_their_experts(kernel, dtype, attributes, sim_cache):
    inputs = operands({"decode": 8, "token": 1}.get(kernel, 11), 64, 24, 5, dtype)
    bias = np.linspace(0.3, -0.3, 5).astype(np.float32) if attributes["scoring"] == "sigmoid" else None
    wanted = exact(*inputs, bias, k=3, **attributes)
    given = {"activation": "Swish", **attributes}
    run = runtime(kernel, sim_cache, checked=False)
    close(run.call(FUSION, *inputs, bias, top_k=3, **given), wanted, dtype)
    assert run.kernels_used == {f"{FUSION}/{kernel}": 1}


@pytest.mark.parametrize(("kernel", "tokens"), [("wgmma", 150), ("decode", 8)])
def test_one_expert_for_all_and_none_for_the_rest(kernel, tokens, sim_cache):
    """All tokens meet in one expert, more than a tile holds; NaN stands in every expert that no token has."""
    x, logits, gate_up, down = operands(tokens, 72, 40, 4, "bfloat16")
    logits[:, 2] += 100
    gate_up[[0, 1, 3]], down[[0, 1, 3]] = np.nan, np.nan
    run = runtime(kernel, sim_cache)
    given = {"top_k": 1, "activation": "Swish"}
    y = run.call(FUSION, x, logits, gate_up, down, None, **given)
    finite = (np.nan_to_num(w.astype(np.float32)) for w in (gate_up, down))
    close(y, exact(x, logits, *finite, k=1), "bfloat16")
    assert run.call(FUSION, x[:0], logits[:0], gate_up, down, None, **given).shape == (0, 72)
    order = np.random.default_rng(1).permutation(tokens)
    assert run.call(FUSION, x[order], logits[order], gate_up, down, None, **given).tobytes() == y[order].tobytes()


@pytest.mark.parametrize(
    ("kernel", "multiprocessors", "axes"),
    [
        ("wgmma", 1, {"M": 520, "D": 24, "E": 3, "J": 272, "I": 136}),  # more choices than are staged at once
        ("wgmma", 3, {"M": 40, "D": 328, "E": 4, "J": 144, "I": 72}),
        ("decode", 2, {"M": 7, "D": 264, "E": 6, "J": 272, "I": 136}),  # more tiles than a window has
        ("token", 2, {"M": 1, "D": 136, "E": 6, "J": 272, "I": 136}),  # a warp has channels of two experts
    ],
)
def test_blocks_take_tile_after_tile(kernel, multiprocessors, axes, sim_cache):
    entry = CATALOG[FUSION]
    executor = SimExecutor(sim_cache, ahead=False)
    executor.multiprocessors = multiprocessors
    attributes = {n: a.default for n, a in entry.spec.attributes.items()} | {"renormalise": 1}
    trial = Trial(
        "tiles", FrozenDict(T="bfloat16", L="float32"), FrozenDict(axes), attributes=FrozenDict(attributes),
        choices=FrozenDict(activation="Swish"), absent=("bias",),
    )  # fmt: skip
    job = prepare(entry, entry.kernel(kernel), trial, executor)
    assert isinstance(job, Job), job.reason
    assert job.candidate.launch.cooperative and job.candidate.launch.blocks == multiprocessors
    found = execute(job, executor, CATALOG.ops)
    assert found.status.name == "PASSED", found.reason


@pytest.mark.parametrize(
    ("dtype", "axes", "kernel"),
    [
        ("bfloat16", {"M": 1, "D": 2048, "E": 128, "J": 1536, "I": 768}, "token"),
        ("float16", {"M": 64, "D": 2048, "E": 128, "J": 1536, "I": 768}, "wgmma"),
        ("bfloat16", {"M": 1, "D": 4096, "E": 8, "J": 28672, "I": 14336}, "token"),
        ("float16", {"M": 256, "D": 4096, "E": 8, "J": 28672, "I": 14336}, "wgmma"),
        ("float16", {"M": 4096, "D": 4096, "E": 8, "J": 28672, "I": 14336}, "wgmma"),
        ("bfloat16", {"M": 64, "D": 2044, "E": 128, "J": 1536, "I": 768}, "plain"),
        ("float32", {"M": 64, "D": 2048, "E": 128, "J": 1536, "I": 768}, "plain"),
    ],
)
def test_which_kernel_is_chosen(dtype, axes, kernel):
    entry = CATALOG[FUSION]
    attributes = {n: a.default for n, a in entry.spec.attributes.items()}
    trial = Trial(
        "chosen", FrozenDict(T=dtype, L="float32"), FrozenDict(axes), attributes=FrozenDict(attributes),
        choices=FrozenDict(activation="Swish"), absent=("bias",),
    )  # fmt: skip
    problem = problem_of(entry, trial, "sm_90a")
    first = select(entry, problem, pending=True).accepted[0]
    assert first.kernel.name == kernel
    assert first.launch.blocks <= 132 or kernel == "plain"
