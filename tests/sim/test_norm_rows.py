"""Row normalisations on inputs that went wrong somewhere in public, their gradients, and their dropout masks.

Calls go through the runtime, in the simulator, on NumPy arrays.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from catalogs import shipped

from fusionreg.core.conformance import run, run_mutants
from fusionreg.core.conformance.mutants import edit
from fusionreg.core.errors import FusionregError
from fusionreg.core.ops import default_vocabulary, numpy_backend
from fusionreg.core.runtime import Runtime

F16, BF16, F32 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("float32")
ALL = pytest.mark.parametrize("kind", [F16, BF16, F32], ids=str)
CATALOG = shipped("norm")
ROWS = [
    name for name, entry in CATALOG.fusions.items() if any(k.spec.template.startswith("row_") for k in entry.kernels)
]
DROPOUT = default_vocabulary()["fusionreg::Dropout"].meaning


@pytest.fixture(scope="module")
def runtime(sim_cache):
    return Runtime(CATALOG, device="sim", cache=sim_cache)


def layernorm(runtime, x, eps=1e-5):
    n, kind = x.shape[-1], x.dtype
    return runtime.call("norm.layernorm", x, np.ones(n, kind), np.zeros(n, kind), epsilon=eps).astype(np.float64)


def rng(seed=11, offset=2):
    return np.array([seed, offset])


def kept(shape, p, seed=11, offset=2):
    return DROPOUT(numpy_backend(), np.ones(shape), rng(seed, offset), p=p) > 0


def dropped_rows(runtime, x, p, state, residual=None):
    """dropout(x) of `norm.dropout_residual_layernorm`, told by where its output leaves that of p = 1."""
    n = x.shape[-1]
    zero = np.zeros_like(x) if residual is None else residual
    return runtime.call(
        "norm.dropout_residual_layernorm", x, state, zero, np.ones(n, x.dtype), np.zeros(n, x.dtype), p=p
    )


#: Backward kernels that all their fusions run; the others' templates are run by one fusion or two.
EVERY = ("columns", "stream", "rows", "long")
#: What runs of fusions whose templates are those of others: without bias, or with the same slots.
SOME = {
    "norm.gelu_dropout_layernorm_backward.summed": ("packed",),
    "norm.dropout_residual_layernorm_backward.summed": ("stream",),
    "norm.rmsnorm_backward.summed": ("rows", "columns", "stream"),
    "norm.layernorm_backward.accumulated": ("rows", "spread"),
    "norm.layernorm_backward": (*EVERY, "spread"),
    "norm.rmsnorm_backward": EVERY,
    "norm.residual_rmsnorm_backward": (*EVERY, "strided"),
    "norm.dropout_residual_layernorm_backward": EVERY,
    **{f: ("rows", "stream") for f in ROWS if f.endswith("_unbiased")},
}


@pytest.mark.parametrize("fusion", ROWS)
def test_conforms(fusion, sim_cache):
    every = [k for e in CATALOG.entries([fusion]) for k in e.kernels]
    kernels = [k.key for k in every if k.name in SOME.get(k.fusion, (k.name,))]
    report = run(CATALOG, [fusion], device="sim", cases="quick", kernels=kernels, cache=sim_cache)
    assert report.ok, "\n".join(map(str, report.failures))


@pytest.mark.parametrize(("at", "step"), [(2e4, 0.25), (1e4, 1.0)])
@pytest.mark.parametrize("n", [4, 40])
def test_variance_does_not_cancel(runtime, at, step, n):
    x = np.tile(at + step * np.arange(4), n // 4)[None].astype(F32)
    y = layernorm(runtime, x, eps=0.0)
    np.testing.assert_allclose(y[0], np.tile([-1.3416408, -0.4472136, 0.4472136, 1.3416408], n // 4), rtol=1e-5)


@pytest.mark.parametrize("n", [2, 16])
def test_squares_that_overflow(runtime, n):
    x = np.tile(np.array([1e30, -1e30]), n // 2)[None].astype(F32)
    np.testing.assert_allclose(layernorm(runtime, x), np.sign(x), rtol=1e-6)
    rms = runtime.call("norm.rmsnorm", 3e38 * np.sign(x).astype(F32), np.ones(n, F32))
    np.testing.assert_allclose(rms, np.sign(x), rtol=1e-6)


@ALL
@pytest.mark.parametrize("n", [7, 64])
def test_a_nan_spoils_its_row_alone(runtime, kind, n):
    x = np.random.default_rng(0).standard_normal((5, n)).astype(kind)
    x[2, n - 1] = np.nan
    y = layernorm(runtime, x)
    assert np.isnan(y[2]).all() and np.isfinite(np.delete(y, 2, axis=0)).all()


@pytest.mark.parametrize("n", [1, 3, 33, 255, 257, 1025, 4097, 33000])
def test_row_lengths(runtime, n):
    x = np.random.default_rng(n).standard_normal((2, n)).astype(F32) + 3
    want = (x - x.mean(-1, keepdims=True, dtype=np.float64)) / np.sqrt(
        x.astype(np.float64).var(-1, keepdims=True) + 1e-5
    )
    np.testing.assert_allclose(layernorm(runtime, x), want, atol=3e-6)


POINTS = np.array([8, 10.5, 11, 15, 40, 60, 1e4, -10.5, -13.5, -40, -60, -1e4, 2.7, -2.7, 0.5, -0.75])


@ALL
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("lanes", ["vector", "scalar"])
def test_gelu_at_its_tails_and_its_gradient(runtime, kind, approximate, lanes):
    """x^3 overflows fp16 at 60, tanh by exp is inf / inf from 10.5 on, erf and tanh differ by 4.7e-4 near 2.7."""
    x = POINTS if lanes == "vector" else POINTS[:-1]
    x, n = x[None].astype(kind), x.size
    p0 = {"p": 0.0, "approximate": approximate}
    y = runtime.call("norm.gelu_dropout_layernorm", x, rng(), np.ones(n, kind), np.zeros(n, kind), **p0)
    tx = torch.tensor(x.astype(np.float64), requires_grad=True)
    g = torch.nn.functional.gelu(tx, approximate=approximate)
    wanted = torch.nn.functional.layer_norm(g, (n,))
    tolerance = {F16: 2e-3, BF16: 2e-2, F32: 1e-6}[kind]
    np.testing.assert_allclose(y.astype(np.float64), wanted.detach().numpy(), atol=tolerance)
    dy = np.linspace(-1, 1, n)[None].astype(kind)
    wanted.backward(torch.tensor(dy.astype(np.float64)))
    dx, _, _ = runtime.call("norm.gelu_dropout_layernorm_backward", dy, x, rng(), np.ones(n, kind), **p0)
    largest = float(tx.grad.abs().max())
    np.testing.assert_allclose(dx.astype(np.float64), tx.grad.numpy(), atol=8 * tolerance * largest)


def test_the_two_gelus_are_told_apart(runtime):
    x = np.array([[2.7, -2.7, 0.0, 0.0]], F32)
    one, zero = np.ones(4, F32), np.zeros(4, F32)

    def call(approximate):
        keywords = {"p": 0.0, "approximate": approximate, "epsilon": 1.0}
        return runtime.call("norm.gelu_dropout_layernorm", x, rng(), one, zero, **keywords)

    for a in ("none", "tanh"):
        g = torch.nn.functional.gelu(torch.tensor(x, dtype=torch.float64), approximate=a)
        np.testing.assert_allclose(call(a), torch.nn.functional.layer_norm(g, (4,), eps=1.0).numpy(), atol=1e-6)
    assert np.abs(call("none") - call("tanh")).max() > 1e-4


@ALL
def test_dropout_of_nothing_and_of_everything(runtime, kind):
    n = 24
    x = np.random.default_rng(1).standard_normal((3, n)).astype(kind)
    beta = np.linspace(-1, 1, n).astype(kind)
    y = runtime.call("norm.gelu_dropout_layernorm", np.full((3, n), np.nan, kind), rng(), np.ones(n, kind), beta, p=1.0)
    np.testing.assert_array_equal(y, np.broadcast_to(beta, y.shape))
    np.testing.assert_array_equal(dropped_rows(runtime, x, 0.0, rng()), layernorm(runtime, x).astype(kind))
    dx, dresidual, *_ = runtime.call(
        "norm.dropout_residual_layernorm_backward", x, x, rng(), x, np.ones(n, kind), p=1.0
    )  # fmt: skip
    assert not dx.any() and dresidual.any()


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_what_is_no_probability_is_refused(runtime, p):
    with pytest.raises(FusionregError):
        dropped_rows(runtime, np.ones((2, 8), F32), p, rng())


@pytest.mark.parametrize("shape", [(6, 40), (5, 37), (3, 4100)], ids=str)
@pytest.mark.parametrize("state", [(11, 2), (-1, 1 << 33)], ids=str)
def test_one_mask_forward_and_backward(runtime, shape, state):
    """Recovered from both, for warps and blocks to a row, whole vectors and single elements: the vocabulary's own."""
    mask, n, p = kept(shape, 0.3, *state), shape[1], 0.3
    x = np.ones(shape, F32)
    y = dropped_rows(runtime, x, p, rng(*state))
    np.testing.assert_array_equal(y > 0, mask)
    g = np.random.default_rng(3).standard_normal(shape).astype(F32)
    dx, dresidual, *_ = runtime.call(
        "norm.dropout_residual_layernorm_backward", g, x, rng(*state), x, np.ones(n, F32), p=p
    )  # fmt: skip
    np.testing.assert_array_equal(dx != 0, mask)
    np.testing.assert_allclose(dx[mask], dresidual[mask] * (65536 / (65536 - 19661)), rtol=1e-6)


