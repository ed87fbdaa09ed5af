"""cuBLASLt as a kernel: what reaches the library, held against its header and against products in float64."""

from __future__ import annotations

import ctypes
import gc
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fake_gpu
import ml_dtypes
import numpy as np
import pytest

from fusionreg.core.cache import Cache
from fusionreg.core.errors import LaunchError, MissingDependencyError
from fusionreg.core.headers import find, include_directories
from fusionreg.core.problem import Tensor, bind, select
from fusionreg.core.registry.catalog import load
from fusionreg.core.runtime import Runtime
from fusionreg.core.runtime.libraries import Place, library_of
from fusionreg_gemm import cublaslt, cublaslt_kernels
from fusionreg_gemm import cublaslt_library as lt

HEADER = find("cublasLt.h", include_directories())
CXX = shutil.which("g++")
needs_header = pytest.mark.skipif(HEADER is None or CXX is None, reason="no cublasLt.h (nvidia-cublas), or no g++")
KINDS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
TYPES = {"float16": "R_16F", "bfloat16": "R_16BF", "float32": "R_32F"}
WORKSPACE = 33554432
ZERO = ctypes.c_float(0)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    target = tmp_path_factory.mktemp("cublaslt") / "libcublasLt.so.13"
    source = Path(__file__).parents[1] / "support" / "fake_cublaslt.cpp"
    includes = [f"-I{d}" for d in include_directories()]
    subprocess.run([CXX, "-std=c++17", "-O1", "-shared", "-fPIC", *includes, source, "-o", target], check=True)
    library = ctypes.CDLL(str(target))
    library.fake_notes.restype = ctypes.c_char_p
    return target, library


@pytest.fixture
def fake(built, monkeypatch):
    target, library = built
    monkeypatch.setenv(lt.VARIABLE, str(target))
    lt.cublaslt.cache_clear()
    library.fake_reset(1, 0)
    yield library
    lt.cublaslt.cache_clear()


def notes(fake, kind: str) -> list[dict[str, str]]:
    """What the library noted: the words of each line, by name."""
    lines = [line.split() for line in fake.fake_notes().decode().splitlines()]
    return [{"": line[1]} | dict(w.split("=") for w in line if "=" in w) for line in lines if line[0] == kind]


@pytest.fixture
def gpu(monkeypatch):
    library = fake_gpu.FakeLibrary()
    fake_gpu.install(monkeypatch, library)
    return library


@pytest.fixture(scope="module")
def catalog():
    """The family with cuBLASLt, proven or not, and no other kernel."""
    found = load(allow=("gemm",))
    assert not found.failures
    alone = {}
    for fusion in ("gemm.activation", "gemm.bias", "gemm.scale", "gemm.scale_bias"):
        kernel = found[fusion].kernel("cublaslt")
        kernel = replace(kernel, spec=kernel.spec.model_copy(update={"pending": ""}))
        alone[fusion] = replace(found[fusion], kernels=(kernel,))
    return replace(found, fusions=alone)


@pytest.fixture
def runtime(fake, gpu, catalog, tmp_path):
    return Runtime(catalog, cache=Cache(tmp_path))


def array(*shape, dtype="float16", seed=0, width=None) -> np.ndarray:
    """Normal numbers on the device; ``width``: of rows of which the last axis is the beginning."""
    stored = (*shape[:-1], width or shape[-1]) if shape else ()
    made = library_of(np.ndarray).allocator(stored, dtype, Place("cuda", 0))()
    made[...] = np.random.default_rng(seed).standard_normal(stored)
    return made[..., : shape[-1]] if shape else made


def reference(x, w, transposed, scale=None, bias=None, activation="none") -> np.ndarray:
    v = x.astype(np.float64) @ (w.T if transposed else w).astype(np.float64)
    v = v if scale is None else v * scale.astype(np.float64)
    v = v if bias is None else v + bias.astype(np.float64)
    if activation == "Relu":
        v = np.maximum(v, 0)
    if activation == "gelu_tanh":
        v = 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
    return v


def close(got: np.ndarray, wanted: np.ndarray) -> None:
    ulp = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-21}[got.dtype.name]
    assert np.all(np.abs(got.astype(np.float64) - wanted) <= ulp * (np.abs(wanted) + 2**-6))
    assert np.abs(wanted).max() > 0.1


# --- products ----------------------------------------------------------------------------------------------------


