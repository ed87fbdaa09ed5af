"""Every point-wise operator at its dtypes on special values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from graphs import Net
from pointwise_units import OPS, Case

from fusionreg.core.dtypes import DTYPES, dtype
from fusionreg.core.render.conversions import NARROW
from fusionreg.core.render.pointwise import supported

INTEGERS = tuple(n for n, d in DTYPES.items() if d.kind in "iu")
FLOATS = tuple(n for n, d in DTYPES.items() if d.kind == "f")

#: Attribute values beside the defaults; those that a required attribute may take.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "Gelu": [{}, {"approximate": "tanh"}],
    "fusionreg::GeluGrad": [{}, {"approximate": "tanh"}],
    "Mod": [{}, {"fmod": 1}],
    "IsInf": [{}, {"detect_negative": 0}, {"detect_positive": 0}],
    "BitShift": [{"direction": "LEFT"}, {"direction": "RIGHT"}],
    "LeakyRelu": [{"alpha": 0.3}],
    "ThresholdedRelu": [{}, {"alpha": -0.7}],
    "Elu": [{"alpha": 1.5}],
    "Celu": [{"alpha": 0.7}],
    "Selu": [{}],
    "HardSigmoid": [{}, {"alpha": 0.3, "beta": 0.4}],
    "Shrink": [{"lambd": 1.5, "bias": 0.3}],
    "Swish": [{}, {"alpha": 1.5}],
}
LOGICAL = ("And", "Or", "Xor", "Not")


@cache
def special(name: str) -> np.ndarray:
    """Values worth trying in a dtype."""
    row, kind = dtype(name), dtype(name).numpy
    if row.kind == "b":
        return np.array([False, True])
    if row.kind in "iu":
        low, high = (0, 2**row.bits - 1) if row.kind == "u" else (-(2 ** (row.bits - 1)), 2 ** (row.bits - 1) - 1)
        small = [0, 1, 2, 3, 5, 7, 8, 13, 31, 63, 64, 100, 113]
        big = [low, low + 1, high - 1, high, high // 2, high // 3, low // 2, low // 3]
        return np.unique(np.array([*small, *(-v for v in small if row.kind == "i"), *big], kind))
    if row.bits == 8:
        return np.arange(256, dtype=np.uint8).view(kind)
    near = [0.0, 1e-3, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 2.7, 3.0, 3.5, 7.0, 12.0, 40.0, 87.0, 300.0, 1e4]
    tiny = float(np.finfo(kind).smallest_subnormal) if row.bits >= 32 else 2.0 ** (-24 if name == "float16" else -133)
    far = [1e-20, 3e-39, 1e30, tiny, 3 * tiny] + ([3.4028234e38, 1.1754944e-38] if row.bits >= 32 else [6e4])
    values = np.array([*near, *far], np.float64)
    with np.errstate(over="ignore"):
        return np.concatenate([values, -values, [np.nan, np.inf, -np.inf]]).astype(kind)


def _grid(names: list[str]) -> list[np.ndarray]:
    """Every pair of special values; operands beyond two rotate."""
    lists = [special(n) for n in names]
    if len(lists) == 1:
        return [lists[0]]
    a, b = np.meshgrid(lists[0], lists[1], indexing="ij")
    grid = [a.reshape(-1), b.reshape(-1)]
    for i, values in enumerate(lists[2:], 1):
        index = (np.arange(grid[0].size) * (2 * i + 1)) % values.size
        grid.append(values[index])
    return [np.ascontiguousarray(x) for x in grid]


def case(
    op: str, names: list[str], attributes: dict[str, Any], absent: tuple[int, ...] = (), kind: str = "operator"
) -> Case | None:
    """One operator on the special values of its operands' dtypes; None when it cannot be generated."""
    net, arrays = Net(op.rsplit(":", 1)[-1]), _grid(names)
    given = [net.input(f"x{i}", n, ("N",)) for i, n in enumerate(names)]
    wired: list[str | None] = list(given)
    for i in absent:
        wired.insert(i, None)
    y = net.op(op, *wired, **attributes)
    graph = net.build([y])
    if supported(graph.nodes[0], graph.values, OPS):
        return None
    words = "-".join([op.replace("::", "."), *names, *(f"{k}={v}" for k, v in attributes.items()), *map(str, absent)])
    return Case(words, graph, dict(zip(given, arrays, strict=True)), kind)


