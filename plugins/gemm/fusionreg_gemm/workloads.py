"""What the family is measured on: large and small products, shapes off every tile, projections of language models."""

from __future__ import annotations

from collections.abc import Collection

from fusionreg.core.spec import Workload

#: M, N, K, dtype, mode, goal.
_MAIN = (
    (8192, 8192, 8192, "bfloat16", "b", "{library}"),
    (4096, 4096, 4096, "float16", "b", "{library}"),
    (2048, 28672, 8192, "bfloat16", "b", "{library}"),
    (16, 14336, 4096, "bfloat16", "g", "floor / 0.88"),
    (1, 14336, 4096, "bfloat16", "g", "floor / 0.90"),
)
_ODD = ((1000, 5128, 4104, "float16", "b", ""),)

#: N, K of the projections of Llama-3-8B and 70B.
_LLAMA = {
    "8B-qkv": (6144, 4096), "8B-out": (4096, 4096), "8B-up": (28672, 4096), "8B-down": (4096, 14336),
    "70B-qkv": (10240, 8192), "70B-out": (8192, 8192), "70B-up": (57344, 8192), "70B-down": (8192, 28672),
}  # fmt: skip
_TOKENS = (1, 16, 64, 256, 4096)
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def workloads(operands: Collection[str]) -> tuple[Workload, ...]:
    """Those of the fusion with these operands beside x and w: all of them with scale and bias, else the main ones."""
    forms = dict.fromkeys(operands, "T[N]")
    library = "min(product, epilogue)" if "bias" in operands else "product"  # cuBLASLt's epilogue adds a bias
    found = [
        _one(f"{m}x{n}x{k}", "S15", m, n, k, forms, dtype, mode, goal.format(library=library))
        for m, n, k, dtype, mode, goal in _MAIN
    ]
    if len(operands) == 2:
        found += [_one(f"{m}x{n}x{k}", "S15 more", m, n, k, forms, *rest) for m, n, k, *rest in _ODD]
        for name, (n, k) in _LLAMA.items():
            for m in _TOKENS:
                mode = "g" if m <= 256 else "b"
                found.append(_one(f"llama-{name}-{m}", "S15 more", m, n, k, forms, "bfloat16", mode, ""))
    return tuple(found)


def _one(
    name: str, row: str, m: int, n: int, k: int, forms: dict[str, str], dtype: str, mode: str, goal: str
) -> Workload:
    return Workload(
        name=f"{name}-{_SHORT[dtype]}",
        row=row,
        mode="g" if mode == "g" else "b",
        axes={"M": m, "N": n, "K": k},
        dtypes={"T": dtype},
        attributes={"transB": 1, "activation": "Gelu"},
        forms={"w": "T[N K]", **forms},
        goal=goal,
    )
