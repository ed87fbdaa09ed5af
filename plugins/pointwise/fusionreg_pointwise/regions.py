"""The open fusion, and the programs that its kernels are proven and measured on."""

from __future__ import annotations

from typing import Any

from fusionreg.core.spec import Case, FusionSpec, Region, Workload

from .kernels import KERNELS

#: The kernels have run all cases of the other programs on a GPU, as they now are.

WHOLE = "T[A0 A1]"

#: Of the three axes, in conformance: every case moves all positions.
SMALL = {"A0": 3, "A1": 16, "A2": 32}

#: What every large problem should keep of a copy's rate.
MOST = "floor / 0.8"


def _workload(name: str, dtype: str, goal: str, row: str = "S8", **fields: Any) -> Workload:
    short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    extents = dict(zip(("A0", "A1", "A2"), map(int, name.split("x")), strict=False))
    return Workload(name=f"{name}-{short}", row=row, axes=extents, dtypes={"T": dtype}, goal=goal, **fields)


ADD_MUL = Region(
    name="add_mul",
    summary="(a + b) * c",
    pattern="v0 = Add(a, b)\nd = Mul(v0, c)",
    inputs={"a": WHOLE, "b": WHOLE, "c": WHOLE},
    outputs={"d": WHOLE},
    dtypes={"T": ("float32", "float64", "float16")},
    workloads=(
        _workload("8192x8192", "float32", "1.02 * best"),
        _workload("1024x1024", "float32", "best", mode="g"),
    ),
)

CHAIN = Region(
    name="chain",
    summary="seven operators: a gate, a residual and an activation",
    pattern="v0 = Mul(x, a)\nv1 = Add(v0, b)\nv2 = Sigmoid(v1)\nv3 = Mul(v1, v2)\nv4 = Add(v3, x)\nv5 = Relu(v4)\n"
    "y = Mul(v5, a)",
    inputs={"x": WHOLE, "a": WHOLE, "b": WHOLE},
    outputs={"y": WHOLE},
    dtypes={"T": ("bfloat16",)},
    workloads=(_workload("8192x8192", "bfloat16", "floor / 0.94"),),
)

BIAS = Region(
    name="bias_relu",
    summary="a bias along the last axis, then Relu",
    pattern="v0 = Add(x, bias)\ny = Relu(v0)",
    inputs={"x": WHOLE, "bias": "T[A1]"},
    outputs={"y": WHOLE},
    dtypes={"T": ("float16", "bfloat16")},
    workloads=(
        _workload("8192x8192", "bfloat16", MOST, "S8 more"),
        _workload("8192x8191", "bfloat16", MOST, "S8 more", summary="vectors run past the ends of rows"),
    ),
)

CHANNELS = Region(
    name="channel_affine",
    summary="a scale and a shift of each channel, then Swish; the channels stand before the pixels",
    pattern="v0 = Mul(x, scale)\nv1 = Add(v0, shift)\ny = Swish(v1)",
    inputs={"x": "T[A0 A1 A2]", "scale": "T[A1 1]", "shift": "T[A1 1]"},
    outputs={"y": "T[A0 A1 A2]"},
    dtypes={"T": ("bfloat16",)},
    extents=SMALL,
    workloads=(
        _workload("64x256x3136", "bfloat16", MOST, "S8 more"),
        _workload("64x256x3137", "bfloat16", MOST, "S8 more", summary="vectors run past the ends of rows"),
    ),
)

RESIDUAL = Region(
    name="residual",
    summary="a residual whose channels may lie elsewhere in memory, then Relu",
    pattern="v0 = Add(x, residual)\ny = Relu(v0)",
    inputs={"x": "T[A0 A1 A2]", "residual": "T[A0 A1 A2]"},
    outputs={"y": "T[A0 A1 A2]"},
    dtypes={"T": ("bfloat16",)},
    extents=SMALL,
    cases=(
        Case(name="odd", axes={"A0": 2, "A1": 19, "A2": 75}, layouts={"residual": "channels_last"},
             summary="no row and no column begins where a vector does"),
    ),
    workloads=(
        _workload("64x256x4096", "bfloat16", MOST, "S8 more", layouts={"residual": "channels_last"}),
        _workload("64x255x3137", "bfloat16", MOST, "S8 more", layouts={"residual": "channels_last"}),
    ),
)

TWELVE = Region(
    name="twelve",
    summary="twelve operators of several dtypes, two outputs",
    pattern='v0 = Cast(x, to="float32")\nv1 = Mul(v0, gain)\nv2 = Add(v1, 0.5)\nv3 = Erf(v2)\n'
    "v4 = Clip(v3, -0.75, 0.75)\n"
    "v5 = Greater(v2, limit)\nv6 = Neg(v4)\nv7 = Where(v5, v4, v6)\nv8 = Exp(v7)\nv9 = Max(v8, v1)\n"
    'keep = And(v5, mask)\ny = Cast(v9, to="float16")',
    inputs={"x": "float16[A0 A1]", "gain": "float32[A1]", "limit": "float32[]", "mask": "bool[A0 1]"},
    outputs={"keep": "bool[A0 A1]", "y": "float16[A0 A1]"},
)

WHOLE_NUMBERS = Region(
    name="whole_numbers",
    summary="integers: they wrap, and divide as ONNX says",
    pattern="v0 = Mul(i, j)\nv1 = Add(v0, 7)\nv2 = Max(v1, j)\nlow = BitwiseAnd(v2, 255)\nv3 = Less(low, 128)\n"
    'k = Where(v3, low, i)\nz = Cast(k, to="float32")',
    inputs={"i": "T[A0 A1]", "j": "T[A0 A1]"},
    outputs={"low": "T[A0 A1]", "k": "T[A0 A1]", "z": "float32[A0 A1]"},
    dtypes={"T": ("int32", "int64", "uint8")},
)

POINTS = Region(
    name="scalars",
    summary="no axis at all",
    pattern="v0 = Sub(a, b)\nc = Abs(v0)",
    inputs={"a": "T[]", "b": "T[]"},
    outputs={"c": "T[]"},
    dtypes={"T": ("float32",)},
)

REGION = FusionSpec(
    api=1,
    name="pointwise.region",
    summary="any program of point-wise operators, broadcast operands and several outputs included",
    pattern="region",
    inputs={},
    outputs={},
    dtypes={},
    regions=(ADD_MUL, CHAIN, BIAS, CHANNELS, RESIDUAL, TWELVE, WHOLE_NUMBERS, POINTS),
    kernels=KERNELS,
    tags=("S3", "S8"),
)
