"""``conv.conv_bn``, ``conv.conv_bn_relu``, ``conv.conv_bn_relu_pool``: convolutions with what follows in a network.

Tensors are [N C H W] in shape; in memory they may be channels last instead, as torch has them, and the result then is,
too. Batch normalization is that of inference; a model may have it folded into the weights already, so that it is
optional. Behind the fusions without a pool stand whatever point-wise operators a network has there, by a slot.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, Region, Tolerance

from .kernels import kernels
from .workloads import workloads

IMAGE, WEIGHT, RESULT = "T[N C H W]", "T[K G R S]", "T[N K P Q]"
NORM = dict.fromkeys(("gamma", "beta", "mean", "var"), "B[K]")
AXES = {
    "N": "images", "C": "channels of x", "H": "rows of x", "W": "columns of x", "K": "channels of the convolution",
    "G": "channels of x that one of them reads: C / groups", "R": "rows of the kernel", "S": "columns of the kernel",
    "P": "rows of the convolution", "Q": "columns of the convolution",
}  # fmt: skip
POOLED = {"U": "rows of the pool", "V": "columns of the pool"}
EXTENTS = {"N": 2, "C": 16, "G": 16, "H": 6, "W": 7, "K": 24, "R": 3, "S": 3}


def _int(default: int, summary: str) -> AttributeSpec:
    return AttributeSpec(type="int", default=default, summary=summary)


WINDOW = {
    "stride_h": _int(1, "rows from one window to the next"),
    "stride_w": _int(1, "columns from one window to the next"),
    "pad_top": _int(0, "rows of zeros above"),
    "pad_left": _int(0, "columns of zeros on the left"),
    "pad_bottom": _int(0, "rows of zeros below"),
    "pad_right": _int(0, "columns of zeros on the right"),
    "dilation_h": _int(1, "rows from one element of the kernel to the next"),
    "dilation_w": _int(1, "columns from one element of the kernel to the next"),
    "groups": _int(1, "groups that the channels are divided into"),
}
POOL_WINDOW = {
    "pool_h": _int(2, "rows of a window of the pool"),
    "pool_w": _int(2, "columns of a window of the pool"),
    "pool_stride_h": _int(1, "rows from one window to the next"),
    "pool_stride_w": _int(1, "columns from one window to the next"),
    "pool_top": _int(0, "rows of padding above"),
    "pool_left": _int(0, "columns of padding on the left"),
    "pool_bottom": _int(0, "rows of padding below"),
    "pool_right": _int(0, "columns of padding on the right"),
    "count_include_pad": AttributeSpec(
        type="int", default=0, choices=(0, 1), summary="1 where an average counts the padding"
    ),
}
SLOPE = {"alpha": AttributeSpec(type="float", default=0.01, summary="slope of a leaky ReLU below 0")}
EPSILON = {"epsilon": AttributeSpec(type="float", default=1e-5, summary="added to the variance")}

_POSITIVE = "stride_h >= 1 and stride_w >= 1 and dilation_h >= 1 and dilation_w >= 1 and groups >= 1"
_PADS = "pad_top >= 0 and pad_left >= 0 and pad_bottom >= 0 and pad_right >= 0"
CONSTRAINTS = (
    _POSITIVE,
    _PADS,
    "1 <= R and R <= 7 and 1 <= S and S <= 7",
    "G >= 1",
    "C == G * groups",
    "K % groups == 0",
    "P == (H + pad_top + pad_bottom - dilation_h * (R - 1) - 1) // stride_h + 1",
    "Q == (W + pad_left + pad_right - dilation_w * (S - 1) - 1) // stride_w + 1",
    "P >= 1 and Q >= 1",
    "present(gamma) == present(beta) and present(gamma) == present(mean) and present(gamma) == present(var)",
    "not present(gamma) or B == 'float32' or B == T",
)
POOL_CONSTRAINTS = (
    "1 <= pool_h and pool_h <= 7 and 1 <= pool_w and pool_w <= 7 and pool_stride_h >= 1 and pool_stride_w >= 1",
    "pool_top >= 0 and pool_left >= 0 and pool_bottom >= 0 and pool_right >= 0",
    "U == (P + pool_top + pool_bottom - pool_h) // pool_stride_h + 1",
    "V == (Q + pool_left + pool_right - pool_w) // pool_stride_w + 1",
    "U >= 1 and V >= 1",
)

CONVOLUTION = (
    "c = Conv(x, w, optional(bias), strides=(stride_h, stride_w), pads=(pad_top, pad_left, pad_bottom, pad_right), "
    "dilations=(dilation_h, dilation_w), group=groups)\n"
)
NORMALIZED = CONVOLUTION + "n = optional(BatchNormalization)(c, gamma, beta, mean, var, epsilon=epsilon)\n"
_WINDOWS = (
    "kernel_shape=(pool_h, pool_w), strides=(pool_stride_h, pool_stride_w), "
    "pads=(pool_top, pool_left, pool_bottom, pool_right)"
)

_SUMS = Tolerance(
    dtype="float32",
    ulp=4.0,
    inputs=2.0,
    reason="sums of products in another order, which the normalization may take the mean from",
)

#: Deviations that are no numbers leave little to compare.
_POSITIVE_VALUES = {"var": "uniform"}


#: Windows of a pool that do not overlap; a row and a column are in none.
_HALVED = Case(
    name="halved", axes={"N": 3, "C": 16, "G": 16, "H": 7, "W": 9, "K": 24, "R": 3, "S": 3},
    attributes={"pad_top": 1, "pad_left": 1, "pad_bottom": 1, "pad_right": 1, "pool_stride_h": 2, "pool_stride_w": 2,
                "pool": "MaxPool", "activation": "Relu"},
    values=_POSITIVE_VALUES, layouts={"x": "channels_last", "w": "channels_last"}, absent=("residual",),
)  # fmt: skip


#: The same on few channels.
_FIRST_HALVED = _HALVED.model_copy(
    update={"name": "first_layer_halved", "axes": _HALVED.axes | {"C": 3, "G": 3, "H": 21, "W": 19}}
)

#: Rows of few channels that begin at multiples of 16 bytes, and the pools that first layers have, or none.
_FIRST_ALIGNED = _FIRST_HALVED.model_copy(
    update={"name": "first_layer_aligned", "axes": _FIRST_HALVED.axes | {"W": 24, "K": 72}}
)
_FIRST_ALONE = _FIRST_ALIGNED.model_copy(
    update={"attributes": {"stride_h": 2, "stride_w": 2, "pad_top": 1, "pad_left": 1, "pad_bottom": 1, "pad_right": 1}}
)
_STEM = Case(
    name="stem", axes={"N": 2, "C": 3, "G": 3, "H": 43, "W": 40, "K": 24, "R": 7, "S": 7},
    attributes={"stride_h": 2, "stride_w": 2, "pad_top": 3, "pad_left": 3, "pad_bottom": 3, "pad_right": 3,
                "pool_h": 3, "pool_w": 3, "pool_stride_h": 2, "pool_stride_w": 2, "pool_top": 1, "pool_left": 1,
                "pool_bottom": 1, "pool_right": 1, "pool": "MaxPool", "activation": "Relu"},
    values=_POSITIVE_VALUES, layouts={"x": "channels_last", "w": "channels_last"}, absent=("residual",),
)  # fmt: skip


def _cases(pool: bool, add: bool) -> tuple[Case, ...]:
    """What the derived ones, of one stride and no padding, leave open. Extents are odd, kernels are not square."""
    window = {"stride_h": 2, "pad_top": 1, "pad_left": 2, "pad_right": 1}
    pooled = {"pool_h": 3, "pool_w": 3, "pool_stride_h": 2, "pool_stride_w": 2, "pool_top": 1, "pool_left": 1}
    pooled |= {"pool_bottom": 1, "pool_right": 1}
    more = pooled | {"pool": "MaxPool", "activation": "Relu"} if pool else {}
    leaky = {"activation": "leaky", "alpha": 0.3} if pool else {}
    average = {"pool": "AveragePool", "activation": "Swish", "pool_h": 3, "pool_stride_h": 2, "pool_left": 1}
    plain = {"absent": ("residual",)} if add or pool else {}
    last = {"x": "channels_last", "w": "channels_last"}
    beside = last | ({"residual": "channels_last"} if add and not pool else {})
    alone = _FIRST_ALONE.model_copy(update={"absent": ("residual",) if add else ()})
    return (
        Case(
            name="strided", axes={"N": 2, "C": 8, "G": 8, "H": 9, "W": 8, "K": 16, "R": 3, "S": 2},
            attributes={**window, "dilation_w": 2, **more}, values=_POSITIVE_VALUES, layouts=last, **plain,
            summary="stride, padding and dilation differ along rows and columns",
        ),
        Case(
            name="groups", axes={"N": 1, "C": 32, "G": 8, "H": 5, "W": 6, "K": 32, "R": 3, "S": 3},
            attributes={"groups": 4, "pad_top": 1, "pad_bottom": 1, **(average if pool else {})},
            values={**_POSITIVE_VALUES, "x": "special" if pool else "normal"}, layouts=last, **plain,
        ),
        Case(
            name="depthwise", axes={"N": 2, "C": 16, "G": 1, "H": 7, "W": 6, "K": 16, "R": 3, "S": 3},
            attributes={"groups": 16, "pad_top": 1, "pad_left": 1, "pad_bottom": 1, "pad_right": 1, **more, **leaky},
            values=_POSITIVE_VALUES, layouts=beside, summary="the padding of a pool is not the largest",
        ),
        Case(
            name="first_layer", axes={"N": 1, "C": 3, "G": 3, "H": 17, "W": 19, "K": 16, "R": 7, "S": 7},
            attributes={"stride_h": 2, "stride_w": 2, "pad_top": 3, "pad_left": 3, "pad_bottom": 3, "pad_right": 3,
                        **more},
            values=_POSITIVE_VALUES, layouts=last, **plain, summary="three channels: no vector of them",
        ),
        Case(
            name="pixels", axes={"N": 3, "C": 24, "G": 24, "H": 5, "W": 9, "K": 40, "R": 1, "S": 1},
            attributes={**more}, values={**_POSITIVE_VALUES, "x": "special"}, layouts=last, **plain,
            summary="a product of matrices; NaN stays NaN",
        ),
        *((_HALVED, _FIRST_HALVED, _FIRST_ALIGNED, _STEM) if pool else (alone,)),
    )  # fmt: skip


#: What the slot of y is proven on: a gated residual connection, and a gain for each channel.
_BEHIND = Region(
    name="gated",
    summary="SiLU of the normalised convolution, a gain for each channel, added to a residual",
    pattern="...\ns = Swish(y)\nv0 = Mul(s, gain)\nz = Add(v0, residual)",
    slots=("y",),
    inputs={"x": IMAGE, "w": WEIGHT, "bias": "T[K]", **NORM, "gain": "T[K 1 1]", "residual": RESULT},
    outputs={"z": RESULT},
    dtypes={"T": ("bfloat16",), "B": ("float32",)},
    extents=EXTENTS,
    cases=tuple(
        c.model_copy(update={"layouts": c.layouts | {"residual": "channels_last"}})
        for c in _cases(pool=False, add=False)
        if c.name in ("depthwise", "first_layer", "pixels", "first_layer_aligned")
    ),
)


def _fusion(words: str, summary: str, steps: str, pool: bool, add: bool, regions: tuple[Region, ...]) -> FusionSpec:
    return FusionSpec(
        api=1,
        name=f"conv.{words}",
        summary=summary,
        pattern=steps,
        inputs={"x": IMAGE, "w": WEIGHT, "bias": "T[K]", **NORM, **({"residual": RESULT} if add else {})},
        outputs={"y": "T[N K U V]" if pool else RESULT},
        layouts={"y": "x"},
        dtypes={"T": ("float16", "bfloat16", "float32"), "B": ("float32", "float16", "bfloat16")},
        axes={**AXES, **(POOLED if pool else {})},
        extents=EXTENTS,
        attributes={**WINDOW, **EPSILON, **({**POOL_WINDOW, **SLOPE} if pool else {})},
        autocast="lower",
        constraints=(*CONSTRAINTS, *(POOL_CONSTRAINTS if pool else ())),
        cases=_cases(pool, add),
        tolerances=(_SUMS,),
        workloads=workloads(words),
        regions=regions,
        kernels=kernels(words),
        tags=("conv", "S13", "inference"),
    )


CONV_BN = _fusion(
    "conv_bn",
    "BatchNorm(x convolved with w [+ bias]), or the convolution alone, for what stands behind it",
    NORMALIZED.replace("n = ", "y = "),
    pool=False,
    add=False,
    regions=(_BEHIND,),
)
CONV_BN_RELU = _fusion(
    "conv_bn_relu",
    "relu(BatchNorm(x convolved with w [+ bias]) [+ residual])",
    f"{NORMALIZED}r = optional(Add)(n, residual)\ny = Relu(r)",
    pool=False,
    add=True,
    regions=(),
)
CONV_BN_RELU_POOL = _fusion(
    "conv_bn_relu_pool",
    "pool(act(BatchNorm(x convolved with w [+ bias]) [+ residual])): windows of the pool in the convolution's epilogue",
    f"{NORMALIZED}r = optional(Add)(n, residual)\n"
    'a = optional(any_of(Relu, Swish, "activation", leaky=LeakyRelu(alpha=alpha)))(r)\n'
    f'y = any_of(MaxPool({_WINDOWS}), "pool", AveragePool=AveragePool({_WINDOWS}, '
    "count_include_pad=count_include_pad))(a)",
    pool=True,
    add=True,
    regions=(),
)

FUSIONS = (CONV_BN, CONV_BN_RELU, CONV_BN_RELU_POOL)
