"""Calls on NumPy arrays and CPU tensors: what is refused and how, what falls back, what is never launched.

The simulator is replaced by one NumPy expression, so that these tests are about calls; ``tests/sim`` has the real one.
"""

from __future__ import annotations

import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import plugin_kit
import pytest

from fusionreg.core import simulator
from fusionreg.core.cache import Cache
from fusionreg.core.errors import ArgumentError, LaunchError, UnknownNameError
from fusionreg.core.matcher.match import Match
from fusionreg.core.problem import Tensor
from fusionreg.core.runtime import FallbackWarning, Runtime
from fusionreg.core.runtime.libraries import ALIGNMENT, library_of, overlapping, self_overlapping
from fusionreg.core.spec import KernelSpec

torch = pytest.importorskip("torch")

FUSION = "acme.add_relu"


class Simulated:
    """relu(x + bias) in float64, on whatever the runtime hands over."""

    def __init__(self):
        self.calls = []

    def launch(self, arguments, launch, **options):
        self.calls.append((arguments, launch, options))
        arrays = [a for a in arguments if isinstance(a, np.ndarray)]
        x, bias, y = arrays[:3] if len(arrays) > 2 else (arrays[0], np.zeros(1, arrays[0].dtype), arrays[1])
        y[...] = np.maximum(x.astype(np.float64) + bias.astype(np.float64), 0).astype(y.dtype)
        return "report"


@pytest.fixture
def simulated(monkeypatch):
    made = Simulated()
    made.compiled = 0

    def compile(source, *, cache, **options):
        made.compiled += 1
        return made

    monkeypatch.setattr(simulator, "compile", compile, raising=False)
    return made


def runtime_of(tmp_path, device="auto", **changes):
    return Runtime(
        plugin_kit.catalog(tmp_path / "p", {"k.cu.j2": plugin_kit.ADD_RELU}, plugin_kit.add_relu(**changes)),
        device, Cache(tmp_path / "cache"),
    )  # fmt: skip


def expected(x, bias):
    return np.maximum(x.astype(np.float64) + bias.astype(np.float64), 0)


X, BIAS = np.linspace(-2, 2, 48).reshape(2, 3, 8), np.linspace(-1, 1, 8)


# --- libraries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numpy_arrays(tmp_path, simulated, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x, bias = X.astype(kind), BIAS.astype(kind)
    y = runtime_of(tmp_path).call(FUSION, x, bias)
    assert y.dtype == kind and y.shape == (2, 3, 8) and y.__array_interface__["data"][0] % 256 == 0
    assert np.array_equal(y.astype(np.float64), expected(x, bias).astype(kind).astype(np.float64))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_on_the_cpu(tmp_path, simulated, dtype):
    x, bias = (torch.tensor(a, dtype=getattr(torch, dtype)) for a in (X, BIAS))
    y = runtime_of(tmp_path).call(FUSION, x, bias)
    assert y.dtype == x.dtype and y.shape == x.shape and isinstance(y, torch.Tensor)
    assert torch.equal(y, torch.relu(x.double() + bias.double()).to(x.dtype))


def test_views_share_memory_both_ways(tmp_path, simulated):
    x = torch.zeros(6, 8, dtype=torch.bfloat16)
    y = torch.full((6, 8), 7.0, dtype=torch.bfloat16)
    runtime_of(tmp_path).call(FUSION, x, torch.ones(8, dtype=torch.bfloat16), out=y)
    assert torch.equal(y, torch.ones(6, 8, dtype=torch.bfloat16))


def test_scalars_and_geometry_reach_the_simulator(tmp_path, simulated):
    runtime_of(tmp_path).call(FUSION, X, BIAS)
    ((arguments, launch, options),) = simulated.calls
    assert arguments[3:] == [6, 8] and launch.grid == (1, 1, 1) and launch.block == (256, 1, 1) and options == {}


def test_it_is_compiled_once(tmp_path, simulated):
    runtime = runtime_of(tmp_path)
    for rows in (1, 2, 3, 3):
        runtime.call(FUSION, np.zeros((rows, 8)), np.zeros(8))
    assert simulated.compiled == 1 and runtime.kernels_used == {"acme.add_relu/plain": 4}


