"""What fusions with windows need of a spec: attributes of several numbers, operands that an operator can do without,
axes that constraints tell, and results whose memory order is that of an input of another shape.
"""

from __future__ import annotations

import pytest
from catalogs import shipped
from graphs import Net
from registry_kit import module, only, spec

from fusionreg.core.errors import MisfitError, PatternError
from fusionreg.core.matcher.search import match_pattern
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.pattern.graph import Input
from fusionreg.core.pattern.instantiate import instantiate, parse_pattern
from fusionreg.core.problem import Tensor, bind

OPS = default_vocabulary()
CONV = "y = Conv(x, w, optional(bias), strides=(down, across), pads=(top, 1, 0, 1))"
CATALOG = shipped("conv")


def matched(bias: bool = False, text: str = CONV, **attributes):
    net = Net()
    x, w, b = (net.input(n, "float32", s) for n, s in (("x", (1, 3, 9, 9)), ("w", (4, 3, 2, 2)), ("b", (4,))))
    graph = net.build((net.op("Conv", x, w, *([b] if bias else []), **attributes),))
    return next(match_pattern(graph, parse_pattern(text, OPS), graph.nodes[-1], OPS), None)


@pytest.mark.parametrize("bias", [False, True])
def test_an_attribute_of_several_numbers(bias):
    found = matched(bias, strides=(2, 3), pads=(5, 1, 0, 1))
    assert dict(found.attributes) == {"down": 2, "across": 3, "top": 5}
    assert ("bias" in found.inputs) is bias
    assert matched(bias, strides=(2, 3), pads=(5, 1, 1, 1)) is None  # a number beside the names must be equal
    assert matched(bias, strides=(2, 3), pads=(5, 1, 0, 1), dilations=(1, 2)) is None


def test_an_attribute_that_is_left_empty():
    """The defaults of the fusion stand for those of the operator: nothing is bound."""
    assert dict(matched(pads=(5, 1, 0, 1)).attributes) == {"top": 5}
    assert matched(text="y = Conv(x, w, strides=(n, n))", strides=(2, 3)) is None
    assert dict(matched(text="y = Conv(x, w, strides=(n, n))", strides=(2, 2)).attributes) == {"n": 2}


def test_the_pattern_as_a_graph():
    pattern = parse_pattern(CONV, OPS)
    assert pattern.attributes == {"down", "across", "top"} and pattern.optional == {"bias"}
    assert pattern.steps[0].operands[2] == Input("bias", optional=True)
    assert "strides=(down, across)" in str(pattern) and "pads=(top, 1, 0, 1)" in str(pattern)
    fusion = CATALOG["conv.conv_bn"]
    shapes = {"x": (1, 3, 9, 9), "w": (4, 3, 2, 2)}
    graph = instantiate(
        fusion.patterns[0], fusion.spec, dtypes={"T": "float32"}, shapes=shapes, ops=OPS, attributes={"stride_h": 2},
        absent=("bias", "gamma", "beta", "mean", "var"),
    )  # fmt: skip
    assert [(n.op, n.inputs, n.attrs["strides"]) for n in graph.nodes] == [("Conv", ("x", "w"), (2, 1))]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("y = Conv(optional(x), w)", "optional(x) as 'x' of Conv"),
        ("y = Conv(x, w, optional(1))", "operand 'optional(1)'"),
        ("h = Relu(x)\ny = Conv(h, w, optional(h))", "operand 'optional(h)'"),
    ],
)
def test_operands_that_cannot_be_optional(text, found):
    with pytest.raises(PatternError) as error:
        parse_pattern(text, OPS)
    assert found in str(error.value)


def tensors(n=2, c=8, h=9, w=7, k=16, r=3, last=True, **more):
    x, filters = Tensor.contiguous("float16", (n, c, h, w)), Tensor.contiguous("float16", (k, c, r, r))
    if last:
        x = Tensor("float16", (n, c, h, w), (c * h * w, 1, c * w, c))
    return {"x": x, "w": filters, **more}


def test_constraints_tell_axes():
    problem = bind(CATALOG["conv.conv_bn"], tensors(), {"stride_h": 2, "pad_left": 1}, "sm_90a")
    assert (problem.axes["P"], problem.axes["Q"]) == (4, 6) and problem.shapes["y"] == (2, 16, 4, 6)
    assert problem.strides["y"] == (4 * 6 * 16, 1, 6 * 16, 16)  # as x lies, though of another shape
    assert not bind(CATALOG["conv.conv_bn"], tensors(last=False), {}, "sm_90a").strides


def test_an_input_is_held_to_the_axes_that_constraints_tell():
    residual = Tensor.contiguous("float16", (2, 16, 7, 5))
    assert bind(CATALOG["conv.conv_bn_relu"], tensors(residual=residual), {}, "sm_90a").axes["P"] == 7
    with pytest.raises(MisfitError, match="P == "):
        bind(CATALOG["conv.conv_bn_relu"], tensors(residual=residual), {"pad_top": 1}, "sm_90a")


@pytest.mark.parametrize(
    ("shape", "strides", "last"),
    [
        ((1, 8, 1, 1), (8, 1, 8, 8), True),
        ((2, 1, 9, 7), (63, 1, 7, 1), False),
        ((2, 8, 1, 7), (56, 1, 56, 8), True),
        ((2, 8, 7, 1), (56, 1, 8, 8), True),
    ],
)
def test_orders_of_axes_of_one_element(shape, strides, last):
    """They may have any stride: the result lies channels last, or row-major where x is both."""
    c = shape[1]
    x, filters = Tensor("float16", shape, strides), Tensor.contiguous("float16", (16, c, 1, 1))
    y = bind(CATALOG["conv.conv_bn"], {"x": x, "w": filters}, {}, "sm_90a").tensors["y"]
    assert y.is_dense and (y.strides[1] == 1 or y.shape[2:] == (1, 1)) is last


def test_an_output_needs_something_that_tells_its_axes():
    fields = {"inputs": {"x": "T[M]"}, "outputs": {"y": "T[K]"}, "pattern": "y = MaxPool(x, kernel_shape=(2,))"}
    (failure,) = only(module(register_fusions=[spec(**fields)], FUSIONREG_PREFIXES=("acme",))).failures
    assert "no input tells axis K" in failure.reason
    told = only(module(register_fusions=[spec(**fields, constraints="K == M - 1")], FUSIONREG_PREFIXES=("acme",)))
    assert all("no input tells axis" not in f.reason for f in told.failures)