def test_masks_of_calls_differ(runtime):
    x = np.ones((64, 128), F32)
    masks = [dropped_rows(runtime, x, 0.5, rng(s, o)) > 0 for s, o in ((1, 0), (1, 1), (2, 0))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(masks[a].ravel(), masks[b].ravel())[0, 1]) < 4 / np.sqrt(x.size)


@pytest.mark.parametrize("fusion", ["layernorm", "rmsnorm"])
def test_gradients_are_those_of_torch(runtime, fusion):
    r = np.random.default_rng(4)
    x, dy = r.standard_normal((50, 72)).astype(F32), r.standard_normal((50, 72)).astype(F32)
    scale = r.standard_normal(72).astype(F32)
    got = runtime.call(f"norm.{fusion}_backward", dy, x, scale)
    tx, ts, tb = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, scale, np.zeros(72)))
    f = torch.nn.functional
    y = f.layer_norm(tx, (72,), ts, tb) if fusion == "layernorm" else f.rms_norm(tx, (72,), ts, 1e-5)
    y.backward(torch.tensor(dy, dtype=torch.float64))
    for value, t in zip(got, (tx, ts, tb), strict=False):
        np.testing.assert_allclose(value, t.grad.numpy(), atol=2e-5)


def test_no_rows_and_no_elements(runtime):
    assert layernorm(runtime, np.ones((0, 16), F32)).shape == (0, 16)
    assert layernorm(runtime, np.ones((3, 0), F32)).shape == (3, 0)
    none = np.ones((0, 16), F32)
    dx, dscale, dbias = runtime.call("norm.layernorm_backward", none, none, np.ones(16, F32))
    assert dx.shape == (0, 16) and not dscale.any() and not dbias.any() and dscale.shape == (16,)


