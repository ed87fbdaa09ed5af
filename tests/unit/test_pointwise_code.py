"""Device functions of point-wise graphs as text: names, literals, refusals; the rules of CUDA texts; NVRTC."""

from __future__ import annotations

import re
import types
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from graphs import Net
from pointwise_cases import operator_cases
from pointwise_random import random_cases
from pointwise_units import unit

from fusionreg import OpSpec
from fusionreg.core import headers
from fusionreg.core.dtypes import dtype
from fusionreg.core.errors import GraphError, RenderError, SpecError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import GraphBuilder, Node, Value
from fusionreg.core.ops import check_cuda, default_vocabulary, numpy_backend
from fusionreg.core.ops.cuda import FUNCTIONS, serves_double
from fusionreg.core.registry.catalog import load
from fusionreg.core.render import OPTIONS
from fusionreg.core.render.conversions import CONVERSIONS
from fusionreg.core.render.pointwise import device_function, supported
from fusionreg.core.targets import SHIPPED
from fusionreg.hookspecs import hookimpl

OPS = default_vocabulary()
POINTWISE = [name for name, spec in OPS.items() if spec.pointwise]


def op(cuda, inputs=("x",), name="acme::Odd", **fields) -> OpSpec:
    fields = {"pointwise": True, "summary": "for tests"} | fields
    return OpSpec(name=name, inputs=inputs, meaning=lambda xp, *x: x[0], infer=lambda i, a, c: [], cuda=cuda, **fields)


def reason(spec: OpSpec | str, *dtypes: str, result: str = "", **attrs) -> str:
    name = spec if isinstance(spec, str) else spec.name
    ops = OPS if isinstance(spec, str) else OPS.with_ops([spec])
    values = {f"x{i}": Value(f"x{i}", d, (4,)) for i, d in enumerate(dtypes)}
    values["y"] = Value("y", result or dtypes[0], (4,))
    inputs = tuple(f"x{i}" for i in range(len(dtypes)))
    return supported(Node("n", name, inputs, ("y",), FrozenDict(attrs)), values, ops)


# ---- the function --------------------------------------------------------------------------------------------------


def test_parameters_follow_the_graph_in_compute_types() -> None:
    net = Net()
    names = {"float16": "float", "bfloat16": "float", "float32": "float", "float8_e4m3fn": "float", "float64": "double",
             "int8": "signed char", "uint16": "unsigned short", "int64": "long long", "bool": "bool"}  # fmt: skip
    given = [net.input(f"in put/{i}", kind, ("N",)) for i, kind in enumerate(names)]
    outs = [net.op("Identity", x) for x in reversed(given)]
    text = device_function("region", net.build(outs), OPS)
    types = list(names.values())
    parameters = [f"{t} in{i}" for i, t in enumerate(types)] + [f"{t}& out{i}" for i, t in enumerate(reversed(types))]
    assert text.startswith(f"__device__ __forceinline__ void region({', '.join(parameters)}) {{\n")
    assert "put" not in text.replace("out", "") and text.endswith("}\n")


def test_inputs_and_repeated_values_may_be_outputs() -> None:
    net = Net()
    x = net.input("x", "float32", ("N",))
    y = net.op("Relu", x)
    text = device_function("f", net.build([y, x, y, net.const(3.0)]), OPS)
    assert [line.strip() for line in text.splitlines() if "out" in line][1:] == [
        "out0 = v0;", "out1 = in0;", "out2 = v0;", "out3 = c0;"
    ]  # fmt: skip


def test_each_node_is_one_variable_and_unread_ones_are_left_out() -> None:
    net = Net()
    x = net.input("x", "float32", ("N",))
    y = net.op("Exp", x)
    net.op("Log", y)
    text = device_function("f", net.build([net.op("Mul", net.op("Add", y, y), y)]), OPS)
    assert text.count("expf") == 1 and "logf" not in text


@pytest.mark.parametrize(
    ("kind", "value", "literal"),
    [("float32", 0.1, "0x1.99999ap-4f"), ("float16", 0.1, "0x1.998p-4f"), ("bfloat16", 0.1, "0x1.9ap-4f"),
     ("float64", 0.1, "0x1.999999999999ap-4"), ("float32", -0.0, "(-0.0f)"), ("float32", 1e-45, "0x1p-149f"),
     ("float32", np.inf, "__builtin_bit_cast(float, 0x7f800000U)"), ("int8", -128, "-128"), ("bool", True, "true"),
     ("int64", -(2**63), "(-9223372036854775807LL - 1)"), ("uint64", 2**64 - 1, "18446744073709551615ULL")],
)  # fmt: skip
def test_constants_are_exactly_their_dtypes(kind: str, value: float, literal: str) -> None:
    net = Net()
    x = net.input("x", kind, ("N",))
    c = net.constant("c", np.full((2, 1), value, object).astype(dtype(kind).numpy), kind)
    text = device_function("f", net.build([net.op("Equal", x, c)]), OPS)
    found = re.search(r"const [\w ]+ c0 = (.*);", text)
    assert found and found[1] == literal


