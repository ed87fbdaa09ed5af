"""cuDNN as kernels of attention: what reaches its frontend, held against the operators in float64."""

from __future__ import annotations

import sys

import fake_cudnn
import ml_dtypes
import numpy as np
import pytest

from fusionreg.core.dtypes import dtype
from fusionreg.core.errors import LaunchError, UnsupportedError
from fusionreg.core.problem import Tensor, bind, select
from fusionreg.core.problem.selection import choose
from fusionreg.core.registry.catalog import load
from fusionreg_attention import cudnn_attention, cudnn_library

B, H, G, Q, K, D, E = 2, 4, 2, 24, 40, 64, 32
SHAPES = {"q": (B, H, Q, D), "k": (B, G, K, D), "v": (B, G, K, E)}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def catalog():
    return load(allow=("attention",))


@pytest.fixture
def frontend(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn)
    cudnn_library.cudnn.cache_clear()
    fake_cudnn.notes.clear()
    fake_cudnn.plan[0] = 64
    yield fake_cudnn
    cudnn_library.cudnn.cache_clear()


def arrays_of(turned: bool = False) -> dict[str, np.ndarray]:
    """``turned``: heads lie behind queries in memory, as a projection leaves them."""
    rng = np.random.default_rng(7)
    found = {n: rng.standard_normal(s).astype(BFLOAT16) for n, s in SHAPES.items()}
    return {n: a.swapaxes(1, 2).copy().swapaxes(1, 2) for n, a in found.items()} if turned else found


def tensor(a: np.ndarray) -> Tensor:
    return Tensor(a.dtype.name, a.shape, tuple(s // a.itemsize for s in a.strides), 256)


def problem_of(entry, arrays, **attributes):
    return bind(entry, {n: tensor(a) for n, a in arrays.items()}, attributes, "sm_90a")


def empty(t: Tensor) -> np.ndarray:
    kind = dtype(t.dtype).numpy
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))
    return np.lib.stride_tricks.as_strided(np.zeros(extent, kind), t.shape, [s * kind.itemsize for s in t.strides])


