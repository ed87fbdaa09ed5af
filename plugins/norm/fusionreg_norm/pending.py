"""Kernels that dispatch must not choose yet."""

from __future__ import annotations

from fusionreg.core.spec import FusionSpec

REASON = "no GPU has run all its cases as it now is"

#: Fusion → kernels without evidence from a GPU.
UNPROVEN: dict[str, tuple[str, ...]] = {
    "norm.gelu_dropout_layernorm_unbiased": ("rows",),
    "norm.groupnorm_swish_dropout": ("cluster",),
    "norm.dropout_residual_layernorm_backward": ("columns",),
    "norm.gelu_dropout_layernorm_backward": ("columns",),
    "norm.layernorm_backward": ("columns",),
    "norm.residual_rmsnorm_backward": ("columns",),
    "norm.rmsnorm_backward": ("columns",),
}


def with_pending(spec: FusionSpec) -> FusionSpec:
    """The fusion with its unproven kernels marked."""
    unproven = UNPROVEN.get(spec.name, ())
    kernels = tuple(k.model_copy(update={"pending": REASON}) if k.name in unproven else k for k in spec.kernels)
    return spec.model_copy(update={"kernels": kernels})
