"""The operator vocabulary: what every operator means, once, for NumPy, CuPy and torch. Floor 1.

ONNX's operators by name, in their newest meaning (axes and the like as inputs); domain ``fusionreg`` for what ONNX
lacks. Two departures from ONNX, which frontends bring about: ``MatMul`` has attributes ``transA`` and ``transB`` (swap
the last two axes of an operand first), and attributes that hold a dtype hold its name.

Conventions of a meaning ``f(xp, *arrays, **attributes)``: ``xp`` is a :class:`Backend`; omitted inputs are None; all
outputs, optional ones too, are returned, several as a tuple. It never rounds to 16 bits: the evaluator hands it wide
floats and rounds its results.

Conventions of ``OpSpec.cuda``, what an operator is in generated CUDA: see ``cuda``.
"""

from __future__ import annotations

from .backends import Backend, backend_of, numpy_backend
from .cuda import check_cuda
from .define import operator
from .vocabulary import (
    CONTROL_FLOW,
    DTYPE_ATTRIBUTES,
    UNDEFINED,
    Vocabulary,
    check_inputs,
    complete,
    default_vocabulary,
    infer,
    named,
    normalise,
)

__all__ = [
    "CONTROL_FLOW",
    "DTYPE_ATTRIBUTES",
    "UNDEFINED",
    "Backend",
    "Vocabulary",
    "backend_of",
    "check_cuda",
    "check_inputs",
    "complete",
    "default_vocabulary",
    "infer",
    "named",
    "normalise",
    "numpy_backend",
    "operator",
]