def operator_cases() -> Iterator[Case]:
    """All operators but the conversions, at every dtype that they support."""
    for op, spec in OPS.items():
        if not spec.pointwise or not spec.cuda:
            continue
        variadic = spec.inputs[-1].endswith("*")
        count = 3 if variadic else len(spec.inputs)
        for own, attributes in product(("float32", "float64", "float16", *INTEGERS, "bool"), VARIANTS.get(op, [{}])):
            if own == "float16" and spec.moves is False and op not in ("Add", "Gelu", "Max"):
                continue  # the text is that of float32
            names = [own] * count
            if op == "Where":
                names[0] = "bool"
            yield from filter(None, [case(op, names, attributes)])
            if variadic:
                yield from filter(None, [case(op, [own], attributes), case(op, [own] * 2, attributes)])
            if op == "Clip":
                yield from filter(None, [case(op, [own] * 2, {}, absent=(1,)), case(op, [own] * 2, {})])
                yield from filter(None, [case(op, [own], {})])


def cast_cases() -> Iterator[Case]:
    """Cast between all dtypes, Cast to float8 without saturation."""
    every = (*FLOATS, *INTEGERS, "bool")
    for source, to in product(every, every):
        yield from filter(None, [case("Cast", [source], {"to": to}, kind="cast")])
        if to.startswith("float8"):
            yield from filter(None, [case("Cast", [source], {"to": to, "saturate": 0}, kind="cast")])
    for names in (["float32", "float16"], ["int64", "bool"]):
        yield from filter(None, [case("CastLike", names, {}, kind="cast")])


def pow_cases() -> Iterator[Case]:
    pairs = [("float32", "float32"), ("float64", "float64"), ("float32", "float64"), ("float64", "float32"),
             ("float32", "int32"), ("float16", "int64"), ("int32", "float32"), ("int64", "float64"),
             *((n, n) for n in INTEGERS if n[0] == "u"), ("int64", "uint8")]  # fmt: skip
    for a, b in pairs:
        yield from filter(None, [case("Pow", [a, b], {}, kind="power")])


def whole_powers() -> Iterator[Case]:
    """Integers to every small power, negative ones too, which the meaning (NumPy's) refuses."""
    for own in INTEGERS:
        net = Net("Pow")
        a, b = net.input("x0", own, ("N",)), net.input("x1", own, ("N",))
        graph = net.build([net.op("Pow", a, b)])
        bases, exponents = np.meshgrid(special(own), np.arange(-5 if own[0] == "i" else 0, 20).astype(own))
        arrays = {"x0": bases.reshape(-1).copy(), "x1": exponents.reshape(-1).copy()}
        yield Case(f"Pow-small-{own}", graph, arrays, "whole")


def kept_casts() -> Iterator[Case]:
    """From and to dtypes that need no header, through a float that has one: rounded there, and nowhere else."""
    for source, to in product(("float32", "float64", "int64", "uint64", "int32"), NARROW):
        net = Net("Cast")
        x = net.input("x0", source, ("N",))
        graph = net.build([net.op("Cast", net.op("Cast", x, to=to), to="float32")])
        values = special(source)
        if dtype(source).floating:  # ties, and what is just beside them
            ties = np.arange(1, 4096, dtype=np.float64) * 2.0 ** np.arange(-30, 12)[:, None]
            ties = np.concatenate([ties.reshape(-1), -ties[:4].reshape(-1)])
            near = ties * (1 + 2.0**-50) if source == "float64" else ties * (1 + 2.0**-23)
            values = np.concatenate([values, ties.astype(values.dtype), near.astype(values.dtype)])
        else:
            middle = [1 << k for k in range(3, dtype(source).bits - 1)]
            middle += [m + (m >> h) for m in middle for h in (3, 8, 9, 11, 12)]
            values = np.concatenate([values, np.array([m + d for m in middle for d in (-1, 0, 1)], values.dtype)])
        yield Case(f"kept-{source}-{to}", graph, {"x0": np.unique(values)}, "kept")


def constant_divisors() -> Iterator[Case]:
    """Division by constants: ordinary ones, powers of two, and those whose inverse is no normal number."""
    for own in ("float32", "float64", "float16"):
        extreme = () if own == "float16" else (1e-40, 1.1e-38, 2e38)
        for c in (3.0, -3.0, 0.1, -7.3, 1.5, 2.0, -0.25, 0.0, -0.0, np.inf, -np.inf, np.nan, *extreme):
            net = Net("Div")
            graph = net.build([net.op("Div", net.input("x0", own, ("N",)), net.const(c, own))])
            rng = np.random.default_rng(3)
            ordinary = rng.normal(size=4096) * np.exp2(rng.integers(-9, 9, 4096))
            arrays = {"x0": np.concatenate([special(own), ordinary.astype(dtype(own).numpy)])}
            yield Case(f"Div-{own}-by-{c}", graph, arrays, "divided")
