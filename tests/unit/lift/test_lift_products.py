"""Matrix products and tidying: Gemm, Transposes into flags, moves that cancel."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from lifting import Spell, assert_lifted, kinds, lifted, lifted_of

from fusionreg.core.ir import Value


def flags(node):
    return node.attrs.get("transA", 0), node.attrs.get("transB", 0)


@pytest.mark.parametrize("perm", [(0, 1), (1, 0), None])
@pytest.mark.parametrize("side", ["a", "b"])
def test_two_dimensional_transposes(perm, side):
    """onnxruntime#32228: A = [[1,2],[3,4]], B = [[1,0],[1,1]]; an identity permutation must not toggle the flag."""
    n = Spell()
    a, b = n.x(2, 2), n.x(2, 2)
    attrs = {} if perm is None else {"perm": perm}
    left = n.op("Transpose", a, **attrs) if side == "a" else a
    right = n.op("Transpose", b, **attrs) if side == "b" else b
    graph = n.done(n.op("MatMul", left, right))
    result = assert_lifted(graph, {"MatMul": 1}, 1e-12)
    swapped = perm != (0, 1)
    assert flags(result.nodes[0]) == ((int(swapped), 0) if side == "a" else (0, int(swapped)))
    inputs = {"x": np.array([[1, 2], [3, 4]], "f"), "x_2": np.array([[1, 0], [1, 1]], "f")}
    want = {
        ("a", False): [[3, 2], [7, 4]],
        ("a", True): [[4, 3], [6, 4]],
        ("b", False): [[3, 2], [7, 4]],
        ("b", True): [[1, 3], [3, 7]],
    }
    np.testing.assert_array_equal(lifted_of(graph, inputs), want[side, swapped])


@pytest.mark.parametrize("perm", [None, *permutations(range(3))])
@pytest.mark.parametrize("side", ["a", "b"])
def test_three_dimensional_transposes(perm, side):
    """Only the swap of the last two axes is a flag; equal extents would hide any other."""
    n = Spell()
    a, b = n.x(3, 3, 3), n.x(3, 3, 3)
    t = n.op("Transpose", a if side == "a" else b, **({} if perm is None else {"perm": perm}))
    graph = n.done(n.op("MatMul", t, b) if side == "a" else n.op("MatMul", a, t))
    kept = {} if perm in ((0, 1, 2), (0, 2, 1)) else {"Transpose": 1}
    result = assert_lifted(graph, {"MatMul": 1, **kept}, 1e-12)
    assert sum(flags(result.nodes[-1])) == (perm == (0, 2, 1))


def test_two_transposes_in_a_row():
    for perms, flag in ((((1, 0), (1, 0)), 0), (((1, 0), (0, 1)), 1)):
        n = Spell()
        t = n.op("Transpose", n.op("Transpose", n.x(3, 3), perm=perms[0]), perm=perms[1])
        result = assert_lifted(n.done(n.op("MatMul", t, n.x(3, 3))), {"MatMul": 1}, 1e-12)
        assert flags(result.nodes[0]) == (flag, 0)


def test_shared_transpose_survives_for_its_other_reader():
    """onnxruntime#22762: a Transpose is folded into both its products; one that something else reads stays."""
    n = Spell()
    x, w = n.x(3, 4), n.x(4, 3)
    t = n.op("Transpose", w)
    graph = n.done(n.op("MatMul", x, n.op("Transpose", x)), n.op("MatMul", t, w), n.op("Neg", t))
    result = assert_lifted(graph, {"MatMul": 2, "Transpose": 1, "Neg": 1}, 1e-12)
    assert sorted(flags(m) for m in result.nodes if m.op == "MatMul") == [(0, 1), (1, 0)]


def test_transposed_weight_is_not_copied():
    """The weight stays as the model stores it: the flag, not a transposed copy."""
    n = Spell()
    w = n.weight((5, 4))
    result = assert_lifted(n.done(n.op("MatMul", n.x(3, 4), n.op("Transpose", w, perm=(1, 0)))), {"MatMul": 1}, 1e-12)
    assert result.nodes[0].inputs == ("x", w) and result.constants[w].shape == (5, 4)


def test_transpose_of_a_vector_beside_a_matrix():
    n = Spell()
    graph = n.done(n.op("MatMul", n.op("Transpose", n.x(4)), n.x(4, 3)))
    assert_lifted(graph, {"MatMul": 1}, 1e-12)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("beta", [1.0, 0.25, 0.0])
