"""Kernels that dispatch must not choose yet."""

from __future__ import annotations

from fusionreg.core.spec import FusionSpec, KernelSpec

REASON = "no GPU has run all its cases as it now is"

#: Fusion → kernels without evidence from a GPU.
UNPROVEN: dict[str, tuple[str, ...]] = {
    "norm.gelu_dropout_layernorm_unbiased": ("rows",),
    "norm.groupnorm_swish": ("stream",),
    "norm.groupnorm_swish_dropout": ("cluster", "stream"),
    "norm.dropout_residual_layernorm_backward": ("columns", "strided", "spread"),
    "norm.gelu_dropout_layernorm_backward": ("packed", "strided", "spread"),
    "norm.layernorm_backward": ("columns", "strided", "spread"),
    "norm.residual_rmsnorm_backward": ("columns", "strided", "spread"),
    "norm.rmsnorm_backward": ("columns", "strided", "spread"),
    "norm.groupnorm": (
        "plain", "strided", "cluster", "stream", "last_cluster", "last_stream", "last_tiles", "last_grid",
    ),
}

#: Fusion → kernels with evidence, but none with operators at their slots.
UNPROVEN_SLOTS: dict[str, tuple[str, ...]] = {
    "norm.batchnorm_relu": ("channels_last",),
    "norm.batchnorm_add_relu": ("channels_last",),
    "norm.batchnorm_relu_backward": ("channels_last",),
    "norm.batchnorm_add_relu_backward": ("channels_last",),
    "norm.dropout_residual_layernorm_backward": ("stream", "long"),
    "norm.gelu_dropout_layernorm_backward": ("stream", "long"),
    "norm.layernorm_backward": ("stream", "long"),
    "norm.residual_rmsnorm_backward": ("stream", "long"),
    "norm.rmsnorm_backward": ("stream", "long"),
    "norm.groupnorm_swish": ("cluster", "stream", "last_cluster", "last_stream", "last_tiles", "last_grid"),
    "norm.groupnorm_swish_dropout": ("cluster", "stream", "last_cluster", "last_stream", "last_tiles", "last_grid"),
}

#: The same of values that they store for others; of all fusions.
UNPROVEN_KEEPS = ("rows", "spread", "long")


def with_pending(spec: FusionSpec) -> FusionSpec:
    """The fusion with its unproven kernels marked."""
    marks = {
        "pending": UNPROVEN.get(spec.name, ()),
        "slots_pending": UNPROVEN_SLOTS.get(spec.name, ()),
        "keeps_pending": UNPROVEN_KEEPS,
    }

    def marked(kernel: KernelSpec) -> KernelSpec:
        return kernel.model_copy(update={mark: REASON for mark, names in marks.items() if kernel.name in names})

    return spec.model_copy(update={"kernels": tuple(map(marked, spec.kernels))})
