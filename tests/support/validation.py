"""The fusion and the kernel that validation's tests start from, and what validation says of changed ones."""

from __future__ import annotations

from fusionreg.core.errors import SpecError
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.spec import AttributeSpec, FusionSpec
from fusionreg.core.validate.fusion import check_fusion

OPS = default_vocabulary()

PATTERN = """\
h = MatMul(x, w, transB=transB)
b = optional(Add)(h, bias)
y = optional(any_of(Relu, Tanh), "act")(b)
"""
TRANSB = AttributeSpec(type="int", default=0, choices=(0, 1), static=True)

INPUTS = {"x": "T[... M K]", "w": "T[K N] | T[N K]", "bias": "T[N]"}
RELU = {
    "pattern": "y = Relu(x)",
    "inputs": {"x": "T[M]"},
    "outputs": {"y": "T[M]"},
    "attributes": {},
    "constraints": (),
}

TEMPLATE = "{{ signature }} { constexpr int t = BM * C; x[x_stride_0] = STAGES; workspace[0] = K; }"
KERNEL = {
    "name": "k",
    "fusion": "acme.gemm",
    "template": "k.cu.j2",
    "targets": ("sm_80+",),
    "requires": ("K % 8 == 0", "aligned(x, 16)"),
    "strides": ("x",),
    "params": {"BM": (64, 128), "STAGES": (2, 3)},
    "valid": ("BM * STAGES * bits(T) < 8192",),
    "constants": {"C": "BM // 2"},
    "specialize": ("K",),
    "grid": ("ceildiv(M, BM)", "N"),
    "block": "C * 2",
    "shared_memory": "BM * STAGES",
    "workspace": "M * 4",
    "estimate": "M * N / 1e12",
}


def fusion(**changes) -> FusionSpec:
    fields = {
        "api": 1,
        "name": "acme.gemm",
        "pattern": PATTERN,
        "inputs": {"x": "T[... M K]", "w": "T[K N] | T[N K]", "bias": "T[N]"},
        "outputs": {"y": "T[... M N]"},
        "dtypes": {"T": ("float16", "bfloat16")},
        "attributes": {"transB": TRANSB},
        "constraints": ("shape(w, -1) == (K if transB else N)",),
    }
    return FusionSpec(**{**fields, **changes})


def by_field(errors) -> dict[str, str]:
    found: dict[str, str] = {}
    for e in errors:
        found[e.facts["field"]] = f"{found.get(e.facts['field'], '')} {e}"
    return found


def faults(**changes) -> dict[str, str]:
    _, errors = check_fusion(fusion(**changes), OPS, "acme")
    for e in errors:
        assert isinstance(e, SpecError) and e.facts["plugin"] == "acme" and e.facts["fusion"] == "acme.gemm"
        assert "acme.gemm" in str(e) and "plugin acme" in str(e) and e.facts["field"] in str(e)
    return by_field(errors)
