"""Rotary embedding of q and k together, in one kernel: by position, or as Hugging Face's models spell it.

``rope`` has tables by position [L R], as ONNX RotaryEmbedding reads them; ``rope_half`` has those of a model that
looked them up before, as wide as a head, and rotates halves: x cos + (-x2, x1) sin.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec, Workload

from .rope import ATTRIBUTES

_ROTATED = "".join(
    f"{y} = {{op}}({x}, cos, sin, positions, interleaved=interleaved, "
    "rotary_embedding_dim=rotary_embedding_dim)\n"
    for y, x in (("yq", "q"), ("yk", "k"))
)


def _half(cut: str) -> str:
    return "".join(
        f"{cut.format(x=x)}\ny{x} = Add(Mul({x}, cos), Mul(Concat(Neg({x}2), {x}1, axis=-1), sin))\n" for x in "qk"
    )


_END = 2**63 - 1
#: A head cut in two; the halves of Slices are told by where the second one begins.
CUTS = (
    "{x}1, {x}2 = Split({x}, (-1, -1), axis=-1)",
    f"{{x}}1 = Slice({{x}}, (0,), (middle,), (-1,), (1,))\n{{x}}2 = Slice({{x}}, (middle,), ({_END},), (-1,), (1,))",
    f"{{x}}1 = Slice({{x}}, (0,), (middle,), (-1,))\n{{x}}2 = Slice({{x}}, (middle,), ({_END},), (-1,))",
)


def _kernel(half: bool) -> KernelSpec:
    rows = ("q", "k", "yq", "yk")
    pairs = "D // 2" if half else "R"
    wide = " and ".join(
        (
            f"({pairs}) % (128 // bits(T)) == 0 and D % (128 // bits(T)) == 0",
            *(f"aligned({n}, 16)" for n in (*rows, "cos", "sin")),
            *(f"stride({n}, 3) == 1" for n in rows),
            *(f"stride({n}, {i}) % (128 // bits(T)) == 0" for n in rows for i in range(3)),
        )
    )
    return KernelSpec(
        name="rows",
        template="rope.cu.j2",
        summary="a token's heads to a block",
        strides=rows,
        params={"VEC": (8, 4, 1)},
        valid=(f"VEC == (128 // bits(T) if {wide} else 1)",),
        constants={
            "HALF": str(int(half)),
            "INTERLEAVED": "0" if half else "interleaved",
            "BATCHED": "1 if rank(cos) == 4 and form(cos) == 1 else 0" if half else "0",
        },
        grid="B * S",
        block="128",
        estimate="4e-6 + B * S * 2 * (H + G) * D * bits(T) / 8 / 3.5e12",
    )


def _workload(name: str, sequences: int, length: int, half: bool) -> Workload:
    axes = {"B": sequences, "S": length, "H": 32, "G": 8, "D": 128}
    return Workload(
        name=name,
        row="S23",
        axes=axes if half else axes | {"R": 64, "L": 8192},
        dtypes={"T": "bfloat16"} if half else {"T": "bfloat16", "I": "int64"},
        forms={"cos": "T[1 1 S D]", "sin": "T[1 1 S D]"} if half else {},
        values={} if half else {"positions": "below L"},
        summary="a layer of a decoder in prefill",
    )


_WORDS = {"B": "sequences", "H": "heads of q", "G": "heads of k", "S": "tokens of each", "D": "width of a head"}

ROPE = FusionSpec(
    api=1,
    name="attention.rope",
    summary="rotary embedding of q and k by position",
    pattern=(_ROTATED.format(op="attention.Rotate"), _ROTATED.format(op="RotaryEmbedding")),
    inputs={"q": "T[B H S D]", "k": "T[B G S D]", "cos": "T[L R]", "sin": "T[L R]", "positions": "I[B S]"},
    outputs={"yq": "T[B H S D]", "yk": "T[B G S D]"},
    layouts={"yq": "q", "yk": "k"},
    dtypes={"T": ("bfloat16", "float16", "float32"), "I": ("int64", "int32")},
    axes=_WORDS | {"R": "pairs of a head that are rotated", "L": "positions of the tables"},
    extents={"B": 2, "H": 4, "G": 2, "S": 3, "D": 64, "R": 32, "L": 24},
    attributes=ATTRIBUTES,
    autocast="lower",
    constraints=("2 * R == D if rotary_embedding_dim == 0 else 2 * R == rotary_embedding_dim and 2 * R <= D",),
    cases=(
        Case(name="beyond", axes={"L": 1}, values={"positions": "bytes"}, summary="no position gives NaN"),
        Case(name="partial", axes={"D": 64, "R": 16}, attributes={"rotary_embedding_dim": 32}),
        Case(name="odd", axes={"D": 42, "R": 21}, summary="no whole vectors"),
    ),
    workloads=(_workload("8x2048", 8, 2048, False),),
    kernels=(_kernel(half=False),),
    tags=("S23", "attention"),
)

ROPE_HALF = FusionSpec(
    api=1,
    name="attention.rope_half",
    summary="rotary embedding of q and k, spelled out: x cos + (-x2, x1) sin",
    pattern=tuple(_half(cut) for cut in CUTS),
    inputs={
        "q": "T[B H S D]",
        "k": "T[B G S D]",
        "cos": "T[1 1 S D] | T[B 1 S D] | T[S D]",
        "sin": "T[1 1 S D] | T[B 1 S D] | T[S D]",
    },
    outputs={"yq": "T[B H S D]", "yk": "T[B G S D]"},
    layouts={"yq": "q", "yk": "k"},
    dtypes={"T": ("bfloat16", "float16", "float32")},
    axes=_WORDS,
    extents={"B": 2, "H": 4, "G": 2, "S": 3, "D": 64},
    attributes={"middle": AttributeSpec(type="int", default=0, summary="D / 2 where Slices cut heads, else 0")},
    autocast="lower",
    constraints=("D % 2 == 0", "middle == 0 or 2 * middle == D", "form(cos) == form(sin)"),
    cases=(Case(name="odd", axes={"D": 42}, summary="no whole vectors"),),
    workloads=(_workload("8x2048", 8, 2048, True),),
    kernels=(_kernel(half=True),),
    tags=("S23", "attention"),
)

FUSIONS: tuple[FusionSpec, ...] = (ROPE, ROPE_HALF)
