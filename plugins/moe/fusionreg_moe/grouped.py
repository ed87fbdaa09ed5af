"""Products of rows in groups, one for each expert: ``moe.grouped_gemm``, ``index_select_gemm``, ``gemm_scatter_add``.

Rows of a group lie one after the other, and ``ends`` tells behind which row each group ends; rows behind the last one
belong to none, and their products are zeros. ``index`` is a row of x that is multiplied, which is read where it lies,
or a row of the result that a product is added to: one that there is not gives zeros, or is left out. Sums are made in
fp32, in the order of the rows of x, so that they are the same at every run.
"""

from __future__ import annotations

from fusionreg.core.spec import Case, FusionSpec, Workload

from .gemv import TRANSPOSED
from .grouped_kernels import plain, tensor_core, wgmma

_MATRICES = (
    "shape(w, -1) == (K if trans else N)",
    "shape(w, -2) == (N if trans else K)",
    'I == "int64" or J == "int32"',  # ends are of the dtype of index, or narrower: as many variants fewer
)
_DTYPES = {"T": ("float16", "bfloat16", "float32"), "I": ("int64", "int32"), "J": ("int32", "int64")}
_EXTENTS = {"M": 9, "N": 40, "K": 48, "P": 20, "E": 3}
_AXES = {"P": "rows that are multiplied", "N": "output channels", "K": "summed over", "E": "experts"}

_AT = 'at = optional(fusionreg.FromEnd, "indices")(index, {})'
_UP_PRODUCT = "y = fusionreg.GroupedMatMul(h, w, ends, trans=trans)"
_DOWN_PRODUCT = "h = fusionreg.GroupedMatMul(x, w, ends, trans=trans)\ns = optional(Mul)(h, weights)"
_GATHERED = 'h = any_of("indices", FromEnd=Gather)(x, index)'
#: As index_add and ONNX have it.
_SCATTERED = ('y = any_of("indices", FromEnd=ScatterND(reduction="add"))(base, Unsqueeze(index, (1,)), s)',)


def _cases(*operands: str) -> tuple[Case, ...]:
    """The same for both: groups of any size, indices of any kind."""
    nothing = {"w": "nan", "ends": "0"} | dict.fromkeys(operands, "integers")
    return (
        Case(
            name="rising",
            axes={"M": 9, "N": 72, "K": 136, "P": 150, "E": 40},
            values={"ends": "rising", "index": "integers"},
            summary="groups of 0 to 7 rows, rows that are named often or do not exist",
        ),
        Case(
            name="wrapped",
            axes={"M": 6, "N": 72, "K": 64, "P": 50, "E": 20},
            values={"ends": "rising", "index": "integers"},
            attributes={"indices": "FromEnd"},
            summary="indices from -4 to 4, of which those below 0 count from the end",
        ),
        Case(
            name="one_expert",
            axes={"M": 3, "N": 72, "K": 328, "P": 170, "E": 4},
            values={"ends": "170", "index": "integers"},
            summary="all rows in the first group, the others empty; more rows than a tile has",
        ),
        Case(
            name="descending",
            axes={"M": 6, "N": 64, "K": 64, "P": 40, "E": 30},
            values={"ends": "integers", "index": "integers"},
            summary="ends that do not rise, and below 0: a group ends nowhere before another one that stands before it",
        ),
        Case(
            name="no_group",
            axes={"M": 5, "N": 64, "K": 64, "P": 20, "E": 3},
            values=nothing,
            summary="rows of no group; NaN in all matrices",
        ),
        Case(
            name="beyond",
            axes={"M": 5, "N": 64, "K": 64, "P": 20, "E": 2},
            values={"index": "9223372036854775807", "ends": "20"},
            summary="indices far outside read and write nothing",
        ),
    )


def _workload(name: str, rows: int, index: str, n: int, k: int, experts: int, top_k: int, goal: str = "") -> Workload:
    return Workload(
        name=name,
        row="S18 more",
        mode="b",
        axes={"M": rows, "N": n, "K": k, "P": rows * top_k, "E": experts},
        dtypes={"T": "bfloat16", "I": "int64", "J": "int32"},
        attributes={"trans": 1, "indices": "none"},
        forms={"w": "T[E N K]"},
        values={"index": "below M", "ends": "rising P"},
        goal=goal,
        summary=index,
    )


_UP = "first product of routed experts"
_DOWN = "second product of routed experts"

