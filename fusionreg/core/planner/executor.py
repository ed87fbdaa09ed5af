"""Who runs what is not fused, and what that costs there: the other side of every saving. Floor 4.

What a fusion saves is what the rest's executor would have spent on its nodes. Torch has kernels of its own for whole
normalisations; Inductor generates one for a chain of point-wise operators and reductions: a fusion that is a large
gain beside our own evaluator may be none beside those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import UnknownNameError
from ..frozen import EMPTY, FrozenDict

#: Operators that move no data: they give the same elements another shape.
FREE = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Shape", "Size"})

#: Operators that our own executor runs as several library kernels, each over the whole tensor: how many, at least.
PASSES: Mapping[str, int] = FrozenDict(
    {"LayerNormalization": 8, "RMSNormalization": 6, "GroupNormalization": 8, "InstanceNormalization": 8}
    | {"BatchNormalization": 4, "Softmax": 5, "LogSoftmax": 5, "fusionreg::Dropout": 6, "fusionreg::SoftmaxGrad": 4}
    | {"fusionreg::LayerNormalizationGrad": 16, "fusionreg::RMSNormalizationGrad": 12}
    | {"fusionreg::CausalSoftmaxGrad": 3, "Attention": 9}
)

#: Matrix products and what else is a call into a library everywhere.
PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Attention", "MatMulInteger"})


@dataclass(frozen=True)
class Executor:
    """What an executor makes of the nodes that are left to it.

    Attributes:
        name: how options and plans call it.
        summary: what is modelled, in a sentence.
        free: operators that cost it nothing.
        passes: operators that are several kernels there, each over the whole tensor: how many.
        joins: (producer, consumer) of operators that one kernel of its library computes, pairs alone; an ``Add`` joins
            a matrix product only as a bias, a vector. A ``Conv`` takes all that may follow it.
        chains: whether it generates a kernel for a whole chain of point-wise operators and reductions.
        epilogues: whether it computes point-wise operators in the kernel of the product that they follow.
        slow: operators whose kernels take longer there than what they move and compute does: how many times as long, at
            least.
        persistent: elements of a row that a generated reduction keeps, in registers or by what the caches still have
            of it; of longer ones it reads its inputs a second time for what follows the reduction.
        largest: nodes that one generated kernel has at most.
        columns: competitors of ``fusionreg bench`` that stand for it, the best fitting first.
    """

    name: str
    summary: str = ""
    free: frozenset[str] = FREE
    passes: Mapping[str, int] = field(default=EMPTY, repr=False)
    joins: frozenset[tuple[str, str]] = frozenset()
    chains: bool = False
    epilogues: bool = False
    slow: Mapping[str, float] = field(default=EMPTY, repr=False)
    persistent: int = 16384
    largest: int = 64
    columns: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether every node is a kernel of its own, or several."""
        return not self.chains and not self.joins

    def __str__(self) -> str:
        return self.name


_BIAS = frozenset({("MatMul", "Add")})
#: As an H200 took them: layers of experts by torch's grouped products 1.5 to 3 times as long as their bytes or products
#: do, what Inductor generates for normalisations of groups 1.5 to 2 times, since a group is a block's there.
_EXPERTS = {"fusionreg::RoutedMatMul": 1.5}
_GROUPS = {"GroupNormalization": 1.6, "InstanceNormalization": 1.6, "fusionreg::GroupNormalizationGrad": 1.6}
#: Strides alone: generated code reads through them.
_STRIDED = FREE | {"Transpose", "Expand", "Slice", "Split"}

LIBRARY = Executor(
    "library",
    "our own evaluator: every operator by itself, with the functions of the arrays' library",
    passes=PASSES,
    columns=("eager",),
)
EAGER = Executor(
    "eager",
    "torch, operator by operator: one kernel each, a bias in its product, normalisations and softmax whole",
    free=FREE | {"Transpose", "Expand", "Slice", "Split"},
    passes=FrozenDict(
        {"GroupNormalization": 3, "InstanceNormalization": 3, "fusionreg::LayerNormalizationGrad": 2}
        | {"fusionreg::GroupNormalizationGrad": 4, "fusionreg::RMSNormalizationGrad": 4}
        | {"RMSNormalization": 4, "fusionreg::QuickGelu": 3}  # models spell them out, as does torch's own gradient
        | {"fusionreg::Dropout": 1}
    ),
    joins=_BIAS,
    slow=FrozenDict(_EXPERTS),
    columns=("eager",),
)
INDUCTOR = Executor(
    "inductor",
    "torch.compile: chains of point-wise operators and reductions are generated kernels, products are library calls",
    free=_STRIDED,
    passes=FrozenDict(
        dict.fromkeys(("fusionreg::LayerNormalizationGrad", "fusionreg::RMSNormalizationGrad"), 2)
        | {"fusionreg::GroupNormalizationGrad": 2, "fusionreg::BatchNormalizationGrad": 2}
    ),
    joins=_BIAS,
    chains=True,
    slow=FrozenDict(_EXPERTS | _GROUPS),
    columns=("compile",),
)
MAX_AUTOTUNE = Executor(
    "inductor-max-autotune",
    "torch.compile in a max-autotune mode: as inductor, with point-wise operators in the kernel of their product",
    free=_STRIDED,
    passes=INDUCTOR.passes,
    joins=_BIAS,
    chains=True,
    epilogues=True,
    slow=INDUCTOR.slow,
    columns=("compile",),
)
ONNXRUNTIME = Executor(
    "onnxruntime",
    "onnxruntime on CUDA: a kernel for each operator, and those few that its optimizer fuses",
    joins=_BIAS
    | {("Conv", "Add"), ("Conv", "Relu"), ("Add", "Gelu")}
    | {("Add", "LayerNormalization"), ("Add", "RMSNormalization")},
)

EXECUTORS: Mapping[str, Executor] = FrozenDict(
    {e.name: e for e in (LIBRARY, EAGER, INDUCTOR, MAX_AUTOTUNE, ONNXRUNTIME)}
)


def executor(name: str | Executor) -> Executor:
    """The executor of a name, or itself; :class:`UnknownNameError` for another name."""
    if isinstance(name, Executor):
        return name
    if name not in EXECUTORS:
        raise UnknownNameError.among("executor", name, EXECUTORS)
    return EXECUTORS[name]
