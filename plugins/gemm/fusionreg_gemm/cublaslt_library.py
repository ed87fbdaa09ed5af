"""libcublasLt through its C interface: where it is, the functions, and the values of its header that a product needs.

NVIDIA cuBLAS Library, "Using the cuBLASLt API"; cublasLt.h and cublas_api.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fusionreg.core.errors import LaunchError, MissingDependencyError

#: The library's file, where it is not to be looked for.
VARIABLE = "FUSIONREG_CUBLASLT"
#: Names by which the system's loader knows it, and torch has it loaded.
SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12")

# cudaDataType_t, cublasComputeType_t, cublasOperation_t
DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
COMPUTE_32F = 68
OP_N, OP_T = 0, 1
# cublasLtMatmulDescAttributes_t
DESC_POINTER_MODE, DESC_TRANSA, DESC_TRANSB, DESC_EPILOGUE, DESC_BIAS_POINTER = 2, 3, 4, 7, 8
# cublasLtPointerMode_t
POINTER_HOST, POINTER_DEVICE = 0, 1
# cublasLtEpilogue_t; a bias is added before the activation
EPILOGUE_DEFAULT, EPILOGUE_RELU, EPILOGUE_BIAS, EPILOGUE_GELU = 1, 2, 4, 32
# cublasLtMatmulPreferenceAttributes_t
PREF_WORKSPACE, PREF_REDUCTION = 1, 3
PREF_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C, D
#: Partial sums stay fp32, in the workspace: the other schemes round them to the output's dtype.
REDUCTION_COMPUTE_TYPE = 2


class Heuristic(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``; its algorithm is opaque."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


_P, _ANY = c_void_p, POINTER(c_void_p)
_FUNCTIONS: dict[str, list[Any]] = {
    "cublasLtCreate": [_ANY],
    "cublasLtMatmulDescCreate": [_ANY, c_int, c_int],
    "cublasLtMatmulDescDestroy": [_P],
    "cublasLtMatmulDescSetAttribute": [_P, c_int, _P, c_size_t],
    "cublasLtMatrixLayoutCreate": [_ANY, c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutDestroy": [_P],
    "cublasLtMatmulPreferenceCreate": [_ANY],
    "cublasLtMatmulPreferenceDestroy": [_P],
    "cublasLtMatmulPreferenceSetAttribute": [_P, c_int, _P, c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [_P, _P, _P, _P, _P, _P, _P, c_int, POINTER(Heuristic), POINTER(c_int)],
    "cublasLtMatmul": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, c_size_t, _P],
}


class CublasLt:
    """The library. Its functions answer with a status; :meth:`check` makes an error of it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        library.cublasLtGetVersion.argtypes, library.cublasLtGetVersion.restype = [], c_size_t
        library.cublasLtGetStatusName.argtypes, library.cublasLtGetStatusName.restype = [c_int], c_char_p
        self.matmul = library.cublasLtMatmul
        self._handles: dict[int, c_void_p] = {}

    def check(self, status: int, what: str, whom: str) -> None:
        """:class:`LaunchError` naming the status unless it is success."""
        if status:
            raise LaunchError(what, whom, f"cuBLASLt says {self.status(status)}", status=status)

    def status(self, status: int) -> str:
        """A status by name and number."""
        return f"{(self.library.cublasLtGetStatusName(status) or b'unknown status').decode()} ({status})"

    def version(self) -> str:
        """E.g. ``13.1.0``."""
        number = self.library.cublasLtGetVersion()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def handle(self, device: int) -> c_void_p:
        """The handle of a device, whose context is current."""
        if device not in self._handles:
            made = c_void_p()
            self.check(self.library.cublasLtCreate(ctypes.byref(made)), "cannot start", "cuBLASLt")
            self._handles[device] = made
        return self._handles[device]

    def new(self, kind: str, *arguments: int) -> c_void_p:
        """A new ``MatmulDesc``, ``MatrixLayout`` or ``MatmulPreference``."""
        made = c_void_p()
        status = getattr(self.library, f"cublasLt{kind}Create")(ctypes.byref(made), *arguments)
        self.check(status, "cannot make", f"a cuBLASLt {kind}")
        return made

    def set(self, kind: str, of: c_void_p, attribute: int, value: Any) -> None:
        """Sets an attribute to a ctypes value, whose size is the attribute's."""
        function = getattr(self.library, f"cublasLt{kind}SetAttribute")
        status = function(of, attribute, ctypes.addressof(value), ctypes.sizeof(value))
        self.check(status, "cannot set", f"attribute {attribute} of a cuBLASLt {kind}")

    def destroy(self, kind: str, what: c_void_p) -> None:
        getattr(self.library, f"cublasLt{kind}Destroy")(what)


def candidates() -> list[str]:
    """Files and names to try, in order: the variable's, those of NVIDIA's wheels, of the toolkit, of the system."""
    if os.environ.get(VARIABLE):
        return [os.environ[VARIABLE]]
    spec = find_spec("nvidia")
    roots = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    folders = [p / "lib" for root in roots for p in (*sorted(root.glob("cu[0-9]*"), reverse=True), root / "cublas")]
    bases = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders += [Path(base) / "lib64" for base in bases if base]
    return [str(folder / name) for folder in folders for name in SONAMES if (folder / name).is_file()] + [*SONAMES]


@cache
def cublaslt() -> CublasLt:
    """The library of this machine; :class:`MissingDependencyError` without one."""
    failures = []
    for name in candidates():
        try:
            return CublasLt(ctypes.CDLL(name))
        except (OSError, AttributeError) as e:
            failures.append(str(e))
    raise MissingDependencyError(
        "cannot call", "cuBLASLt", failures[0], f"one of {', '.join(SONAMES)}",
        f"Install it with: pip install nvidia-cublas, or name its file in {VARIABLE}",
    )  # fmt: skip


