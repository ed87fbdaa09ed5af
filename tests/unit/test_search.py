"""The search for bare patterns: what one name, one node, one choice and one operand mean."""

from __future__ import annotations

import pytest
from graphs import Net, fusion, largest, matches_of, vocabulary

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Value
from fusionreg.core.matcher.search import match_pattern
from fusionreg.core.pattern.instantiate import parse_pattern


def found(graph, text, outputs=("y",), legal=False):
    """Bindings of a bare pattern at the node that writes the graph's first output."""
    pattern = parse_pattern(text, vocabulary(), "test", outputs)
    return list(match_pattern(graph, pattern, graph.producers[graph.outputs[0]], vocabulary(), legal=legal))


def test_bindings_say_what_stands_for_what():
    net = Net()
    x = net.input("x", "float32", (4,))
    graph = net.build([net.op("Mul", net.op("Add", net.const(1.0), x), net.const(0.5))])
    (b,) = found(graph, "y = Mul(Add(v, 1.0), 0.5)")
    assert b.root.op == "Mul" and [n.op for n in b.nodes] == ["Add", "Mul"]
    assert dict(b.inputs) == {"v": x} and dict(b.outputs) == {"y": "mul"} and dict(b.values) == {"v": x, "y": "mul"}
    assert {b.steps[i].op for i in b.steps} == {"Add", "Mul"}
    assert dict(b.literals) == {(0, 0): "c", (1, 1): "c_2"}  # by the node's operand, not the pattern's


def test_one_node_is_one_step():
    net = Net()
    r = net.op("Relu", net.input("x", "float32", (4,)))
    assert not found(net.build([net.op("Add", r, r)]), "y = Add(Relu(a), Relu(b))")


@pytest.mark.parametrize("same", [True, False])
def test_one_interior_value_is_one_node(same):
    net = Net()
    x, b = net.input("x", "float32", (4,)), net.input("b", "float32", (4,))
    h = net.op("Add", x, b)
    other = h if same else net.op("Add", x, b)
    graph = net.build([net.op("Sub", h, net.op("Relu", other))])
    assert bool(found(graph, "h = Add(x, b)\ny = Sub(h, Relu(h))")) == same


@pytest.mark.parametrize("crossed", [False, True])
def test_outputs_of_one_node_are_told_apart(crossed):
    net = Net()
    a, b = net.op("Split", net.input("x", "float32", (4,)), outputs=2, num_outputs=2)
    graph = net.build([net.op("Sub", *((b, a) if crossed else (a, b)))])
    assert bool(found(graph, "a, b = Split(x, num_outputs=2)\ny = Sub(a, b)")) != crossed


def test_another_output_of_the_right_operator_is_not_the_operand():
    for read in (0, 1):
        net = Net()
        parts = net.op("Split", net.input("x", "float32", (4,)), outputs=2, num_outputs=2)
        graph = net.build([net.op("Relu", parts[read])])
        assert bool(found(graph, "a, _ = Split(x, num_outputs=2)\ny = Relu(a)")) == (read == 0)


@pytest.mark.parametrize(
    ("operands", "text", "fits"),
    [
        ((0.0,), "y = Clip(x, 0.0)", True),
        ((0.0, 6.0), "y = Clip(x, 0.0)", False),
        ((0.0,), "y = Clip(x, 0.0, 6.0)", False),
        ((None, 6.0), "y = Clip(x, None, 6.0)", True),
        ((0.0, 6.0), "y = Clip(x, None, 6.0)", False),
        ((0.0, None), "y = Clip(x, 0.0)", True),
        ((), "y = Clip(x)", True),
    ],
)
def test_operands_that_are_left_out_are_left_out_on_both_sides(operands, text, fits):
    net = Net()
    rest = [None if o is None else net.const(o) for o in operands]
    graph = net.build([net.op("Clip", net.input("x", "float32", (4,)), *rest)])
    assert bool(found(graph, text)) == fits


