"""``moe.expert_gemv``: y[m] = W[ids[m]] x[m], the matrix of an expert of its own for each row.

A row whose id no expert has gets zeros, and nothing is read for it. With ``indices="FromEnd"`` ids from -E to -1 count
from the end, as those of Gather do.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, Workload

from .gemv_kernels import KERNELS

TRANSPOSED = AttributeSpec(type="int", default=1, choices=(0, 1), static=True, summary="1 when w is stored [E N K]")

_REFERENCE = """
at = optional(fusionreg.FromEnd, "indices")(ids, w)
y = fusionreg.RoutedMatMul(x, w, at, trans=trans)
""".strip()
#: As people write it: gathered matrices, the row as a row or as a column of batched products.
_SPELLINGS = (
    'm = any_of("indices", FromEnd=Gather)(w, ids)\ny = Squeeze(MatMul(Unsqueeze(x, (1,)), m, transB=trans), (1,))',
    'm = any_of("indices", FromEnd=Gather)(w, ids)\ny = Squeeze(MatMul(m, Unsqueeze(x, (2,))), (2,))',
)

_CASES = (
    Case(
        name="mixed",
        axes={"M": 40, "N": 40, "K": 72, "E": 3},
        values={"ids": "integers"},
        summary="ids from -4 to 4 of three experts",
    ),
    Case(
        name="wrapped",
        axes={"M": 40, "N": 64, "K": 64, "E": 4},
        values={"ids": "integers"},
        attributes={"indices": "FromEnd"},
        summary="ids from -4 to 4, of which those below 0 count from the end",
    ),
    Case(
        name="one_expert",
        axes={"M": 50, "N": 64, "K": 1088, "E": 4},
        values={"ids": "2"},
        summary="one expert for all, more rows than are multiplied at a time",
    ),
    Case(
        name="many_experts",
        axes={"M": 6, "N": 64, "K": 64, "E": 40},
        values={"ids": "integers"},
        summary="more experts than rows, some of which share one",
    ),
    Case(name="none", axes={"M": 5, "N": 64, "K": 64, "E": 3}, values={"ids": "-1", "w": "nan"}, summary="no expert"),
    Case(
        name="beyond",
        axes={"M": 20, "N": 64, "K": 64, "E": 2},
        values={"ids": "9223372036854775807", "w": "nan"},
        summary="ids far outside read nothing",
    ),
    Case(
        name="unused_nan",
        axes={"M": 20, "N": 64, "K": 64, "E": 40},
        values={"w": "special", "ids": "0"},
        summary="NaN in matrices that no row names",
    ),
)


def _workload(name: str, m: int, n: int, k: int, experts: int, trans: int, dtype: str, goal: str = "") -> Workload:
    return Workload(
        name=name,
        row="S18" if goal else "S18 more",
        mode="g",
        axes={"M": m, "N": n, "K": k, "E": experts},
        dtypes={"T": dtype, "I": "int64"},
        attributes={"trans": trans, "indices": "none"},
        forms={"w": "T[E N K]" if trans else "T[E K N]"},
        values={"ids": "below E"},
        goal=goal,
        summary="a projection of routed experts, decoding",
    )


_WORKLOADS = (
    _workload("64x128x4096-e8-fp32", 64, 128, 4096, 8, 0, "float32", "0.008"),
    _workload("64x128x4096-e8-fp32-transposed", 64, 128, 4096, 8, 1, "float32", "0.008"),
    _workload("64x128x4096-e8-bf16", 64, 128, 4096, 8, 1, "bfloat16"),
    _workload("2x14336x4096-e8-bf16", 2, 14336, 4096, 8, 1, "bfloat16"),
    _workload("8x1536x2048-e128-bf16", 8, 1536, 2048, 128, 1, "bfloat16"),
    _workload("8x2048x768-e128-bf16", 8, 2048, 768, 128, 1, "bfloat16"),
    _workload("128x1536x2048-e128-bf16", 128, 1536, 2048, 128, 1, "bfloat16"),
)

EXPERT_GEMV = FusionSpec(
    api=1,
    name="moe.expert_gemv",
    summary="each row times the matrix of its expert: W[id] x; zeros where the id names none",
    pattern=(_REFERENCE, *_SPELLINGS),
    inputs={"x": "T[M K]", "w": "T[E K N] | T[E N K]", "ids": "I[M]"},
    outputs={"y": "T[M N]"},
    dtypes={"T": ("float16", "bfloat16", "float32"), "I": ("int64", "int32")},
    axes={"M": "rows, a token for each", "N": "output channels", "K": "summed over", "E": "experts"},
    extents={"M": 20, "N": 64, "K": 96, "E": 3},
    attributes={"trans": TRANSPOSED},
    autocast="lower",
    constraints=("shape(w, -1) == (K if trans else N)", "shape(w, -2) == (N if trans else K)"),
    cases=_CASES,
    workloads=_WORKLOADS,
    kernels=KERNELS,
    tags=("S18", "S20", "inference", "moe"),
)
FUSIONS = (EXPERT_GEMV,)
