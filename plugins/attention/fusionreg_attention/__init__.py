"""The family ``attention``: softmax over masked scores, and attention without scores in memory.

``softmax`` has fusions of scores that are in memory: scale, mask, causal, softmax, and their gradients; ``sdpa`` has
attention as one operator, for which ``decode`` has kernels for few queries; ``rope`` rotates q and k by position and
puts new keys into a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.registry.library_calls import LibraryCall
from fusionreg.core.spec import FusionSpec, KernelSpec, OpSpec
from fusionreg.hookspecs import hookimpl

from . import (
    cudnn_attention,
    cudnn_gradient,
    cudnn_kernels,
    decode,
    log_softmax,
    qkv,
    rope,
    rope_alone,
    rope_ops,
    sdpa,
    softmax,
)


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    return (*softmax.FUSIONS, *log_softmax.FUSIONS, *sdpa.FUSIONS, *rope.FUSIONS, *rope_alone.FUSIONS, *qkv.FUSIONS)


@hookimpl
def register_kernels() -> Sequence[KernelSpec]:
    return (*cudnn_kernels.KERNELS, *decode.KERNELS)


@hookimpl
def register_ops() -> Sequence[OpSpec]:
    return rope_ops.OPS


@hookimpl
def register_library_calls() -> Sequence[LibraryCall]:
    return [cudnn_attention.CudnnAttention(), cudnn_gradient.CudnnAttentionGrad()]
