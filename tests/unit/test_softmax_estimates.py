"""Which kernel of softmax dispatch takes, and with which parameters: by estimates alone."""

from __future__ import annotations

import graphs as kit
import pytest
from catalogs import shipped

from fusionreg.core.bench import Subject
from fusionreg.core.problem.selection import estimated
from fusionreg.core.spec import Workload

OPS = kit.vocabulary()


def subject(fusion: str, *, diagonal: int = 0, **axes: int) -> Subject:
    entry = shipped()[f"attention.{fusion}"]
    names = [a for a in "BHQK" if a in entry.spec.axes]
    workload = Workload(
        name="w", axes={a: axes.get(a, 1) for a in names}, dtypes={"T": "bfloat16"}, absent=("scale",),
        attributes={"diagonal": diagonal}, forms={"mask": "bool[B 1 1 K]"} if "mask" in entry.inputs else {},
    )  # fmt: skip
    return Subject.of(entry, workload, "sm_90a", OPS, multiprocessors=132)


@pytest.mark.parametrize(
    "fusion, axes, kernel, threads, values",
    [
        ("causal_softmax_backward", {"H": 128, "Q": 512, "K": 512}, "rows", 32, 16),
        ("causal_softmax_backward", {"H": 128, "Q": 2048, "K": 2048}, "block", 128, 16),
        ("mask_causal_softmax", {"B": 4, "H": 32, "Q": 2048, "K": 2048}, "rows", 32, 64),
        ("softmax", {"Q": 32768, "K": 4096}, "block", 128, 32),
        ("softmax", {"Q": 32768, "K": 16384}, "block", 512, 32),
        ("softmax_backward", {"Q": 32768, "K": 4096}, "block", 128, 32),
        ("softmax_backward", {"Q": 32768, "K": 16384}, "cluster", 256, 32),
        ("softmax_backward", {"Q": 16384, "K": 32768}, "cluster", 256, 32),  # a block of 1024 threads would spill
        ("softmax", {"Q": 16384, "K": 32768}, "block", 1024, 32),
        ("softmax_backward", {"Q": 16384, "K": 65536}, "cluster", 256, 32),
        ("log_softmax_backward", {"Q": 8192, "K": 32000}, "block", 1024, 32),  # these registers suffice
        ("softmax_backward", {"Q": 8, "K": 32768}, "cluster", 256, 16),  # a few rows: over many multiprocessors
    ],
)
def test_what_an_h200_was_fastest_with_is_taken(fusion, axes, kernel, threads, values) -> None:
    chosen = subject(fusion, **axes).selection.accepted[0]
    found = chosen.kernel.spec.name, chosen.params["LANES"], chosen.params["VALUES"]
    assert found == (kernel, threads, values) and chosen.params["VEC"] == 8


def test_hidden_keys_are_no_bytes() -> None:
    def seconds(**axes: int) -> float:
        made = subject("causal_softmax_backward", **axes)
        chosen = made.selection.accepted[0]
        return estimated(chosen.kernel, made.problem, chosen.params)

    square, decoding = seconds(H=64, Q=2048, K=2048), seconds(H=64, Q=2048, K=2048, diagonal=2048)
    assert square == pytest.approx(decoding * 2 / 3, rel=0.1)  # of three tensors two are read, half of each
    assert seconds(H=64, Q=2048, K=2048, diagonal=-2048) < 0.7 * square


def test_parameters_that_do_not_fill_the_device_are_slower() -> None:
    """64 values of two tensors in each lane, or a cluster to a row: few rows are on the way at a time."""
    made = subject("causal_softmax_backward", H=128, Q=2048, K=2048)
    times = {c.kernel.spec.name: estimated(c.kernel, made.problem, c.params) for c in made.selection.accepted}
    assert list(times) == ["block", "rows", "cluster", "long"] and list(times.values()) == sorted(times.values())
