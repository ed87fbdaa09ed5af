"""The kernels of point-wise regions: any program of point-wise operators, one launch, every tensor moved once."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec

#: Blocks of a grid along y and z.
MOST = 65535

#: Positions of a tile along each of its axes: 128 bytes of the widest dtype where runs are 16 bytes, else 32.
EDGE = "max(8 * VEC, min(32, 128 // element_bytes))"

#: A thread moves a run or a few of each operand; narrow runs of 16-bit elements need more of them under way.
THREADS = f"min(64 if VEC == 4 and element_bytes == 2 else 256, {EDGE} * {EDGE} // VEC)"


def _padded(axis: str) -> str:
    """By how much tiles exceed an axis."""
    return f"(align({axis}, {EDGE}) / max({axis}, 1))"


VECTOR = KernelSpec(
    name="vector",
    programmatic=True,
    template="region.cu.j2",
    summary="runs of up to 16 bytes of every operand that has them",
    regions="*",
    strides="*",
    requires=("widest > 1",),
    params={"VEC": (16, 8, 4, 2), "UNROLL": (1, 2)},
    constants={"THREADS": "256"},
    valid=("VEC <= widest", "VEC * element_bytes <= 16 or VEC == 2"),
    grid="ceildiv(elements, VEC * UNROLL * THREADS)",
    block="THREADS",
    # what device memory takes, and loads of single elements: 32 VEC bytes of each apart, so many 128-byte lines a warp
    estimate="2.5e-6 + max((traffic + 0.75 * scattered) * (0.9 + 1.6 / (VEC * element_bytes)) / 4e12, "
    "(traffic + elements * VEC * gathered_bytes) / 3e13)",
)

TURNS = KernelSpec(
    name="turns",
    programmatic=True,
    template="region_turns.cu.j2",
    summary="what is repeated is loaded once for several vectors that find the same of it, whatever the length of rows",
    regions="*",
    strides="*",
    requires=("widest > 1",),
    params={"VEC": (16, 8, 4, 2), "UNROLL": (4, 2, 1)},
    constants={"THREADS": "256"},
    valid=(
        "VEC <= widest",
        "VEC * element_bytes <= 16 or VEC == 2",
        f"VEC * UNROLL <= turns or elements <= {2**26}",  # so that no position is beyond 2^32
    ),
    grid="ceildiv(ceildiv(turns, VEC * UNROLL) * (elements // max(turns, 1)), THREADS)",
    block="THREADS",
    estimate="2.6e-6 + (traffic + 64 * elements * loose) * (0.1 / UNROLL + (0.85 if crossing else 1.0) + "
    "1.6 / (VEC * element_bytes)) / 4e12 * (align(turns, VEC * UNROLL) / max(turns, 1))",
)

STRIDED = KernelSpec(
    name="strided",
    programmatic=True,
    template="region.cu.j2",
    summary="any strides, an element at a time",
    regions="*",
    strides="*",
    params={"UNROLL": (4, 1)},
    constants={"VEC": "1", "THREADS": "256"},
    grid="ceildiv(elements, UNROLL * THREADS)",
    block="THREADS",
    estimate="2.5e-6 + (1.15 * traffic + 0.75 * scattered) / 4e12",
)

TRANSPOSED = KernelSpec(
    name="transposed",
    programmatic=True,
    template="region_transposed.cu.j2",
    summary="operands contiguous along another axis go through shared memory, so that every access is a run",
    regions="*",
    strides="*",
    params={"VEC": (16, 8, 4, 2, 1)},
    valid=("VEC <= tile_widest", "VEC == 1 or VEC * element_bytes <= 16"),
    constants={"EDGE": EDGE, "THREADS": THREADS},
    grid=(
        "ceildiv(columns, EDGE)",
        f"min(ceildiv(depth, EDGE), {MOST})",
        f"min(elements // max(columns * depth, 1), {MOST})",
    ),
    block="THREADS",
    shared_memory="staged_bytes * EDGE * EDGE",
    estimate=f"3e-6 + traffic * (1.1 + 0.8 / (VEC * element_bytes)) / 4e12 * {_padded('columns')} * {_padded('depth')}",
)

RAGGED = KernelSpec(
    name="ragged",
    programmatic=True,
    template="region_ragged.cu.j2",
    summary="the same where rows or columns are no whole numbers of runs: runs are shifted into place",
    regions="*",
    strides="*",
    requires=("returned_bytes == 0",),
    params={"VEC": (8, 4, 2), "WIDTH": (1, 2)},
    valid=("VEC == min(8, 16 // element_bytes)", "WIDTH == (2 if VEC <= 4 else 1)"),  # 256 threads, few registers
    constants={"LINES": "8 * VEC", "COLUMNS": "8 * VEC * WIDTH", "THREADS": "min(256, 64 * VEC * WIDTH)"},
    grid=(
        "ceildiv(columns + VEC - 1, COLUMNS - VEC)",
        f"min(ceildiv(depth, LINES), {MOST})",
        f"min(elements // max(columns * depth, 1), {MOST})",
    ),
    block="THREADS",
    shared_memory="staged_bytes * COLUMNS * (2 * LINES + VEC + 4)",
    min_blocks=6,  # the more tiles are under way, the better
    estimate=f"3e-6 + traffic * 1.18 / 4e12 * {_padded('columns')} * {_padded('depth')} "
    "+ (1 if staged_bytes == 0 else 0)",
)

KERNELS = (VECTOR, TURNS, TRANSPOSED, RAGGED, STRIDED)
