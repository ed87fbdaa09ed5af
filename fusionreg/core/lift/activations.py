"""Activations that exporters spell out: the three GELUs, Swish, HardSwish, Sigmoid, Mish. Floor 3.

A spelling is an inner part and the product around it; every pair of the two is one rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import pi, sqrt
from typing import Any

from .engine import Rule
from .site import Site, equals, floats

#: x/2 · a, in every association that exporters write; ``a`` is 1 + erf or 1 + tanh.
_HALF = (
    "y = Mul(Mul(x, a), 0.5)",
    "y = Mul(Mul(x, 0.5), a)",
    "y = Mul(x, Mul(a, 0.5))",
    "y = Div(Mul(x, a), 2.0)",
    "y = Mul(Div(x, 2.0), a)",
)

_ERF = (("Div", sqrt(2.0)), ("Mul", sqrt(0.5)))

#: c·x³ …
_CUBIC = (
    "q = Mul(Pow(x, 3.0), c)",
    "q = Mul(Mul(Mul(x, x), x), c)",
    "q = Mul(Mul(Mul(x, c), x), x)",
    "q = Mul(Mul(Mul(x, x), c), x)",
)
#: … and c·x², for the form x·k·(1 + c·x²)
_SQUARE = ("q = Mul(Mul(x, x), c)", "q = Mul(Mul(x, c), x)", "q = Mul(Pow(x, 2.0), c)")
_FACTORED = ("u = Mul(Mul(x, k), b)", "u = Mul(Mul(x, b), k)", "u = Mul(x, Mul(b, k))")


def _gelu_erf() -> Iterator[Rule]:
    for (op, number), half in product(_ERF, _HALF):
        yield Rule(
            "gelu_erf",
            f"a = Add(Erf({op}(x, c)), 1.0)\n{half}",
            "y = Gelu(x)",
            (floats("x", "c"), equals("c", number)),
        )
        # the half may be distributed over the sum
    for op, number in _ERF:
        yield Rule(
            "gelu_erf",
            f"y = Mul(x, Add(Mul(Erf({op}(x, c)), 0.5), 0.5))",
            "y = Gelu(x)",
            (floats("x", "c"), equals("c", number)),
        )


def _gelu_tanh() -> Iterator[Rule]:
    inner = [f"{q}\nu = Mul(Add(x, q), k)" for q in _CUBIC]
    inner += [f"{q}\nb = Add(q, 1.0)\n{u}" for q, u in product(_SQUARE, _FACTORED)]
    conditions = (floats("x", "c", "k"), equals("c", 0.044715), equals("k", sqrt(2.0 / pi)))
    for part, half in product(inner, _HALF):
        yield Rule("gelu_tanh", f"{part}\na = Add(Tanh(u), 1.0)\n{half}", 'y = Gelu(x, approximate="tanh")', conditions)


def _scaled_swish(site: Site) -> Mapping[str, Any] | None:
    alpha = site.number("c")
    return None if alpha is None or equals("c", 1.702)(site) else {"alpha": alpha}


_RELU6 = "r = Clip(Add(x, 3.0), 0.0, 6.0)\n"


def _hard_swish() -> Iterator[Rule]:
    for tail in ("y = Div(Mul(x, r), 6.0)", "y = Mul(x, Div(r, 6.0))"):
        yield Rule("hard_swish", _RELU6 + tail, "y = HardSwish(x)", (floats("x"),))
    for tail in ("y = Mul(Mul(x, r), c)", "y = Mul(x, Mul(r, c))"):
        yield Rule("hard_swish", _RELU6 + tail, "y = HardSwish(x)", (floats("x", "c"), equals("c", 1 / 6)))
    yield Rule(
        "hard_swish",
        "y = Mul(x, HardSigmoid(x, alpha=alpha, beta=0.5))",
        "y = HardSwish(x)",
        (floats("x"), lambda site: abs(site.attribute("alpha") - 1 / 6) < 1e-6),
    )


RULES: tuple[Rule, ...] = (
    *_gelu_erf(),
    *_gelu_tanh(),
    Rule("sigmoid", "y = Div(1.0, Add(Exp(Neg(x)), 1.0))", "y = Sigmoid(x)", (floats("x"),)),
    Rule("sigmoid", "y = Reciprocal(Add(Exp(Neg(x)), 1.0))", "y = Sigmoid(x)", (floats("x"),)),
    Rule("swish", "y = Mul(x, Sigmoid(x))", "y = Swish(x)", (floats("x"),)),
    Rule("swish", "y = Div(x, Add(Exp(Neg(x)), 1.0))", "y = Swish(x)", (floats("x"),)),
    Rule(
        "quick_gelu",
        "y = Mul(x, Sigmoid(Mul(x, c)))",
        "y = fusionreg.QuickGelu(x)",
        (floats("x", "c"), equals("c", 1.702)),
    ),
    Rule("swish", "y = Mul(x, Sigmoid(Mul(x, c)))", "y = Swish(x, alpha=alpha)", (floats("x", "c"),), _scaled_swish),
    *_hard_swish(),
    Rule("relu2", "r = Relu(x)\ny = Mul(r, r)", "y = fusionreg.SquaredRelu(x)", (floats("x"),)),
    Rule("relu2", "y = Mul(Relu(x), Relu(x))", "y = fusionreg.SquaredRelu(x)", (floats("x"),)),
    Rule("relu2", "y = Pow(Relu(x), 2.0)", "y = fusionreg.SquaredRelu(x)", (floats("x"),)),
    Rule("mish", "y = Mul(x, Tanh(Softplus(x)))", "y = Mish(x)", (floats("x"),)),
)
