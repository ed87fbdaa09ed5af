"""Tensor texts: parsing, and binding axes to shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionreg.core.errors import ArgumentError, SpecError
from fusionreg.core.problem import Tensor
from fusionreg.core.tensors import Form, TensorType, bind, expand, folded_axis

parse = TensorType.parse
GEMM = {
    "x": parse("T[... M K]"),
    "w": parse("T[K N]"),
    "scale": parse("T[] | T[N] | T[M 1]"),
    "y": parse("T[... M N]"),
}


def test_parse():
    t = parse("T[... M K] | T[8 K] pinned_host")
    assert t.dtype == "T" and t.space == "pinned_host" and t.axes == ("M", "K") and t.leading
    assert t.forms == (Form(("M", "K"), True), Form((8, "K")))
    assert str(t.forms[0]) == "... M K" and parse("float32[]").forms == (Form(()),)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("T", "no form"),
        ("T[", "no form"),
        ("", "no form"),
        ("T[M..]", "axis 'M..'"),
        ("T[M ... ... K]", "axis '...'"),
        ("T[... ... K]", "axis '...'"),
        ("T[M, K]", "axis 'M,'"),
        ("T[0]", "axis '0'"),
        ("T[-1]", "axis '-1'"),
        ("T[é]", "axis 'é'"),
        ("T[...]", "beside nothing"),
        ("T[... 2 K]", "beside 2"),
        ("T[M] | S[N]", "different dtypes"),
        ("T[M] | T[M]", "stands twice"),
        ("T[M] shared", "memory space 'shared'"),
        ("T[M]; int x", "no form"),
        ("T{{M}}", "no form"),
        ("T[M] | ", "no form"),
    ],
)
def test_refused(text, word):
    with pytest.raises(SpecError) as caught:
        parse(text, "acme.f input x")
    assert word in str(caught.value) and "acme.f input x" in str(caught.value)


def test_bind_folds_leading_axes():
    found = bind(GEMM, {"x": (2, 3, 4, 8), "w": (8, 5), "scale": (5,), "y": (2, 3, 4, 5)})
    assert found.axes == {"M": 4, "K": 8, "N": 5} and found.leading == (2, 3) and found.folds == "M"
    assert found.folded == {"M": 24, "K": 8, "N": 5}
    assert found.forms["scale"] == Form(("N",))


def test_bind_keeps_symbols():
    found = bind(GEMM, {"x": ("batch", "seq", 64), "w": (64, "out")})
    assert found.axes == {"M": "seq", "K": 64, "N": "out"} and found.leading == ("batch",)
    with pytest.raises(TypeError, match="symbolic"):
        _ = found.folded


@pytest.mark.parametrize(
    ("scale", "form"),
    [((), ()), ((1,), ()), ((1, 1), ()), ((5,), ("N",)), ((1, 5), ("N",)), ((1, 1, 5), ("N",)), ((4, 1), ("M", 1))],
)
def test_lower_rank_forms_take_leading_ones(scale, form):
    found = bind(GEMM, {"x": (4, 8), "w": (8, 5), "scale": scale})
    assert found.forms["scale"].axes == form


@pytest.mark.parametrize(
    ("shapes", "word"),
    [
        ({"x": (4,), "w": (8, 5)}, "for x"),
        ({"x": (4, 8), "w": (7, 5)}, "K = 7 where K = 8"),
        ({"x": (2, 4, 8), "w": (8, 5), "scale": (4, 1)}, "fold into M"),
        ({"x": (2, 4, 8), "w": (8, 5), "y": (3, 4, 5)}, "extents (3,) of"),
        ({"x": (4, 8), "w": (8, 5), "scale": (2, 5)}, "for scale"),
        ({"x": (4, 8), "w": (2, 8, 5)}, "for w"),
        ({"x": ("b", 8), "w": (8, 5), "scale": ("s", 5)}, "for scale"),  # an unknown extent is not provably 1
        ({"x": ("b", "k"), "w": ("j", 5)}, "K = j where K = k"),
    ],
)
def test_bind_refuses(shapes, word):
    with pytest.raises(ArgumentError) as caught:
        bind(GEMM, shapes)
    assert word in str(caught.value) and caught.value.facts["tensor"] in shapes


def test_leading_of_one_does_not_bar_the_folded_axis():
    found = bind(GEMM, {"x": (1, 4, 8), "w": (8, 5), "scale": (4, 1)})
    assert found.folded["M"] == 4


def test_a_later_tensor_may_force_another_form():
    types = {"a": parse("T[M N] | T[N M]"), "b": parse("T[M 3]")}
    assert bind(types, {"a": (2, 5), "b": (5, 3)}).axes == {"N": 2, "M": 5}


def test_a_repeated_axis_is_one_extent():
    square = {"a": parse("T[N N]")}
    assert bind(square, {"a": (3, 3)}).axes == {"N": 3}
    with pytest.raises(ArgumentError):
        bind(square, {"a": (3, 4)})


def test_all_dots_must_fold_into_one_axis():
    with pytest.raises(SpecError, match=r"'S' in q and 'L' in k|'L' in k and 'S' in q"):
        folded_axis({"q": parse("T[... S D]"), "k": parse("T[... L D]")})
    assert folded_axis({"q": parse("T[S D]")}) == ""


@given(st.lists(st.integers(0, 5), max_size=3), st.lists(st.integers(0, 5), min_size=2, max_size=2))
def test_expand_is_the_inverse_of_bind(lead, axes):
    types = {"x": parse("T[... M K]")}
    shape = (*lead, *axes)
    found = bind(types, {"x": shape})
    assert expand(found.forms["x"], found.axes, found.leading) == shape


CHANNELS = {"x": parse("T[N C S ...]"), "scale": parse("T[C]"), "y": parse("T[N S ... C]")}


def test_axes_fold_where_the_dots_stand():
    x, y = CHANNELS["x"].forms[0], CHANNELS["y"].forms[0]
    assert (x.axes, x.before, x.folds, str(x)) == (("N", "C", "S"), 3, "S", "N C S ...")
    assert (y.axes, y.before, y.folds, str(y)) == (("N", "S", "C"), 2, "S", "N S ... C")
    found = bind(CHANNELS, {"x": (2, 6, 4, 5, 7), "scale": (6,), "y": (2, 4, 5, 7, 6)})
    assert dict(found.axes) == {"N": 2, "C": 6, "S": 4} and found.leading == (5, 7) and found.folds == "S"
    assert found.folded["S"] == 4 * 5 * 7
    assert expand(x, found.axes, found.leading) == (2, 6, 4, 5, 7)
    assert expand(y, found.axes, found.leading) == (2, 4, 5, 7, 6)
    assert bind(CHANNELS, {"x": (2, 6, 4), "scale": (6,)}).leading == ()
    for shapes in ({"x": (2, 6), "scale": (6,)}, {"x": (2, 6, 4, 5), "scale": (6,), "y": (2, 4, 6, 6)}):
        with pytest.raises(ArgumentError):
            bind(CHANNELS, shapes)


def test_dots_fold_into_one_axis():
    with pytest.raises(SpecError, match="'S' in x and 'C' in y"):
        bind({"x": parse("T[N C S ...]"), "y": parse("T[N C ... S]")}, {})


def test_a_channels_last_array_folds_its_pixels():
    form = CHANNELS["x"].forms[0]
    found = Tensor("float16", (2, 6, 4, 5), (120, 1, 30, 6)).folded(form)
    assert (found.shape, found.strides, found.foldable) == ((2, 6, 20), (120, 1, 6), True)
    assert not Tensor("float16", (2, 6, 4, 5), (120, 1, 6, 24)).folded(form).foldable


def test_dots_beside_one_stand_for_ones():
    film = parse("T[N C 1 ...]")
    (form,) = film.forms
    assert (form.folds, form.ones, str(form)) == ("", True, "N C 1 ...")
    for first, second in (("x", "s"), ("s", "x")):  # whichever is declared first
        types = {first: parse("T[N C S ...]" if first == "x" else "T[N C 1 ...]")}
        types[second] = film if second == "s" else parse("T[N C S ...]")
        found = bind(types, {"x": (2, 6, 4, 5), "s": (2, 6, 1, 1)})
        assert found.leading == (5,) and found.folded == {"N": 2, "C": 6, "S": 20}
        for wrong in ((2, 6, 1), (2, 6, 1, 5), (2, 6, 4, 1)):
            with pytest.raises(ArgumentError):
                bind(types, {"x": (2, 6, 4, 5), "s": wrong})
    assert expand(form, {"N": 2, "C": 6, "S": 4}, (5, 7)) == (2, 6, 1, 1, 1)
    assert folded_axis({"x": parse("T[N C S ...]"), "s": film}) == "S"
    assert Tensor("float16", (2, 6, 1, 1), (6, 1, 1, 1)).folded(form).shape == (2, 6, 1)
