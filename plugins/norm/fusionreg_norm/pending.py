"""Kernels that dispatch must not choose yet."""

from __future__ import annotations

from fusionreg.core.spec import FusionSpec

REASON = "no GPU has run all its cases as it now is"

#: Fusion → kernels without evidence from a GPU.
UNPROVEN = {
    "norm.dropout_residual_layernorm_unbiased": ("stream", "rows", "strided", "spread", "long"),
    "norm.gelu_dropout_layernorm_unbiased": ("stream", "rows", "strided", "spread", "long"),
    "norm.layernorm_unbiased": ("stream", "rows", "strided", "spread", "long"),
    "norm.dropout_residual_layernorm": ("rows", "strided", "spread"),
    "norm.gelu_dropout_layernorm": ("rows", "strided", "spread"),
    "norm.residual_rmsnorm": ("rows", "strided", "spread"),
    "norm.rmsnorm": ("rows", "strided", "spread"),
    "norm.layernorm": ("rows", "strided", "spread"),
    "norm.batchnorm_relu_backward": ("planes",),
    "norm.groupnorm_swish": (
        "plain", "strided", "cluster", "stream", "twice", "last_tiles", "last_grid", "last_cluster", "last_stream",
    ),
    "norm.groupnorm_swish_backward": ("cluster", "last", "team"),
    "norm.groupnorm_swish_dropout": (
        "plain", "strided", "cluster", "stream", "twice", "last_tiles", "last_grid", "last_cluster", "last_stream",
    ),
    "norm.groupnorm_swish_dropout_backward": ("cluster", "last", "team"),
    "norm.dropout_residual_layernorm_backward": ("columns", "rows"),
    "norm.gelu_dropout_layernorm_backward": ("columns", "rows"),
    "norm.layernorm_backward": ("columns", "rows", "stream"),
    "norm.residual_rmsnorm_backward": ("columns", "rows", "stream"),
    "norm.rmsnorm_backward": ("columns", "rows", "stream"),
    "norm.swish_dropout": ("elements",),
}


def with_pending(spec: FusionSpec) -> FusionSpec:
    """The fusion with its unproven kernels marked."""
    unproven = UNPROVEN.get(spec.name, ())
    kernels = tuple(k.model_copy(update={"pending": REASON}) if k.name in unproven else k for k in spec.kernels)
    return spec.model_copy(update={"kernels": kernels})
