"""Softmax and cross entropy of rows of scores, without probabilities in memory, and the gradient.

A loss for each row (``cross_entropy_rows``), or their sum or mean (``cross_entropy``): the mean of those whose label
is not ignored. A label that is no class, and not the ignored one, gives NaN. Smoothed labels, weights of classes and
labels that are probabilities are other operators, and not fused.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Backward, Case, FusionSpec, KernelSpec, Tolerance, Workload

_IGNORED = {"ignore_index": AttributeSpec(type="int", default=-100, summary="a label whose row does not count")}
_REDUCTION = {
    "reduction": AttributeSpec(
        type="str", default="mean", choices=("mean", "sum"), static=True, summary="of the losses of all rows"
    )
}

_CASES = (
    Case(name="ignored", attributes={"ignore_index": 1}, summary="some of the labels"),
    Case(name="all_ignored", values={"labels": "1"}, attributes={"ignore_index": 1}, summary="a mean of none is NaN"),
    Case(name="classes", axes={"K": 264}, values={"labels": "bytes"}, summary="labels anywhere in a row"),
    Case(name="no_class", axes={"K": 9}, values={"labels": "integers"}, summary="labels below the first one"),
    Case(name="beyond", axes={"K": 9}, values={"labels": "9"}, summary="labels behind the last class"),
    Case(name="long", axes={"M": 3, "K": 5128}, values={"labels": "5127"}, summary="several rounds of a block"),
    Case(name="longer", axes={"M": 2, "K": 20488}, values={"labels": "9000"}, summary="the same of a larger one"),
    Case(name="odd", axes={"M": 300, "K": 77}, summary="several rows to a block"),
    Case(name="sure", axes={"K": 24}, values={"x": "large"}, summary="losses of 0, and large ones"),
)

#: ONNX's operator, and as torch has it.
_SPELLINGS = ("SoftmaxCrossEntropyLoss(x, labels, {})", "NegativeLogLikelihoodLoss(LogSoftmax(x, axis=-1), labels, {})")

_ROUNDING = Tolerance(
    dtype="float32", ulp=6.0, inputs=2.0, reason="expf and logf are within 2 ulp, and a loss is a difference of scores"
)


def _kernel(backward: bool, reduced: bool) -> KernelSpec:
    rows = ("x", "dx") if backward else ("x",)
    wide = " and ".join(("K % (128 // bits(T)) == 0", *(f"aligned({n}, 16)" for n in rows)))
    # As many rows as the cache keeps until they are read again.
    longest, long = ((1024,), "1024 if K * bits(T) > 1048576 else ") if backward else ((), "")
    # A row and the next one in registers: fewer threads are resident.
    resident = "(768 if HELD else 1024)" if backward else "1024"
    blocks = f"max(1, min(multiprocessors * ({resident} // THREADS), ceildiv(M, THREADS // TEAM)))"
    return KernelSpec(
        name="rows",
        template=f"cross_entropy_{'backward' if backward else 'forward'}.cu.j2",
        summary="a row to a warp or to a block, read once"
        + (" where registers hold it, and again from the cache elsewhere" if backward else ""),
        requires=("M < 2147483648 and K < 2147483648",),
        params={
            "VEC": (8, 4, 1),
            "THREADS": (*longest, 512, 128),
            "TEAM": (*longest, 512, 128, 32),  # of a row
            **({"HELD": (1, 0)} if backward else {}),
        },
        valid=(
            f"VEC == (128 // bits(T) if {wide} else 1)",
            f"TEAM == ({long}512 if K > 8192 else 128 if K > 2048 else 32) and THREADS == max(TEAM, 128)",
            *(("HELD == (1 if TEAM == 32 and K <= 128 * VEC else 0)",) if backward else ()),
        ),
        constants={
            "REDUCED": str(int(reduced)),
            "AT_ONCE": "4 if TEAM == 32 else 2" if backward else "4",  # loads of a thread that are under way together
        },
        grid=blocks,
        block="THREADS",
        cooperative=reduced,
        workspace=f"8 * {blocks} * (THREADS // TEAM)" if reduced else "0",
        estimate=f"6e-6 + M * K * bits(T) / 8 * {2 if backward else 1} / 3.8e12",
    )


def _fusion(backward: bool, reduced: bool) -> FusionSpec:
    words = "cross_entropy" if reduced else "cross_entropy_rows"
    loss = "T[]" if reduced else "T[M]"
    how = "ignore_index=ignore_index, reduction=" + ("reduction" if reduced else '"none"')
    whose = "of all rows together" if reduced else "of each row"
    return FusionSpec(
        api=1,
        name=f"attention.{words}{'_backward' if backward else ''}",
        summary=f"gradient of softmax and cross entropy {whose}" if backward else f"softmax and cross entropy {whose}",
        pattern=f"dx = fusionreg.SoftmaxCrossEntropyGrad(dy, x, labels, {how})"
        if backward
        else tuple(f"y = {operator.format(how)}" for operator in _SPELLINGS),
        inputs={**({"dy": loss} if backward else {}), "x": "T[M K]", "labels": "I[M]"},
        outputs={"dx": "T[M K]"} if backward else {"y": loss},
        dtypes={"T": ("float16", "bfloat16", "float32"), "I": ("int64", "int32")},
        axes={"M": "rows", "K": "classes"},
        extents={"M": 16, "K": 40},
        attributes=_IGNORED | (_REDUCTION if reduced else {}),
        constraints=("M > 0 and K > 0",),
        backward=None if backward else Backward(fusion=f"attention.{words}_backward"),
        autocast="float32",
        cases=_CASES,
        tolerances=(_ROUNDING,),
        workloads=tuple(
            Workload(
                name=f"{m}x{k}-bf16", row="S16 more", axes={"M": m, "K": k}, dtypes={"T": "bfloat16", "I": "int64"},
                values={"labels": "below K"}, summary="logits of a language model" if k > 10000 else "classes",
            )
            for m, k in ((32768, 1024), (8192, 32000), (4096, 128256))
        ),
        kernels=(_kernel(backward, reduced),),
        tags=("S16", "attention", *(("training", "backward") if backward else ())),
    )  # fmt: skip


FUSIONS: tuple[FusionSpec, ...] = tuple(_fusion(b, reduced) for b in (False, True) for reduced in (True, False))
