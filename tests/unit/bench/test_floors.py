"""Bytes, operations, floors and statistics against numbers worked out by hand."""

from __future__ import annotations

import math
import statistics as stdlib

import graphs as kit
import plugin_kit
import pytest
from catalogs import shipped
from hypothesis import given
from hypothesis import strategies as st

from fusionreg.core.bench import Ceilings, Subject, spread
from fusionreg.core.bench.floors import floor
from fusionreg.core.errors import ArgumentError
from fusionreg.core.spec import Workload

OPS = kit.vocabulary()
H200 = Ceilings(copy_rate=4.26e12, read_rate=4.39e12, write_rate=3.39e12, matmul={"bfloat16": 7.88e14})


def gemm(m: int, n: int, k: int, **fields) -> Subject:
    fields.setdefault("forms", {"w": "T[N K]", "scale": "T[N]", "bias": "T[N]"})
    fields.setdefault("attributes", {"transB": 1, "activation": "Gelu"})
    workload = Workload(name="w", axes={"M": m, "N": n, "K": k}, dtypes={"T": "bfloat16"}, mode="b", **fields)
    return Subject.of(shipped()["gemm.scale_bias"], workload, "sm_90a", OPS)


def seconds(s: Subject, ceilings: Ceilings = H200) -> tuple[float, str]:
    return floor(s.traffic, s.graph, ceilings, OPS)


def test_bytes_and_operations_of_a_product() -> None:
    found = gemm(16, 64, 32).traffic
    assert found.read == 2 * (16 * 32 + 64 * 32 + 64 + 64)
    assert found.written == 2 * 16 * 64
    assert found.flops == 2 * 16 * 64 * 32 + 3 * 16 * 64  # the product, then scale, bias and gelu
    assert found.intensity == found.flops / (found.read + found.written)


def test_leading_axes_and_forms_count() -> None:
    found = gemm(4, 8, 16, batch=(3, 5), forms={"w": "T[N K]", "scale": "T[]", "bias": "T[N]"})
    assert found.trial.shapes(found.entry)["x"] == (3, 5, 4, 16) and found.trial.shapes(found.entry)["scale"] == ()
    assert found.traffic.read == 2 * (15 * 4 * 16 + 8 * 16 + 1 + 8)
    assert found.traffic.written == 2 * 15 * 4 * 8


def test_a_product_in_front_counts() -> None:
    """Its operands in place of what it makes."""
    axes = {"M": 32, "N": 64, "K": 128, "E": 2, "R": 8}
    fields = {"dtypes": {"T": "bfloat16", "I": "int64"}, "absent": ("ranks", "scales"), "values": {"ids": "below E"}}
    workload = Workload(name="w", axes=axes, **fields)
    alone, both = (
        Subject.of(shipped()["gemm.lora_routed"], w, "sm_90a", OPS).traffic
        for w in (workload, workload.model_copy(update={"products": {"base": "x @ weight"}}))
    )
    assert both.read - alone.read == 2 * (64 * 128 - 32 * 64)
    assert both.flops - alone.flops == 2 * 32 * 64 * 128
    assert both.written == alone.written == 2 * 32 * 64


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (16, 128 * (1 - (1 - 8 / 128) ** 16)), (16384, 128)])
def test_experts_that_no_token_has_are_not_read(tokens: int, experts: float) -> None:
    axes = {"M": tokens, "D": 2048, "E": 128, "J": 1536, "I": 768}
    workload = Workload(
        name="w", axes=axes, dtypes={"T": "bfloat16", "L": "bfloat16"}, absent=("bias",),
        attributes={"top_k": 8, "activation": "Swish"},
    )  # fmt: skip
    found = Subject.of(shipped()["moe.routed_ffn"], workload, "sm_90a", OPS)
    assert found.traffic.read == pytest.approx(2 * (experts * 3 * 768 * 2048 + tokens * (2048 + 128)), rel=1e-6)
    products = 2 * tokens * 8 * 3 * 768 * 2048
    assert products < found.traffic.flops < 1.01 * products
    assert seconds(found)[1] == ("matmul" if tokens > 1000 else "memory")


def test_an_elementwise_fusion(tmp_path) -> None:
    entry = plugin_kit.entry(tmp_path)
    workload = Workload(name="w", axes={"M": 8, "N": 32}, dtypes={"T": "float32"})
    found = Subject.of(entry, workload, "sm_90a", OPS)
    assert (found.traffic.read, found.traffic.written, found.traffic.flops) == (4 * (256 + 32), 4 * 256, 2 * 256)
    assert seconds(found)[1] == "memory"


