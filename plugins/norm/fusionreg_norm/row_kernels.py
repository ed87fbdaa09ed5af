"""The kernels of row fusions: rows held by warps and blocks, rows of any length, and blocks that take row after row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.frozen import EMPTY
from fusionreg.core.spec import KernelSpec

#: Rows that a block of about THREADS threads works on; each that is spread over several warps needs a barrier, and a
#: block has 15 beside its own.
GROUPS = "max(1, min(THREADS // LANES, 15 if LANES > 32 else 32))"

#: Longest row that a block keeps in registers.
LONGEST = 32768

#: Rows at most of a kernel whose blocks all know all rows.
MOST_ROWS = 128

#: What a fusion does before it normalises; templates read all of these. MEAN: 1 where the mean is removed and a bias
#: added, 2 where the mean is removed alone. DROPOUT: 2 where random words are compared as numbers.
_PARTS = ("MEAN", "GELU", "TANH", "DROPOUT", "RESIDUAL", "H_OUT")


def _constants(parts: Mapping[str, str]) -> dict[str, str]:
    return {name: parts.get(name, "0") for name in _PARTS}


def _whole(tensors: tuple[str, ...]) -> str:
    """Whether 16-byte accesses reach every row of every tensor."""
    return f"VEC == 1 or VEC * bits(T) == 128 and N % VEC == 0 and {' and '.join(f'aligned({t}, 16)' for t in tensors)}"


def _runs(tensors: tuple[str, ...]) -> str:
    """Whether rows of every tensor are whole runs of 16 bytes."""
    return f"N % 8 == 0 and {' and '.join(f'aligned({t}, 16)' for t in tensors)}"


#: Of kernels whose threads keep their columns: lanes of a row, and which of them fit it.
_COLUMN_LANES = (32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
_COLUMN_VALID = (
    "(N == LANES * ITEMS * 8) if EXACT else (N < LANES * ITEMS * 8)",
    "LANES == 32 or N > (LANES - 32) * ITEMS * 8 or 3 * N > 2 * LANES * ITEMS * 8",
    "N > LANES * (ITEMS - 1) * 8",
)


def _joint(sums: int) -> str:
    """Bytes for ``sums`` sums of each row of a group at once, and for what their rows arrive on."""
    each = "48 + ROWS * 16 * max(2, LANES // 32) + LANES // 2 + 16"
    return f"align(GROUPS * ({each} + align(LANES // 32 * ROWS * {sums * 8}, 16)), 128)"


def forward(parts: Mapping[str, str], tensors: tuple[str, ...], rows: int) -> tuple[KernelSpec, ...]:
    """``rows``: tensors of the row's size that move."""
    seconds = f"{rows} * M * N * bits(T) / 8"
    held, streams = 2 if "bias" in tensors else 1, 2 if "RESIDUAL" in parts else 1

    parts_of = "M * max(1, min(multiprocessors // M, ceildiv(N, 2048)))"

    def held_rows(name: str, regions: tuple[str, ...], summary: str, strided: tuple[str, ...] = ()) -> KernelSpec:
        apart = "".join(f" and stride({t}, 0) % VEC == 0" for t in strided)
        return KernelSpec(
            name=name,
            template="row_forward.cu.j2",
            programmatic=True,
            regions=regions,
            keeps=tuple(n for n in regions if n == "x"),
            strides=strided,
            summary=summary,
            requires=(f"N <= {LONGEST}", *(f"N == 1 or stride({t}, 1) == 1" for t in strided)),
            params={"VEC": (8, 4, 1), "LANES": (8, 16, 32, 128, 256, 512, 1024), "VALUES": (8, 16, 24, 32)},
            valid=(
                f"{_whole(tensors)}{apart}",
                "N <= LANES * VALUES",
                "VALUES >= 8 and LANES <= 32 or VALUES >= (16 if LANES == 128 else 24)",
                "LANES >= 32 or VALUES == 8",
                "LANES == 8 or (3 if LANES > 32 else 2) * N > LANES * VALUES",
            ),
            constants={**_constants(parts), "THREADS": "max(LANES, 128)", "STRIDED": "1" if strided else "0"},
            grid="ceildiv(M * LANES, THREADS)",
            block="THREADS",
            estimate=f"3e-6 + {'1.4' if 'GELU' in parts else '1'} * {seconds} / (4e12 if VEC > 1 else 1.5e12)",
        )

    return (
        KernelSpec(
            name="stream",
            template="row_stream.cu.j2",
            programmatic=True,
            regions=("y",),
            summary="blocks that stay, row after row, the next one under way while one is computed",
            requires=(_runs(tensors), f"N <= {28672 // held}", f"M * N < {2**35}"),
            params={
                "EXACT": (1, 0),
                "ITEMS": (4, 3, 2, 1),
                "LANES": (32, 64, 96, 128, 160, 192, 256, 320, 384, 512),
                "THREADS": (512, 256) if "RESIDUAL" in parts else (896, 768, 384) if "GELU" in parts else (768, 384),
                "DEPTH": (0, 1),
                **({"DROPOUT": (2, 1)} if "DROPOUT" in parts else {}),
            },
            valid=(
                *(("DROPOUT == (2 if has(cluster) and p <= 0.498 else 1)",) if "DROPOUT" in parts else ()),
                "(N == LANES * ITEMS * 8) if EXACT else (N < LANES * ITEMS * 8)",
                "ITEMS == 4 or LANES == 32",
                "THREADS <= (896 if bits(T) == 16 else 768)",  # registers
                "DEPTH == (1 if LANES > 256 else 0)",  # few rows at once: registers for those, not for what comes next
                "LANES == 32 or 3 * N > 2 * LANES * ITEMS * 8",
                "N > LANES * (ITEMS - 1) * 8",
            ),
            constants={**{k: v for k, v in _constants(parts).items() if v == "0" or k != "DROPOUT"}, "GROUPS": GROUPS},
            grid="min(M, multiprocessors)",
            block="LANES * GROUPS",
            shared_memory=f"LANES * ITEMS * {32 * held} + GROUPS * LANES // 2"
            f" + {streams} * DEPTH * LANES * GROUPS * ITEMS * bits(T)",
            estimate=f"4e-6 + {seconds} / {4.2e12 if held == 2 else 3.9e12}",
        ),
        held_rows(
            name="rows",
            regions=("x", "y"),
            summary="the row in registers, read once; lanes of a warp, a warp or a block to a row",
        ),
        held_rows(
            name="strided",
            regions=("y",),
            summary="the same for rows that lie further apart than they are long",
            strided=tuple(t for t in ("x", "residual") if t in tensors),
        ),
        KernelSpec(
            name="spread",
            template="row_spread.cu.j2",
            regions=("x", "y"),
            keeps=("x",),
            summary="few rows of any length, each spread over several blocks",
            requires=("M >= 1 and 2 * M <= multiprocessors",),
            params={"VEC": (8, 4, 1), "THREADS": (512,)},
            valid=(_whole(tensors),),
            constants=_constants(parts),
            grid=parts_of,
            block="THREADS",
            cooperative=True,
            min_blocks=1,
            workspace=f"{parts_of} * 16",
            estimate=f"8e-6 + 2 * {seconds} / (4e12 if VEC > 1 else 1e12)",
        ),
        KernelSpec(
            name="long",
            template="row_long.cu.j2",
            regions=("x", "y"),
            keeps=("x",),
            summary="a row of any length to a block, read three times",
            params={"VEC": (8, 4, 1), "THREADS": (256, 512)},
            valid=(_whole(tensors),),
            constants=_constants(parts),
            grid="M",
            block="THREADS",
            estimate=f"4e-6 + 2 * {seconds} / min(4e12 if VEC > 1 else 1e12, (4e10 if VEC > 1 else 1e10) * max(M, 1))",
        ),
    )


