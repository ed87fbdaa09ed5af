"""Rotary embedding of q and k, and what a decoder does next: k and v go to their places in the cache of keys.

A cache is contiguous, [B G C D], or of pages, [N W G D], that a table names for each sequence; it holds the dtype of k
and v, or float8_e4m3fn with a scale for all of k and one for all of v. New keys go to ``slots``, counted in a sequence;
those that no place has are not written. In meaning the new caches are outputs: a caller who brings the caches as those
outputs has them updated in place, and only new keys are written; else the kernel copies the rest, too.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec, Workload

ATTRIBUTES = {
    "interleaved": AttributeSpec(
        type="int", default=0, choices=(0, 1), static=True, summary="1: pairs lie side by side (GPT-J), 0: D / 2 apart"
    ),
    "rotary_embedding_dim": AttributeSpec(
        type="int", default=0, summary="2 R where only the first elements of a head are rotated, 0: all are"
    ),
}

_QUANTISED = ', output_dtype="float8_e4m3fn")'


def _pattern(paged: bool, quantised: bool) -> str:
    append = "attention.AppendPages" if paged else "attention.AppendCache"
    where = "slots, table" if paged else "slots"
    lines = [
        f"{y} = attention.Rotate({x}, cos, sin, positions, interleaved=interleaved, "
        "rotary_embedding_dim=rotary_embedding_dim)"
        for y, x in (("yq", "q"), ("r", "k"))
    ]
    if quantised:
        lines += [f"rq = QuantizeLinear(r, k_scale{_QUANTISED}", f"vq = QuantizeLinear(v, v_scale{_QUANTISED}"]
    for name, x in (("k", "r"), ("v", "v")):
        lines.append(f"new_{name}_cache = {append}({name}_cache, {x}{'q' if quantised else ''}, {where})")
    return "\n".join(lines)


def _cases(paged: bool, quantised: bool) -> tuple[Case, ...]:
    """Slots count places of a sequence: 0 and 1 where nothing is said."""
    many = {"B": 3, "S": 5, "L": 40, **({"N": 7, "W": 4, "M": 3} if paged else {"C": 30})}
    return (
        Case(name="scattered", axes=many, values={"slots": "integers", "positions": "bytes"},
             summary="slots before the first place write nothing, equal ones the last key; no position gives NaN"),
        Case(name="beyond", axes=many, values={"slots": "12" if paged else "30"}, summary="nothing is written"),
        *((Case(name="no_page", axes=many, values={"table": "7"}, summary="there is no such page"),) if paged else ()),
        *((Case(name="saturated", axes=many, values={"k": "256", "v": "-256", "k_scale": "0.25", "v_scale": "0.5"},
                summary="numbers that fp8 has not become its largest"),) if quantised else ()),
        Case(name="partial", axes={**many, "D": 64, "R": 16}, attributes={"rotary_embedding_dim": 32},
             summary="half of a head is rotated, the other half passes"),
        Case(name="odd", axes={**many, "D": 42, "R": 21}, summary="no whole vectors"),
        Case(name="more_tokens_than_threads", axes={**many, "B": 1, "S": 140, "H": 1, "G": 1, "D": 16, "R": 8},
             summary="many keys for one place"),
    )  # fmt: skip


def _kernel(paged: bool, quantised: bool) -> KernelSpec:
    rows = ("q", "k", "v", "yq")
    caches = ("k_cache", "v_cache", "new_k_cache", "new_v_cache")
    wide = " and ".join(
        (
            "R % (128 // bits(T)) == 0 and D % (128 // bits(T)) == 0",
            *(f"aligned({n}, 16)" for n in (*rows, "cos", "sin", *caches)),
            *(f"stride({n}, 3) == 1" for n in (*rows, *caches)),
            *(f"stride({n}, {i}) % (128 // bits(T)) == 0" for n in (*rows, *caches) for i in range(3)),
        )
    )
    places = "N * W" if paged else "B * C"
    return KernelSpec(
        name="rows",
        template="rope_append.cu.j2",
        summary="a token's heads to a block; where caches are updated in place, their new rows are all that is written",
        requires=(f"B * S < 2147483648 and {places} * G < 2147483648 and D < 65536 and H + G < 65536",),
        strides=(*rows, *caches),
        specialize=("D", "R"),
        params={"VEC": (8, 4, 1)},
        valid=(f"VEC == (128 // bits(T) if {wide} else 1)",),
        constants={"THREADS": "128", "PAGED": str(int(paged)), "QUANTISED": str(int(quantised))},
        grid=f"max(1, min(multiprocessors * 4, max(B * S, ceildiv({places} * G * D, 8 * THREADS))))",
        block="THREADS",
        workspace=f"max(4, {places} * 4 if {'B * S' if paged else 'S'} > 128 else 0)",
        cooperative=True,
        min_blocks=4,
        estimate=f"6e-6 + B * S * (2 * H + {3 if quantised else 4} * G) * D * bits(T) / 8 / 3.5e12",
    )


def _workload(name: str, sequences: int, length: int, places: int, paged: bool) -> Workload:
    cache = {"N": sequences * places // 16, "W": 16, "M": places // 16} if paged else {"C": places}
    axes = {"B": sequences, "S": length, "H": 32, "G": 8, "D": 128, "R": 64, "L": 8192, **cache}
    return Workload(
        name=name, row="S23", mode="b", axes=axes, dtypes={"T": "bfloat16", "I": "int64"},
        values={"positions": "below L", "slots": "distinct M * W", "table": "distinct N"}
        if paged
        else {"positions": "below L", "slots": "distinct C"},
        summary="both caches copied, as a caller has it who brings none",
    )  # fmt: skip


def _fusion(paged: bool, quantised: bool) -> FusionSpec:
    kind = "float8_e4m3fn" if quantised else "T"
    cache = f"{kind}[{'N W G D' if paged else 'B G C D'}]"
    words = f"rope_kv_append{'_paged' if paged else ''}{'_fp8' if quantised else ''}"
    where = "pages" if paged else "a contiguous cache"
    return FusionSpec(
        api=1,
        name=f"attention.{words}",
        summary=f"rotary embedding of q and k, and k and v into {where}{' of fp8' if quantised else ''}",
        pattern=_pattern(paged, quantised),
        inputs={
            "q": "T[B H S D]",
            "k": "T[B G S D]",
            "v": "T[B G S D]",
            "cos": "T[L R]",
            "sin": "T[L R]",
            "positions": "I[B S]",
            "k_cache": cache,
            "v_cache": cache,
            "slots": "I[B S]",
            **({"table": "I[B M]"} if paged else {}),
            **({"k_scale": "float32[]", "v_scale": "float32[]"} if quantised else {}),
        },
        outputs={"yq": "T[B H S D]", "new_k_cache": cache, "new_v_cache": cache},
        layouts={"yq": "q", "new_k_cache": "k_cache", "new_v_cache": "v_cache"},
        aliases={"new_k_cache": "k_cache", "new_v_cache": "v_cache"},
        dtypes={"T": ("bfloat16", "float16", "float32"), "I": ("int64", "int32")},
        axes={
            "B": "sequences",
            "H": "heads of q",
            "G": "heads of k and v",
            "S": "new tokens of each",
            "D": "width of a head",
            "R": "pairs of a head that are rotated",
            "L": "positions of the tables",
            **(
                {"N": "pages", "W": "places of a page", "M": "pages of a sequence"}
                if paged
                else {"C": "places of a sequence"}
            ),
        },
        extents={
            "B": 2, "H": 4, "G": 2, "S": 3, "D": 64, "R": 32, "L": 24,
            **({"N": 5, "W": 4, "M": 3} if paged else {"C": 12}),
        },
        attributes=ATTRIBUTES,
        autocast="lower",
        constraints=("2 * R == D if rotary_embedding_dim == 0 else 2 * R == rotary_embedding_dim and 2 * R <= D",),
        cases=_cases(paged, quantised),
        workloads=()
        if quantised
        else (_workload("decode-64", 64, 1, 2048, paged), _workload("prefill-8x2048", 8, 2048, 2048, paged)),
        kernels=(_kernel(paged, quantised),),
        tags=("S23", "attention"),
    )


FUSIONS: tuple[FusionSpec, ...] = tuple(_fusion(paged, fp8) for fp8 in (False, True) for paged in (False, True))
