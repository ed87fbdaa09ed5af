"""Problems of attention whose speed matters."""

from __future__ import annotations

from fusionreg.core.spec import Workload


def _causal(batch: int, heads: int, groups: int, length: int, width: int, of_v: int = 0, row: str = "S12") -> Workload:
    """``of_v``: the width of a head of v, where that is another."""
    shape = f"{batch}x{heads}" + (f".{groups}" if groups != heads else "")
    return Workload(
        name=f"causal-{shape}x{length}x{width}" + (f".{of_v}" if of_v else ""),
        row=row,
        axes={"B": batch, "H": heads, "G": groups, "Q": length, "K": length, "D": width, "E": of_v or width},
        dtypes={"T": "bfloat16"},
        attributes={"is_causal": 1, "scaling": "usual"},
        summary="a layer of a decoder in training or prefill",
    )


def _decoding(batch: int, length: int) -> Workload:
    return Workload(
        name=f"decode-{batch}x32.8x{length}x128",
        row="S12 more",
        axes={"B": batch, "H": 32, "G": 8, "Q": 1, "K": length, "D": 128, "E": 128},
        dtypes={"T": "bfloat16"},
        attributes={"scaling": "usual"},
        summary="a layer of a decoder that adds a token to each sequence",
    )


def _encoding(batch: int, heads: int, length: int, summary: str, bias: bool) -> Workload:
    mask = {"MB": 1, "MH": heads, "MQ": length} if bias else {}
    return Workload(
        name=f"{'bias' if bias else 'padding'}-{batch}x{heads}x{length}x64",
        row="S12 more",
        axes={"B": batch, "H": heads, "G": heads, "Q": length, "K": length, "D": 64, "E": 64, **mask},
        dtypes={"T": "bfloat16"} if bias else {"T": "bfloat16", "P": "bool"},
        attributes={"scaling": "usual"},
        forms={} if bias else {"mask": "P[B 1 1 K]"},
        summary=summary,
    )


#: Of the fusions with a mask that is a constant, and of those whose mask is trained.
MASKED_WORKLOADS = (_encoding(16, 12, 512, "a layer of an encoder whose sentences are padded", bias=False),)
BIAS_WORKLOADS = (_encoding(8, 12, 512, "a layer of an encoder with a bias for each head and distance", bias=True),)

#: Heads wider than most.
_WIDE = tuple(_causal(1, 32, 32, 4096, d, of_v, row="S12 more") for d, of_v in ((192, 128), (256, 0)))

WORKLOADS = (
    _decoding(16, 8192),
    _decoding(1, 32768),
    _causal(1, 64, 8, 8192, 128),
    _causal(1, 64, 8, 4096, 128),
    _causal(4, 32, 32, 4096, 64),
    *_WIDE,
)

GRADIENT_WORKLOADS = (
    _causal(1, 64, 8, 8192, 128),
    _causal(1, 32, 32, 4096, 128),
    _causal(1, 16, 16, 16384, 128),
    _causal(4, 32, 32, 4096, 64),
    _causal(1, 32, 32, 4096, 96, row="S12 more"),
    *_WIDE,
)

#: A cache of keys of which sequences have filled a part, and sentences of several lengths.
LENGTHS_WORKLOADS = tuple(
    w.model_copy(
        update={"name": f"lengths-{w.name}", "dtypes": {**w.dtypes, "I": "int64"}, "values": {"lengths": f"below {n}"},
                "row": "S12 more", "summary": f"{w.summary}; lengths anywhere"}
    )
    for w, n in ((WORKLOADS[0], 8192), (_causal(4, 32, 32, 4096, 64), 4096))
)  # fmt: skip
