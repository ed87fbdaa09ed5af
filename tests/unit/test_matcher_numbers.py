"""Tuples of numbers as operands of a pattern: names in them are bound, 0 and -1 in a Reshape's target are ONNX's."""

from __future__ import annotations

import pytest
from graphs import Net

from fusionreg.core.errors import PatternError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.matcher.search import match_pattern
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.pattern.instantiate import instantiate, parse_pattern
from fusionreg.core.spec import AttributeSpec, FusionSpec

OPS = default_vocabulary()
HEADS = "y = Transpose(Reshape(x, (0, 0, heads, -1)), perm=(0, 2, 1, 3))"


def attributes(text, before, after, target=None):
    """What the pattern binds where x of one shape is reshaped to another; None where it does not fit."""
    net = Net()
    x = net.input("x", "float32", before)
    r = net.op("Reshape", x, net.const(after if target is None else target, "int64"))
    y = net.op("Transpose", r, perm=(0, 2, 1, 3) if len(after) == 4 else tuple(range(len(after))))
    graph = net.build((y,))
    assert graph.values[r].shape == after
    return bound(text, graph)


def bound(text, graph):
    found = list(match_pattern(graph, parse_pattern(text, OPS), graph.nodes[-1], OPS))
    return dict(found[0].attributes) if found else None


@pytest.mark.parametrize(
    ("before", "after", "target", "heads"),
    [
        ((2, 5, 12), (2, 5, 3, 4), None, 3),
        ((2, 5, 12), (2, 5, 3, 4), (0, 0, 3, -1), 3),
        ((2, 5, 12), (2, 5, 3, 4), (2, -1, 3, 4), 3),
        ((2, 5, 12), (5, 2, 3, 4), None, None),  # other rows
        ((2, 5, 12), (2, 3, 5, 4), None, None),
        ((10, 12), (2, 5, 3, 4), None, None),  # the second axis is not that of x
    ],
)
def test_heads(before, after, target, heads):
    assert attributes(HEADS, before, after, target) == (None if heads is None else {"heads": heads})


def test_one_name_is_one_number():
    text = "y = Transpose(Reshape(x, (0, a, a, -1)), perm=(0, 2, 1, 3))"
    assert attributes(text, (2, 36), (2, 3, 3, 4)) == {"a": 3}
    assert attributes(text, (2, 24), (2, 3, 2, 4)) is None


def test_sizes_of_a_split():
    net = Net()
    net.input("x", "float32", (2, 12))
    graph = net.build(net.op("Split", "x", net.const([4, 4, 4], "int64"), axis=1, outputs=3))
    assert bound("a, b, c = Split(x, (-1, -1, -1), axis=-1)", graph) == {}
    assert bound("a, b, c = Split(x, (4, -1, n), axis=-1)", graph) == {"n": 4}
    assert bound("a, b, c = Split(x, (5, -1, -1), axis=-1)", graph) is None
    uneven = Net()
    uneven.input("x", "float32", (2, 12))
    graph = uneven.build(uneven.op("Split", "x", uneven.const([4, 2, 6], "int64"), axis=1, outputs=3))
    assert bound("a, b, c = Split(x, (-1, -1, -1), axis=-1)", graph) is None  # equal shares
    assert bound("a, b, c = Split(x, (4, -1, 6), axis=-1)", graph) == {}
    assert bound("a, b, c = Split(x, (-1, -1), axis=-1)", graph) is None


def test_the_reference_has_the_numbers():
    spec = FusionSpec(
        api=1, name="acme.heads", pattern=HEADS, inputs={"x": "T[B S N]"}, outputs={"y": "T[B H S D]"},
        dtypes={"T": ("float32",)}, attributes={"heads": AttributeSpec(type="int", default=3)},
    )  # fmt: skip
    graph = instantiate(parse_pattern(HEADS, OPS), spec, dtypes={"T": "float32"}, shapes={"x": (2, 5, 12)}, ops=OPS)
    assert graph.values["y"].shape == (2, 3, 5, 4)
    text, shapes = "a, b, c = Split(x, (-1, 2, -1), axis=-1)", {"x": (2, 5, 12)}
    outputs = FrozenDict(a="T[B S D]", b="T[B S E]", c="T[B S D]")
    parts = spec.model_copy(update={"pattern": (text,), "outputs": outputs})
    graph = instantiate(parse_pattern(text, OPS), parts, dtypes={"T": "float32"}, shapes=shapes, ops=OPS)
    assert [graph.values[n].shape[-1] for n in "abc"] == [5, 2, 5]
    with pytest.raises(PatternError, match="letters, digits"):
        parse_pattern("y = Reshape(x, (0, _a))", OPS)
