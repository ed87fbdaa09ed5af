"""The family ``attention``: softmax over masked scores, and attention without scores in memory.

``softmax`` has fusions of scores that are in memory: scale, mask, causal, softmax, and their gradients, and
``cross_entropy`` of softmax and a loss; ``sdpa`` has attention as one operator, for which ``decode`` has kernels for
few queries, and ``sdpa_sequences`` that of sequences one behind the other, or with keys in pages; ``rope`` rotates q
and k by position and puts new keys into a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.registry.library_calls import LibraryCall
from fusionreg.core.spec import FusionSpec, KernelSpec, OpSpec
from fusionreg.hookspecs import hookimpl

from . import (
    cross_entropy,
    cudnn_attention,
    cudnn_kernels,
    decode,
    log_softmax,
    pages_ops,
    qkv,
    rope,
    rope_alone,
    rope_ops,
    sdpa,
    sdpa_sequences,
    softmax,
)


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    families = (softmax, log_softmax, cross_entropy, sdpa, sdpa_sequences, rope, rope_alone, qkv)
    return tuple(fusion for family in families for fusion in family.FUSIONS)


@hookimpl
def register_kernels() -> Sequence[KernelSpec]:
    return (*cudnn_kernels.KERNELS, *decode.KERNELS)


@hookimpl
def register_ops() -> Sequence[OpSpec]:
    return (*rope_ops.OPS, *pages_ops.OPS)


@hookimpl
def register_library_calls() -> Sequence[LibraryCall]:
    return [cudnn_attention.CudnnAttention()]