ONE_PASS = edit("variance_of_squares", "const float d = v[i][j] - mean;", "const float d = v[i][j];")
OTHER_MASK = edit("mask_of_the_row_alone", "dropout.apply(v[i], start + n);", "dropout.apply(v[i], n);")
RAW_WORD = edit("low_half_twice", "j % 2 ? words[j / 2] : words[j / 2] << 16", "words[j / 2] << 16")


@pytest.mark.parametrize(
    ("fusion", "extra"),
    [("norm.layernorm", [ONE_PASS]), ("norm.gelu_dropout_layernorm", [OTHER_MASK, RAW_WORD])],
)
def test_every_mutant_dies(fusion, extra, sim_cache):
    verdicts = run_mutants(CATALOG, [fusion], kernels=["rows"], device="sim", extra=extra, cache=sim_cache)
    assert not [str(v) for v in verdicts if v.survived]
    assert {m.name for m in extra} <= {v.mutant for v in verdicts if v.applies}


KEEP = "dropout.keep(static_cast<unsigned>(start / 8) + i * LANES + lane, keep);"
ONE_MASK = edit("one_mask_for_all_rows", KEEP, "dropout.keep(i * LANES + lane, keep);")
CANCELS = edit("cancels", "if (m.variance > 0x1p-6f * (squares * share) && ", "if (")
EPSILON = edit("epsilon_without_the_factor", "epsilon / (dropout.factor * dropout.factor)", "epsilon")


@pytest.mark.parametrize(
    ("fusion", "extra"),
    [("gelu_dropout_layernorm", [ONE_MASK, EPSILON]), ("gelu_dropout_layernorm_backward", [ONE_MASK]),
     ("layernorm", [CANCELS])],
)  # fmt: skip
def test_what_only_the_stream_can_get_wrong(fusion, extra, sim_cache):
    verdicts = run_mutants(
        CATALOG, [f"norm.{fusion}"], kernels=["stream"], device="sim", extra=extra, only=[m.name for m in extra],
        cache=sim_cache,
    )  # fmt: skip
    assert not [str(v) for v in verdicts if v.survived]
    assert {m.name for m in extra} <= {v.mutant for v in verdicts if v.applies}
