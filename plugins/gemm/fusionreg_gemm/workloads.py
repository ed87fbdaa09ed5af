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


def quantized(words: str) -> tuple[Workload, ...]:
    """Of a fusion with weights of 8 bits: decoding, with as many tokens as still leave the weight the most bytes."""
    found = []
    for kind, short in (("int8", "w8"), ("float8_e4m3fn", "fp8")):
        for name, (n, k) in _LLAMA.items():
            for m in (1, 16, 64) if name in ("8B-up", "70B-down") and words == "cast_scale" else ():
                found.append(_narrow(f"llama-{name}-{m}-{short}", "S15 more", m, n, k, {"T": "bfloat16", "W": kind}))
        goal = "floor / 0.88"
        found.append(_narrow(f"16x14336x4096-{short}", "S15 more", 16, 14336, 4096, {"T": "bfloat16", "W": kind}, goal))
    if words == "dequantize":
        found = [w.model_copy(update={"attributes": {**w.attributes, "axis": -2}}) for w in found]
    return tuple(found)


def scaled(words: str) -> tuple[Workload, ...]:
    """Of products of two e4m3 tensors: large, and decoding."""
    rows = [] if "float32" in words else [("8192x8192x8192-fp8", "S15", 8192, 8192, 8192, "product")]
    for m in (1, 16, 64) if words == "scaled" else ():
        rows += [(f"llama-{name}-{m}-fp8", "S15 more", m, n, k, "") for name, (n, k) in _LLAMA.items()]
    forms = {"w": "float8_e4m3fn[N K]", "scale_x": "float32[M 1]", "scale_w": "float32[N]"}
    dtypes = {"T": "bfloat16"}
    if words == "scaled_bias":
        forms, dtypes = forms | {"bias": "B[N]"}, dtypes | {"B": "bfloat16"}
    return tuple(
        Workload(
            name=name,
            row=row,
            mode="b" if m > 256 else "g",
            axes={"M": m, "N": n, "K": k},
            dtypes=dtypes,
            attributes={"transB": 1, "activation": "none"},
            forms=forms,
            goal=goal,
        )
        for name, row, m, n, k, goal in rows
    )


def gated() -> tuple[Workload, ...]:
    """The first half of the feed-forward networks of Llama-3-8B and 70B."""
    return tuple(
        Workload(
            name=f"llama-{name}-gated-{m}",
            row="S15 more",
            mode="g" if m <= 256 else "b",
            axes={"M": m, "N": n, "K": k},
            dtypes={"T": "bfloat16"},
            attributes={"transB": 1, "activation": "Swish"},
            forms={"gate": "T[N K]", "up": "T[N K]"},
        )
        for name, n, k in (("8B", 14336, 4096), ("70B", 28672, 8192))
        for m in (256, 4096)
    )


def _narrow(name: str, row: str, m: int, n: int, k: int, dtypes: dict[str, str], goal: str = "") -> Workload:
    return Workload(
        name=name,
        row=row,
        mode="g",
        axes={"M": m, "N": n, "K": k},
        dtypes=dtypes,
        attributes={"transB": 1, "activation": "none"},
        absent=("bias",),
        forms={"w": "W[N K]", "scale": "T[N]"},
        goal=goal,
    )


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