def test_attributes_are_rounded_to_what_is_computed_in() -> None:
    for kind, literal in (("float32", "0x1.47ae14p-7f"), ("float64", "0x1.47ae147ae147bp-7")):
        net = Net()
        text = device_function("f", net.build([net.op("LeakyRelu", net.input("x", kind, ("N",)))]), OPS)
        assert f"{literal} * in0" in text


def test_float64_uses_double_literals_and_functions_alone() -> None:
    for case in operator_cases():
        if {v.dtype for v in case.graph.values.values()} <= {"float64", "bool"}:
            text = device_function("f", case.graph, OPS).rpartition("void f(")[2]
            assert not re.search(r"\d\.\d*f\b|\bfloat\b", text), text
            assert not any(re.search(rf"\b{name}\(", text) for name in FUNCTIONS), text


def test_what_cannot_be_generated_says_why() -> None:
    net = Net()
    x = net.input("x", "float32", (4, 3))
    with pytest.raises(GraphError, match="MatMul is not point-wise") as caught:
        device_function("f", net.build([net.op("MatMul", x, net.weight((3, 2)))]), OPS)
    assert caught.value.facts["op"] == "MatMul"
    net = Net()
    x = net.input("x", "float32", (3,))
    with pytest.raises(GraphError, match="constant 'w' of 3 elements — one value"):
        device_function("f", net.build([net.op("Add", x, net.weight((3,)))]), OPS)
    with pytest.raises(RenderError, match="identifier"):
        device_function("f() {} void g", net.build([x]), OPS)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (lambda: reason("Exp", "int32"), "Exp has no CUDA text for int32"),
        (lambda: reason("Exp", "complex64"), "no arithmetic on complex64"),
        (lambda: reason("Equal", "string", "string", result="bool"), "no arithmetic on string"),
        (lambda: reason("Softmax", "float32"), "Softmax is not point-wise"),
        (lambda: reason("Nope", "float32"), "unknown operator Nope"),
        (lambda: reason("Add", "float32", "float64"), "Add of float32 and float64"),
        (lambda: reason("Add", "int32", "int64"), "Add of int32 and int64"),
        (lambda: reason("Gelu", "float32", approximate="sinh"), "Gelu with approximate='sinh'"),
        (lambda: reason("BitShift", "uint8", "uint8", direction="UP"), "BitShift with direction='UP'"),
        (lambda: reason("Gelu", "float32", approx="tanh"), "unknown attribute"),
        (lambda: reason("Cast", "float32", result="float8_e5m2", to="float8_e5m2", round_mode="down"), "round_mode"),
        (lambda: reason("Pow", "bool", "float32"), "Pow of bool and float32"),
        (lambda: reason("Add", "bool", "bool"), "Add has no CUDA text for bool"),
        (lambda: reason(op("fr::gelu_erf(x)"), "float64"), "serves no float64"),
        (lambda: reason(op(""), "float32"), "acme::Odd has no CUDA text"),
        (lambda: reason(op("x"), "float32", result="int32"), "acme::Odd of float32 gives int32"),
    ],
)  # fmt: skip
def test_reasons(found, text: str) -> None:
    assert text in found()


def test_what_is_supported_has_no_reason() -> None:
    assert reason("Add", "float16", "float32") == ""  # both are computed in float
    assert reason("Where", "bool", "int8", "int8", result="int8") == ""
    assert reason("Pow", "float32", "int64") == "" and reason("Cast", "bool", result="float8_e4m3fn", to="x") == ""
    assert reason(op("fr::gelu_erf(x)"), "bfloat16") == ""


# ---- the vocabulary's texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POINTWISE)
def test_every_pointwise_operator_has_a_text(name: str) -> None:
    check_cuda(OPS[name])
    assert bool(OPS[name].cuda) != (name in CONVERSIONS)
    assert all(serves_double(text) for kinds, text in OPS[name].cuda.items() if "f" in kinds)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (lambda: op("x + y"), "unknown name 'y'"),
        (lambda: op("fmaxf(x, 0.0f)"), "the function 'fmaxf'"),
        (lambda: op("x; } __global__ void evil() {"), "steps `name = value;`"),
        (lambda: op("x[0]"), "'['"),
        (lambda: op('"x"'), "'\"'"),
        (lambda: op("x = x; x"), "a step named 'x'"),
        (lambda: op("h = k; k = x; h"), "unknown name 'k'"),
        (lambda: op({"q": "x"}), "texts for the kinds ['q']"),
        (lambda: op({"fi": "x", "i": "x"}), "once at most"),
        (lambda: op("x", pointwise=False), "not point-wise"),
        (lambda: op("x", ("x", "more*")), "variadic input after others"),
        (lambda: op("a + COUNT"), "unknown name 'a'"),
        (lambda: op(""), ""),
        (lambda: op("s = a + b; LAST ? s / COUNT : s", ("args*",)), ""),
        (lambda: op("HAS_b && scale > 1.0f ? x + b : mode_fast ? T(0) : x", ("x", "b?"),
                    attributes={"scale": 1.0, "mode": "slow"}), ""),
    ],
)  # fmt: skip
def test_texts_are_checked(spec, text: str) -> None:
    if not text:
        check_cuda(spec())
        return
    with pytest.raises(SpecError, match=re.escape(text)) as caught:
        check_cuda(spec())
    assert caught.value.whom == "acme::Odd" and caught.value.facts["field"] == "cuda"