def attention(arrays, causal: bool, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Weighted sums of v and the log-sum-exp of scores, query by query."""
    q, k, v = (a.astype(np.float64) for a in arrays.values())
    y, lse = np.zeros((B, H, Q, E)), np.zeros((B, H, Q))
    for b, h, i in np.ndindex(B, H, Q):
        seen = slice(0, i + 1 if causal else K)
        weights = np.exp(k[b, h // (H // G), seen] @ q[b, h, i] * scale)
        y[b, h, i] = weights @ v[b, h // (H // G), seen] / weights.sum()
        lse[b, h, i] = np.log(weights.sum())
    return y, lse


@pytest.mark.parametrize("fusion", ["sdpa", "sdpa_training"])
@pytest.mark.parametrize(
    ("turned", "causal", "attributes"),
    [(False, 1, {"scaling": "usual"}), (True, 0, {"scaling": "given", "scale": 0.25})],
)
def test_a_call_computes_attention(catalog, frontend, fusion, turned, causal, attributes):
    entry, arrays = catalog[f"attention.{fusion}"], arrays_of(turned)
    problem = problem_of(entry, arrays, is_causal=causal, **attributes)
    call = cudnn_attention.CudnnAttention().prepare(problem, 0, 1024)
    results = [empty(problem.tensors[n]) for n in problem.output_names]
    call([a.__array_interface__["data"][0] for a in (*arrays.values(), *results)], 4096, 77)
    assert frontend.notes[-1] == ("execute", (4096, 77))
    assert (results[0].strides[1] < results[0].strides[2]) == turned  # y lies as q does
    wanted = attention(arrays, bool(causal), attributes.get("scale", 0.125))
    assert len(results) == (2 if fusion == "sdpa_training" else 1)
    np.testing.assert_allclose(results[0].astype(np.float64), wanted[0], atol=1e-2)
    if len(results) > 1:
        np.testing.assert_allclose(results[1], wanted[1], atol=1e-5)


def test_what_it_is_not_asked_for(catalog):
    entry = catalog["attention.sdpa"]
    kernel = entry.kernel("cudnn")
    arrays = arrays_of()

    def refusal(**attributes) -> str:
        made = problem_of(entry, arrays, scaling="usual", **attributes)
        return getattr(choose(kernel, made, pending=True), "reason", "")

    assert refusal() == refusal(is_causal=1) == ""
    for attributes in ({"softcap": 3.0}, {"left_window_size": 4}, {"right_window_size": 0}):
        assert "requires softcap == 0 and left_window_size == -1" in refusal(**attributes)
    half = {n: a.astype(np.float16) for n, a in arrays.items()}
    assert 'requires T == "bfloat16"' in choose(kernel, problem_of(entry, half, scaling="usual"), pending=True).reason
    odd = {**arrays, "k": np.zeros((B, G, K, D + 4), arrays["k"].dtype)[..., :D]}
    made = problem_of(entry, odd, scaling="usual")
    assert "stride(k, 2) % 8 == 0" in choose(kernel, made, pending=True).reason


def test_dispatch_asks_it_where_ours_are_slower(catalog):
    """Heads of 64 and 128 have a kernel of ours that is faster; for those of 96, 192 and 256 cuDNN is."""
    entry = catalog["attention.sdpa"]

    def first(d: int, e: int) -> str:
        shapes = {"q": (4, 32, 2048, d), "k": (4, 8, 2048, d), "v": (4, 8, 2048, e)}
        given = {n: Tensor.contiguous("bfloat16", s) for n, s in shapes.items()}
        made = bind(entry, given, {"is_causal": 1, "scaling": "usual"}, "sm_90a")
        return select(entry, made, pending=True).accepted[0].kernel.spec.name

    assert [first(64, 64), first(128, 128)] == ["wgmma", "wgmma"]
    assert {first(96, 96), first(192, 128), first(256, 256)} == {"cudnn"}


def test_no_plan_lets_the_next_kernel_run(catalog, frontend):
    entry = catalog["attention.sdpa"]
    problem = problem_of(entry, arrays_of(), scaling="usual")
    call = cudnn_attention.CudnnAttention()
    frontend.plan[0] = "no engine\nof many"
    with pytest.raises(UnsupportedError, match="cuDNN says no engine "):
        call.prepare(problem, 0, 1024)
    frontend.plan[0] = 2048
    with pytest.raises(UnsupportedError, match="takes 2048 bytes of scratch memory, 1024"):
        call.prepare(problem, 0, 1024)
    frontend.plan[0] = 64
    prepared = call.prepare(problem, 0, 1024)
    with pytest.raises(LaunchError, match="cuDNN says"):
        prepared([1], 0, 0)
    assert [n for n, _ in frontend.notes].count("handle") == 1


def test_without_a_frontend_it_is_missing(monkeypatch):
    call = cudnn_attention.CudnnAttention()
    for module, said in ((None, "ImportError|ModuleNotFoundError"), (type(sys)("cudnn"), "AttributeError")):
        monkeypatch.setitem(sys.modules, "cudnn", module)
        cudnn_library.cudnn.cache_clear()
        assert call.missing().startswith("cuDNN is not there: ") and any(w in call.missing() for w in said.split("|"))
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn)
    monkeypatch.setattr(fake_cudnn, "__version__", "1.31.2")
    cudnn_library.cudnn.cache_clear()
    assert "the frontend is 1.31.2, and 1.32 is the oldest" in call.missing()
    monkeypatch.undo()
    cudnn_library.cudnn.cache_clear()


def test_versions_are_told(frontend):
    call = cudnn_attention.CudnnAttention()
    assert call.missing() == "" and call.version() == "cuDNN 91900, frontend 1.32.0"


def test_few_queries_of_pages_are_decoded(catalog):
    """A tile of the tensor cores is as much work with one query as when it is full."""
    entry = catalog["attention.sdpa_paged"]
    shapes = {"q": (16, 32, 1, 128), "k": (8192, 16, 8, 128), "v": (8192, 16, 8, 128)}
    given = {n: Tensor.contiguous("bfloat16", s) for n, s in shapes.items()}
    given |= {"table": Tensor.contiguous("int32", (16, 512)), "lengths": Tensor.contiguous("int64", (16,))}
    made = bind(entry, given, {"scaling": "usual"}, "sm_90a")
    assert select(entry, made, pending=True).accepted[0].kernel.name == "decode"