def _packed(parts: Mapping[str, str], tensors: tuple[str, ...], seconds: str) -> KernelSpec:
    return KernelSpec(
        name="packed",
        template="row_backward_packed.cu.j2",
        regions=("dx",),
        summary="as columns, two elements to a word; GELU from a table, sums of a row by the tensor cores",
        targets=("sm_90+",),
        requires=("T == 'bfloat16'", _runs(tensors), "N <= 12288", f"M * N < {2**35}", "p <= 0.498 or p == 0.5"),
        params={
            "EXACT": (1, 0),
            "ITEMS": (1, 2, 3),
            "ROWS": (4, 2, 1),
            "LANES": _COLUMN_LANES,
            "THREADS": (512,),
            "HALF": (0, 1),
        },
        valid=(
            *_COLUMN_VALID,
            "ITEMS == (1 if N <= 2048 else 2 if N <= 8192 else 3)",
            "ROWS == 4 // ITEMS",  # registers: more rows, or more columns
            "HALF == (1 if p == 0.5 else 0)",
        ),
        constants={**_constants(parts), "GROUPS": GROUPS},
        grid="max(1, min(ceildiv(M, ROWS), multiprocessors))",
        block="LANES * GROUPS",
        shared_memory="49152 + (LANES * ITEMS * 16 if ITEMS > 1 else 0) + 4 * ROWS * GROUPS * LANES * ITEMS * 16",
        cooperative=True,
        workspace="max(1, min(ceildiv(M, ROWS), multiprocessors)) * 2 * max(N, 1) * 4",
        min_blocks=1,
        estimate=f"5e-6 + {seconds} / 4.6e12",
    )


