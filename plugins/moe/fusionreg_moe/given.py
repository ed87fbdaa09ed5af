"""``moe.expert_ffn``: the feed-forward layer of experts whose choice is given: indices and weights of whatever router.

What ``moe.routed_ffn`` computes behind its own. An index that no expert has gives nothing, and nothing is read for it.
"""

from __future__ import annotations

from fusionreg.core.spec import Backward, Case, FusionSpec, KernelSpec, Tolerance

from .routed import ROUTED_FFN, ROUTING
from .routed_backward import ROUTED_FFN_BACKWARD
from .routed_quantized import ROUTED_FFN_W4A16, ROUTED_FFN_W8A16

_INPUTS = {"ids": "N[M top_k]", "weights": "R[M top_k]"}
#: Extents of cases of weights that are not quantised.
_SMALL = {"D": 72, "E": 4, "J": 80, "I": 40}
#: What only routers have.
_OF_ROUTERS = ("top_k", "scoring", "renormalise", "scale")


def _kernel(kernel: KernelSpec) -> KernelSpec:
    """One of routed experts that reads their choice in place of the router's logits."""
    return kernel.model_copy(
        update={
            "constants": {**kernel.constants, "scoring": "0"},  # templates read: there is none
            "specialize": ("top_k",),
            "strides": tuple(name for name in kernel.strides if name != "logits"),
        }
    )


def _cases(axes: dict[str, int], values: dict[str, str]) -> tuple[Case, ...]:
    """``axes``: of a small layer; ``values``: of its weights."""
    return (
        Case(
            name="any_ids",
            axes={**axes, "M": 8, "top_k": 4},
            values={**values, "ids": "integers"},
            summary="ids from -4 to 4: some twice for a token, some that no expert has",
        ),
        Case(
            name="no_expert",
            axes={**axes, "M": 3, "top_k": 2},
            values={**values, "ids": "-1", "gate_up": "nan"} if not values else {**values, "ids": "-1"},
            summary="nothing is read",
        ),
        Case(
            name="one_for_all",
            axes={**axes, "M": 40, "top_k": 3},
            values={**values, "ids": "2"},
            attributes={"activation": "Gelu"},
            summary="a token names an expert again and again",
        ),
        Case(
            name="beyond",
            axes={**axes, "M": 4, "top_k": 1},
            values={**values, "ids": "9223372036854775807"},
            summary="ids far outside",
        ),
    )


#: For the kernel of one token.
_ONE_TOKEN = (
    Case(
        name="one_token",
        axes={**_SMALL, "M": 1, "top_k": 3},
        attributes={"activation": "Swish"},
        values={"ids": "integers"},
        summary="decoding",
    ),
)


def _given(spec: FusionSpec, words: str, small: dict[str, int]) -> FusionSpec:
    """The layer of ``spec`` behind its router, as ``moe.<words>``; ``small``: extents of cases."""
    first = spec.pattern if isinstance(spec.pattern, str) else spec.pattern[0]
    assert first.startswith(ROUTING)
    kept = {name: text for name, text in spec.inputs.items() if name not in ("x", "logits", "bias")}
    scaled = {name: "0.01" for name in kept if name.endswith("_scale")}
    values = {"gate_up": "bytes", "down": "bytes", **scaled} if scaled else {}
    return FusionSpec(
        api=1,
        name=f"moe.{words}",
        summary=spec.summary.replace("routed experts", "given experts").replace("moe.routed_ffn", "moe.expert_ffn")
        if scaled
        else "feed-forward layer of given experts: gated first products, second ones, sum by given weights",
        pattern=first.removeprefix(ROUTING).strip(),
        inputs={"x": spec.inputs["x"], **_INPUTS, **kept},
        outputs=spec.outputs,
        dtypes={
            **{n: kinds for n, kinds in spec.dtypes.items() if n != "L"},
            "R": ("float32",) if scaled else ("float32", "float16", "bfloat16"),
            "N": ("int64", "int32"),
        },
        axes={**spec.axes, "top_k": "experts of a token"},
        extents={**spec.extents, "top_k": 2},
        sizes=spec.sizes,
        attributes={name: a for name, a in spec.attributes.items() if name not in _OF_ROUTERS},
        autocast="lower",
        constraints=(
            *(c for c in spec.constraints if "top_k" not in c and not c.startswith("L ")),
            "top_k >= 1 and top_k <= 32",
            "R == T or R == 'float32'",
        ),
        cases=(*_cases(small, values), *(_ONE_TOKEN if not scaled else ())),
        tolerances=(
            Tolerance(
                dtype="float32",
                ulp=1.0,
                inputs=1.0,
                reason="weights of either sign leave small differences of large products",
            ),
        )
        if "float32" in spec.dtypes["T"]
        else (),
        kernels=tuple(_kernel(k) for k in spec.kernels),
        tags=spec.tags,
    )


_FFN = _given(ROUTED_FFN, "expert_ffn", _SMALL)


def _backward(spec: FusionSpec) -> FusionSpec:
    """The gradients of ``spec`` behind its router, those of the weights among them."""
    (pattern,) = spec.pattern
    assert pattern.startswith(ROUTING)
    routers = next(line for line in pattern.split("\n") if line.startswith("dlogits = "))
    pattern = pattern.removeprefix(ROUTING).replace(routers, "dweights = Cast(slopes, to=R)")
    pattern = pattern.replace("dweights = ReduceSum(", "slopes = ReduceSum(")
    pattern = pattern.replace("Unsqueeze(weights, (2,))", 'Cast(Unsqueeze(weights, (2,)), to="float32")')
    return FusionSpec(
        api=1,
        name="moe.expert_ffn_backward",
        summary="gradients of the feed-forward layer of given experts; what is between the products is computed again",
        pattern=pattern.strip(),
        inputs={"dy": spec.inputs["dy"], **_FFN.inputs},
        outputs={"dx": "T[M D]", "dweights": "R[M top_k]", "dgate_up": "T[E J D]", "ddown": "T[E D I]"},
        dtypes=_FFN.dtypes,
        axes=_FFN.axes,
        extents={**spec.extents, "top_k": 2},
        autocast="lower",
        constraints=_FFN.constraints,
        cases=_cases(_SMALL, {}),
        tolerances=tuple(
            # weights of either sign: float32 tells how much of large sums is left
            t.model_copy(update={"inputs": 8.0}) if t.dtype == "float32" else t
            for t in spec.tolerances
        ),
        kernels=tuple(_kernel(k) for k in spec.kernels),
        tags=spec.tags,
    )


FUSIONS = (
    _FFN.model_copy(update={"backward": Backward(fusion="moe.expert_ffn_backward")}),
    _backward(ROUTED_FFN_BACKWARD),
    _given(ROUTED_FFN_W8A16, "expert_ffn_w8a16", {"D": 80, "E": 4, "J": 160, "I": 80}),
    _given(ROUTED_FFN_W4A16, "expert_ffn_w4a16", {"D": 128, "C": 64, "G": 1, "E": 4, "J": 256, "B": 64, "H": 1}),
)
