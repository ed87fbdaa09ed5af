"""Batch normalisation in training, with the ReLU that follows it, and the gradients of both.

The forward fusions give the batch's own mean and inverse deviation, 8 bytes a channel: with them the backward fusions
read each tensor twice and not three times. Tensors are [N C S ...] in shape, channels last in memory or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec, Tolerance

from .batch_workloads import workloads
from .rows import EPSILON, PENDING

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
    inputs=2.0,
    reason="a channel carries the rounding of mean, variance and root; the chain sums in another order",
)


def _last(tensors: tuple[str, ...]) -> tuple[str, ...]:
    """Channels last, places and images at one distance; an axis of extent 1 may have any stride."""
    conditions = ("C == 1 or stride({0}, 1) == 1", "N == 1 or S == 1 or stride({0}, 0) == S * stride({0}, 2)")
    return ("N * S > 0", *(c.format(t) for t in tensors for c in conditions))


def _whole(axis: str, tensors: tuple[str, ...]) -> str:
    """Whether 16-byte accesses reach all of every tensor."""
    fits = [f"{axis} % VEC == 0", *(f"aligned({t}, 16)" for t in tensors)]
    if axis == "C":
        fits += [f"(stride({t}, 2) if S > 1 else stride({t}, 0)) % VEC == 0" for t in tensors]
    return f"VEC == 1 or VEC * bits(T) == 128 and {' and '.join(fits)}"


def _kernels(
    direction: str,
    tensors: tuple[str, ...],
    moved: int,
    parts: Mapping[str, str],
    threads: int = 512,
    blocks: int = 1,
    unroll: int = 4,
    stages: int = 4,
    pending: str = PENDING,
) -> tuple[KernelSpec, ...]:
    """``tensors``: all [N C S]; ``moved``: how many of them are read or written, one read twice counting twice.

    ``threads``: of a block; ``blocks``: that are resident on a multiprocessor at once; ``unroll``: vectors of a thread
    in one turn; ``stages``: turns of one tensor that fit the shared memory which is copied to ahead.
    """
    resident = f"{blocks} * multiprocessors"
    seconds = f"{moved} * N * C * S * bits(T) / 8 / (4e12 if VEC > 1 else 1e12)"

    def cooperative(name: str, grid: str, count: str, **fields: Any) -> KernelSpec:
        return KernelSpec(
            name=name,
            pending=pending,
            template=f"batch_{direction}.cu.j2",
            constants={
                **parts, "LAST": "1" if name == "channels_last" else "0", "PLAIN": "0", "THREADS": str(threads),
                "RING": "1 if VEC > 1 else 0" if name == "channels_last" else "0",
            },
            grid=grid,
            block="THREADS",
            workspace=f"({count} + 1) * 2 * max(C, 1) * 8",
            cooperative=True,
            min_blocks=blocks,
            estimate=f"1e-5 + {seconds}",
            **fields,
        )

    strips = "ceildiv(C, LANES * VEC)"
    slices = f"max(1, min({resident} // {strips}, ceildiv(N * S, {threads} // LANES * UNROLL)))"
    units = "N * C * ceildiv(S, CHUNK)"
    return (
        cooperative(
            "channels_last",
            f"{strips} * {slices}",
            slices,
            summary="channels last: 16 bytes of channels a thread, rows over the grid",
            strides=tensors,
            requires=_last(tensors),
            params={
                "VEC": (8, 4, 1), "LANES": (32, 16, 8, 4, 2, 1), "UNROLL": (unroll,), "STAGES": (stages,),
            },
            shared_memory=f"(STAGES * UNROLL * {threads} * 16) if VEC > 1 else 0",
            valid=(
                _whole("C", tensors),
                "LANES == min(32, next_pow2(ceildiv(C, VEC)))",
                f"{strips} <= {resident}",
            ),
        ),
        cooperative(
            "planes",
            f"max(1, min(ceildiv({units}, {4 * threads // 32}), {resident}))",
            "N * ceildiv(S, CHUNK)",
            summary="row-major: a warp to so many places of a channel of an image",
            requires=("N * C * S > 0",),
            params={"VEC": (8, 4, 1), "CHUNK": (4096,), "UNROLL": (unroll,)},
            valid=(_whole("S", tensors),),
        ),
        KernelSpec(
            name="plain",
            pending=pending,
            template=f"batch_{direction}_plain.cu.j2",
            summary="a channel of any memory order to a block",
            strides=tensors,
            constants={**parts, "PLAIN": "1", **({"LAST": "0"} if direction == "forward" else {}), "THREADS": "256"},
            grid="C",
            block="THREADS",
            estimate=f"8e-6 + {moved + 1} * N * C * S * bits(T) / 8 / 2e11",
        ),
    )


def _cases(forward: bool) -> tuple[Case, ...]:
    """Beyond the derived ones, which have few images and one slice of rows. Kernels for tensors that are channels last
    get them channels last."""
    unbiased = {"unbiased": 1}

    def case(
        name: str, n: int, c: int, s: int, *more: int, training: Mapping[str, Any] | None = None, **fields: Any
    ) -> Case:
        attributes = training if forward and training else {}
        return Case(name=name, axes={"N": n, "C": c, "S": s}, batch=more, attributes=attributes, **fields)

    found = [
        case("one_element", 1, 5, 1, training=unbiased, summary="its variance is 0, its unbiased variance NaN"),
        case("volume", 2, 3, 3, 2, 4, training={"momentum": 0.0, **unbiased}),
        case("odd", 3, 37, 5, 5, training={"momentum": 1.0}, summary="channels and places that no vector divides"),
        case("slices", 3, 40, 7, 19, training={"momentum": 0.99, **unbiased}, summary="rows of more than one block"),
        case("wide", 1, 520, 6, summary="channels of more than one block"),
        case("mixed", 2, 16, 6, layouts={"x": "channels_last"}, summary="one tensor channels last, others not"),
    ]
    if forward:
        offset = {"x": "offset", "scale": "ones", "bias": "zeros"}
        found.append(case("far_from_zero", 4, 8, 64, values=offset, summary="E[x^2] - E[x]^2 cancels here"))
    return tuple(found)


def _fusion(words: str, **fields: Any) -> FusionSpec:
    backward = words.endswith("backward")
    maps = tuple(n for n, t in fields["inputs"].items() if t == MAP)
    return FusionSpec(
        api=1,
        name=f"norm.{words}",
        dtypes={"T": ("float16", "bfloat16", "float32"), "P": ("float32", "float16", "bfloat16")},
        axes=AXES,
        constraints=("P == 'float32' or P == T",),
        attributes={} if backward else {**TRAINING, **EPSILON},
        cases=_cases(not backward),
        tolerances=(_SUMS,),
        workloads=workloads(words, maps),
        tags=("norm", "S22", "training", *(("backward",) if backward else ())),
        **fields,
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
    kernels=_kernels("forward", ("x", "y"), 3, {"ADD": "0"}),
)

BATCHNORM_ADD_RELU = _fusion(
    "batchnorm_add_relu",
    summary="relu(BatchNorm(x) + residual) in training: new running statistics and the batch's own besides",
    pattern=f"{_STEP}y = Relu(Add(n, residual))",
    inputs={"x": MAP, **_STATISTICS, "residual": MAP},
    outputs={"y": MAP, **_NEW},
    layouts={"y": "x"},
    kernels=_kernels("forward", ("x", "residual", "y"), 4, {"ADD": "1"}),
)

_GRADIENT = "dx, dscale, dbias = fusionreg.BatchNormalizationGrad({dz}, x, scale, mean, inv_std_dev)"
_SAVED = {"mean": SAVED, "inv_std_dev": SAVED}

BATCHNORM_RELU_BACKWARD = _fusion(
    "batchnorm_relu_backward",
    summary="gradients of relu(BatchNorm(x)) from the saved statistics; the mask is made again from x",
    pattern="n = fusionreg.BatchNormalizationApply(x, scale, bias, mean, inv_std_dev)\n"
    f"dz = fusionreg.ReluGrad(dy, n)\n{_GRADIENT.format(dz='dz')}",
    inputs={"dy": MAP, "x": MAP, "scale": CHANNEL, "bias": CHANNEL, **_SAVED},
    layouts={"dx": "x"},
    outputs={"dx": MAP, "dscale": CHANNEL, "dbias": CHANNEL},
    kernels=_kernels("backward", ("dy", "x", "dx"), 5, {"ADD": "0"}, unroll=2, stages=8),
)

BATCHNORM_ADD_RELU_BACKWARD = _fusion(
    "batchnorm_add_relu_backward",
    summary="gradients of relu(BatchNorm(x) + residual) from the saved statistics; the mask is that of y",
    pattern=f"dresidual = fusionreg.ReluGrad(dy, y)\n{_GRADIENT.format(dz='dresidual')}",
    inputs={"dy": MAP, "x": MAP, "y": MAP, "scale": CHANNEL, **_SAVED},
    layouts={"dx": "x", "dresidual": "x"},
    outputs={"dx": MAP, "dresidual": MAP, "dscale": CHANNEL, "dbias": CHANNEL},
    kernels=_kernels("backward", ("dy", "x", "y", "dx", "dresidual"), 7, {"ADD": "1"}, unroll=2, stages=8),
)

FUSIONS = (BATCHNORM_RELU, BATCHNORM_RELU_BACKWARD, BATCHNORM_ADD_RELU, BATCHNORM_ADD_RELU_BACKWARD)