INDEX_SELECT_GEMM = FusionSpec(
    api=1,
    name="moe.index_select_gemm",
    summary="rows of x by index, in groups, each times its group's matrix; no gathered copy",
    pattern=(f"{_AT.format('x')}\nh = fusionreg.SelectRows(x, at)\n{_UP_PRODUCT}", f"{_GATHERED}\n{_UP_PRODUCT}"),
    inputs={"x": "T[M K]", "index": "I[P]", "w": "T[E K N] | T[E N K]", "ends": "J[E]"},
    outputs={"y": "T[P N]"},
    dtypes=_DTYPES,
    axes={"M": "rows of x", **_AXES},
    extents=_EXTENTS,
    attributes={"trans": TRANSPOSED},
    autocast="lower",
    constraints=_MATRICES,
    cases=_cases("x"),
    workloads=(
        _workload("mixtral-16", 16, _UP, 28672, 4096, 8, 2),
        _workload("mixtral-4096", 4096, _UP, 28672, 4096, 8, 2),
        _workload("qwen3-16", 16, _UP, 1536, 2048, 128, 8),
        _workload("qwen3-4096", 4096, _UP, 1536, 2048, 128, 8),
    ),
    kernels=(wgmma(gather=True), tensor_core(gather=True), plain(gather=True)),
    tags=("S18", "inference", "moe"),
)

GEMM_SCATTER_ADD = FusionSpec(
    api=1,
    name="moe.gemm_scatter_add",
    summary="rows in groups times their group's matrix and their weight, added to rows of base by index, in order",
    pattern=(
        f"{_DOWN_PRODUCT}\n{_AT.format('base')}\ny = fusionreg.AddRows(base, at, s)",
        *(f"{_DOWN_PRODUCT}\n{scatter}" for scatter in _SCATTERED),
    ),
    inputs={
        "base": "T[M N]",
        "x": "T[P K]",
        "w": "T[E K N] | T[E N K]",
        "ends": "J[E]",
        "weights": "T[P 1]",
        "index": "I[P]",
    },
    outputs={"y": "T[M N]"},
    dtypes=_DTYPES,
    axes={"M": "rows of the result", **_AXES},
    extents=_EXTENTS,
    attributes={"trans": TRANSPOSED},
    autocast="lower",
    constraints=_MATRICES,
    cases=(
        *_cases("base"),
        Case(
            name="one_row",
            axes={"M": 2, "N": 64, "K": 64, "P": 90, "E": 3},
            values={"index": "1", "ends": "rising"},
            summary="more products for a row than it lists",
        ),
        Case(
            name="small_onto_large",
            axes={"M": 2, "N": 64, "K": 8, "P": 300, "E": 1},
            values={"base": "256", "x": "0.0625", "w": "0.0625", "weights": "1", "ends": "300", "index": "0"},
            summary="products that are lost where the sum is rounded each time",
        ),
    ),
    workloads=(
        _workload("mixtral-16", 16, _DOWN, 4096, 14336, 8, 2),
        _workload("mixtral-4096", 4096, _DOWN, 4096, 14336, 8, 2),
        _workload("qwen3-16", 16, _DOWN, 2048, 768, 128, 8),
        _workload("qwen3-4096", 4096, _DOWN, 2048, 768, 128, 8),
    ),
    kernels=(wgmma(combine=True), tensor_core(combine=True), plain(combine=True)),
    tags=("S18", "inference", "moe"),
)
GROUPED_GEMM = FusionSpec(
    api=1,
    name="moe.grouped_gemm",
    summary="rows in groups, each times its group's matrix; zeros for rows of no group",
    pattern="y = fusionreg.GroupedMatMul(x, w, ends, trans=trans)",
    inputs={"x": "T[P K]", "w": "T[E K N] | T[E N K]", "ends": "J[E]"},
    outputs={"y": "T[P N]"},
    dtypes={"T": _DTYPES["T"], "J": _DTYPES["J"]},
    axes=_AXES,
    extents={axis: n for axis, n in _EXTENTS.items() if axis != "M"},
    attributes={"trans": TRANSPOSED},
    autocast="lower",
    constraints=_MATRICES[:2],
    cases=(
        Case(
            name="rising",
            axes={"N": 72, "K": 136, "P": 150, "E": 40},
            values={"ends": "rising"},
            summary="groups of 0 to 7 rows",
        ),
    ),
    kernels=(wgmma(), tensor_core(), plain()),
    tags=("S18", "inference", "moe"),
)
FUSIONS = (GROUPED_GEMM, INDEX_SELECT_GEMM, GEMM_SCATTER_ADD)
