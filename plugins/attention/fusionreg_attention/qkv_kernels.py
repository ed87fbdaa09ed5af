"""Kernels of the fusions in ``qkv``."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fusionreg.core.spec import KernelSpec, TensorMap


class Kind(NamedTuple):
    """What a fusion has between x and the heads of attention.

    Attributes:
        packed: one weight for q, k and v, whose columns follow each other in that order; else one each.
        groups: k and v may have fewer heads than q.
        norms: whether heads of q and k are RMS normalised.
        rotary: a rotary embedding of q and k.
        wide: scales of norms are float32, whatever the heads are.
    """

    packed: bool = False
    groups: bool = True
    norms: Literal["never", "maybe", "always"] = "never"
    rotary: bool = False
    wide: bool = False

    @property
    def normed(self) -> str:
        """Whether a problem has norms, as expressions say it."""
        return {"never": "0", "maybe": "1 if present(gq) else 0", "always": "1"}[self.norms]

    @property
    def width(self) -> str:
        """Of a head."""
        if not self.packed:
            return "N // H"
        return "N // (H + 2 * G)" if self.groups else "N // (3 * H)"

    @property
    def merged(self) -> str:
        """Columns of all heads of q."""
        if not self.packed:
            return "N"
        return f"{self.width} * H" if self.groups else "N // 3"


def _constants(kind: Kind) -> dict[str, str]:
    return {
        "PACKED": str(int(kind.packed)),
        **({"GROUPED": "1"} if kind.packed and kind.groups else {}),
        **({"WIDE_SCALES": "1"} if kind.wide else {}),
        "ROTARY": str(int(kind.rotary)),
        "NORMED": kind.normed,
        "BATCHED": "1 if rank(cos) == 4 and form(cos) == 1 else 0" if kind.rotary else "0",
        **{f"BIAS_{n.upper()}": f"1 if present({'b' if kind.packed else f'b{n}'}) else 0" for n in "qkv"},
    }


def _fused(kind: Kind) -> KernelSpec:
    packed, width = kind.packed, kind.width
    columns = "N" if packed else "(N + 2 * J)"
    tiles = "ceildiv(N, 64)" if packed else "ceildiv(N, 64) + 2 * ceildiv(J, 64)"
    return KernelSpec(
        name="fused",
        template="qkv_fused.cu.j2",
        summary="one cooperative launch: projections into the workspace, a barrier over the grid, then attention",
        targets=("sm_90a", "sm_100f"),
        rounding="per_op",
        requires=(
            'T in ("float16", "bfloat16")',
            f"{width} in (16, 32, 64, 128)",
            *(() if packed else ("J == U", "aligned(wq, 16) and aligned(wk, 16) and aligned(wv, 16)")),
            *(("aligned(w, 16)",) if packed else ()),
            "C % 8 == 0 and aligned(x, 16) and N % 8 == 0",
            f"B * S * {columns} < 2147483648",
        ),
        strides=("mask",),
        params={"D": (64, 128, 32, 16)},
        valid=(f"D == {width}",),
        constants={
            "MASK_FORM": "form(mask)",
            **_constants(kind),
        },
        grid=f"max(1, min(2 * multiprocessors, max(ceildiv(B * S, 64) * ({tiles}), B * H * ceildiv(S, 64))))",
        block="128",
        cooperative=True,
        min_blocks=2,
        shared_memory="max(40960, 640 * (D + 8))",
        workspace=f"max(B * S, 1) * {columns} * 2",
        estimate=f"1.1e-5 + ceildiv(ceildiv(B * S, 64) * ({tiles}), 2 * multiprocessors) * ceildiv(C, 64) * 1.1e-6"
        f" + B * S * S * {kind.merged} * 4 / 1.5e14",
    )


def _wgmma(kind: Kind, masked: bool) -> KernelSpec:
    packed, rotary, width = kind.packed, kind.rotary, kind.width
    columns = "N" if packed else "(N + 2 * J)"
    weights = {"w": "N"} if packed else {"wq": "N", "wk": "J", "wv": "U"}
    whole = " and present(gq)" if kind.norms == "maybe" else ""
    box = "32 if D == 128 else 64" if rotary else "64"  # columns of weights that a copy brings
    parts = "B * ceildiv(S, BK) * (BK // 64)"
    tiles = f"ceildiv({parts}, CONSUMERS) * ceildiv({columns}, 64 * PIECES)"
    return KernelSpec(
        name="wgmma_masked" if masked else "wgmma",
        template="qkv_wgmma.cu.j2",
        summary="the same beside a mask, with two warpgroups"
        if masked
        else "wgmma fed by TMA, one cooperative launch: what the projections write is what attention's copies read",
        targets="sm_90a",
        rounding="per_op",
        requires=(
            'T in ("float16", "bfloat16")',
            "present(mask)" if masked else "not present(mask)",
            f"{width} in (64, 128)",
            *(() if packed else ("J == U",)),
            *(("aligned(cos, 4) and aligned(sin, 4)",) if rotary else ()),
            f"B * (S + 127) * {columns} < 17179869184 and B * H * S < 1073741824",
        ),
        strides=("mask",) if masked else (),
        params={"D": (128, 64)},
        valid=(f"D == {width}",),
        constants={
            **({"MASK_FORM": "form(mask)"} if masked else {}),
            "CONSUMERS": "2" if masked else "3",
            # columns of a tile of the projection, by 64: whole heads, where these are normalised
            "PIECES": "3" if kind.norms == "never" else f"2 if D == 128{whole} else 3",
            "STAGES": "4",
            "BK": "64 if D == 128 else 128",
            "ROOM": "max((STAGES * (CONSUMERS + PIECES) + CONSUMERS) * 8192, (256 * CONSUMERS + 8 * BK) * D)",
            **_constants(kind),
        },
        tensor_maps=(
            TensorMap(name="x_map", operand="x", box=("64", "64", "1"), swizzle="128", l2_promotion=256),
            *(
                TensorMap(
                    name=f"{name}_map", operand=name, dims=("C if transB else " + n, n + " if transB else C"),
                    box=(f"64 if transB else ({box})", f"({box}) if transB else 64"),
                    swizzle=f"128 if transB else 2 * ({box})", l2_promotion=256,
                )
                for name, n in weights.items()
            ),
            TensorMap(name="y_map", operand="y", box=("64", "64", "1"), swizzle="128"),
        ),
        grid=f"max(1, min(multiprocessors, max({tiles}, B * H * ceildiv(S, 64 * CONSUMERS))))",
        block="128 * (CONSUMERS + 1)",
        cooperative=True,
        min_blocks=1,
        shared_memory="ROOM + (2 * STAGES + 10) * 8",
        workspace=f"max(1, {parts}) * {columns} * 128",
        estimate="1.2e-5 + ceildiv(C, 64) * 8e-7"
        f" * ceildiv(ceildiv(B * S, {128 if masked else 192}) * ceildiv({columns}, 192), multiprocessors)"
        f" + B * S * S * {kind.merged} * 4 / {'3e14' if masked else '6.5e14'}"
        " * (0.6 if is_causal else 1)",
    )  # fmt: skip


def kernels(kind: Kind, pending: tuple[str, ...] = ()) -> tuple[KernelSpec, ...]:
    """All of them; ``pending``: names of those that no GPU has run yet, which dispatch does not choose on one."""
    return tuple(
        k.model_copy(update={"pending": "no GPU has run all its cases yet"}) if k.name in pending else k
        for k in (_wgmma(kind, False), _wgmma(kind, True), _fused(kind))
    )
