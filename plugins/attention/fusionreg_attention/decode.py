"""Kernels of ``attention.sdpa`` and its relatives for decoding: few queries, many keys."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec

#: What names of fusions end in.
_WORDS = {"": "", "mask": "_masked", "lengths": "_lengths", "paged": "_paged"}
#: Bytes of a warp's stage, 16 keys of k and v with padding.
_STAGE = "32 * (D + E + 16)"
#: Stages of a warp: as many as let a block fill a multiprocessor's shared memory.
_STAGES = f"max(2, min(8, 26112 // ({_STAGE})))"
#: Tiles of up to 16 rows, each a query of one of the heads that share a head of k and v.
_TILES = "B * G * ceildiv(Q * (H // G), 16)"


def _blocks(keys: str) -> str:
    """Those that are resident together, with at least a unit of 16 keys for each warp."""
    return f"max(1, min(multiprocessors, ceildiv({_TILES} * max(1, ceildiv({keys}, 16)), WARPS)))"


#: How many tiles each block has, where all have as many, and as many blocks nearly as there may be.
_ROUNDS = f"ceildiv({_TILES}, {_blocks('K')})"
_EVEN = f"{_TILES} > 0 and {_TILES} % {_ROUNDS} == 0 and {_TILES} // {_ROUNDS} * 17 >= {_blocks('K')} * 16"


def kernel(beside: str, whole: bool = False) -> KernelSpec:
    """For the fusion with a mask, with lengths, with pages, or with none of them (a key of :data:`_WORDS`); ``whole``:
    where no tile is shared by blocks."""
    masked, lengths = beside == "mask", beside in ("lengths", "paged")
    keys, blocks = "M * W" if beside == "paged" else "K", _blocks("M * W" if beside == "paged" else "K")
    rows = ("q", "k", "v", "y")
    return KernelSpec(
        name="decode_whole" if whole else "decode",
        fusion=f"attention.sdpa{_WORDS[beside]}",
        template="decode.cu.j2",
        summary="decode where blocks have whole tiles: no barrier, an ordinary launch"
        if whole
        else "for few queries: heads that share k and v in one tile, keys in equal parts to all blocks (split-KV)",
        targets=("sm_90a", "sm_100f"),
        requires=(
            'T in ("float16", "bfloat16")',
            "D % 16 == 0 and D <= 256 and E % 16 == 0 and E <= 256 and E > 0",
            "Q * (H // G) <= 512",
            *(f"aligned({n}, 16) and stride({n}, 3) == 1 and stride({n}, 2) % 8 == 0" for n in rows),
            *(f"stride({n}, 0) % 8 == 0 and stride({n}, 1) % 8 == 0" for n in rows),
            f"{keys} < 1000000000 and {_TILES} * ceildiv({keys}, 16) < 1000000000",
            *(("W % 16 == 0",) if beside == "paged" else ()),
        ),
        strides=("q", "k", "v", *(("mask",) if masked else ()), "y"),
        specialize=("D", "E"),
        params={"WARPS": (8, 4), "CAPPED": (0, 1)},  # whether there is a softcap
        valid=(
            "(CAPPED == 1) == (softcap > 0)", "WARPS == (8 if D + E <= 384 else 4)", *((_EVEN,) if whole else ()),
        ),
        constants={
            "MASK_FORM": "form(mask)" if masked else "-1", "STAGES": _STAGES,
            **({"WHOLE": "1", "AROUND": "128"} if whole else {}),
            **({"LENGTHS": "1"} if lengths else {}),
            **({"PAGED": "1"} if beside == "paged" else {}),
        },
        grid=f"max(1, {_TILES} // max(1, {_ROUNDS}))" if whole else blocks,
        block="32 * WARPS",
        min_blocks=1,
        shared_memory=f"WARPS * {_STAGES} * {_STAGE} + (16 * (D + 8) * 2 if D > 128 else 0)",
        workspace="0" if whole else f"{blocks} * 2 * min(16, max(1, Q * (H // G))) * (E + 4) * 4",
        cooperative=not whole,
        estimate=("5e-6 + " if whole else "6e-6 + ") + _TILES + f" * {keys} * (D + E) * 2 / 3.9e12",
    )  # fmt: skip


KERNELS: tuple[KernelSpec, ...] = (
    *(kernel(beside, whole) for whole in (False, True) for beside in ("", "mask")),
    *(kernel(beside) for beside in ("lengths", "paged")),
)