def _columns(parts: Mapping[str, str], tensors: tuple[str, ...], seconds: str) -> KernelSpec:
    columns, at_once = (2, 2) if "MEAN" in parts else (1, 4)
    streams = 3 if "RESIDUAL" in parts or "H_OUT" in parts else 2
    return KernelSpec(
        name="columns",
        template="row_backward_columns.cu.j2",
        regions=("dx",),
        summary="threads keep their columns; rows arrive by bulk copies, several are reduced together",
        targets=("sm_90+",),
        requires=("bits(T) == 16", _runs(tensors), "N <= 12288", f"M * N < {2**35}"),
        params={
            "EXACT": (1, 0),
            "ROWS": (at_once, 1),
            "ITEMS": (1, 2, 3),
            "LANES": _COLUMN_LANES,
            "THREADS": (512,),
        },
        valid=(
            *_COLUMN_VALID,
            "ITEMS == max(1, ceildiv(N, 4096))",
            f"ROWS == ({at_once} if ITEMS == 1 else 1)",  # registers: more rows, or more columns
        ),
        constants={**_constants(parts), "GROUPS": GROUPS},
        grid="max(1, min(ceildiv(M, ROWS), multiprocessors))",
        block="LANES * GROUPS",
        shared_memory=f"{_joint(2 * columns)} + (LANES * ITEMS * 32 if ITEMS > 1 else 0)"
        f" + {streams * 2} * ROWS * GROUPS * LANES * ITEMS * 16",
        cooperative=True,
        workspace=f"max(1, min(ceildiv(M, ROWS), multiprocessors)) * {columns} * max(N, 1) * 4",
        min_blocks=1,
        estimate=f"5e-6 + {seconds} / 4.3e12",
    )


