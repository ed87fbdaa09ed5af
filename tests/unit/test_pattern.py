"""Pattern text: its meaning as a graph, what it refuses, and the reference it stands for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionreg.core.errors import ArgumentError, GraphError, PatternError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.pattern.instantiate import (
    AttributeName,
    Input,
    Literal,
    Output,
    instantiate,
    parse_pattern,
    resolve_attributes,
    resolve_choices,
)
from fusionreg.core.spec import AttributeSpec, FusionSpec

OPS = default_vocabulary()

GEMM = """\
h = MatMul(x, w, transB=transB)
s = optional(Mul)(h, scale)
b = optional(Add)(s, bias)
y = optional(any_of(Relu, Tanh, gelu_tanh=Gelu(approximate="tanh")), "activation")(b)
"""


def spec(pattern: str = GEMM, **changes) -> FusionSpec:
    fields = {
        "api": 1,
        "name": "acme.gemm",
        "pattern": pattern,
        "inputs": {"x": "T[... M K]", "w": "T[K N] | T[N K]", "scale": "T[] | T[N]", "bias": "T[N]"},
        "outputs": {"y": "T[... M N]"},
        "dtypes": {"T": ("float16", "float32")},
        "attributes": {"transB": AttributeSpec(type="int", default=0, choices=(0, 1), static=True)},
    }
    return FusionSpec(**{**fields, **changes})


def parse(text: str, outputs=None):
    return parse_pattern(text, OPS, "acme.f", outputs)


def test_steps():
    p = parse(GEMM)
    assert p.inputs == ("x", "w", "scale", "bias") and p.optional == {"scale", "bias"}
    assert p.outputs == {"y": Output(3)} and p.attributes == {"transB"}
    assert p.choices == {"activation": ("Relu", "Tanh", "gelu_tanh", "none")}
    matmul, mul, _, act = p.steps
    assert matmul.operands == (Input("x"), Input("w")) and not matmul.optional
    assert matmul.alternatives[0].attributes == {"transB": AttributeName("transB")}
    assert mul.optional and mul.gates == ("scale",) and mul.choice == "" and mul.operands[0] == Output(0)
    assert act.choice == "activation" and act.ops == ("Relu", "Tanh", "Gelu") and act.line == 4
    assert p.readers == {(0, 0): (1,), (1, 0): (2,), (2, 0): (3,)}


def test_nested_calls_literals_and_several_outputs():
    p = parse("a, _ = Split(Mul(x, -0.5), num_outputs=2)\ny = Clip(a, None, 6)\nz = ReduceSum(a, (0, -1))")
    assert p.steps[0].operands == (Input("x"), Literal(-0.5))
    assert p.steps[1].outputs == ("a", "") and p.steps[1].operands == (Output(0),)
    assert p.steps[2].operands == (Output(1), None, Literal(6))
    assert p.steps[3].operands == (Output(1), Literal((0, -1)))
    assert set(p.outputs) == {"y", "z"}


def test_an_interior_value_may_be_an_output():
    p = parse("h = Relu(x)\ny = Exp(h)", ("h", "y"))
    assert p.outputs == {"h": Output(0), "y": Output(1)}


def test_a_shared_choice_has_one_value():
    p = parse('a = any_of(Relu, Tanh, "act")(x)\nb = any_of(Relu, Tanh, "act")(w)\ny = Add(a, b)')
    assert p.choices == {"act": ("Relu", "Tanh")}
    with pytest.raises(PatternError, match="has keys"):
        parse('a = any_of(Relu, Tanh, "act")(x)\ny = any_of(Relu, Exp, "act")(a)')


def test_keywords_of_the_outer_call_reach_every_alternative():
    p = parse('y = any_of(ReduceSum, ReduceMean, "r")(x, keepdims=0)')
    assert all(a.attributes == {"keepdims": 0} for a in p.steps[0].alternatives)


def test_domain_operators_are_written_with_a_dot():
    name = next(n for n in OPS if n.startswith("fusionreg::"))
    with pytest.raises(PatternError, match=r"operands for|without"):  # it was found: only the operands are wrong
        parse(f"y = {name.replace('::', '.')}()")


@pytest.mark.parametrize(
    ("text", "word", "line"),
    [
        ("", "empty", 1),
        ("\n\n", "empty", 1),
        ("y = ", "syntax", 1),
        ("y = x", "is assigned", 1),
        ("y = 3", "is assigned", 1),
        ("h = Exp(x)\ny = Rellu(h)", "did you mean Relu", 2),
        ("x = Relu(x)", "read before it is assigned", 1),
        ("y = Relu(z)\nz = Relu(x)", "read before it is assigned", 2),
        ("y = Relu(x)\ny = Relu(y)", "assigned twice", 2),
        ("import os", "import statement", 1),
        ("for i in x: pass", "for statement", 1),
        ("y: int = Relu(x)", "annassign statement", 1),
        ("y += Relu(x)", "augassign", 1),
        ("y = z = Relu(x)", "assign statement", 1),
        ("y[0] = Relu(x)", "target", 1),
        ("y = Relu(x, x)", "2 operands for Relu", 1),
        ("y = Add(x)", "1 operands for Add", 1),
        ("a, b = Relu(x)", "2 outputs for Relu", 1),
        ("y = Relu(None)", "not optional", 1),
        ("y = Relu(*x)", "operand", 1),
        ("y = Relu(x.y)", "operand", 1),
        ("y = Relu('x')", "operand", 1),
        ("y = Gelu(x, aproximate='tanh')", "did you mean approximate", 1),
        ("y = Gelu(x, **k)", "** in a call", 1),
        ("y = MatMul(x, w, transB=f(x))", "attribute value", 1),
        ("y = MatMul(x, w, transB=__t)", "attribute name", 1),
        ("y = Relu(_x)", "name '_x'", 1),
        ("y = __import__('os')(x)", "attributes only", 1),
        ("y = (lambda: x)()", "is called", 1),
        ("h = Relu(x)\nd = Exp(h)\ny = Tanh(h)", "neither read nor an output", 2),
        ("y = optional(Relu)(x)", "every step is optional", 1),
        ("y = Exp(optional(Relu)(x))", "without a name", 1),
        ("y = Exp(any_of(Relu, Tanh)(x))", "without a name", 1),
        ("y = any_of(Relu, Relu)(x)", "a key twice", 1),
        ("y = any_of(none=Relu)(x)", "key 'none'", 1),
        ("y = any_of()(x)", "without operators", 1),
        ("y = any_of(Relu, 'a b')(x)", "choice 'a b'", 1),
        ("y = any_of('a', Relu, 'b')(x)", "2 strings", 1),
        ("y = any_of('a', Relu)(x)", "1 strings", 1),
        ("y = any_of(k=Gelu(approximate='tanh'), Relu)(x)", "Keyed alternatives stand last", 1),
        ("h = Exp(x)\ny = optional(optional(Relu))(h)", "optional inside optional", 2),
        ("h = Exp(x)\ny = optional(Relu, Tanh)(h)", "optional of 2", 2),
        ("h = Exp(x)\na, b = optional(Split)(h)", "several outputs", 2),
        ("y = optional(Add)(1, x)", "first tensor operand", 1),
        ("y = foo.Bar(x)", "unknown operator", 1),
        ("y = Cast(x)", "without to", 1),
        ("y = ReduceL2(x, axes=(-1,))", "'axes' — an operand in its place: ReduceL2(x, axes?)", 1),
        ("y = ReduceL2(x, keepdim=1)", "'keepdim' — did you mean keepdims", 1),
        ("y = " + "Relu(" * 120 + "x" + ")" * 120 + "\nz = " + "(" * 500, "line", 1),
    ],
)
def test_refused(text, word, line):
    with pytest.raises(PatternError) as caught:
        parse(text, ("y",) if "d = Exp" in text else None)
    assert word in str(caught.value) and "acme.f" in str(caught.value)
    if word != "line":
        assert caught.value.facts["line"] == line


def test_missing_output():
    with pytest.raises(PatternError, match="output 'z' is never assigned"):
        parse("y = Relu(x)", ("y", "z"))


@given(st.text(alphabet="yx=ReluAddMl(),.\n 01_*'", max_size=40))
def test_no_text_does_more_than_raise_a_typed_error(text):
    try:
        parse(text)
    except PatternError as error:
        assert error.facts["line"] >= 1


# --- choices and attributes ------------------------------------------------------------------------------------


def test_choices_resolve():
    p = parse(GEMM)
    assert resolve_choices(p, {}) == {"activation": "none"}
    assert resolve_choices(p, {"activation": "Relu"}) == {"activation": "Relu"}
    for wrong in ({"activation": "Rleu"}, {"activatoin": "Relu"}):
        with pytest.raises(ArgumentError):
            resolve_choices(p, wrong)
    required = parse('y = any_of(Relu, Tanh, "act")(x)')
    with pytest.raises(ArgumentError, match="missing choice"):
        resolve_choices(required, {})


def test_a_gated_choice_follows_its_input():
    p = parse('h = Exp(x)\ny = optional(any_of(Add, Mul, "mix"))(h, r)')
    assert p.steps[1].gates == ("r",) and p.choices == {"mix": ("Add", "Mul", "none")}
    assert resolve_choices(p, {}, absent=("r",)) == {"mix": "none"}
    with pytest.raises(ArgumentError, match="both or neither"):
        resolve_choices(p, {"mix": "Add"}, absent=("r",))
    with pytest.raises(ArgumentError, match="both or neither"):
        resolve_choices(p, {"mix": "none"})


def test_attributes_resolve():
    s = spec(attributes={"eps": AttributeSpec(type="float", default=1e-5), "n": AttributeSpec(type="int")})
    assert resolve_attributes(s, {"n": 3}) == {"eps": 1e-5, "n": 3}
    assert resolve_attributes(s, {"n": 3, "eps": 1})["eps"] == 1.0
    for wrong in ({}, {"n": 2.5}, {"n": "3"}, {"n": 1, "m": 1}):
        with pytest.raises(ArgumentError):
            resolve_attributes(s, wrong)


# --- the reference ---------------------------------------------------------------------------------------------


def build(absent=(), choices=None, attributes=None, shapes=None, dtype="float32", pattern=GEMM, **changes):
    s = spec(pattern, **changes)
    given = {"x": (2, 3, 4), "w": (4, 5), "scale": (5,), "bias": (5,), **(shapes or {})}
    return instantiate(
        parse_pattern(pattern, OPS, s.name, tuple(s.outputs)), s, dtypes={"T": dtype}, shapes=given, ops=OPS,
        choices=choices or {}, attributes=attributes or {}, absent=absent,
    )  # fmt: skip


def test_reference_computes_what_the_text_says():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 4)), rng.standard_normal((5, 4))
    scale, bias = rng.standard_normal(5), rng.standard_normal(5)
    g = build(choices={"activation": "Relu"}, attributes={"transB": 1}, shapes={"w": (5, 4)})
    found = evaluate(g, {"x": x, "w": w, "scale": scale, "bias": bias}, ops=OPS, mode="exact")
    np.testing.assert_allclose(found["y"], np.maximum((x @ w.T) * scale + bias, 0), rtol=1e-12)


@pytest.mark.parametrize(
    ("absent", "choices", "ops"),
    [
        ((), {}, ["MatMul", "Mul", "Add"]),
        (("scale",), {}, ["MatMul", "Add"]),
        (("scale", "bias"), {}, ["MatMul"]),
        (("scale", "bias"), {"activation": "Tanh"}, ["MatMul", "Tanh"]),
        ((), {"activation": "gelu_tanh"}, ["MatMul", "Mul", "Add", "Gelu"]),
    ],
)
def test_absent_steps_are_dropped(absent, choices, ops):
    g = build(absent, choices)
    assert [n.op for n in g.nodes] == ops and g.outputs == ("y",)
    assert g.inputs == tuple(i for i in ("x", "w", "scale", "bias") if i not in absent)
    assert g.values["y"].dtype == "float32" and g.values["y"].shape == (2, 3, 5)


def test_symbolic_axes_stay_symbolic():
    g = build(shapes={"x": ("b", "s", 4)})
    assert g.values["y"].shape == ("b", "s", 5)


def test_literals_take_the_dtype_of_the_tensor():
    text = "h = Mul(x, 0.1)\ny = ReduceSum(h, (-1,))"
    types = {"inputs": {"x": "T[... M K]"}, "outputs": {"y": "T[... M 1]"}, "attributes": {}}
    g = build(pattern=text, dtype="float16", **types)
    scale, axes = (g.constants[n] for n in (g.nodes[0].inputs[1], g.nodes[1].inputs[1]))
    assert scale.dtype == np.float16 and scale == np.float16(0.1) and axes.dtype == np.int64 and axes.tolist() == [-1]
    assert g.values["y"].shape == (2, 3, 1)


def test_outputs_that_are_one_value():
    text = "h = Exp(x)\ny = optional(Relu)(h)"
    g = build(pattern=text, inputs={"x": "T[M]"}, outputs={"h": "T[M]", "y": "T[M]"}, attributes={}, shapes={"x": (3,)})
    found = evaluate(g, {"x": np.ones(3, np.float32)}, ops=OPS)
    assert [n.op for n in g.nodes] == ["Exp", "Identity"]
    np.testing.assert_array_equal(found["h"], found["y"])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"absent": ("x",)}, ArgumentError),
        ({"absent": ("nothing",)}, ArgumentError),
        ({"shapes": {"w": (3, 5)}}, ArgumentError),
        ({"shapes": {"bias": (4,)}}, ArgumentError),
        ({"choices": {"activation": "Gelu"}}, ArgumentError),
        ({"attributes": {"transB": 2}}, ArgumentError),
        ({"attributes": {"transA": 1}}, ArgumentError),
        ({"attributes": {"transB": 1}}, GraphError),  # w is [K N]: the product would be another one
    ],
)
def test_instantiate_refuses(changes, error):
    with pytest.raises(error):
        build(**changes)


def test_two_gates_are_all_or_none():
    text = "h = Exp(x)\ny = optional(Clip)(h, low, high)"
    changes = {"inputs": {"x": "T[M]", "low": "T[]", "high": "T[]"}, "outputs": {"y": "T[M]"}, "attributes": {}}
    shapes = {"x": (3,), "low": (), "high": ()}
    assert len(build(pattern=text, shapes=shapes, absent=("low", "high"), **changes).nodes) == 1
    with pytest.raises(ArgumentError, match="all or none"):
        build(pattern=text, shapes=shapes, absent=("low",), **changes)