def test_nothing_is_imported_for_an_array():
    code = (
        "import numpy, sys\nfrom fusionreg.core.runtime.libraries import library_of\n"
        "assert library_of(numpy.ndarray).name == 'numpy' and library_of(int) is None\n"
        "print([m for m in ('torch', 'cupy', 'onnx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# --- refused ---------------------------------------------------------------------------------------------------------


def lazy_negative():
    return torch.complex(torch.zeros(6, 8), torch.ones(6, 8)).conj().imag


REFUSED = {
    "too many": ((X, BIAS, BIAS), "3 arrays — at most 2: x, bias"),
    "too few": ((X,), "bias is missing"),
    "None for a required one": ((None, BIAS), "x is missing"),
    "no array": ((), "no array"),
    "a list": (([1.0, 2.0], BIAS), r"x is a builtins\.list — a NumPy, torch or CuPy array"),
    "two libraries": ((X, torch.tensor(BIAS)), "bias is a torch array — a numpy array, as x is"),
    "dtypes": ((X, BIAS.astype(np.float32)), "bias is float32 — float64, as x is"),
    "dtype": ((X.astype(np.int32), BIAS.astype(np.int32)), "x is int32"),
    "shape": ((X, BIAS[:-1]), "N = 7 where N = 8"),
    "objects": ((X.astype(object), BIAS), "dtype object"),
    "masked": ((np.ma.masked_array(X, X > 0), BIAS), r"MaskedArray — an array without a mask.*x\.filled\(value\)"),
    "strings": ((X.astype("U4"), BIAS), "dtype"),
    "foreign byte order": ((X.astype(">f8"), BIAS), "byte order"),
    "odd strides": ((np.ndarray((2, 8), "f4", bytearray(200), strides=(33, 4)), BIAS.astype("f4")), "element size"),
    "sparse": ((torch.eye(8).to_sparse(), torch.zeros(8)), "layout is torch.sparse_coo"),
    "lazy negative": ((lazy_negative(), torch.zeros(8)), "resolve_neg"),
    "on meta": ((torch.zeros(6, 8, device="meta"), torch.zeros(8)), "meta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, simulated, case):
    arrays, words = REFUSED[case]
    runtime = runtime_of(tmp_path)
    with pytest.raises(ArgumentError, match=words) as caught:
        runtime.call(FUSION, *arrays)
    assert caught.value.facts["fusion"] == FUSION and not simulated.calls
    if isinstance(arrays[0] if arrays else None, torch.Tensor) and arrays[0].device.type == "cpu":
        runtime.call(FUSION, torch.zeros(6, 8), torch.zeros(8))  # and the next call is none the worse


def test_a_refused_array_of_a_known_layout(tmp_path, simulated):
    """The fast path must not let through what the slow path refuses, once it knows the type."""
    runtime = runtime_of(tmp_path)
    runtime.call(FUSION, X, BIAS)
    with pytest.raises(ArgumentError, match="mask"):
        runtime.call(FUSION, np.ma.masked_array(X, X > 0), BIAS)
    runtime.call(FUSION, torch.zeros(6, 8), torch.zeros(8))
    for array in (lazy_negative(), torch.eye(8).to_sparse(), torch.zeros(6, 8, device="meta")):
        with pytest.raises(ArgumentError):
            runtime.call(FUSION, array, torch.zeros(8))


def test_tensors_that_are_being_traced_or_transformed(tmp_path, simulated):
    """A tensor without memory of its own must never reach a kernel as a null pointer."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    runtime, x, bias = runtime_of(tmp_path), torch.zeros(6, 8), torch.zeros(8)
    call = lambda a: runtime.call(FUSION, a, bias)  # noqa: E731
    call(x)
    with FakeTensorMode(), pytest.raises(ArgumentError, match="FakeTensor"):
        runtime.call(FUSION, torch.zeros(6, 8), torch.zeros(8))
    for transformed in (torch.vmap(call), torch.func.functionalize(call), torch.func.grad(lambda a: call(a).sum())):
        with pytest.raises(ArgumentError, match="no memory"):
            transformed(x)
    assert len(simulated.calls) == 1


def test_unknown_names(tmp_path, simulated):
    runtime = runtime_of(tmp_path)
    with pytest.raises(UnknownNameError, match=r"did you mean acme\.add_relu"):
        runtime.call("acme.ad_relu", X, BIAS)
    with pytest.raises(ArgumentError, match="unknown attribute 'alpha'"):
        runtime.call(FUSION, X, BIAS, alpha=1)
    with pytest.raises(ArgumentError, match="unknown attribute 'alpha'"):
        runtime.call(FUSION, X, BIAS, alpha=[1, 2])  # which cannot even be hashed
    with pytest.raises(ArgumentError, match="device 'gpu'"):
        Runtime(runtime.catalog, "gpu")


def test_a_device_that_was_asked_for(tmp_path, simulated):
    with pytest.raises(ArgumentError, match="CPU memory"):
        runtime_of(tmp_path, "cuda").call(FUSION, X, BIAS)
    assert runtime_of(tmp_path / "s", "sim").call(FUSION, X, BIAS).shape == X.shape


def test_inputs_that_want_a_gradient(tmp_path, simulated):
    """No silent detach; with gradients off, or a detached input, it runs (TileOPs#648)."""
    runtime = runtime_of(tmp_path)
    x, bias = torch.zeros(6, 8, requires_grad=True), torch.zeros(8)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="no backward"):
            runtime.call(FUSION, x, bias)
        with torch.no_grad():
            assert not runtime.call(FUSION, x, bias).requires_grad
    runtime.call(FUSION, x.detach(), bias)
    with torch.inference_mode():
        runtime.call(FUSION, x, torch.nn.Parameter(bias))


def test_outputs_of_the_caller(tmp_path, simulated):
    runtime = runtime_of(tmp_path)
    x, bias = np.ascontiguousarray(X.reshape(6, 8)), BIAS.copy()
    big = np.zeros((13, 8))
    assert runtime.call(FUSION, x, bias, out=big[:6]).base is big
    for out, words in (
        (x, "x and y overlap"), (big[3:9], None), (bias[None].repeat(6, 0)[:5], "y is"),
        (np.zeros((6, 8), "f4"), "y is"), ((big[:6], big[6:12]), "2 arrays in out="),
        (np.lib.stride_tricks.as_strided(big, (6, 8), (8, 8)), "overlaps itself"),
    ):  # fmt: skip
        if words is None:
            runtime.call(FUSION, x, bias, out=out)
            continue
        with pytest.raises(ArgumentError, match=words):
            runtime.call(FUSION, x, bias, out=out)
    runtime.call(FUSION, big[:6], bias, out=big[6:12])
    with pytest.raises(ArgumentError, match="overlap"):  # the same layouts, other addresses
        runtime.call(FUSION, big[:6], bias, out=big[5:11])


# --- empty, unfused, impossible --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (3, 0, 8), (0, 0)])
def test_empty_outputs_launch_nothing(tmp_path, simulated, shape):
    runtime = runtime_of(tmp_path)
    y = runtime.call(FUSION, np.zeros(shape), np.zeros(shape[-1]))
    assert y.shape == shape and not simulated.calls and simulated.compiled == 0 and runtime.kernels_used == {}
    assert runtime.execute(FUSION, (np.zeros(shape), np.zeros(shape[-1])), {}).kernel == f"{FUSION}/plain"
    assert runtime.bind(FUSION, np.zeros(shape), np.zeros(shape[-1]))().shape == shape


def test_a_call_that_no_kernel_accepts_runs_unfused_and_says_so_once(tmp_path, simulated):
    runtime = runtime_of(tmp_path, kernel_requires="N % 3 == 0")
    with pytest.warns(FallbackWarning, match=r"acme.add_relu runs unfused.*requires N % 3 == 0 \(N = 8\)") as caught:
        y = runtime.call(FUSION, X, BIAS)
        runtime.call(FUSION, X, BIAS)
        runtime.call(FUSION, X[:1], BIAS)
    assert len(caught) == 1 and np.allclose(y, expected(X, BIAS)) and not simulated.calls
    assert "N % 3" in runtime.fallbacks[FUSION] and runtime.kernels_used == {}
    outcome = runtime.execute(FUSION, (X, BIAS), {})
    assert outcome.kernel == "" and "N % 3" in outcome.reason and np.allclose(outcome.outputs[0], expected(X, BIAS))
    bound = runtime.bind(FUSION, X, BIAS)
    assert np.allclose(bound(), expected(X, BIAS)) and bound.kernel == ""


def test_unfused_on_tensors_and_into_out(tmp_path, simulated):
    runtime = runtime_of(tmp_path, kernel_requires="N % 3 == 0")
    x, bias, y = torch.tensor(X), torch.tensor(BIAS), torch.zeros(2, 3, 8, dtype=torch.float64)
    with pytest.warns(FallbackWarning):
        assert runtime.call(FUSION, x, bias, out=y) is y
    assert torch.allclose(y, torch.relu(x + bias))


def test_strided_arrays_are_never_copied_by_a_call_but_are_by_a_model(tmp_path, simulated):
    runtime = runtime_of(tmp_path)
    x = np.ascontiguousarray(X.reshape(6, 8).T).T
    with pytest.warns(FallbackWarning, match="x is not contiguous"):
        y = runtime.call(FUSION, x, BIAS)
    assert np.allclose(y, expected(x, BIAS)) and not simulated.calls
    outcome = runtime.execute(FUSION, (x, BIAS), {})
    assert outcome.kernel == "acme.add_relu/plain" and np.allclose(outcome.outputs[0], expected(x, BIAS))
    assert simulated.calls[0][0][0].flags.c_contiguous


def test_a_kernel_that_the_simulator_cannot_execute(tmp_path, simulated):
    plain = {"template": "k.cu.j2", "grid": "ceildiv(M * N, 256)", "block": "256"}
    kernels = [KernelSpec(name="a_tma", simulator="tensor maps", **plain), KernelSpec(name="b", **plain)]
    runtime = runtime_of(tmp_path, kernels=kernels)
    assert runtime.execute(FUSION, (X, BIAS), {}).kernel == "acme.add_relu/b"
    runtime = runtime_of(tmp_path / "2", kernels=kernels[:1])
    with pytest.warns(FallbackWarning, match="the simulator cannot execute it: tensor maps"):
        runtime.call(FUSION, X, BIAS)


def test_a_grid_that_vanishes_under_an_output_with_elements(tmp_path, simulated):
    runtime = runtime_of(tmp_path, kernel_grid="M - 6")
    with pytest.raises(LaunchError, match=r"grid \(0, 1, 1\)"):
        runtime.call(FUSION, X, BIAS)


def test_refusal_of_a_matched_site(tmp_path, simulated):
    runtime = runtime_of(tmp_path, device="sim", kernel_requires="N % 3 == 0")
    site = {"fusion": FUSION, "plugin": "acme", "spelling": 0, "root": "r", "nodes": ("a", "r")}
    site |= {"inputs": {"x": "x", "bias": "b"}, "outputs": {"y": "y"}, "dtypes": {"T": "float16"}}
    assert runtime.refusal(Match(**site, axes={"M": "batch", "N": 9}, leading=("s",))) is None
    assert "N % 3" in runtime.refusal(Match(**site, axes={"M": "batch", "N": 8}))
    assert "int8" in runtime.refusal(Match(**{**site, "dtypes": {"T": "int8"}}, axes={"M": 2, "N": 9}))


def test_prepared_launches_are_bounded(tmp_path, simulated, monkeypatch):
    monkeypatch.setattr("fusionreg.core.runtime.dispatch._KEPT", 4)
    runtime = runtime_of(tmp_path)
    for rows in range(1, 20):
        runtime.call(FUSION, np.zeros((rows, 8)), np.zeros(8))
    assert len(runtime._prepared) == 4


def test_observers_hear_of_compiled_kernels_only(tmp_path, monkeypatch):
    from fusionreg.core.compiler import compile_source
    from fusionreg.core.problem import bind, select
    from fusionreg.core.render import render

    runtime = runtime_of(tmp_path)
    seen = []
    monkeypatch.setattr(type(runtime.catalog), "hook", lambda self, name, **kw: seen.append((name, kw["code"].kernel)))
    entry = runtime.catalog[FUSION]
    problem = bind(
        entry, {"x": Tensor.contiguous("float32", (4, 8)), "bias": Tensor.contiguous("float32", (8,))}, {}, "sm_80"
    )
    source = render(entry, entry.kernels[0], problem, select(entry, problem).accepted[0].params)
    for _ in range(2):
        compile_source(source, runtime._cache(), (runtime.kernels._observer,))
    assert seen == [("kernel_compiled", "acme.add_relu/plain")]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_alignment_of_addresses():
    assert [ALIGNMENT[a & 255] for a in (0, 256, 1, 2, 48, 0x7F10, 384)] == [256, 256, 1, 2, 16, 16, 128]


def spans(shape, strides):
    return {sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)}


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 4), (4, 1)), ((3, 4), (3, 1)), ((3, 4), (1, 3)), ((2, 2), (1, 1)), ((3, 1), (0, 0)), ((3,), (0,)),
        ((2, 3), (-3, 1)),
    ],
)  # fmt: skip
def test_self_overlap_is_never_missed(shape, strides):
    unique = len(spans(shape, strides)) == int(np.prod(shape))
    assert self_overlapping(Tensor("int8", shape, strides)) >= (not unique)


def test_overlap_counts_bytes_and_negative_strides():
    row = Tensor("float32", (4,), (1,))
    back = Tensor("float32", (4,), (-1,))
    assert overlapping([("a", 100, row), ("b", 116, row)], {"b"}) is None
    assert overlapping([("a", 100, row), ("b", 115, row)], {"b"}) == ("a", "b")
    assert overlapping([("a", 100, row), ("b", 115, row)], set()) is None
    assert overlapping([("a", 100, row), ("b", 128, back)], {"b"}) is None
    assert overlapping([("a", 100, row), ("b", 124, back)], {"b"}) == ("a", "b")
    assert overlapping([("a", 100, Tensor("float32", (0,), (1,))), ("b", 100, row)], {"b"}) is None


def test_no_warning_in_an_accepted_call(tmp_path, simulated):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime_of(tmp_path).call(FUSION, torch.tensor(X), torch.tensor(BIAS))
    assert library_of(torch.nn.Parameter).name == "torch"
