"""``moe.expert_gemv`` of weights of 8 and of 4 bits: ``moe.expert_gemv_w8a16`` and ``moe.expert_gemv_w4a16``.

Weights are stored as those of ``moe.routed_ffn_w8a16`` and ``_w4a16`` are, and mean the same.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec, Workload

from .gemv_kernels import WRAPPED

_OF_CHANNELS = 'Mul(Cast(w, to="float32"), w_scale)'
_OF_BLOCKS = "DequantizeLinear(fusionreg.UnpackInt4(w), w_scale, axis=2, block_size=block)"


def _kernels(bits: int) -> tuple[KernelSpec, ...]:
    """For weights of so many bits."""
    stored = {
        "BITS": str(bits),
        "BLOCK": "block" if bits == 4 else "0",
        "WHOLE": "form(w_scale)" if bits == 8 else "0",
        **WRAPPED,
    }
    decode = KernelSpec(
        name="decode",
        template="gemv_narrow.cu.j2",
        summary="a block for 16 channels of an expert: weights stream past once for 8 rows, into mma.sync",
        requires=(
            f"E > 0 and M <= 65536 and K > 0 and K <= 2147483647 - 65536 and K % {128 // bits} == 0",
            *(("block % 128 == 0",) if bits == 4 else ()),
            "aligned(x, 16) and aligned(w, 16)",
        ),
        constants={"THREADS": "256", "AHEAD": "4", **stored},
        grid="min(M, E) * ceildiv(N, 16)",
        block="THREADS",
        min_blocks=2,
        estimate=f"4e-6 + min(M, E) * N * K * {bits / 8:g} * max(1, M / (8 * E)) / 3.3e12"
        " + ceildiv(min(M, E) * ceildiv(N, 16), 2 * multiprocessors) * 1e-6",
    )
    plain = KernelSpec(
        name="plain",
        template="gemv_narrow_plain.cu.j2",
        summary="a warp for a channel of a row: any shape and alignment",
        strides=("x",),
        constants={"THREADS": "256", **stored},
        grid="M * ceildiv(N, 8)",
        block="THREADS",
        estimate="5e-6 + M * N * K / 3e11",
    )
    return decode, plain


def _cases(axes: dict[str, int]) -> tuple[Case, ...]:
    """``axes``: all but rows and experts."""
    every = {"w": "bytes", "w_scale": "0.01"}
    return (
        Case(
            name="mixed",
            axes={**axes, "M": 30, "E": 3},
            values={**every, "ids": "integers"},
            summary="ids from -4 to 4 of three experts, more rows than are multiplied at a time",
        ),
        Case(
            name="wrapped",
            axes={**axes, "M": 20, "E": 4},
            values={**every, "ids": "integers"},
            attributes={"indices": "FromEnd"},
            summary="ids below 0 count from the end",
        ),
        Case(
            name="many_experts",
            axes={**axes, "M": 6, "E": 40},
            values={**every, "ids": "integers"},
            summary="more experts than rows, some of which share one",
        ),
        Case(
            name="beyond",
            axes={**axes, "M": 5, "E": 2},
            values={**every, "ids": "9223372036854775807", "w_scale": "nan"},
            summary="ids far outside read nothing",
        ),
        Case(
            name="infinite_scale",
            axes={**axes, "M": 4, "E": 3},
            values={**every, "w_scale": "inf", "x": "integers", "ids": "ones"},
            summary="a scale stands in front of the sum, where 0 times infinity is NaN",
        ),
    )


def _workloads(bits: int) -> tuple[Workload, ...]:
    return tuple(
        Workload(
            name=f"{rows}x{n}x{k}-e{experts}",
            row="S18 more",
            mode="g",
            axes={"M": rows, "N": n, "E": experts} | ({"K": k} if bits == 8 else {"K": k, "C": k // 2, "G": k // 128}),
            dtypes={"T": "bfloat16", "I": "int64"} | ({"W": "float8_e4m3fn"} if bits == 8 else {}),
            attributes={"indices": "none"},
            values={"ids": "below E"},
            summary="a projection of routed experts, decoding",
        )
        for rows, n, k, experts in ((2, 14336, 4096, 8), (8, 1536, 2048, 128))
    )


def _fusion(bits: int) -> FusionSpec:
    weights = _OF_CHANNELS if bits == 8 else _OF_BLOCKS
    sizes = {"N": 40, "K": 96} if bits == 8 else {"N": 40, "K": 256, "C": 128, "G": 2}
    return FusionSpec(
        api=1,
        name=f"moe.expert_gemv_w{bits}a16",
        summary="moe.expert_gemv of weights of "
        + ("8 bits: int8 or e4m3, a scale for each channel or expert" if bits == 8 else "4 bits, a scale for a block"),
        pattern=(
            'at = optional(fusionreg.FromEnd, "indices")(ids, w)\n'
            f'y = Cast(fusionreg.RoutedMatMul(Cast(x, to="float32"), {weights}, at, trans=1), to=T)'
        ),
        inputs={
            "x": "T[M K]",
            "w": "W[E N K]" if bits == 8 else "uint8[E N C]",
            "w_scale": "float32[E N 1] | float32[E 1 1]" if bits == 8 else "float32[E N G]",
            "ids": "I[M]",
        },
        outputs={"y": "T[M N]"},
        dtypes={"T": ("float16", "bfloat16"), "I": ("int64", "int32")}
        | ({"W": ("int8", "float8_e4m3fn")} if bits == 8 else {}),
        axes={"M": "rows, a token for each", "N": "output channels", "K": "summed over", "E": "experts"}
        | ({} if bits == 8 else {"C": "bytes of a row", "G": "blocks of it"}),
        extents={"M": 8, "E": 3, **sizes},
        sizes={"w_scale": 0.01},
        attributes={}
        if bits == 8
        else {"block": AttributeSpec(type="int", default=128, static=True, summary="weights of a row with one scale")},
        autocast="lower",
        constraints=() if bits == 8 else ("2 * C == K", "block >= 16 and G * block == K"),
        cases=_cases(sizes),
        workloads=_workloads(bits),
        kernels=_kernels(bits),
        tags=("S18", "inference", "moe", "quantization"),
    )


FUSIONS = (_fusion(8), _fusion(4))