@needs_header
@pytest.mark.parametrize(
    ("dtype", "activation"), [*((d, a) for d in KINDS for a in ("none", "Relu")), ("float16", "gelu_tanh")]
)
@pytest.mark.parametrize("transposed", [0, 1])
def test_bias_and_activation(runtime, fake, dtype, transposed, activation):
    m, n, k = 6, 24, 16
    x, bias = array(2, 3, k, dtype=dtype), array(n, dtype=dtype, seed=1)
    w = array(n, k, dtype=dtype, seed=2) if transposed else array(k, n, dtype=dtype, seed=2)
    y = runtime.call("gemm.bias", x, w, bias, transB=transposed, activation=activation)
    close(y.reshape(m, n), reference(x.reshape(m, k), w, transposed, bias=bias, activation=activation))
    (call,) = notes(fake, "matmul")
    name, t = TYPES[dtype], "T" if transposed else "N"
    assert call == {
        "": f"{t}N", "A": f"{name}:{k}x{n}:{k}" if transposed else f"{name}:{n}x{k}:{n}", "B": f"{name}:{k}x{m}:{k}",
        "D": f"{name}:{n}x{m}:{n}", "mode": "HOST", "algorithm": "1000", "workspace": str(WORKSPACE), "stream": "77",
        "epilogue": {"none": "BIAS", "Relu": "RELU_BIAS", "gelu_tanh": "GELU_BIAS"}[activation],
    }  # fmt: skip
    assert runtime.kernels_used == {"gemm.bias/cublaslt": 1}


@needs_header
@pytest.mark.parametrize(("activation", "epilogue"), [("Relu", "RELU"), ("gelu_tanh", "GELU")])
def test_activation_alone(runtime, fake, activation, epilogue):
    x, w = array(5, 32), array(32, 8, seed=2)
    close(runtime.call("gemm.activation", x, w, activation=activation), reference(x, w, 0, activation=activation))
    assert notes(fake, "matmul")[0]["epilogue"] == epilogue


@needs_header
@pytest.mark.parametrize("bias", [False, True])
def test_a_scale_of_fp32_is_alpha_on_the_device(runtime, fake, monkeypatch, bias):
    monkeypatch.setattr(cublaslt, "device_zero", lambda: ctypes.addressof(ZERO))
    x, w = array(5, 32, dtype="float32"), array(32, 12, dtype="float32", seed=2)
    scale = array(dtype="float32", seed=3)
    more = [array(12, dtype="float32", seed=4)] if bias else []
    y = runtime.call("gemm.scale_bias" if bias else "gemm.scale", x, w, scale, *more, activation="Relu")
    close(y, reference(x, w, 0, scale=scale, bias=more[0] if bias else None, activation="Relu"))
    (call,) = notes(fake, "matmul")
    assert call["mode"] == "DEVICE"
    assert call["epilogue"] == ("RELU_BIAS" if bias else "RELU")


def test_the_zero_on_the_device(monkeypatch):
    memory = (ctypes.c_uint32 * 2)(7, 7)
    library = type("Driver", (), {})()

    def allocate(out, size):
        out._obj.value = ctypes.addressof(memory)
        return 0 if size.value == 4 else 1

    def fill(address, value, count):
        ctypes.c_uint32.from_address(address.value).value = value
        return 0 if count.value == 1 else 1

    library.cuMemAlloc_v2, library.cuMemsetD32_v2 = allocate, fill
    codes: list[int] = []
    check = staticmethod(lambda code, *words: codes.append(code))
    found = type("Cuda", (), {"library": library, "check": check})
    monkeypatch.setattr("fusionreg.core.runtime.driver.driver", lambda: found)
    assert cublaslt.device_zero() == ctypes.addressof(memory) and list(memory) == [0, 7] and codes == [0, 0]


@needs_header
def test_rows_apart_and_single_rows(runtime, fake):
    x, w, bias = array(5, 16, width=40), array(16, 8, seed=2, width=24), array(8, seed=1)
    close(runtime.call("gemm.bias", x, w, bias), reference(x, w, 0, bias=bias))
    one = np.lib.stride_tricks.as_strided(array(16), (1, 16), (6, 2))  # whose stride says nothing
    close(runtime.call("gemm.bias", one, w, bias), reference(one, w, 0, bias=bias))
    first, second = notes(fake, "matmul")
    assert (first["A"], first["B"], first["D"]) == ("R_16F:8x16:24", "R_16F:16x5:40", "R_16F:8x5:8")
    assert second["B"] == "R_16F:16x1:16"