@pytest.mark.parametrize("trans", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("bias", [None, (), (5,), (1, 5), (3, 1), (3, 5)])
def test_gemm(alpha, beta, trans, bias):
    n = Spell()
    a = n.x(*((4, 3) if trans[0] else (3, 4)))
    b = n.x(*((5, 4) if trans[1] else (4, 5)))
    c = [] if bias is None else [n.x(*bias)]
    graph = n.done(n.op("Gemm", a, b, *c, alpha=alpha, beta=beta, transA=trans[0], transB=trans[1]))
    expected = {"MatMul": 1}
    scaled = (alpha != 1.0) + (beta not in (0.0, 1.0) and bias is not None)
    if scaled:
        expected["Mul"] = scaled
    if bias is not None and beta != 0.0:
        expected["Add"] = 1
    behind = len(expected) > 1  # what a kernel for the product takes in, which reads columns of a by their stride
    if trans[0] and behind:
        expected["Transpose"] = 1
    result = assert_lifted(graph, expected, 1e-6)
    (product,) = (node for node in result.nodes if node.op == "MatMul")
    assert flags(product) == ((0, trans[1]) if behind else trans)


def test_gemm_of_integers_and_of_mixed_types_stays():
    n = Spell("int32")
    assert kinds(n.done(n.op("Gemm", n.x(3, 4), n.x(4, 5)))) == {"Gemm": 1}


def test_scale_after_and_before():
    """onnx-mlir#3214: a product and its scalar factor stay two operators, in either order of operands."""
    for left in (False, True):
        n = Spell()
        h = n.op("MatMul", n.x(2, 3), n.weight((3, 4)))
        assert_lifted(n.done(n.mul(0.3, h) if left else n.mul(h, 0.3)), {"MatMul": 1, "Mul": 1}, 1e-12)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("c", [8.0, -0.5, 2.0**10])
def test_division_by_a_power_of_two_is_a_product(kind, c):
    n = Spell(kind)
    result = assert_lifted(n.done(n.div(n.x(3, 4), c)), {"Mul": 1}, 1e-15)
    inverse = result.constants[result.nodes[0].inputs[1]]
    assert isinstance(inverse, np.ndarray) and float(inverse) == 1.0 / c


OTHERS = [
    ("float32", 3.0),
    ("float32", 0.0),
    ("float32", np.inf),
    ("float16", 2.0**15),
    ("float32", 2.0**127),
    ("float32", 2.0**-149),
]


@pytest.mark.parametrize(("kind", "c"), OTHERS)
def test_division_by_anything_else_stays(kind, c):
    """Never change numerics: 1/3 rounds, and a reciprocal outside the normal numbers is flushed on some devices."""
    n = Spell(kind)
    assert kinds(n.done(n.div(n.x(3, 4), c))) == {"Div": 1}


def test_integer_division_stays():
    n = Spell("int32")
    assert kinds(n.done(n.div(n.x(4), 8))) == {"Div": 1}


def test_moves_that_do_nothing():
    n = Spell()
    x = n.x(2, 6)
    y = n.op("Identity", n.op("Cast", n.op("Reshape", x, n.ints(2, 6)), to="float32"))
    y = n.op("Dropout", n.op("Transpose", y, perm=(0, 1)), n.const(0.5))
    y = n.div(n.mul(n.op("Expand", y, n.ints(1, 6)), 1.0), 1.0)
    assert_lifted(n.done(n.op("Neg", y)), {"Neg": 1}, 1e-15)


def test_moves_that_do_something():
    n = Spell()
    x = n.x(1, 6)
    y = n.op("Expand", n.op("Transpose", n.op("Reshape", x, n.ints(2, 3)), perm=(1, 0)), n.ints(4, 3, 2))
    assert_lifted(
        n.done(n.mul(y, n.const(np.ones((2, 1, 1, 1))))), {"Reshape": 1, "Transpose": 1, "Expand": 1, "Mul": 1}, 1e-15
    )


def test_dropout_in_training_stays():
    n = Spell()
    y = n.op("Dropout", n.x(4), n.const(0.5), n.const(True, "bool"))
    assert kinds(n.done(y)) == {"Dropout": 1}


def test_dropout_whose_mask_is_read_stays():
    n = Spell()
    y, mask = n.op("Dropout", n.x(4), n.const(0.5), outputs=2)
    assert kinds(n.done(n.op("Neg", y), mask))["Dropout"] == 1


RESHAPES = [((3, 4), (2, 6), True), ((3, 4), (0, 2, 2), False), ((3, 4), (-1,), True), ((4, 3), (2, 0, 2), False)]


@pytest.mark.parametrize(("first", "second", "folds"), RESHAPES)
def test_reshape_of_a_reshape(first, second, folds):
    """A 0 copies an extent of the shape in between, which would be gone."""
    n = Spell()
    graph = n.done(n.op("Reshape", n.op("Reshape", n.x(2, 6), n.ints(*first)), n.ints(*second)))
    # (2, 6) → … → (2, 6) is nothing at all
    expected = {"Reshape": 1 if folds else 2} if second != (2, 6) else {"Identity": 1}
    assert_lifted(graph, expected, 1e-15)


def test_computed_targets_that_are_known_become_constants():
    """One extent may be symbolic; two may not; an Expand needs them all."""
    n = Spell()
    x = n.x("N", 4, 6)
    s = n.op("Concat", n.op("Slice", n.op("Shape", x), n.ints(0), n.ints(1)), n.ints(24), axis=0)
    n.node("Reshape", (x, s), [Value("y", "float32", ("N", 24))])
    result = assert_lifted(n.done("y"), {"Reshape": 1}, 1e-15, N=5)
    np.testing.assert_array_equal(result.constants[result.nodes[0].inputs[1]], [-1, 24])
    n = Spell()
    x = n.x("N", "M", 6)
    s = n.op("Concat", n.op("Slice", n.op("Shape", x), n.ints(0), n.ints(2)), n.ints(2, 3), axis=0)
    n.node("Reshape", (x, s), [Value("y", "float32", ("N", "M", 2, 3))])
    assert kinds(n.done("y"))["Concat"] == 1
    n = Spell()
    x = n.x(1, 6)
    n.node("Expand", (x, n.input("s", "int64", (2,))), [Value("y", "float32", ("N", 6))])
    assert lifted(n.done("y")).nodes[0].inputs[1] == "s"


@pytest.mark.parametrize("shapes", [((2, 3, 4, 5), (6, 4, 5), (2, 3, 5, 4)), ((4, 4, 4, 4), (16, 4, 4), (4, 4, 4, 4))])
def test_swap_inside_a_merged_batch(shapes):
    """torch's exporter transposes keys as [B·H, S, D]."""
    x, middle, y = shapes
    n = Spell()
    k = n.op("Reshape", n.op("Transpose", n.op("Reshape", n.x(*x), n.ints(*middle)), perm=(0, 2, 1)), n.ints(*y))
    result = assert_lifted(n.done(n.op("MatMul", n.x(*x), k)), {"MatMul": 1}, 1e-12)
    assert flags(result.nodes[0]) == (0, 1)


def test_merged_batch_that_is_split_otherwise():
    n = Spell()
    k = n.op(
        "Reshape",
        n.op("Transpose", n.op("Reshape", n.x(2, 3, 4, 5), n.ints(6, 4, 5)), perm=(0, 2, 1)),
        n.ints(3, 2, 5, 4),
    )
    assert_lifted(n.done(n.op("Neg", k)), {"Reshape": 1, "Transpose": 1, "Neg": 1}, 1e-15)


@pytest.mark.parametrize(("split", "kept"), [((3, 2, 10, 2), 2), ((3, 2, 4, 5), 2), ((6, 5, 4), 1)])
def test_merged_batch_whose_rows_are_cut(split, kept):
    """Only where the last two axes are those that were swapped, the swap is one of four axes."""
    n = Spell()
    k = n.op("Transpose", n.op("Reshape", n.x(2, 3, 4, 5), n.ints(6, 4, 5)), perm=(0, 2, 1))
    k = n.op("Reshape", k, n.ints(*split))
    assert_lifted(n.done(n.op("Neg", k)), {"Reshape": kept, "Transpose": 1, "Neg": 1}, 1e-15)


@pytest.mark.parametrize(
    ("start", "end", "dropped", "one"), [(1, 2, 0, True), (-1, 99, 0, True), (-2, -1, -3, True), (0, 1, 1, False)]
)
@pytest.mark.parametrize("step", [(), (1,)])
def test_one_of_a_slice(start, end, dropped, one, step):
    """unbind, as torch's exporter writes it."""
    n = Spell()
    cut = n.op("Slice", n.x(3, 1, 4), n.ints(start), n.ints(end), n.ints(0), *map(n.ints, step))
    graph = n.done(n.op("Neg", n.op("Squeeze", cut, n.ints(dropped))))
    assert_lifted(graph, {"Gather": 1, "Neg": 1} if one else {"Slice": 1, "Squeeze": 1, "Neg": 1}, 1e-15)


@pytest.mark.parametrize(("target", "left"), [((2, 12), 0), ((-1, 4), 0), ((0, 6), 1)])
def test_what_a_zero_would_mean(target, left):
    """torch's exporter writes allowzero=1 for every target."""
    n = Spell()
    x = n.x(*((0, 3, 6) if 0 in target else (2, 3, 4)))
    graph = lifted(n.done(n.op("Neg", n.op("Reshape", x, n.ints(*target), allowzero=1))))
    (node,) = (m for m in graph.nodes if m.op == "Reshape")
    assert node.attrs.get("allowzero", 0) == left


def test_an_output_keeps_its_name_when_its_node_goes():
    n = Spell()
    x = n.x(2, 3)
    y = n.op("Identity", x, name="result")
    z = n.op("Dropout", n.op("Relu", x), n.const(0.1), name="other")
    assert_lifted(n.done(y, z, x), {"Identity": 2, "Relu": 1}, 1e-15)


def test_maximum_with_minus_infinity():
    n = Spell()
    x = n.x(3)
    graph = n.done(n.op("Neg", n.op("Max", n.const(-np.inf), x)))
    assert_lifted(graph, {"Neg": 1}, 1e-15)
    np.testing.assert_array_equal(lifted_of(graph, {"x": np.array([np.nan, -np.inf, 1], "f")}), [np.nan, np.inf, -1])
    n = Spell()
    assert kinds(n.done(n.op("Max", n.const(-1e30), n.x(3)))) == {"Max": 1}


def test_a_value_captured_by_a_sub_graph_is_read():
    """The hidden reader of an interior value keeps the chain as it is."""
    from fusionreg.core.frozen import FrozenDict
    from fusionreg.core.ir import Graph, Node

    n = Spell()
    x, c = n.x(4), n.input("c", "bool", ())
    s = n.op("Sigmoid", x)
    bodies = {}
    for name, op in (("then_branch", "Neg"), ("else_branch", "Abs")):
        out = f"{name}_out"
        values = FrozenDict({out: Value(out, "float32", (4,))})
        bodies[name] = Graph(name, (), (out,), (Node(f"{name}_node", op, (s,), (out,)),), values).check({s})
    n.node("If", (c,), [Value("branch", "float32", (4,))], graphs=FrozenDict(bodies))
    graph = n.done(n.mul(x, s), "branch")
    assert "Swish" not in kinds(graph) and kinds(graph)["Sigmoid"] == 1


def test_in_place_writes_between_stop_a_rewrite():
    """pytorch#130584: the value that was read before a write is not the one after it."""
    n = Spell()
    x = n.x(4)
    s = n.op("Sigmoid", x)
    n.node("Add", (x, x), [Value("written", "float32", (4,))], mutates=(x,))
    graph = n.done(n.mul(x, s), "written")
    assert "Swish" not in kinds(graph)


@pytest.mark.parametrize("written", ["x", "copy", "other"])
def test_a_copy_of_what_is_written_in_place_stays(written):
    """y = x.clone(); x.add_(1): y is what x was."""
    n = Spell()
    x, z = n.x(4), n.x(4)
    y = n.op("Identity", x)
    n.node(
        "Add",
        ({"x": x, "copy": y, "other": z}[written], z),
        [Value("w", "float32", (4,))],
        mutates=({"x": x, "copy": y, "other": z}[written],),
    )
    graph = n.done(n.op("Neg", y), n.op("Abs", x), "w")
    assert kinds(graph).get("Identity", 0) == (0 if written == "other" else 1)


def test_sum_of_two():
    n = Spell()
    assert_lifted(n.done(n.op("Sum", n.x(3, 4), n.x(4))), {"Add": 1}, 1e-15)
    n = Spell()
    assert_lifted(n.done(n.op("Sum", n.x(3, 4), n.x(4), n.x(3, 1))), {"Sum": 1}, 1e-15)


def test_rules_name_themselves_and_settle():
    from lifting import OPS

    from fusionreg.core.lift import RULES, compile_rules, lift

    log = []
    n = Spell()
    x = n.x(4)
    lift(n.done(n.mul(x, n.op("Sigmoid", x))), OPS, log)
    assert [rule for rule, _ in log] == ["swish"]
    assert compile_rules(RULES, OPS).rules == RULES


@pytest.mark.parametrize(("first", "second"), [("Squeeze", "Unsqueeze"), ("Unsqueeze", "Squeeze")])
@pytest.mark.parametrize(("axes", "back", "gone"), [((1,), (1,), True), ((1,), (3,), False), ((-3,), (1,), True)])
def test_axes_that_come_back(first, second, axes, back, gone):
    """As products of vectors follow each other: the axis of extent 1 goes and comes; elsewhere it is another shape."""
    n = Spell()
    x = n.x(4, 1, 3, 1) if first == "Squeeze" else n.x(4, 3, 1)
    graph = n.done(n.op("Relu", n.op(second, n.op(first, x, n.ints(*axes)), n.ints(*back))))
    assert_lifted(graph, {"Relu": 1} if gone else {"Relu": 1, first: 1, second: 1}, 0)
