"""FrozenDict: immutable, hashable, ordered, equal by content."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionreg.core.frozen import EMPTY, FrozenDict

DICTS = st.dictionaries(st.text(max_size=3), st.integers(), max_size=5)


@given(DICTS)
def test_is_the_dict_it_was_made_of(plain):
    frozen = FrozenDict(plain)
    assert frozen == plain and dict(frozen) == plain and list(frozen) == list(plain) and len(frozen) == len(plain)
    for again in (pickle.loads(pickle.dumps(frozen)), copy.deepcopy(frozen)):
        assert again == frozen and hash(again) == hash(frozen) and list(again) == list(frozen)


@given(DICTS, DICTS)
def test_equal_values_have_equal_hashes(a, b):
    assert (FrozenDict(a) == FrozenDict(b)) == (a == b)
    if a == b:
        assert hash(FrozenDict(a)) == hash(FrozenDict(b))
    assert dict(FrozenDict(a) | b) == a | b
    assert hash(FrozenDict(a)) == hash(FrozenDict(reversed(a.items())))  # equal whatever the order


def test_immutable():
    plain = {"a": 1}
    frozen = FrozenDict(plain)
    plain["a"] = 2
    assert frozen["a"] == 1
    with pytest.raises(AttributeError):
        frozen.x = 1
    with pytest.raises(AttributeError):
        frozen._items = {}
    with pytest.raises(TypeError):
        frozen["a"] = 3
    with pytest.raises(TypeError):
        del frozen["a"]
    for method in ("pop", "update", "setdefault", "clear", "popitem"):
        assert not hasattr(frozen, method)


def test_union_leaves_both_alone():
    left, right = FrozenDict(a=1), FrozenDict(b=2)
    assert left | right == {"a": 1, "b": 2} and left == {"a": 1} and right == {"b": 2} and EMPTY == {}


def test_unhashable_values_show_when_hashed():
    with pytest.raises(TypeError):
        hash(FrozenDict(a=[1]))
    assert FrozenDict(a=1) != 3 and repr(FrozenDict(a=1)) == "FrozenDict({'a': 1})"