@needs_header
def test_special_values_pass(runtime):
    x, w, bias = array(2, 16), array(16, 8, seed=2), array(8, seed=1)
    x[0, 0], bias[3] = np.nan, -np.inf
    y = runtime.call("gemm.bias", x, w, bias, activation="Relu")
    assert np.isnan(y[0]).all() and y[1, 3] == 0


# --- the search --------------------------------------------------------------------------------------------------


@needs_header
def test_the_search_is_told_alignments_and_runs_once(runtime, fake):
    held = array(300)
    x, w, bias = held[8:40].reshape(2, 16), array(16, 8, seed=2), array(24, seed=1)
    for start in (8, 0, 16):
        part = bias[start : start + 8]
        close(runtime.call("gemm.bias", x, w, part), reference(x, w, 0, bias=part))
    searches, calls = notes(fake, "search"), notes(fake, "matmul")
    assert len(calls) == 3 and [s["bias"] for s in searches] == ["16", "256", "32"]  # for each alignment one
    assert {s["alignments"] for s in searches} == {"256,16,256,256"}  # of W, x, y and y
    assert {(s["workspace"], s["reduction"]) for s in searches} == {(str(WORKSPACE), "COMPUTE_TYPE")}
    runtime.call("gemm.bias", x, w, bias[:8])
    assert len(notes(fake, "search")) == 3


@needs_header
@pytest.mark.parametrize(("found", "unusable", "taken"), [(3, 0, "1000"), (3, 1, "1001"), (4, 2, "1002")])
def test_the_first_usable_algorithm_is_taken(runtime, fake, found, unusable, taken):
    fake.fake_reset(found, unusable)
    runtime.call("gemm.bias", array(2, 16), array(16, 8), array(8))
    assert notes(fake, "matmul")[0]["algorithm"] == taken


@needs_header
@pytest.mark.parametrize(
    ("found", "unusable", "words"), [(0, 0, "CUBLAS_STATUS_NOT_SUPPORTED"), (2, 2, "no algorithm")]
)
def test_without_an_algorithm_the_next_kernel_runs(fake, gpu, tmp_path, found, unusable, words):
    whole = load(allow=("gemm",))
    entry = whole["gemm.bias"]
    kernel = entry.kernel("cublaslt")
    ready = replace(kernel, spec=kernel.spec.model_copy(update={"pending": ""}))
    both = replace(whole, fusions={"gemm.bias": replace(entry, kernels=(ready, entry.kernel("plain")))})
    fake.fake_reset(found, unusable)
    runtime = Runtime(both, cache=Cache(tmp_path), measured={ready.key: 1e-9})
    runtime.call("gemm.bias", array(2, 16), array(16, 8), array(8))
    assert runtime.kernels_used == {"gemm.bias/plain": 1} and len(gpu.launches) == 1
    alone = replace(whole, fusions={"gemm.bias": replace(entry, kernels=(ready,))})
    with pytest.warns(UserWarning, match=words):
        Runtime(alone, cache=Cache(tmp_path)).call("gemm.bias", array(2, 16), array(16, 8), array(8))


