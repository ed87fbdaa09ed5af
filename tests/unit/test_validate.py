"""What validation refuses of a fusion, each at load and each with plugin, fusion and field."""

from __future__ import annotations

import math

import pytest
from validation import INPUTS, OPS, PATTERN, RELU, TRANSB, faults, fusion

from fusionreg.core.spec import AttributeSpec, Case, Tolerance
from fusionreg.core.validate.fusion import check_fusion
from fusionreg.core.validate.reference import check_reference


def test_the_spec_under_test_is_right():
    assert faults() == {}
    entry, _ = check_fusion(fusion(), OPS, "acme")
    assert entry is not None and check_reference(entry, OPS) == []


FLOAT = AttributeSpec(type="float", default=1.0)
NAN = math.nan
WORD = AttributeSpec(type="str", choices=("none", "tanh"))
CLASH = {"x": "T[... M K]", "w": "T[K N] | T[N K]", "act_Relu": "T[N]"}
STATIC = {"type": "str", "static": True}
OPTIONAL_INT = AttributeSpec(type="int")


@pytest.mark.parametrize(
    ("changes", "field", "word"),
    [
        # names that nothing declares
        ({"pattern": PATTERN.replace("bias", "bais")}, "pattern", "'bais' is read but neither assigned nor declared"),
        ({"pattern": PATTERN.replace("=transB", "=trans")}, "pattern", "'trans' is bound but not declared"),
        ({"outputs": {"z": "T[... M N]"}}, "pattern", "'z' is never assigned"),
        ({"constraints": ("Q % 8 == 0",)}, "constraints[0]", "unknown name 'Q'"),
        ({"constraints": ("rank(q) == 2",)}, "constraints[0]", "unknown tensor 'q'"),
        ({"constraints": ("K % 8 == 0", "M +",)}, "constraints[1]", "column"),
        ({"inputs": {**INPUTS, "x": "U[... M K]"}}, "inputs.x", "dtype 'U' is not declared"),
        ({"inputs": {**INPUTS, "x": "T[... M K"}}, "inputs.x", "no form"),
        ({"axes": {"M": "rows", "Q": "none"}}, "axes.Q", "no tensor has it"),
        ({"dtypes": {"T": ("float61",)}}, "dtypes.T", "did you mean float64 or float16"),
        ({"dtypes": {"T": ("string",)}}, "dtypes.T", "unknown dtype 'string'"),
        # what nobody reads
        ({"inputs": {**INPUTS, "extra": "T[N]"}}, "inputs.extra", "does not read it"),
        ({"dtypes": {"T": ("float16",), "U": ("float16",)}}, "dtypes.U", "no tensor has it"),
        ({"attributes": {"transB": TRANSB, "alpha": FLOAT}}, "attributes.alpha", "no pattern binds it"),
        ({"tolerances": [Tolerance(dtype="float64", ulp=1, reason="r")]}, "tolerances[0]", "no output is 'float64'"),
        ({"sizes": {"q": 0.5}}, "sizes", "q = 0.5"),
        # what cannot be
        ({"sizes": {"x": -1.0}}, "sizes", "x = -1.0"),
        ({"constraints": ("K < 64", "K >= 128")}, "constraints[1]", "holds for no problem"),
        ({"constraints": ("K % 8 == 9",)}, "constraints[0]", "holds for no problem"),
        ({"constraints": ('T == "float32"',)}, "constraints[0]", "compared with 'float32'"),
        ({"constraints": ('act in ("Relu", "Gelu")',)}, "constraints[0]", "compared with 'Gelu'"),
        ({"constraints": ("T == 16",)}, "constraints[0]", "compared with 16"),
        ({"constraints": ("T * 1000000000 != T",)}, "constraints[0]", "arithmetic on 'T'"),
        ({"constraints": ("1 // 0 == 1",)}, "constraints[0]", "by zero"),
        ({"constraints": ("transB == 2",)}, "constraints[0]", "holds for no problem"),
        ({"constraints": ("contiguous(x)",)}, "constraints[0]", "contiguous() is not known here"),
        ({"constraints": ("has(wgmma)",)}, "constraints[0]", "has() is not known here"),
        ({"outputs": {"y": "T[... M Z]"}}, "outputs.y", "no input tells axis Z"),
        ({"aliases": {"y": "x"}}, "aliases", "y in x"),
        ({"aliases": {"y": "z"}}, "aliases", "an output, and an input of its type"),
        ({"outputs": {"y": "T[... M N] pinned_host"}}, "outputs.y", "only inputs"),
        ({"inputs": {**INPUTS, "w": "T[... K N]"}}, "inputs", "folds into"),
        ({"inputs": {}}, "inputs", "empty"),
        ({"pattern": ()}, "pattern", "empty"),
        ({"pattern": "import os"}, "pattern", "import statement"),
        # names that cannot be
        ({**RELU, "inputs": {"float": "T[M]"}, "pattern": "y = Relu(float)"}, "inputs", "'float'"),
        ({**RELU, "inputs": {"x": "T[class]"}, "outputs": {"y": "T[class]"}}, "axes", "'class'"),
        ({**RELU, "inputs": {"entry": "T[M]"}, "pattern": "y = Relu(entry)"}, "inputs", "'entry'"),
        ({**RELU, "inputs": {"a__b": "T[M]"}, "pattern": "y = Relu(a__b)"}, "inputs", "`__`"),
        ({**RELU, "inputs": {"x": "T[min]"}, "outputs": {"y": "T[min]"}}, "axes", "'min'"),
        ({**RELU, "inputs": {"x": "x[M]"}, "outputs": {"y": "x[M]"}, "dtypes": {"x": ("int8",)}}, "dtypes", "stands"),
        ({**RELU, "inputs": {"x": "T[x]"}, "outputs": {"y": "T[x]"}}, "axes", "stands in inputs too"),
        ({"pattern": PATTERN.replace(', "act"', "")}, "pattern", "'y' stands in outputs too"),
        ({"pattern": PATTERN.replace("bias", "act_Relu"), "inputs": CLASH}, "pattern", "'act_Relu' stands in"),
        ({**RELU, "inputs": {"range": "T[M]"}, "pattern": "y = Relu(range)"}, "inputs", "'range'"),
        ({"dtypes": {"float16": ("float32",)}, "inputs": {"x": "float16[M]"}}, "dtypes.float16", "name of a dtype"),
        # attributes
        ({"attributes": {"transB": AttributeSpec(type="int", default=1.5)}}, "attributes.transB", "1.5 is no int"),
        ({"attributes": {"transB": AttributeSpec(type="int", default=True)}}, "attributes.transB", "True is no int"),
        ({"attributes": {"transB": AttributeSpec(type="int", choices=(0, 0))}}, "attributes.transB", "twice"),
        ({"attributes": {"transB": AttributeSpec(type="int", default=3, choices=(0, 1))}}, "attributes.transB", "t 3"),
        ({"attributes": {"transB": AttributeSpec(type="float", default=0.0)}}, "pattern", "gets a float"),
        ({"attributes": {"transB": AttributeSpec(type="int", default=2**64)}}, "attributes.transB", "no int"),
        ({"pattern": PATTERN.replace("=transB", '="yes"'), "attributes": {}}, "pattern", "gets a str"),
        ({**RELU, "pattern": "y = Gelu(x, approximate=how)", "attributes": {"how": WORD}},
         "attributes.how", "static"),
        ({**RELU, "pattern": "y = Elu(x, alpha=a)", "attributes": {"a": AttributeSpec(type="float", choices=(NAN,))}},
         "attributes.a", "NaN"),
        ({**RELU, "pattern": "y = Gelu(x, approximate=how)", "attributes": {"how": AttributeSpec(**STATIC)}},
         "attributes.how", "the words it may be"),
        ({**RELU, "pattern": "y = Gelu(x, approximate=how)",
          "attributes": {"how": AttributeSpec(**STATIC, choices=('tanh"; evil',))}}, "attributes.how", "the words"),
        ({"pattern": PATTERN.replace("(Relu, Tanh)", "(Relu, é=Exp)").replace(', "act"', "")}, "pattern", "keys of"),
        # spellings
        ({"pattern": (PATTERN, PATTERN)}, "pattern", "two spellings are the same"),
        ({"pattern": (PATTERN, "y = Add(MatMul(x, w, transB=transB), bias)")}, "pattern[1]", "'act' is not made"),
        ({"pattern": (PATTERN, PATTERN.replace("Tanh", "Exp"))}, "pattern[1]", "choice 'act' with keys"),
        ({"pattern": (PATTERN, PATTERN.replace("MatMul", "MatMull"))}, "pattern[1]", "did you mean MatMul"),
        ({"pattern": ("y = Add(MatMul(x, w, transB=transB), bias)", PATTERN)}, "pattern[1]", "may be absent here"),
        ({"pattern": (PATTERN, PATTERN.replace(", transB=transB", "")), "attributes": {"transB": OPTIONAL_INT},
          "constraints": ()}, "pattern[1]", "'transB' is not bound"),
        # cases and tolerances
        ({"cases": [Case(name="c", axes={"Q": 1})]}, "cases[0].axes", "unknown 'Q'"),
        ({"cases": [Case(name="c", attributes={"act": "Gelu"})]}, "cases[0].attributes", "one of Relu, Tanh, none"),
        ({"cases": [Case(name="c", attributes={"transB": 2})]}, "cases[0].attributes", "transB = 2"),
        ({"cases": [Case(name="c", absent=("x",))]}, "cases[0].absent", "'x' is not optional"),
        ({"cases": [Case(name="c", values={"z": "normal"})]}, "cases[0].values", "unknown 'z'"),
        ({"cases": [Case(name="c", axes={"M": -1})]}, "cases[0].axes", "M = -1"),
        ({"cases": [Case(name="c"), Case(name="c")]}, "cases", "one name"),
        ({"cases": [Case(name="c", axes={"K": 4})], "constraints": ("K % 8 == 0",)}, "cases[0]", "does not hold"),
        ({**RELU, "cases": [Case(name="c", batch=(2,))]}, "cases[0].batch", "no batch"),
        ({"tolerances": [Tolerance(dtype="float16", ulp=0, reason="r")]}, "tolerances[0]", "ulp = 0"),
        ({"tolerances": [Tolerance(dtype="float16", ulp=math.inf, reason="r")]}, "tolerances[0]", "ulp = inf"),
        ({"tolerances": [Tolerance(dtype="float16", ulp=1, reason=" ")]}, "tolerances[0]", "no reason"),
        (
            {"tolerances": [Tolerance(dtype="float16", ulp=0, absolute=1e-3, reason="r")]},
            "tolerances[0]", "absolute = 0.001",
        ),
    ],
)  # fmt: skip
def test_fusion_refused(changes, field, word):
    found = faults(**changes)
    assert field in found, found
    assert word in found[field]


def test_a_batched_case_sees_the_folded_axis():
    case = Case(name="c", axes={"M": 4}, batch=(3,))
    assert faults(cases=[case], constraints=("M % 3 == 0",)) == {}
    assert "cases[0]" in faults(cases=[case], constraints=("M % 5 == 0",))


def test_every_problem_is_reported_at_once():
    found = faults(axes={"Q": "x", "R": "y"}, dtypes={"T": ("float61",)}, constraints=("Z > 1",))
    assert set(found) == {"axes.Q", "axes.R", "dtypes.T", "constraints[0]"}


def test_an_output_extent_may_come_from_an_attribute():
    spec = fusion(
        pattern="y = EyeLike(x, k=D)",
        inputs={"x": "T[M N]"}, outputs={"y": "T[M N]"}, attributes={"D": OPTIONAL_INT}, constraints=(),
    )  # fmt: skip
    assert check_fusion(spec, OPS, "acme")[1] == []