def test_rates_of_mixes() -> None:
    assert H200.rate(100, 0) == pytest.approx(4.39e12)
    assert H200.rate(0, 100) == pytest.approx(3.39e12)
    assert H200.rate(50, 50) == pytest.approx(4.26e12)
    # two reads for a write: one pair at the rate of a copy, one read alone
    assert H200.seconds(200, 100) == pytest.approx(200 / 4.26e12 + 100 / 4.39e12)
    assert H200.seconds(100, 300) == pytest.approx(200 / 4.26e12 + 200 / 3.39e12)
    assert H200.seconds(0, 0) == 0 and H200.rate(0, 0) == 4.26e12


def test_a_measured_mix_has_its_own_rate() -> None:
    seen = H200.model_copy(update={"mixes": {"2:1": 4.0e12, "1:3": 3.6e12}})
    assert list(seen.named().items()) == [
        ("read", 4.39e12), ("2:1", 4.0e12), ("copy 1:1", 4.26e12), ("1:3", 3.6e12), ("write", 3.39e12),
    ]  # fmt: skip
    assert seen.rate(200, 100) == pytest.approx(4.0e12) and seen.rate(7, 21) == pytest.approx(3.6e12)
    # 500 read and 100 written: 300 bytes at 2:1, the other 300 only read
    assert seen.seconds(500, 100) == pytest.approx(300 / 4.0e12 + 300 / 4.39e12)
    # 100 read and 200 written: 100 + 100 of a copy but 2/3 of the way to 1:3; by hand 2 * a + 4 * b = 300 bytes
    assert seen.seconds(100, 200) == pytest.approx(100 / 4.26e12 + 200 / 3.6e12)
    assert seen.seconds(0, 10) == pytest.approx(10 / 3.39e12) and seen.seconds(10, 0) == pytest.approx(10 / 4.39e12)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_no_mix_is_faster_than_the_fastest_ceiling(read, written) -> None:
    seen = H200.model_copy(update={"mixes": {"2:1": 4.0e12, "1:2": 3.6e12}})
    if read + written:
        assert 3.39e12 * (1 - 1e-9) <= seen.rate(read, written) <= 4.39e12 * (1 + 1e-9)


def test_the_time_to_issue() -> None:
    assert H200.issuing(10**9) is None
    assert H200.model_copy(update={"issue_rate": 1e12}).issuing(2 * 10**9) == pytest.approx(2e-3)


def test_floors_of_the_main_rows() -> None:
    """The goal table's floors: 1.4 ms and 1.22 ms of products, 0.0269 and 0.0268 ms of weights."""
    big, binds = seconds(gemm(8192, 8192, 8192))
    assert binds == "matmul" and big == pytest.approx(2 * 8192**3 / 7.88e14) == pytest.approx(1.395e-3, rel=1e-3)
    assert seconds(gemm(2048, 28672, 8192))[0] == pytest.approx(1.22e-3, rel=2e-3)
    small, binds = seconds(gemm(16, 14336, 4096))
    assert binds == "memory" and small == pytest.approx(0.0269e-3, rel=2e-3)
    assert seconds(gemm(1, 14336, 4096))[0] == pytest.approx(0.0268e-3, rel=2e-3)


def test_a_dtype_without_a_measured_rate_is_bound_by_bytes() -> None:
    none = H200.model_copy(update={"matmul": {}})
    assert seconds(gemm(8192, 8192, 8192), none)[1] == "memory"


def test_spread_of_known_numbers() -> None:
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.median, found.min, found.n) == (3.0, 1.0, 5)
    assert found.p20 == pytest.approx(1.8) and found.p80 == pytest.approx(4.2)
    assert spread([7.0]).p80 == 7.0


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=50))
def test_spread_agrees_with_the_standard_library(values) -> None:
    found, cuts = spread(values), stdlib.quantiles(values, n=5, method="inclusive")
    assert found.median == pytest.approx(stdlib.median(values))
    assert found.p20 == pytest.approx(cuts[0]) and found.p80 == pytest.approx(cuts[3])
    assert found.min <= found.p20 <= found.median <= found.p80


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.nan], [math.inf], [-1.0]])
def test_no_statistics_of_no_durations(values) -> None:
    with pytest.raises(ArgumentError, match="no statistics"):
        spread(values)