@pytest.mark.parametrize(("first", "second", "fits"), [("Relu", "Relu", True), ("Relu", "Tanh", False)])
def test_one_choice_is_one_alternative(first, second, fits):
    net = Net()
    a, b = net.input("a", "float32", (4,)), net.input("b", "float32", (4,))
    graph = net.build([net.op("Sub", net.op(first, a), net.op(second, b))])
    text = 'y = Sub(any_of(Relu, Tanh, "act")(a), any_of(Relu, Tanh, "act")(b))'
    bindings = found(graph, text)
    assert bool(bindings) == fits
    if fits:
        assert bindings[0].choices["act"] == first


def test_two_optional_steps_of_one_choice_are_both_there_or_both_left_out():
    text = 'y = Sub(optional(Relu, "act")(a), optional(Relu, "act")(b))'
    for left, right, sizes in ((True, True, [3, 1]), (True, False, [1]), (False, False, [1])):
        net = Net()
        a, b = net.input("a", "float32", (4,)), net.input("b", "float32", (4,))
        graph = net.build([net.op("Sub", net.op("Relu", a) if left else a, net.op("Relu", b) if right else b)])
        assert [len(x.nodes) for x in found(graph, text)] == sizes


@pytest.mark.parametrize("overridable", [False, True])
def test_equal_constants_are_one_value_unless_a_caller_may_change_one(overridable):
    net = Net()
    h = net.op("Add", net.input("x", "float32", (4,)), net.const([1.0, 2, 3, 4]))
    graph = net.build([net.op("Mul", h, net.const([1.0, 2, 3, 4], overridable=overridable))])
    assert bool(found(graph, "y = Mul(Add(x, c), c)")) != overridable


def test_constants_of_other_dtype_or_shape_are_other_values():
    for value, kind in (([1.0, 2, 3, 4], "float16"), ([[1.0, 2, 3, 4]], "float32"), ([1.0, 2, 3, 5], "float32")):
        net = Net()
        first = net.const([1.0, 2, 3, 4])
        h = net.op("Concat", net.input("x", "float32", (4,)), first, axis=0)
        second = net.const(value, kind)
        net.node("Concat", [h, second], [Value("y", "float32", (12,))], attrs={"axis": 0})
        assert not found(net.build(["y"]), "y = Concat(Concat(x, c, axis=0), c, axis=0)"), (value, kind)


def test_an_attribute_that_the_vocabulary_does_not_know_is_refused():
    net = Net()
    x = net.input("x", "float32", (4,))
    net.node("Relu", [x], [Value("y", "float32", (4,))], attrs={"upper": 6.0})
    assert not found(net.build(["y"]), "y = Relu(x)")


@pytest.mark.parametrize(
    ("alpha", "literal", "fits"),
    [(0.2, "0.2", True), (float.fromhex("0x1.99999ap-3"), "0.2", True), (0.2001, "0.2", False), (1, "1.0", True)],
)
def test_float_attributes_compare_as_onnx_stores_them(alpha, literal, fits):
    net = Net()
    graph = net.build([net.op("LeakyRelu", net.input("x", "float32", (4,)), alpha=alpha)])
    assert bool(found(graph, f"y = LeakyRelu(x, alpha={literal})")) == fits


@pytest.mark.parametrize(("axes", "text", "fits"), [((0,), "(0,)", True), ((-3,), "(0,)", True), ((0,), "(1,)", False)])
def test_unsqueeze_axes_count_in_the_rank_of_the_result(axes, text, fits):
    net = Net()
    graph = net.build([net.op("Unsqueeze", net.input("x", "float32", (4, 4)), net.const(axes, "int64"))])
    assert bool(found(graph, f"y = Unsqueeze(x, {text})")) == fits


def test_legal_forms_only():
    net = Net()
    h = net.op("Relu", net.input("x", "float32", (4,)))
    graph = net.build([net.op("Tanh", h), h])
    text = "y = Tanh(Relu(x))"
    assert len(found(graph, text)) == 1 and not found(graph, text, legal=True)


