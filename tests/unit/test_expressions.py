"""The expression language: what it accepts, what it refuses, what it computes."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionreg.core.errors import ExpressionError
from fusionreg.core.expressions import MAX_TEXT, Expression, ExpressionSet

ENV = {"M": 7, "K": 12, "N": 64, "T": "bfloat16", "activation": "Relu", "contiguous": lambda name: name == "x"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("M + K * 2 - 1", 30),
        ("-M // 2", -4),
        ("M / 2", 3.5),
        ("K % 8", 4),
        ("ceildiv(M, 4)", 2),
        ("ceildiv(8, 4)", 2),
        ("align(M, 8)", 8),
        ("align(8, 8)", 8),
        ("min(M, K, 3) + max(1, 2)", 5),
        ("log2(64)", 6),
        ("abs(3 - M)", 4),
        ("gcd(12, 18)", 6),
        ("next_pow2(5)", 8),
        ("next_pow2(8)", 8),
        ("next_pow2(0)", 1),
        ("bits(T) // 8", 2),
        ("sqrt(16)", 4.0),
        ("1 < M <= 7 < N", True),
        ("1 < M < 7", False),
        ('T in ("float16", "bfloat16")', True),
        ('T not in ["float16"]', True),
        ("M if K > 100 else N", 64),
        ("not (K % 4 == 0 and N > 3)", False),
        ("contiguous(x) and not contiguous(w)", True),
        ('activation == "Relu" or missing == 1', True),  # names are read only where evaluation reaches them
        ("True and 2", 2),
    ],
)
def test_value(text, value):
    found = Expression.parse(text)(ENV)
    assert found == value and type(found) is type(value)


def test_log2_of_no_power_of_two_is_a_float():
    assert Expression.parse("log2(48)")({}) == math.log2(48)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("M ** 2", "Pow"),
        ("x.shape", "Attribute"),
        ("M[0]", "Subscript"),
        ("lambda: 1", "Lambda"),
        ("[M for M in (1, 2)]", "ListComp"),
        ("(M := 3)", "NamedExpr"),
        ("f'{M}'", "JoinedStr"),
        ("M if", "column"),
        ("", "empty"),
        ("  ", "empty"),
        ("M; N", "column"),
        ("__import__('os')", "__import__"),
        ("M.__class__", "Attribute"),
        ("_M", "letters"),
        ("foo(1)", "unknown function 'foo'"),
        ("min(M)", "1 arguments"),
        ("ceildiv(M, 4, 4)", "3 arguments"),
        ("min(*M, 1)", "starred"),
        ("align(x=1, m=2)", "keyword"),
        ("contiguous(M + 1)", "bare name"),
        ("has(wgmm)", "did you mean wgmma"),
        ("min", "without a call"),
        ("None", "None"),
        ("M << 2", "LShift"),
        ("M | 1", "BitOr"),
        ("~M", "Invert"),
        ("M is 1", "Is"),
        ("'a' * 1000000000", "arithmetic on 'a'"),
        ("M in T", "without a list"),
        ("M in ()", "without a list"),
        ("1j", "constant"),
        ("b'x'", "constant"),
        ("9" * 30, "fits 64 bits"),
        ("(" * 300 + "1" + ")" * 300, "parenthes"),
        ("-" * 3000 + "1", "nested"),
        ("1 + " * MAX_TEXT + "1", "characters"),
    ],
)
def test_refused_when_parsed(text, word):
    with pytest.raises(ExpressionError) as caught:
        Expression.parse(text, whom="fusion acme.f, grid")
    assert word in str(caught.value) and "acme.f" in str(caught.value)


def test_every_name_is_resolved_at_load():
    with pytest.raises(ExpressionError, match=r"unknown name 'BLOCK_N'.*did you mean BLOCK_M"):
        Expression.parse("ceildiv(N, BLOCK_N)", known={"N", "BLOCK_M"})
    with pytest.raises(ExpressionError, match="unknown tensor 'wx'"):
        Expression.parse("contiguous(wx)", known={"x"}, tensors={"w"})
    with pytest.raises(ExpressionError, match="unknown name 'x'"):  # a tensor is no number
        Expression.parse("x > 1", known={"M"}, tensors={"x"})


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("M // (K - 12)", "K = 12"),
        ("M % 0", "M = 7"),
        ("M / 0", "division"),
        ("M + T", "T = 'bfloat16'"),
        ("missing + 1", "'missing' has no value"),
        ("N * 1000000000 * 1000000000 * 1000000000", "64 bits"),
        ("contiguous(x) + rank(x)", "'rank' has no value"),
        ("bits(activation)", "unknown dtype"),
        ("log2(0)", "math domain"),
    ],
)
def test_failing_evaluation_is_typed_and_shows_the_values(text, word):
    with pytest.raises(ExpressionError) as caught:
        Expression.parse(text, whom="acme.f")(ENV)
    assert word in str(caught.value) and text in str(caught.value) and "acme.f" in str(caught.value)


def test_what_it_reads():
    e = Expression.parse("K % 8 == 0 and contiguous(x) and has(wgmma) and shape(w, M) > 1")
    assert e.names == {"K", "M"} and e.tensors == {"x", "w"} and e.features == {"wgmma"}
    assert e.predicates == {"contiguous", "has", "shape"}


def test_pretty_shows_values():
    assert Expression.parse("K % 8 == 0").pretty(ENV) == "K % 8 == 0 (K = 12)"
    assert Expression.parse("contiguous(x)").pretty(ENV) == "contiguous(x)"


def test_immutable_hashable_and_pickles():
    e = Expression.parse(" M + 1 ")
    assert e == Expression.parse("M + 1") and len({e, Expression.parse("M + 1")}) == 1
    assert pickle.loads(pickle.dumps(e))({"M": 2}) == 3
    with pytest.raises(AttributeError):
        e.text = "2"


def test_a_builtin_is_no_name():
    with pytest.raises(ExpressionError):
        Expression.parse("open('/etc/passwd')")
    with pytest.raises(ExpressionError, match="no value"):
        Expression.parse("exit")({})


class TestSet:
    def test_values_in_order(self):
        s = ExpressionSet({"grid0": "ceildiv(M, BM)", "shared_memory": "BM * 2", "ok": "contiguous(x)"})
        assert list(s({"M": 100, "BM": 64, "contiguous": lambda n: True}).items()) == [
            ("grid0", 2), ("shared_memory", 128), ("ok", True),
        ]  # fmt: skip
        assert s.names == {"M", "BM"} and s.tensors == {"x"} and len(s) == 3

    def test_names_the_member_that_fails(self):
        s = ExpressionSet({"grid0": "M", "grid1": "M // K"}, whom="gemm.bias/plain")
        with pytest.raises(ExpressionError, match=r"'M // K' in gemm.bias/plain grid1.*division"):
            s({"M": 3, "K": 0})

    def test_overflow_is_caught(self):
        s = ExpressionSet({"a": "M * M * M"})
        with pytest.raises(ExpressionError, match="64 bits"):
            s({"M": 2**40})

    def test_unknown_name_at_load(self):
        with pytest.raises(ExpressionError, match=r"block.*unknown name 'Q'"):
            ExpressionSet({"grid": "M", "block": "Q"}, known={"M"}, whom="acme.f/k")

    def test_no_pickle_surprise(self):
        s = pickle.loads(pickle.dumps(ExpressionSet({"a": "M + 1"})))
        assert s({"M": 1}) == {"a": 2}


NAMES = st.sampled_from(["M", "N", "K"])
TREES = st.recursive(
    NAMES | st.integers(0, 100).map(str),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner)
        | st.builds("({} if {} < {} else {})".format, inner, inner, inner, inner)
    ),
    max_leaves=8,
)


@given(TREES, st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_agrees_with_python(text, m, n, k):
    env = {"M": m, "N": n, "K": k}
    try:
        expected = eval(text, {}, env)  # Python itself is the reference
    except ZeroDivisionError:
        with pytest.raises(ExpressionError):
            Expression.parse(text)(env)
        return
    if abs(expected) < 2**63:
        assert Expression.parse(text)(env) == expected
        assert ExpressionSet({"a": text})(env) == {"a": expected}


@given(st.text(max_size=40))
def test_no_text_does_more_than_raise_a_typed_error(text):
    try:
        Expression.parse(text)
    except ExpressionError as error:
        assert str(error)
