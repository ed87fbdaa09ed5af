"""``moe.routed_ffn``: the feed-forward layer of routed experts whole, from router logits to the combined result.

The experts' matrices are stacked as Hugging Face does it: gate_up [E 2I D], gate's rows first, and down [E D I].
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Backward, Case, FusionSpec

from .routed_kernels import KERNELS
from .routed_spellings import SPELLINGS
from .routed_workloads import WORKLOADS

ROUTING = """
weights, ids = fusionreg.Route(
    logits, optional(bias), top_k=top_k, scoring=scoring, renormalise=renormalise, scale=scale
)
""".strip()
GATE = """
gate, up = Split(h, axis=-1, num_outputs=2)
a = any_of(Swish, Gelu, "activation", gelu_tanh=Gelu(approximate="tanh"), relu2=fusionreg.SquaredRelu)(gate)
""".strip()
_PATTERN = f"""{ROUTING}
h = fusionreg.RoutedMatMul(Unsqueeze(x, (1,)), gate_up, ids, trans=1)
{GATE}
d = fusionreg.RoutedMatMul(Mul(a, up), down, ids, trans=1)
y = fusionreg.RoutedSum(d, weights)
"""

#: Choices of one expert, and of all.
FEW_AND_ALL = (
    Case(
        name="one_expert_each",
        axes={"M": 21, "D": 72, "E": 5, "J": 80, "I": 40},
        attributes={"top_k": 1, "activation": "Gelu"},
        summary="the highest logit alone",
    ),
    Case(
        name="all_experts",
        axes={"M": 9, "D": 64, "E": 3, "J": 64, "I": 32},
        attributes={"top_k": 3, "scoring": "softmax_after", "activation": "relu2"},
        summary="as many as there are",
    ),
)
_CASES = (
    *FEW_AND_ALL,
    Case(
        name="one_for_all",
        axes={"M": 150, "D": 64, "E": 6, "J": 48, "I": 24},
        attributes={"renormalise": 1},
        values={"logits": "zeros"},
        summary="ties: all tokens on the first two experts, the others empty",
    ),
    Case(
        name="deepseek",
        axes={"M": 12, "D": 64, "E": 40, "J": 32, "I": 16},
        attributes={"top_k": 6, "scoring": "sigmoid", "renormalise": 1, "scale": 2.5},
        summary="sigmoids, chosen with a bias that they are weighed without",
    ),
    Case(
        name="nan_logit",
        axes={"M": 40, "D": 64, "E": 4, "J": 64, "I": 32},
        values={"logits": "special"},
        summary="NaN and infinities in the logits stay with their tokens",
    ),
    Case(
        name="nan_elsewhere",
        axes={"M": 5, "D": 64, "E": 40, "J": 32, "I": 16},
        values={"gate_up": "special", "down": "special", "logits": "cancel"},
        summary="NaN in experts that no token has",
    ),
    Case(
        name="long",
        axes={"M": 3, "D": 520, "E": 4, "J": 1168, "I": 584},
        values={"gate_up": "small", "down": "small"},
        summary="sums longer than a pipeline has stages, and tails of tiles",
    ),
    Case(
        name="one_token",
        axes={"M": 1, "D": 72, "E": 5, "J": 80, "I": 40},
        attributes={"top_k": 3, "renormalise": 1, "activation": "Swish"},
        summary="decoding",
    ),
    Case(
        name="one_token_long",
        axes={"M": 1, "D": 1096, "E": 2, "J": 2080, "I": 1040},
        attributes={"top_k": 1, "activation": "Swish"},
        values={"gate_up": "small", "down": "small"},
        summary="decoding: rows longer than what is copied at once",
    ),
    Case(
        name="no_hidden",
        axes={"M": 3, "D": 64, "E": 4, "J": 0, "I": 0},
        summary="experts without a hidden channel give zero",
    ),
)

AXES = {
    "M": "tokens",
    "D": "channels of the model",
    "E": "experts",
    "J": "twice the hidden channels: gate's, then up's",
    "I": "hidden channels of an expert",
}
ATTRIBUTES = {
    "top_k": AttributeSpec(type="int", default=2, static=True, summary="experts of a token"),
    "scoring": AttributeSpec(
        type="str",
        default="softmax",
        choices=("softmax", "softmax_after", "sigmoid"),
        static=True,
        summary="of all logits, or a softmax of the chosen ones alone",
    ),
    "renormalise": AttributeSpec(
        type="int", default=0, choices=(0, 1), summary="1 when the weights of a token are divided by their sum"
    ),
    "scale": AttributeSpec(type="float", default=1.0, summary="of all weights"),
}

ROUTED_FFN = FusionSpec(
    api=1,
    name="moe.routed_ffn",
    summary="feed-forward layer of routed experts: top-k routing, gated first products, second ones, weighted sum",
    pattern=(_PATTERN.strip(), *SPELLINGS),
    inputs={
        "x": "T[M D]",
        "logits": "L[M E]",
        "gate_up": "T[E J D]",
        "down": "T[E D I]",
        "bias": "float32[E]",
    },
    outputs={"y": "T[M D]"},
    dtypes={"T": ("float16", "bfloat16", "float32"), "L": ("float32", "float16", "bfloat16")},
    axes=AXES,
    extents={"M": 8, "D": 64, "E": 6, "J": 96, "I": 48},
    attributes=ATTRIBUTES,
    backward=Backward(fusion="moe.routed_ffn_backward"),
    autocast="lower",
    constraints=(
        "J == 2 * I",
        "L == T or L == 'float32'",
        "top_k >= 1 and top_k <= 32 and top_k <= E",
    ),
    cases=_CASES,
    workloads=WORKLOADS,
    kernels=KERNELS,
    tags=("S18", "inference", "moe"),
)
FUSIONS = (ROUTED_FFN,)
