"""``moe.routed_ffn`` with weights of 8 and of 4 bits: ``moe.routed_ffn_w8a16`` and ``moe.routed_ffn_w4a16``.

Weights are int8 or e4m3 with a scale for each channel or each expert, or pairs of 4-bit numbers with a scale for each
``block`` of a row. What a weight means is exact in float32, where scales and sums are, too; what is between the
products is rounded as in ``moe.routed_ffn``. Logits are float32, as routers cast them.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec

from .routed import ATTRIBUTES, AXES, GATE, ROUTING
from .routed_kernels import decode, plain, tiles
from .routed_workloads import quantized

_WIDE = ("float16", "bfloat16")
#: Of each product: the weights' name, in float32, and their scale.
_OF_CHANNELS = 'Mul(Cast({w}, to="float32"), {w}_scale)'
_OF_BLOCKS = "DequantizeLinear(fusionreg.UnpackInt4({w}), {w}_scale, axis=2, block_size=block)"
_PRODUCT = 'Cast(fusionreg.RoutedMatMul(Cast({x}, to="float32"), {w}, ids, trans=1), to=T)'


def _pattern(weights: str) -> str:
    gate_up, down = (weights.format(w=name) for name in ("gate_up", "down"))
    return "\n".join(
        (
            ROUTING,
            f"h = {_PRODUCT.format(x='Unsqueeze(x, (1,))', w=gate_up)}",
            GATE,
            f"d = {_PRODUCT.format(x='Mul(a, up)', w=down)}",
            "y = fusionreg.RoutedSum(d, weights)",
        )
    )


def _cases(axes: dict[str, int], wide: dict[str, int]) -> tuple[Case, ...]:
    """``axes``: of small layers; ``wide``: of one whose rows are longer than a pipeline has stages."""
    every = {"gate_up": "bytes", "down": "bytes", "gate_up_scale": "0.01", "down_scale": "0.01"}
    return (
        Case(name="bytes", axes=axes, values=every, summary="weights of every byte"),
        Case(
            name="one_for_all",
            axes={**axes, "M": 7},
            values={**every, "logits": "zeros"},
            attributes={"renormalise": 1, "activation": "Gelu"},
            summary="ties: all tokens on the first two experts",
        ),
        Case(
            name="infinite_scale",
            axes=axes,
            values={**every, "gate_up_scale": "inf", "x": "integers"},
            summary="a scale stands in front of the sum, where 0 times infinity is NaN",
        ),
        Case(
            name="deepseek",
            axes={**axes, "M": 5, "E": 12},
            attributes={"top_k": 6, "scoring": "sigmoid", "renormalise": 1, "scale": 2.5},
            values=every,
            summary="sigmoids, chosen with a bias that they are weighed without",
        ),
        Case(name="long", axes=wide, values=every, summary="sums longer than a pipeline has stages, tails of tiles"),
    )


ROUTED_FFN_W8A16 = FusionSpec(
    api=1,
    name="moe.routed_ffn_w8a16",
    summary="moe.routed_ffn with weights of 8 bits: int8 or e4m3, a scale for each channel or each expert",
    pattern=_pattern(_OF_CHANNELS),
    inputs={
        "x": "T[M D]",
        "logits": "L[M E]",
        "gate_up": "W[E J D]",
        "gate_up_scale": "float32[E J 1] | float32[E 1 1]",
        "down": "W[E D I]",
        "down_scale": "float32[E D 1] | float32[E 1 1]",
        "bias": "float32[E]",
    },
    outputs={"y": "T[M D]"},
    dtypes={"T": _WIDE, "W": ("int8", "float8_e4m3fn"), "L": ("float32",)},
    axes=AXES,
    extents={"M": 8, "D": 64, "E": 6, "J": 96, "I": 48},
    attributes=ATTRIBUTES,
    autocast="lower",
    constraints=(
        "J == 2 * I",
        "form(gate_up_scale) == form(down_scale)",
        "top_k >= 1 and top_k <= 32 and top_k <= E",
    ),
    cases=_cases({"M": 4, "D": 80, "E": 5, "J": 160, "I": 80}, {"M": 3, "D": 1040, "E": 3, "J": 352, "I": 176}),
    workloads=quantized("routed_ffn_w8a16"),
    kernels=(decode(bits=8), tiles(bits=8), plain(bits=8)),
    tags=("S18", "inference", "moe", "quantization"),
)

ROUTED_FFN_W4A16 = FusionSpec(
    api=1,
    name="moe.routed_ffn_w4a16",
    summary="moe.routed_ffn with weights of 4 bits, two to a byte, a scale for each block of a row",
    pattern=_pattern(_OF_BLOCKS),
    inputs={
        "x": "T[M D]",
        "logits": "L[M E]",
        "gate_up": "uint8[E J C]",
        "gate_up_scale": "float32[E J G]",
        "down": "uint8[E D B]",
        "down_scale": "float32[E D H]",
        "bias": "float32[E]",
    },
    outputs={"y": "T[M D]"},
    dtypes={"T": _WIDE, "L": ("float32",)},
    axes={
        **{axis: words for axis, words in AXES.items() if axis != "I"},
        "C": "bytes of a row of gate_up: half of D",
        "G": "blocks of it",
        "B": "bytes of a row of down: a quarter of J",
        "H": "blocks of it",
    },
    extents={"M": 8, "D": 256, "C": 128, "G": 2, "E": 5, "J": 256, "B": 64, "H": 1},
    sizes={"gate_up_scale": 0.01, "down_scale": 0.01},
    attributes={
        **ATTRIBUTES,
        "block": AttributeSpec(type="int", default=128, static=True, summary="weights of a row with one scale"),
    },
    autocast="lower",
    constraints=(
        "2 * C == D and 4 * B == J",
        "block >= 16 and G * block == D and 2 * H * block == J",
        "top_k >= 1 and top_k <= 32 and top_k <= E",
    ),
    cases=(
        *_cases(
            {"M": 4, "D": 128, "C": 64, "G": 1, "E": 5, "J": 256, "B": 64, "H": 1},
            {"M": 3, "D": 1152, "C": 576, "G": 9, "E": 3, "J": 768, "B": 192, "H": 3},
        ),
        Case(
            name="short_blocks",
            axes={"M": 4, "D": 96, "C": 48, "G": 3, "E": 4, "J": 128, "B": 32, "H": 2},
            attributes={"block": 32},
            values={"gate_up": "bytes", "down": "bytes"},
            summary="a scale for each 32 weights",
        ),
        Case(
            name="longer_blocks",
            axes={"M": 7, "D": 320, "C": 160, "G": 5, "E": 4, "J": 384, "B": 96, "H": 3},
            attributes={"block": 64},
            values={"gate_up": "bytes", "down": "bytes"},
            summary="a scale for each 64 weights",
        ),
    ),
    workloads=quantized("routed_ffn_w4a16"),
    kernels=(decode(bits=4), tiles(bits=4), plain(bits=4)),
    tags=("S18", "inference", "moe", "quantization"),
)
FUSIONS = (ROUTED_FFN_W8A16, ROUTED_FFN_W4A16)
