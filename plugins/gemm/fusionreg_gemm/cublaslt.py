"""The products of ``dense.py`` as calls of cuBLASLt: kernels beside ours, where its epilogues mean the same.

cuBLASLt's matrices are column-major, so the row-major y = x @ W is computed as yᵀ = Wᵀ @ xᵀ: its A is W, its B is x,
and its D has N rows. A bias along N is then the vector along D's rows that it knows. Left to other kernels: biases of
other forms; activations but ReLU and, in fp16, the tanh form of GELU, which it computes 5e-6 beside the value and as 0
where that is below: too coarse for the tail of bfloat16; and scales but one fp32 number, since it multiplies sums by
those, and has no algorithm that takes a vector of them (CUDA 13.1). fp32 operands are never rounded to TF32, and
partial sums are added in fp32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int32, c_uint32, c_uint64, c_void_p
from threading import Lock
from typing import Any

from fusionreg.core.errors import MissingDependencyError, UnsupportedError
from fusionreg.core.problem import Problem, Tensor
from fusionreg.core.registry.library_calls import LibraryCall, PreparedCall

from . import cublaslt_library as lt

#: What cuBLASLt gets for split sums, and asks for on Hopper.
WORKSPACE = 32 << 20
#: Algorithms that the library is asked for; the first that it has stands ahead of the others.
ASKED = 8

EPILOGUES = {"none": lt.EPILOGUE_DEFAULT, "Relu": lt.EPILOGUE_RELU, "gelu_tanh": lt.EPILOGUE_GELU}


class CublasLtMatmul(LibraryCall):
    """``cublasLtMatmul`` with its epilogue."""

    name = "cublaslt.matmul"
    modules = (lt.__name__,)

    def __init__(self) -> None:
        self._zeros: dict[int, int] = {}

    def missing(self) -> str:
        try:
            lt.cublaslt()
        except MissingDependencyError as e:
            return f"cuBLASLt is not there: {e.found}"
        return ""

    def version(self) -> str:
        return lt.cublaslt().version()

    def prepare(self, problem: Problem, device: int, workspace: int) -> PreparedCall:
        zero = self._zero(device) if _scaling(problem) == lt.POINTER_DEVICE else 0
        return Product(lt.cublaslt(), problem, device, workspace, zero)

    def _zero(self, device: int) -> int:
        """Address of an fp32 zero on the device: what beta is where alpha is on the device, too."""
        if device not in self._zeros:
            self._zeros[device] = device_zero()
        return self._zeros[device]


def device_zero() -> int:
    """Four bytes of zero in the current context, for the life of the process."""
    from fusionreg.core.runtime.driver import driver  # with a device: loading the plugin wants none of the runtime

    cuda, memory = driver(), c_uint64()
    whom = "a zero on the device"
    cuda.check(cuda.library.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4)), whom, "cannot allocate")
    cuda.check(cuda.library.cuMemsetD32_v2(memory, 0, ctypes.c_size_t(1)), whom, "cannot set")
    return memory.value


def _scaling(problem: Problem) -> int:
    """Where alpha is: in host memory, or on the device."""
    return lt.POINTER_HOST if problem.tensors.get("scale") is None else lt.POINTER_DEVICE


class Product:
    """One product of one problem. Only addresses differ from call to call."""

    def __init__(self, library: lt.CublasLt, problem: Problem, device: int, workspace: int, zero: int) -> None:
        tensors = {n: t for n, t in problem.tensors.items() if t is not None}
        self._owned: list[tuple[str, c_void_p]] = []
        self.library, self.workspace = library, workspace
        self.whom = str(problem)
        order = list(tensors)
        self._x, self._w, self._y = (order.index(n) for n in ("x", "w", "y"))
        self._bias = order.index("bias") if "bias" in tensors else None
        self._scale = order.index("scale") if "scale" in tensors else None
        self._lock = Lock()  # the description holds the bias's address
        self._held = c_uint64()
        self._one, self._none = c_float(1.0), c_float(0.0)
        self._alpha = ctypes.addressof(self._one)
        self._beta = zero or ctypes.addressof(self._none)
        self._handle = library.handle(device)
        self._describe(problem, tensors)
        self._algorithm = self._search([tensors[n].alignment for n in ("w", "x", "y", "y")])

    def __del__(self) -> None:
        for kind, what in self._owned:
            self.library.destroy(kind, what)

    def _new(self, kind: str, *arguments: int) -> c_void_p:
        made = self.library.new(kind, *arguments)
        self._owned.append((kind, made))
        return made

    def _describe(self, problem: Problem, tensors: dict[str, Tensor]) -> None:
        m, n, k = (problem.axes[a] for a in "MNK")
        type_, transposed = lt.DATA_TYPES[problem.dtypes["T"]], bool(problem.attributes["transB"])
        epilogue = EPILOGUES[problem.choices.get("activation", "none")]
        if self._bias is not None:
            epilogue = lt.EPILOGUE_BIAS | (0 if epilogue == lt.EPILOGUE_DEFAULT else epilogue)
        self._product = self._new("MatmulDesc", lt.COMPUTE_32F, lt.DATA_TYPES["float32"])
        for attribute, value in (
            (lt.DESC_TRANSA, c_int32(lt.OP_T if transposed else lt.OP_N)),
            (lt.DESC_TRANSB, c_int32(lt.OP_N)),
            (lt.DESC_POINTER_MODE, c_int32(_scaling(problem))),
            (lt.DESC_EPILOGUE, c_uint32(epilogue)),
        ):
            self.library.set("MatmulDesc", self._product, attribute, value)
        if self._bias is not None:  # the search only looks at the alignment of the address
            self._set_bias(tensors["bias"].alignment)
        rows, columns = (k, n) if transposed else (n, k)  # of W as a column-major matrix
        self._a = self._new("MatrixLayout", type_, rows, columns, _leading(tensors["w"], rows))
        self._b = self._new("MatrixLayout", type_, k, m, _leading(tensors["x"], k))
        self._d = self._new("MatrixLayout", type_, n, m, _leading(tensors["y"], n))

    def _set_bias(self, address: int) -> None:
        if address != self._held.value:
            self._held.value = address
            self.library.set("MatmulDesc", self._product, lt.DESC_BIAS_POINTER, self._held)

    def _search(self, alignments: Sequence[int]) -> Any:
        library, found, count = self.library, (lt.Heuristic * ASKED)(), c_int()
        wanted = library.new("MatmulPreference")
        try:
            library.set("MatmulPreference", wanted, lt.PREF_WORKSPACE, c_uint64(self.workspace))
            library.set("MatmulPreference", wanted, lt.PREF_REDUCTION, c_uint32(lt.REDUCTION_COMPUTE_TYPE))
            for attribute, alignment in zip(lt.PREF_ALIGNMENTS, alignments, strict=True):
                library.set("MatmulPreference", wanted, attribute, c_uint32(alignment))
            status = library.library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._product, self._a, self._b, self._d, self._d, wanted, ASKED, found,
                ctypes.byref(count),
            )  # fmt: skip
        finally:
            library.destroy("MatmulPreference", wanted)
        usable = [h for h in found[: count.value] if h.state == 0 and h.workspace <= self.workspace]
        if status or not usable:
            said = library.status(status) if status else "no algorithm"
            raise UnsupportedError("cannot prepare", self.whom, f"cuBLASLt says {said}", "an algorithm of its own")
        return usable[0].algorithm

    def __call__(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
        alpha = self._alpha if self._scale is None else pointers[self._scale]
        d = pointers[self._y]
        with self._lock:
            if self._bias is not None:
                self._set_bias(pointers[self._bias])
            status = self.library.matmul(
                self._handle, self._product, alpha, pointers[self._w], self._a, pointers[self._x], self._b, self._beta,
                d, self._d, d, self._d, self._algorithm, workspace, self.workspace, stream,
            )  # fmt: skip
        self.library.check(status, "cannot launch", self.whom)


def _leading(tensor: Tensor, rows: int) -> int:
    """Elements from one column to the next of what is row-major to us; that of a single row says nothing."""
    return max(rows, tensor.strides[0]) if tensor.shape[0] > 1 else rows
