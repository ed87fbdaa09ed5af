"""Point-wise graphs as one CUDA unit: a kernel that runs the device function of any of them over arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusionreg.core.dtypes import dtype
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ir import Graph
from fusionreg.core.ops import complete, default_vocabulary, numpy_backend
from fusionreg.core.render import shared_library
from fusionreg.core.render.ctypes import compute_type
from fusionreg.core.render.pointwise import device_function

OPS = default_vocabulary()
HEADERS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cuda_fp8.h>\n"
POINTERS = 6  # operands and results that the kernel takes at most, each


@dataclass(frozen=True)
class Case:
    """A graph over one axis ``N``, and arrays for its inputs."""

    name: str
    graph: Graph
    inputs: dict[str, np.ndarray] = field(repr=False)
    kind: str = "operator"  # how it is judged: pointwise_judge

    @property
    def size(self) -> int:
        return max((x.size for x in self.inputs.values()), default=1)

    def outputs(self) -> list[np.ndarray]:
        values = self.graph.values
        return [np.zeros(self.size, dtype(values[o].dtype).numpy) for o in self.graph.outputs]

    def arguments(self, results: Sequence[Any], zero: Any) -> list[Any]:
        """Pointers of the kernel, ``zero`` standing for those that the graph does not use."""
        given = [self.inputs[n] for n in self.graph.inputs]
        return [
            *given, *[zero] * (POINTERS - len(given)), *results, *[zero] * (POINTERS - len(results))
        ]  # fmt: skip

    def evaluated(self, mode: Any) -> list[np.ndarray]:
        """What the vocabulary gives: ``step`` or ``exact``."""
        found = evaluate(self.graph, self.inputs, ops=OPS, mode=mode)
        return [np.broadcast_to(found[o], (self.size,)) for o in self.graph.outputs]


def rounded_once(case: Case, shift: float = 0.0) -> list[np.ndarray]:
    """The graph in float64, rounded at its casts between floats alone: what a device function promises.

    ``shift``: relative change of what is cast, to find results that turn on the last place of a cast's operand.
    """
    values = dict(case.inputs) | dict(case.graph.constants)
    for node in case.graph.nodes:
        attributes = complete(OPS[node.op], node.attrs)
        given = [values[n] if n else None for n in node.inputs]
        own = dtype(case.graph.values[node.outputs[0]].dtype)
        wide = [x.astype(np.float64) if x is not None and dtype(x.dtype.name).floating else x for x in given]
        with np.errstate(all="ignore"):
            if node.op == "Cast" and own.floating:
                x = wide[0] * (1 + shift) if dtype(given[0].dtype.name).floating else wide[0]
                if own.name == "float8_e4m3fn":  # it saturates
                    x = np.clip(x, -448.0, 448.0)
                same = own.name == case.graph.values[node.inputs[0]].dtype
                result = x if same or own.name == "float64" else x.astype(own.numpy).astype(np.float64)
            else:
                result = OPS[node.op].meaning(numpy_backend("exact"), *wide, **attributes)
        values[node.outputs[0]] = np.asarray(result)
    return [np.broadcast_to(values[o], (case.size,)) for o in case.graph.outputs]


def unit(graphs: Sequence[Graph], headers: str = HEADERS) -> str:
    """CUDA of kernel ``k(int which, long long n, const void* × 6, void* × 6)``."""
    library = (shared_library() / "fusionreg.cuh.j2").read_text()
    parts = [headers, library, *(device_function(f"f{i}", g, OPS) for i, g in enumerate(graphs))]
    ins = ", ".join(f"const unsigned char* p{i}" for i in range(POINTERS))
    outs = ", ".join(f"unsigned char* q{i}" for i in range(POINTERS))
    parts.append(f'extern "C" __global__ void __launch_bounds__(128) k(int which, long long n, {ins}, {outs}) {{')
    parts.append("const long long t = blockIdx.x * 128LL + threadIdx.x; if (t >= n) return; switch (which) {")
    parts += [f"case {i}: {{ {_call(i, g)} }} break;" for i, g in enumerate(graphs)]
    return "\n".join([*parts, "} }", ""])


def _call(i: int, graph: Graph) -> str:
    given, made, stored = [], [], []
    for k, name in enumerate(graph.inputs):
        own = graph.values[name].dtype
        element = f"reinterpret_cast<const {dtype(own).cuda}*>(p{k})[t]"
        given.append(element if dtype(own).cuda == compute_type(own) else f"fr::to_float({element})")
    for k, name in enumerate(graph.outputs):
        own = graph.values[name].dtype
        cuda = dtype(own).cuda
        made.append(f"{compute_type(own)} r{k};")
        value = f"r{k}" if cuda == compute_type(own) else f"fr::from_float<{cuda}>(r{k})"
        stored.append(f"reinterpret_cast<{cuda}*>(q{k})[t] = {value};")
    results = [f"r{k}" for k in range(len(made))]
    return f"{' '.join(made)} f{i}({', '.join([*given, *results])}); {' '.join(stored)}"