def test_a_plugins_operator_is_generated_like_ours() -> None:
    spec = op("r = x < 0.0f ? 0.0f : x; HAS_b && mode_fast ? scale * r + b : expf(r) * T(2)", ("x", "b?"),
              attributes={"scale": 0.5, "mode": "slow"})  # fmt: skip
    ops = OPS.with_ops([spec])
    builder = GraphBuilder("g")
    for name in ("x", "b"):
        builder.input(name, "float64", ("N",))
    builder.node(spec.name, ("x", "b"), [Value("y", "float64", ("N",))], attrs={"mode": "fast"})
    builder.node(spec.name, ("y",), [Value("z", "float64", ("N",))])
    builder.node(spec.name, ("z", ""), [Value("w", "float64", ("N",))])
    text = device_function("f", builder.build(["w"]), ops)
    lines = [line.strip() for line in text.splitlines()]
    assert "const double v0 = true && true ? 0x1p-1 * v0_r + in1 : exp(v0_r) * f64(2);" in lines
    assert "const double v1 = false && false ? 0x1p-1 * v1_r + f64(0) : exp(v1_r) * f64(2);" in lines
    assert "const auto v2_r = v1 < 0.0 ? 0.0 : v1;" in lines and "using f64 = double;" in lines


def documented() -> types.ModuleType:
    """The plugin of docs/writing-a-plugin.md, "Your own operators"."""
    text = (Path(__file__).parents[2] / "docs" / "writing-a-plugin.md").read_text("utf-8")
    block = re.search(r"## Your own operators.*?```python\n(.*?)```", text, re.S)
    assert block
    made = types.ModuleType("documented")
    exec(block[1], made.__dict__)
    return made


def test_the_documented_operator_loads_and_is_generated() -> None:
    catalog = load(entry_points=(), extra_plugins=[("acme", documented())])
    assert not catalog.failures
    net = GraphBuilder("g")
    net.input("x", "float16", ("N",))
    net.node("acme::SquaredRelu", ("x",), [Value("y", "float16", ("N",))], attrs={"scale": 3.0})
    text = device_function("f", net.build(["y"]), catalog.ops)
    assert "const float v0 = 0x1.8p+1f * v0_r * v0_r;" in text
    x = np.array([-2.0, np.nan, 3.0])
    got = catalog.ops["acme::SquaredRelu"].meaning(numpy_backend(), x, scale=3.0)
    np.testing.assert_array_equal(got, [0.0, np.nan, 27.0])


def test_an_operator_with_a_wrong_text_fails_alone() -> None:
    made = documented()
    wrong = made.SQUARED_RELU.model_copy(update={"name": "acme::Wrong", "cuda": FrozenDict(f="x + y")})
    good = made.SQUARED_RELU
    made.register_ops = hookimpl(lambda: [wrong, good])
    catalog = load(entry_points=(), extra_plugins=[("acme", made)])
    assert "acme::SquaredRelu" in catalog.ops and "acme::Wrong" not in catalog.ops
    [failure] = catalog.failures
    assert (failure.fusion, failure.field) == ("acme::Wrong", "cuda") and "unknown name 'y'" in failure.reason


# ---- NVRTC ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", SHIPPED)
def test_nvrtc_takes_it_without_warnings(arch: str) -> None:
    pytest.importorskip("cupy_backends", reason="CuPy brings the binding of NVRTC")
    from fusionreg.core.compiler import nvrtc

    every = [c.graph for c in operator_cases() if "float64" not in c.name or arch == "sm_90a"]
    graphs = [*every[SHIPPED.index(arch) :: 4], *(c.graph for c in islice(random_cases(), 8))]
    folders = [f"-I{d}" for d in headers.include_directories()]
    cubin, log = nvrtc.compile_unit(unit(graphs), "k.cu", arch, (*OPTIONS, *folders), "the point-wise unit")
    assert cubin[:4] == b"\x7fELF" and "warning" not in log, log
