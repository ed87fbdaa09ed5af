"""Random graphs of point-wise operators: floats, integers, bool, casts, Where and comparisons, several outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
from graphs import Net
from pointwise_units import Case

from fusionreg.core.dtypes import dtype

SIZE = 257
#: Operators by arity that neither overflow nor lose all digits on moderate values.
FLOAT_1 = ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Erf", "Gelu", "Swish", "Softplus", "Elu", "HardSwish", "Identity")
FLOAT_2 = ("Add", "Sub", "Mul", "Max", "Min", "Mean")
INT_2 = ("Add", "Sub", "Mul", "Max", "Min", "Div", "Mod", "BitwiseXor", "BitwiseAnd")
NARROW = ("float16", "bfloat16", "float8_e4m3fn")
COMPARE = ("Less", "Greater", "LessOrEqual", "Equal")


def graph(seed: int, floats: tuple[str, ...], count: int = 16) -> Case:
    """``count`` operators over inputs of the given float dtypes, one int32 and one bool; up to five outputs.

    Comparisons read inputs alone: those of computed values may turn on a last place, as any two evaluations would.
    """
    rng, net = random.Random(seed), Net(f"random{seed}")
    data = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    pools: dict[str, list[str]] = {}
    for own in (*floats, "int32", "bool"):
        for i in range(2 if own in floats else 1):
            name = net.input(f"{own}_{i}", own, ("N",))
            values = data.normal(size=SIZE) * 2 if dtype(own).floating else data.integers(-9, 9, SIZE)
            arrays[name] = (values > 0) if own == "bool" else values.astype(dtype(own).numpy)
            if dtype(own).floating:
                arrays[name][:6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-7]
            pools.setdefault(own, []).append(name)
    inputs = {own: list(names) for own, names in pools.items()}
    pools.setdefault("int64", [])
    while len(net._nodes) < count:
        own = rng.choice(floats)
        a, b = rng.choice(pools[own]), rng.choice(pools[own])
        kind = rng.randrange(10)
        if kind < 3:
            pools[own].append(net.op(rng.choice(FLOAT_1), a))
        elif kind < 6:
            pools[own].append(net.op(rng.choice(FLOAT_2), a, b))
        elif kind == 6:
            pools["bool"].append(net.op(rng.choice(COMPARE), *rng.choices(inputs[own], k=2)))
        elif kind == 7:
            pools[own].append(net.op("Where", rng.choice(pools["bool"]), a, b))
        elif kind == 8:
            narrow = net.op("Cast", a, to=rng.choice(NARROW))
            pools[own].append(net.op("Cast", narrow, to=own))
        else:
            pools["int32"].append(net.op(rng.choice(INT_2), *rng.choices(pools["int32"], k=2)))
            pools[own].append(net.op("Cast", pools["int32"][-1], to=own))
    a, b = pools[floats[0]][-1], pools[floats[-1]][-1]
    pools[floats[-1]].append(net.op("Add", net.op("Cast", a, to=floats[-1]), b))
    made = [n.outputs[0] for n in net._nodes]
    outputs = list(dict.fromkeys([made[-1], *rng.sample(made, 4)]))
    return Case(f"random-{seed}-{'-'.join(floats)}", net.build(outputs), arrays, "random")


def random_cases() -> Iterator[Case]:
    mixes = (("float32",), ("float64",), ("float32", "float64"), ("float16", "float32"), ("bfloat16", "float32"))
    for seed in range(30):
        yield graph(seed, mixes[seed % len(mixes)])
