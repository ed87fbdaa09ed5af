"""Dtypes of a pattern: variables, sets, concrete ones, and casts, fused exactly where they fit."""

from __future__ import annotations

import pytest
from graphs import (
    Net,
    fused,
    fusion,
    gemm,
    matches_of,
    quick_gelu,
    sites,
    softmax_bias,
)


@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_a_concrete_dtype_is_that_dtype(kind):
    scaled = fusion("act.scaled", 'y = Mul(x, Cast(n, to="float32"))', {"x": "T[N]", "n": "int64[N]"}, {"y": "T[N]"})
    net = Net()
    c = net.op("Cast", net.input("n", kind, (4,)), to="float32")
    graph = net.build([net.op("Mul", net.input("x", "float32", (4,)), c)])
    assert bool(matches_of(graph, scaled)) == (kind == "int64")


@pytest.mark.parametrize("kind", ["float64", "int32", "int64"])
@pytest.mark.parametrize("which", ["gemm", "gelu", "softmax"])
def test_a_dtype_outside_the_set_is_left_alone(kind, which):
    net = Net()
    x = net.input("x", kind, (4, 4))
    if which == "gemm":
        y = net.op("Add", net.op("MatMul", x, net.weight((4, 4), kind)), net.weight((4,), kind))
    elif which == "gelu":
        y = net.op("Mul", x, net.op("Relu", net.op("Mul", x, net.const(2, kind))))
    else:
        y = net.op("Add", x, net.weight((4,), kind))
    graph = net.build([y])
    result = fused(graph, gemm(), quick_gelu(), softmax_bias())
    assert result.values[y].dtype == kind and all(not n.op.startswith("fused") for n in result.nodes)


def test_one_dtype_variable_is_one_dtype():
    net = Net()
    h = net.op("MatMul", net.input("x", "float16", (4, 4)), net.weight((4, 4), "float16"))
    wide = net.op("Cast", h, to="float32")
    graph = net.build([net.op("Add", wide, net.weight((4,), "float32"))])
    assert sites(fused(graph, gemm())) == {"gemm.scale_bias": 1, "Cast": 1, "Add": 1}


@pytest.mark.parametrize("up", ["float32", "int32", "bool", None])
@pytest.mark.parametrize("down", [True, False])
def test_casts_are_absorbed_only_where_the_pattern_has_them(up, down):
    upcast = fusion(
        "softmax.upcast",
        'p = Softmax(Cast(x, to="float32"), axis=-1)\ny = Cast(p, to="float16")',
        {"x": "T[... N]"},
        {"y": "T[... N]"},
        dtypes={"T": ("float16",)},
    )
    net = Net()
    x = net.input("x", "float16", (3, 4))
    v = x if up is None else net.op("Cast", x, to=up)
    if up in ("int32", "bool"):
        v = net.op("Cast", v, to="float32")
    v = net.op("Softmax", v)
    v = net.op("Cast", v, to="float16") if down else net.op("Relu", v)
    graph = net.build([v])
    assert bool(matches_of(graph, upcast)) == (up == "float32" and down)
    fused(graph, upcast)


def test_a_dtype_variable_may_be_an_attribute():
    back = fusion(
        "softmax.back",
        'y = Cast(Softmax(Cast(x, to="float32"), axis=-1), to=T)',
        {"x": "T[... N]"},
        {"y": "T[... N]"},
        dtypes={"T": ("float16", "bfloat16")},
    )
    for target, fuses in (("float16", 1), ("bfloat16", 0)):
        net = Net()
        p = net.op("Softmax", net.op("Cast", net.input("x", "float16", (3, 4)), to="float32"))
        found = matches_of(net.build([net.op("Cast", p, to=target)]), back)
        assert len(found) == fuses
        assert not any("T" in m.attributes for m in found)
