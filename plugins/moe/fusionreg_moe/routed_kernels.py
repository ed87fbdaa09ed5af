"""Kernels of ``moe.routed_ffn``: one launch each, routing and all on the device."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec

PLAIN = KernelSpec(
    name="plain",
    template="routed_plain.cu.j2",
    summary="a block for each token: any shape, alignment, strides and number of experts",
    rounding="per_op",
    requires=("E <= 2147483647 - 32",),
    strides=("x", "logits", "gate_up", "down"),
    constants={"THREADS": "256"},
    grid="M",
    block="THREADS",
    workspace="max(16, M * top_k * I * bits(T) // 8)",
    pending="not yet proven on a GPU",
    estimate="5e-6 + ceildiv(M, 4 * multiprocessors) * (2e-6 + top_k * I * D * 3 * bits(T) / 8 / 5e9)",
)

KERNELS = (PLAIN,)