def test_skipping_to_the_root_of_an_optional_tail():
    text = 'y = optional(Relu, "a")(optional(Tanh, "b")(Neg(x)))'
    for ops, choices in (
        (("Neg",), {"a": "none", "b": "none"}),
        (("Neg", "Tanh"), {"a": "none", "b": "Tanh"}),
        (("Neg", "Relu"), {"a": "Relu", "b": "none"}),
        (("Neg", "Tanh", "Relu"), {"a": "Relu", "b": "Tanh"}),
    ):
        net = Net()
        v = net.input("x", "float32", (4,))
        for op in ops:
            v = net.op(op, v)
        (b,) = found(net.build([v]), text)
        assert dict(b.choices) == choices and len(b.nodes) == len(ops) and b.outputs["y"] == v


def test_an_output_inside_the_chain_stays_visible():
    inner = fusion("p.inner", "h = Relu(x)\ny = Tanh(h)", {"x": "T[N]"}, {"h": "T[N]", "y": "T[N]"})
    net = Net()
    h = net.op("Relu", net.input("x", "float32", (4,)))
    graph = net.build([net.op("Tanh", h), net.op("Neg", h)])
    assert largest(graph, inner).outputs == FrozenDict(h="relu", y="tanh")


def test_two_outputs_are_two_values():
    both = fusion("p.both", 'h = Relu(x)\ny = optional(Tanh, "a")(h)', {"x": "T[N]"}, {"h": "T[N]", "y": "T[N]"})
    for tail, count in ((True, 1), (False, 0)):
        net = Net()
        h = net.op("Relu", net.input("x", "float32", (4,)))
        assert len(matches_of(net.build([net.op("Tanh", h), h] if tail else [h]), both)) == count


@pytest.mark.parametrize("present", [True, False])
def test_readers_of_a_step_that_is_left_out_read_the_one_before(present):
    text = 'h = Neg(x)\ns = optional(Relu, "a")(h)\ny = Mul(s, Tanh(s))'
    entry = fusion("p.middle", text, {"x": "T[N]"}, {"y": "T[N]"})
    net = Net()
    s = net.op("Neg", net.input("x", "float32", (4,)))
    s = net.op("Relu", s) if present else s
    graph = net.build([net.op("Mul", s, net.op("Tanh", s))])
    assert len(largest(graph, entry).nodes) == 3 + present


def test_the_largest_form_wins_whichever_is_found_first():
    text = 'y = Add(optional(Relu, "a")(x), optional(Tanh, "b")(z))'
    entry = fusion("p.sides", text, {"x": "T[N]", "z": "T[N]"}, {"y": "T[N]"})
    for swap in (False, True):
        net = Net()
        r, t = net.op("Relu", net.input("p", "float32", (4,))), net.op("Tanh", net.input("q", "float32", (4,)))
        m = largest(net.build([net.op("Add", *((t, r) if swap else (r, t)))]), entry)
        assert len(m.nodes) == 3 and dict(m.inputs) == {"x": "p", "z": "q"}


def test_the_largest_spelling_wins_then_the_first():
    kind = {"x": "T[N]"}, {"y": "T[N]"}
    net = Net()
    graph = net.build([net.op("Tanh", net.op("Relu", net.input("x", "float32", (4,))))])
    for texts, spelling in (
        (("y = Tanh(Relu(x))", "y = Tanh(x)"), 0),
        (("y = Tanh(x)", "y = Tanh(Relu(x))"), 1),
        (("y = Tanh(Relu(x))", "h = Relu(x)\ny = Tanh(h)"), 0),
    ):
        (m,) = matches_of(graph, fusion("p.spelled", texts, *kind))
        assert m.spelling == spelling and len(m.nodes) == 2


def test_an_optional_operand_chain_that_is_not_needed_is_dropped():
    text = 'y = optional(Mul, "gate")(Relu(x), Sigmoid(z))'
    net = Net()
    plain = net.build([net.op("Relu", net.input("x", "float32", (4,)))])
    (b,) = found(plain, text)
    assert "z" not in b.inputs and len(b.nodes) == 1
    gated = fusion("p.gated", text, {"x": "T[N]", "z": "T[N]"}, {"y": "T[N]"})
    assert not matches_of(plain, gated)  # z is required and has no value
