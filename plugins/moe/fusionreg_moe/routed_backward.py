"""``moe.routed_ffn_backward``: the gradients of ``moe.routed_ffn``, from its inputs alone.

What is between the products is computed again, row by row of the experts that tokens have: nothing of tokens and all
experts is stored. Sums over tokens are made in their order, so that gradients are the same at every run.
"""

from __future__ import annotations

from fusionreg.core.spec import Case, FusionSpec, Tolerance

from .routed import ATTRIBUTES, AXES, FEW_AND_ALL, GATE, ROUTING
from .routed_backward_kernels import KERNELS
from .routed_workloads import GRADIENT_WORKLOADS

_GRADIENT = """
Swish=fusionreg.SwishGrad, Gelu=fusionreg.GeluGrad, gelu_tanh=fusionreg.GeluGrad(approximate="tanh"),
    relu2=fusionreg.SquaredReluGrad
""".strip()
_PATTERN = f"""
{ROUTING}
h = fusionreg.RoutedMatMul(Unsqueeze(x, (1,)), gate_up, ids, trans=1)
{GATE}
p = Mul(a, up)
q = fusionreg.RoutedMatMul(Unsqueeze(dy, (1,)), down, ids)
dweights = ReduceSum(Mul(Cast(q, to="float32"), Cast(p, to="float32")), (-1,), keepdims=0)
dlogits = fusionreg.RouteGrad(dweights, logits, ids, scoring=scoring, renormalise=renormalise, scale=scale)
dp = Cast(Mul(Cast(q, to="float32"), Unsqueeze(weights, (2,))), to=T)
weighed = Cast(Mul(Cast(p, to="float32"), Unsqueeze(weights, (2,))), to=T)
dgate = any_of("activation", {_GRADIENT})(Mul(dp, up), gate)
dh = Concat(dgate, Mul(dp, a), axis=-1)
dx = ReduceSum(fusionreg.RoutedMatMul(dh, gate_up, ids), (1,), keepdims=0)
dgate_up = fusionreg.RoutedOuter(dh, Unsqueeze(x, (1,)), ids, gate_up)
ddown = fusionreg.RoutedOuter(Unsqueeze(dy, (1,)), weighed, ids, down)
"""

_CASES = (
    *FEW_AND_ALL,
    Case(
        name="one_for_all",
        axes={"M": 150, "D": 64, "E": 6, "J": 48, "I": 24},
        attributes={"renormalise": 1},
        values={"logits": "zeros"},
        summary="ties: all tokens on the first two experts; the matrices of the others get zeros",
    ),
    Case(
        name="deepseek",
        axes={"M": 12, "D": 64, "E": 40, "J": 32, "I": 16},
        attributes={"top_k": 6, "scoring": "sigmoid", "renormalise": 1, "scale": 2.5},
        summary="sigmoids, chosen with a bias that has no gradient",
    ),
    Case(
        name="nan_elsewhere",
        axes={"M": 5, "D": 64, "E": 40, "J": 32, "I": 16},
        values={"gate_up": "nan", "down": "nan", "logits": "cancel"},
        summary="NaN in the matrices of experts",
    ),
    Case(
        name="long",
        axes={"M": 140, "D": 264, "E": 2, "J": 272, "I": 136},
        values={"gate_up": "small", "down": "small"},
        attributes={"activation": "gelu_tanh", "top_k": 1},
        summary="sums longer than a pipeline has stages, and tails of tiles",
    ),
)

ROUTED_FFN_BACKWARD = FusionSpec(
    api=1,
    name="moe.routed_ffn_backward",
    summary="gradients of the feed-forward layer of routed experts; what is between the products is computed again",
    pattern=_PATTERN.strip(),
    inputs={
        "dy": "T[M D]",
        "x": "T[M D]",
        "logits": "L[M E]",
        "gate_up": "T[E J D]",
        "down": "T[E D I]",
        "bias": "float32[E]",
    },
    outputs={"dx": "T[M D]", "dlogits": "L[M E]", "dgate_up": "T[E J D]", "ddown": "T[E D I]"},
    dtypes={"T": ("float16", "bfloat16", "float32"), "L": ("float32", "float16", "bfloat16")},
    axes=AXES,
    extents={"M": 8, "D": 32, "E": 4, "J": 48, "I": 24},
    attributes=ATTRIBUTES,
    autocast="lower",
    constraints=(
        "J == 2 * I",
        "L == T or L == 'float32'",
        "top_k >= 1 and top_k <= 32 and top_k <= E",
    ),
    cases=_CASES,
    tolerances=tuple(
        Tolerance(
            dtype=dtype,
            ulp=2.0,
            inputs=2.0,
            reason="the gradient of a logit is what is left of sums that cancel, and those of gates read rounded ones",
        )
        for dtype in ("float32", "float16", "bfloat16")
    ),
    workloads=GRADIENT_WORKLOADS,
    kernels=KERNELS,
    tags=("S18", "training", "moe"),
)
FUSIONS = (ROUTED_FFN_BACKWARD,)
