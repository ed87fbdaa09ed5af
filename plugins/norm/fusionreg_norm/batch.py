"""Batch normalisation in training, with the ReLU that follows it, and the gradients of both.

The forward fusions give the batch's own mean and inverse deviation, 8 bytes a channel: with them the backward fusions
read each tensor twice and not three times. Tensors are [N C S ...] in shape, channels last in memory or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.spec import AttributeSpec, Backward, Case, FusionSpec, KernelSpec, Region, Tolerance

from .batch_workloads import workloads
from .rows import EPSILON

MAP = "T[N C S ...]"
CHANNEL, SAVED = "P[C]", "float32[C]"
AXES = {"N": "images", "C": "channels, normalised one by one", "S": "places: all spatial axes in one"}
TRAINING = {
    "momentum": AttributeSpec(
        type="float", default=0.9, double=True, summary="what the running statistics keep of themselves: 1 - torch's"
    ),
    "unbiased": AttributeSpec(
        type="int", default=0, choices=(0, 1), summary="which variance the running one takes: ONNX's 0, torch's 1"
    ),
}

_SUMS = Tolerance(
    dtype="float32",
    ulp=2.0,
    inputs=8.0,
    reason="a channel carries the rounding of mean, variance and root; a ReLU may leave of it what nearly cancels",
)


#: The backward fusions read the batch's own statistics, and not the running ones that the forward fusions read.
_STATISTICS_READ = {"mean": "saved_mean", "inv_std_dev": "saved_inv_std_dev"}


def _last(tensors: tuple[str, ...]) -> tuple[str, ...]:
    """Channels last, places and images at one distance; an axis of extent 1 may have any stride."""
    conditions = ("C == 1 or stride({0}, 1) == 1", "N == 1 or S == 1 or stride({0}, 0) == S * stride({0}, 2)")
    return ("N * S > 0", *(c.format(t) for t in tensors for c in conditions))


def _widest(axis: str, tensors: tuple[str, ...]) -> str:
    """16-byte accesses where they reach all of every tensor, single elements elsewhere."""
    fits = [f"{axis} % (128 // bits(T)) == 0", *(f"aligned({t}, 16)" for t in tensors)]
    if axis == "C":
        fits += [f"(stride({t}, 2) if S > 1 else stride({t}, 0)) % (128 // bits(T)) == 0" for t in tensors]
    return f"VEC == (128 // bits(T) if {' and '.join(fits)} else 1)"


#: Threads of a block; one block or two are resident on a multiprocessor at once.
THREADS = 512


#: Rows of a tile to a thread, tiles that are under way, and those that stay in shared memory: the fastest on an H200.
_TILES = {
    ("forward", False): (2, 4, 9),
    ("forward", True): (2, 3, 7),
    ("backward", False): (2, 3, 3),
    ("backward", True): (1, 4, 7),
}


def _kernels(direction: str, tensors: tuple[str, ...], moved: int, add: bool) -> tuple[KernelSpec, ...]:
    """``tensors``: all [N C S]; ``moved``: how many of them are read or written, one read twice counting twice.

    Measured on an H200: row-major, forward kernels like two smaller blocks to a multiprocessor.
    """
    forward = direction == "forward"
    flags = {"ADD": str(int(add))}
    seconds = f"{moved} * N * C * S * bits(T) / 8 / (4e12 if VEC > 1 else 1e12)"

    def cooperative(name: str, template: str, constants: Mapping[str, str], **fields: Any) -> KernelSpec:
        return KernelSpec(
            name=name,
            template=f"batch_{direction}{template}.cu.j2",
            constants={**flags, "PLAIN": "0", "THREADS": str(THREADS), **constants},
            block="THREADS",
            cooperative=True,
            estimate=f"1e-5 + {seconds}",
            **fields,
        )

    strips, resident = "ceildiv(C, LANES * VEC)", "multiprocessors"
    slices = f"max(1, min({resident} // {strips}, ceildiv(N * S, {THREADS} // LANES)))"
    # Few channels of few rows: more channels to a slice would leave each block much to merge.
    few = "C <= 16 * VEC and N * S * C * bits(T) < 320000000"
    lanes = f"(4 if {few} else 8 if 4 * ceildiv(C, 8 * VEC) <= {resident} else 32)"
    held, passing = (1, int(add)) if forward else (2, int(add))
    unroll, ahead, pinned = _TILES[direction, add]
    tiles = f"({held} * (PINNED + AHEAD) + {passing} * AHEAD)"
    planes, units = 2 if forward else 1, "N * C * ceildiv(S, CHUNK)"
    return (
        cooperative(
            "channels_last",
            "_last",
            {"LAST": "1", "RING": "1 if VEC > 1 else 0"},
            grid=f"{strips} * {slices}",
            workspace=f"({slices} + 1) * 2 * max(C, 1) * 8 + {strips} * 4",
            min_blocks=1,
            summary="channels last: 16 bytes of channels a thread, rows over the grid",
            regions=("y" if forward else "dx",),
            strides=tensors,
            requires=_last(tensors),
            params={
                "VEC": (8, 4, 1),
                "LANES": (8, 4, 2, 1, 16, 32),
                "UNROLL": (unroll,),
                "AHEAD": (ahead, 2),
                "PINNED": (pinned, pinned - 2, 0),
            },
            shared_memory=f"({tiles} * UNROLL * {THREADS} * 16) if VEC > 1 else 0",
            valid=(
                _widest("C", tensors),
                f"LANES == min({lanes}, next_pow2(ceildiv(C, VEC)))",
                f"{strips} <= {resident}",
                f"AHEAD == ({ahead} if has(wgmma) else 2)",  # parts with less shared memory
                f"PINNED == (0 if not has(wgmma) else {pinned} if LANES < 32 else {pinned - 2})",
            ),
        ),
        cooperative(
            "planes",
            "_planes",
            {"LAST": "0", "RING": "0"},
            grid=f"max(1, min(ceildiv({units}, {4 * THREADS // 32}), {planes} * multiprocessors))",
            workspace="(N * ceildiv(S, CHUNK) + 1) * 2 * max(C, 1) * 8",
            min_blocks=planes,
            summary="row-major: a warp to so many places of a channel of an image",
            regions=("y" if forward else "dx",),
            requires=("N * C * S > 0",),
            params={"VEC": (8, 4, 1), "CHUNK": (4096,), "UNROLL": (2 if forward else 4,)},
            valid=(_widest("S", tensors),),
        ),
        KernelSpec(
            name="plain",
            template=f"batch_{direction}_plain.cu.j2",
            summary="a channel of any memory order to a block",
            strides=tensors,
            constants={**flags, "PLAIN": "1", **({"LAST": "0"} if forward else {}), "THREADS": "256"},
            grid="C",
            block="THREADS",
            estimate=f"8e-6 + {moved + 1} * N * C * S * bits(T) / 8 / 2e11",
        ),
    )


def _cases(forward: bool) -> tuple[Case, ...]:
    """Beyond the derived ones, which have one slice of rows. Kernels for channels last get them channels last."""
    odd, slices = ({"momentum": 0.0}, {"momentum": 0.99, "unbiased": 1}) if forward else ({}, {})
    return (
        Case(name="odd", axes={"N": 3, "C": 37, "S": 5}, batch=(5,), attributes=odd, summary="no vector divides it"),
        Case(
            name="slices", axes={"N": 3, "C": 40, "S": 7}, batch=(19,), attributes=slices,
            summary="rows of more than one block",
        ),
    )  # fmt: skip


def _fusion(words: str, **fields: Any) -> FusionSpec:
    backward = words.endswith("backward")
    maps = tuple(n for n, t in fields["inputs"].items() if t == MAP)
    return FusionSpec(
        api=1,
        name=f"norm.{words}",
        dtypes={"T": ("float16", "bfloat16", "float32"), "P": ("float32", "float16", "bfloat16")},
        axes=AXES,
        extents={"N": 3, "C": 48, "S": 24},
        constraints=("P == 'float32' or P == T",),
        attributes={} if backward else {**TRAINING, **EPSILON},
        backward=None if backward else Backward(fusion=f"norm.{words}_backward", inputs=_STATISTICS_READ),
        cases=_cases(not backward),
        tolerances=(_SUMS,),
        workloads=workloads(words, maps),
        tags=("norm", "S22", "training", *(("backward",) if backward else ())),
        **fields,
    )


def _behind(written: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Region:
    """What the slot of the output ``written`` is proven on: operands of every form, and a cast."""

    def places(tensors: Mapping[str, str]) -> dict[str, str]:  # one axis of them, so that [C 1] is a channel's
        return {name: text.replace(" ...", "") for name, text in tensors.items()}

    return Region(
        name="gated",
        summary=f"gates of elements, of channels and of places, and a cast behind {written}",
        pattern=f"...\ng = Sigmoid(gate)\nv0 = Mul({written}, g)\nv1 = Mul(v0, gain)\nv2 = Add(v1, shift)\n"
        'z = Cast(v2, to="float32")',
        slots=(written,),
        inputs={**places(inputs), "gate": "T[N C S]", "gain": "T[C 1]", "shift": "T[S]"},
        outputs={**places(outputs), "z": "float32[N C S]"},
        dtypes={"T": ("bfloat16",), "P": ("float32",)},
        extents={"N": 3, "C": 48, "S": 24},
        cases=(Case(name="chunks", axes={"N": 2, "C": 3, "S": 4104}, summary="a channel for several warps"),),
    )


_STATISTICS = {"scale": CHANNEL, "bias": CHANNEL, "mean": CHANNEL, "var": CHANNEL}
_NEW = {"running_mean": CHANNEL, "running_var": CHANNEL, "saved_mean": SAVED, "saved_inv_std_dev": SAVED}
_STEP = (
    "n, running_mean, running_var, saved_mean, saved_inv_std_dev = BatchNormalization("
    "x, scale, bias, mean, var, epsilon=epsilon, momentum=momentum, training_mode=1, unbiased=unbiased)\n"
)

BATCHNORM_RELU = _fusion(
    "batchnorm_relu",
    summary="relu(BatchNorm(x)) in training: new running statistics and the batch's own besides",
    pattern=f"{_STEP}y = Relu(n)",
    inputs={"x": MAP, **_STATISTICS},
    outputs={"y": MAP, **_NEW},
    layouts={"y": "x"},
    regions=(_behind("y", {"x": MAP, **_STATISTICS}, {"y": MAP, **_NEW}),),
    kernels=_kernels("forward", ("x", "y"), 3, add=False),
)

BATCHNORM_ADD_RELU = _fusion(
    "batchnorm_add_relu",
    summary="relu(BatchNorm(x) + residual) in training: new running statistics and the batch's own besides",
    pattern=f"{_STEP}y = Relu(Add(n, residual))",
    inputs={"x": MAP, **_STATISTICS, "residual": MAP},
    outputs={"y": MAP, **_NEW},
    layouts={"y": "x"},
    regions=(_behind("y", {"x": MAP, **_STATISTICS, "residual": MAP}, _NEW),),
    kernels=_kernels("forward", ("x", "residual", "y"), 4, add=True),
)

_GRADIENT = "dx, dscale, dbias = fusionreg.BatchNormalizationGrad({dz}, x, scale, mean, inv_std_dev)"
_SAVED = {"mean": SAVED, "inv_std_dev": SAVED}
_GRADIENTS = {"dscale": CHANNEL, "dbias": CHANNEL}

BATCHNORM_RELU_BACKWARD = _fusion(
    "batchnorm_relu_backward",
    summary="gradients of relu(BatchNorm(x)) from the saved statistics; the mask is made again from x",
    pattern="n = fusionreg.BatchNormalizationApply(x, scale, bias, mean, inv_std_dev)\n"
    f"dz = fusionreg.ReluGrad(dy, n)\n{_GRADIENT.format(dz='dz')}",
    inputs={"dy": MAP, "x": MAP, "scale": CHANNEL, "bias": CHANNEL, **_SAVED},
    layouts={"dx": "x"},
    outputs={"dx": MAP, "dscale": CHANNEL, "dbias": CHANNEL},
    regions=(_behind("dx", {"dy": MAP, "x": MAP, "scale": CHANNEL, "bias": CHANNEL, **_SAVED}, _GRADIENTS),),
    kernels=_kernels("backward", ("dy", "x", "dx"), 5, add=False),
)

BATCHNORM_ADD_RELU_BACKWARD = _fusion(
    "batchnorm_add_relu_backward",
    summary="gradients of relu(BatchNorm(x) + residual) from the saved statistics; the mask is that of y",
    pattern=f"dresidual = fusionreg.ReluGrad(dy, y)\n{_GRADIENT.format(dz='dresidual')}",
    inputs={"dy": MAP, "x": MAP, "y": MAP, "scale": CHANNEL, **_SAVED},
    layouts={"dx": "x", "dresidual": "x"},
    outputs={"dx": MAP, "dresidual": MAP, "dscale": CHANNEL, "dbias": CHANNEL},
    regions=(
        _behind("dx", {"dy": MAP, "x": MAP, "y": MAP, "scale": CHANNEL, **_SAVED}, {"dresidual": MAP, **_GRADIENTS}),
    ),
    kernels=_kernels("backward", ("dy", "x", "y", "dx", "dresidual"), 7, add=True),
)

FUSIONS = (BATCHNORM_RELU, BATCHNORM_RELU_BACKWARD, BATCHNORM_ADD_RELU, BATCHNORM_ADD_RELU_BACKWARD)