@needs_header
def test_threads_do_not_swap_their_biases(runtime):
    x, w = array(2, 16), array(16, 8, seed=2)
    biases = [array(8, seed=s) for s in range(4)]
    bound = [runtime.bind("gemm.bias", x, w, b) for b in biases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for y, bias in zip(pool.map(lambda b: b().copy(), bound), biases, strict=True):
                close(y, reference(x, w, 0, bias=bias))


@needs_header
def test_what_it_makes_is_freed(fake, gpu, catalog, tmp_path):
    gc.collect()
    before = fake.fake_alive()
    runtime = Runtime(catalog, cache=Cache(tmp_path))
    runtime.call("gemm.bias", array(2, 16), array(16, 8), array(8))
    assert fake.fake_alive() == before + 4  # a product and three layouts; the preference is gone
    del runtime
    gc.collect()
    assert fake.fake_alive() == before


# --- what it takes -----------------------------------------------------------------------------------------------


def refusal(catalog, fusion, dtype="bfloat16", m=8, n=16, k=32, forms=None, tensors=None, **keywords) -> str:
    given = {"x": Tensor.contiguous(dtype, (m, k)), "w": Tensor.contiguous(dtype, (k, n))}
    shapes = {"n": (n,), "0": (), "m": (m, 1)}
    given |= {name: Tensor.contiguous(dtype, shapes[form]) for name, form in (forms or {}).items()} | (tensors or {})
    found = select(catalog[fusion], bind(catalog[fusion], given, keywords, "sm_90a"))
    return found.refused[0].reason if found.refused else ""


@pytest.mark.parametrize(
    ("fusion", "options", "words"),
    [
        ("gemm.bias", {"forms": {"bias": "n"}}, ""),
        ("gemm.bias", {"forms": {"bias": "n"}, "dtype": "float32"}, ""),
        ("gemm.bias", {"forms": {"bias": "0"}}, "form(bias) == 1"),
        ("gemm.bias", {"forms": {"bias": "m"}}, "form(bias) == 1"),
        ("gemm.bias", {"forms": {"bias": "n"}, "activation": "Gelu"}, "activation in"),
        ("gemm.bias", {"forms": {"bias": "n"}, "activation": "Sigmoid"}, "activation in"),
        ("gemm.bias", {"tensors": {"bias": Tensor("bfloat16", (16,), (1,), 8)}}, "aligned(bias, 16)"),
        ("gemm.bias", {"forms": {"bias": "n"}, "k": 0}, "K > 0"),
        ("gemm.bias", {"forms": {"bias": "n"}, "tensors": {"x": Tensor("bfloat16", (8, 32), (1, 8))}}, "stride(x, 1)"),
        ("gemm.bias", {"forms": {"bias": "n"}, "tensors": {"x": Tensor("bfloat16", (8, 32), (0, 1))}}, "stride(x, 0)"),
        ("gemm.bias", {"forms": {"bias": "n"}, "tensors": {"w": Tensor("bfloat16", (32, 16), (1, 32))}}, "stride(w,"),
        ("gemm.bias", {"forms": {"bias": "n"}, "activation": "gelu_tanh"}, "activation in"),
        ("gemm.bias", {"forms": {"bias": "n"}, "activation": "gelu_tanh", "dtype": "float32"}, "activation in"),
        ("gemm.bias", {"forms": {"bias": "n"}, "activation": "gelu_tanh", "dtype": "float16"}, ""),
        ("gemm.activation", {"activation": "Relu"}, ""),
        ("gemm.activation", {"activation": "Tanh"}, "activation == "),
        ("gemm.activation", {"activation": "gelu_tanh"}, 'T == "float16"'),
        ("gemm.scale", {"forms": {"scale": "0"}}, 'T == "float32"'),
        ("gemm.scale", {"forms": {"scale": "n"}, "dtype": "float32"}, "form(scale) == 0"),
        ("gemm.scale", {"forms": {"scale": "0"}, "dtype": "float32"}, ""),
        ("gemm.scale", {"forms": {"scale": "0"}, "dtype": "float32", "activation": "gelu_tanh"}, "activation in"),
        ("gemm.scale_bias", {"forms": {"scale": "0", "bias": "m"}, "dtype": "float32"}, "form(bias) == 1"),
        ("gemm.scale_bias", {"forms": {"scale": "0", "bias": "n"}, "dtype": "float32"}, ""),
    ],
)
def test_only_what_one_call_means_exactly(catalog, fusion, options, words):
    found = refusal(catalog, fusion, **options)
    assert words in found and bool(found) == bool(words)


def test_each_is_the_one_call_with_room_for_split_sums():
    for kernel in cublaslt_kernels.KERNELS:
        assert kernel.library == "cublaslt.matmul" and kernel.workspace == str(WORKSPACE)


def test_a_machine_without_the_library_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv(lt.VARIABLE, str(tmp_path / "nothing.so"))
    lt.cublaslt.cache_clear()
    assert "nothing.so" in cublaslt.CublasLtMatmul().missing()
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cublas"):
        lt.cublaslt()
    lt.cublaslt.cache_clear()


# --- the interface -----------------------------------------------------------------------------------------------


@needs_header
def test_values_are_those_of_the_header():
    assert HEADER is not None
    names = ("cublasLt.h", "cublas_api.h", "library_types.h")
    texts = [(HEADER.parent / n).read_text("utf-8", "replace") for n in names]

    def value(name: str) -> int:
        for text in texts:
            if found := re.search(rf"\b{name}\s*=\s*([^,}}]*)", text):
                word = re.sub(r"/\*.*", "", found[1]).strip()
                return int(word, 0) if re.fullmatch(r"-?\d\w*", word) else value(word)
        raise AssertionError(name)

    of = {
        "CUDA_R_32F": lt.DATA_TYPES["float32"], "CUDA_R_16F": lt.DATA_TYPES["float16"],
        "CUDA_R_16BF": lt.DATA_TYPES["bfloat16"], "CUBLAS_COMPUTE_32F": lt.COMPUTE_32F, "CUBLAS_OP_N": lt.OP_N,
        "CUBLAS_OP_T": lt.OP_T, "CUBLASLT_MATMUL_DESC_POINTER_MODE": lt.DESC_POINTER_MODE,
        "CUBLASLT_MATMUL_DESC_TRANSA": lt.DESC_TRANSA, "CUBLASLT_MATMUL_DESC_TRANSB": lt.DESC_TRANSB,
        "CUBLASLT_MATMUL_DESC_EPILOGUE": lt.DESC_EPILOGUE, "CUBLASLT_MATMUL_DESC_BIAS_POINTER": lt.DESC_BIAS_POINTER,
        "CUBLASLT_POINTER_MODE_HOST": lt.POINTER_HOST, "CUBLASLT_POINTER_MODE_DEVICE": lt.POINTER_DEVICE,
        "CUBLASLT_EPILOGUE_DEFAULT": lt.EPILOGUE_DEFAULT, "CUBLASLT_EPILOGUE_RELU": lt.EPILOGUE_RELU,
        "CUBLASLT_EPILOGUE_BIAS": lt.EPILOGUE_BIAS, "CUBLASLT_EPILOGUE_GELU": lt.EPILOGUE_GELU,
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": lt.PREF_WORKSPACE,
        "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK": lt.PREF_REDUCTION,
        "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE": lt.REDUCTION_COMPUTE_TYPE,
    }  # fmt: skip
    assert of == {name: value(name) for name in of}
    assert tuple(value(f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{m}_BYTES") for m in "ABCD") == lt.PREF_ALIGNMENTS
    assert ctypes.sizeof(lt.Heuristic) == 96 and lt.Heuristic.workspace.offset == 64 and lt.Heuristic.state.offset == 72


def test_the_library_itself_takes_every_description(monkeypatch):
    """Descriptions are made on the host: no GPU is needed to see that sizes and attributes are the library's own."""
    monkeypatch.delenv(lt.VARIABLE, raising=False)
    lt.cublaslt.cache_clear()
    try:
        library = lt.cublaslt()
    except MissingDependencyError as e:
        pytest.skip(str(e))
    assert re.fullmatch(r"1[2-9]\.\d+\.\d+", library.version())
    product, wanted = library.new("MatmulDesc", lt.COMPUTE_32F, 0), library.new("MatmulPreference")
    layout = library.new("MatrixLayout", lt.DATA_TYPES["bfloat16"], 24, 16, 32)
    four, eight = ctypes.c_uint32, ctypes.c_uint64
    for attribute, number, kind in (
        (lt.DESC_TRANSA, 1, four), (lt.DESC_TRANSB, 0, four), (lt.DESC_POINTER_MODE, 1, four),
        (lt.DESC_EPILOGUE, 36, four), (lt.DESC_BIAS_POINTER, 256, eight),
    ):  # fmt: skip
        library.set("MatmulDesc", product, attribute, kind(number))
        back, written = kind(), ctypes.c_size_t()
        library.library.cublasLtMatmulDescGetAttribute.argtypes = [
            ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
        ]  # fmt: skip
        status = library.library.cublasLtMatmulDescGetAttribute(
            product, attribute, ctypes.addressof(back), ctypes.sizeof(back), ctypes.addressof(written)
        )
        assert (status, back.value, written.value) == (0, number, ctypes.sizeof(kind))
        with pytest.raises(LaunchError, match="CUBLAS_STATUS_INVALID_VALUE"):
            library.set("MatmulDesc", product, attribute, ctypes.c_uint16(0))
    library.set("MatmulPreference", wanted, lt.PREF_WORKSPACE, ctypes.c_uint64(WORKSPACE))
    for attribute in (lt.PREF_REDUCTION, *lt.PREF_ALIGNMENTS):
        library.set("MatmulPreference", wanted, attribute, ctypes.c_uint32(16))
        with pytest.raises(LaunchError):
            library.set("MatmulPreference", wanted, attribute, ctypes.c_uint64(16))
    for name, what in (("MatmulDesc", product), ("MatmulPreference", wanted), ("MatrixLayout", layout)):
        library.destroy(name, what)
    lt.cublaslt.cache_clear()