def backward(parts: Mapping[str, str], tensors: tuple[str, ...], rows: int) -> tuple[KernelSpec, ...]:
    """Sums over rows need a barrier over the grid: a cooperative launch of as many blocks as are resident at once.

    One block of 512 threads, at most 128 registers each, fits any multiprocessor, so there is one for each.
    """
    seconds = f"{rows} * M * N * bits(T) / 8"
    columns, streams = 2 if "MEAN" in parts else 1, 3 if "RESIDUAL" in parts else 2

    def kernel(
        name: str, summary: str, template: str, threads: str, at_once: str, more: Mapping[str, str] = EMPTY,
        **fields: Any,
    ) -> KernelSpec:
        blocks = f"max(1, min(ceildiv(M, {at_once}), multiprocessors))"
        return KernelSpec(
            name=name,
            summary=summary,
            template=template,
            constants={**_constants(parts), "THREADS": threads, **more},
            grid=blocks,
            block="THREADS",
            cooperative=True,
            workspace=f"{blocks} * {at_once} * {columns} * max(N, 1) * 4",
            min_blocks=1,
            **fields,
        )

    speed = "/ (4e12 if VEC > 1 else 1e12)"
    if "RESIDUAL" in parts or "H_OUT" in parts:
        streams = 3

    def held_rows(
        name: str, regions: tuple[str, ...], summary: str, strided: tuple[str, ...], more: Mapping[str, str]
    ) -> KernelSpec:
        apart = "".join(f" and stride({t}, 0) % VEC == 0" for t in strided)
        return kernel(
            name, summary, "row_backward.cu.j2", "512", "(512 // LANES)",
            more=more,
            regions=regions,
            strides=strided,
            requires=(f"N <= {512 * 24}", *(f"N == 1 or stride({t}, 1) == 1" for t in strided)),
            params={"VEC": (8, 4, 1), "LANES": (128, 256, 512), "VALUES": (8, 16, 24)},
            valid=(
                f"{_whole(tensors)}{apart}",
                "N <= LANES * VALUES",
                "2 * N > LANES * VALUES or LANES == 128 and VALUES == 8",
            ),
            estimate=f"6e-6 + {seconds} {speed}",
        )  # fmt: skip

    spread = "M * max(1, min(multiprocessors // M, ceildiv(N, 2048)))"
    return (
        (_packed if "GELU" in parts else _columns)(parts, tensors, seconds),
        KernelSpec(
            name="stream",
            template="row_backward_stream.cu.j2",
            regions=("dx",),
            summary="blocks that stay; x and dy read once, sums over rows in registers to the end",
            requires=(_runs(tensors), "N <= 12288", f"M * N < {2**35}"),
            params={
                "EXACT": (1, 0),
                "ITEMS": (4, 3, 2, 1),
                "LANES": (32, 64, 96, 128, 160, 192, 256, 384, 448, 512),
                "THREADS": (512, 384, 256),
            },
            valid=(
                "(N == LANES * ITEMS * 8) if EXACT else (N < LANES * ITEMS * 8)",
                "ITEMS == (3 if LANES > 256 else 4) or LANES == 32",
                "LANES == 32 or 3 * N > 2 * LANES * ITEMS * 8",
                "N > LANES * (ITEMS - 1) * 8",
            ),
            constants={**_constants(parts), "GROUPS": GROUPS, "DEPTH": "1"},
            grid="max(1, min(M, multiprocessors))",
            block="LANES * GROUPS",
            shared_memory=f"LANES * ITEMS * 32 * (1 + GROUPS * {columns}) + GROUPS * LANES // 2"
            f" + {streams} * LANES * GROUPS * ITEMS * bits(T)",
            cooperative=True,
            workspace=f"max(1, min(M, multiprocessors)) * {columns} * max(N, 1) * 4",
            min_blocks=1,
            estimate=f"5e-6 + {seconds} / 4.2e12",
        ),
        held_rows(
            "rows", ("dy", "dx"), "x and dy in registers, read once; one, two or four rows of a block at once", (), {}
        ),
        held_rows(
            "strided", ("dx",), "the same for rows that lie further apart than they are long",
            tuple(t for t in ("dy", "x", "h", "dh", "residual") if t in tensors), {"STRIDED": "1"},
        ),
        KernelSpec(
            name="spread",
            template="row_backward_spread.cu.j2",
            regions=("dy", "dx"),
            summary="few rows of any length, each spread over several blocks",
            requires=(f"M >= 1 and 2 * M <= multiprocessors and M <= {MOST_ROWS}",),
            params={"VEC": (8, 4, 1), "THREADS": (512,)},
            valid=(_whole(tensors),),
            constants={**_constants(parts), "ROWS": str(MOST_ROWS)},
            grid=spread,
            block="THREADS",
            cooperative=True,
            min_blocks=1,
            workspace=f"{spread} * 24 + M * 12",
            estimate=f"1.2e-5 + 2 * {seconds} {speed}"
            " + M * ceildiv(N, VEC * THREADS * multiprocessors) * 1e-6",  # each thread goes through all rows
        ),
        kernel(
            "long",
            "rows of any length, x read four times and dy twice",
            "row_backward_long.cu.j2",
            "256",
            "1",
            regions=("dy", "dx"),
            params={"VEC": (8, 4, 1)},
            valid=(_whole(tensors),),
            estimate=f"9e-6 + 2 * {seconds} / min(4e12 if VEC > 1 else 1e12, (4e10 if VEC > 1 else 1e10) * max(M, 1))",
        ),
    )
