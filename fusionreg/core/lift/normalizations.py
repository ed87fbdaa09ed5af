"""Normalisations that exporters spell out: LayerNorm, RMSNorm, GroupNorm, Softmax. Floor 3.

A bare normalisation is lifted with a scale of ones; a scale and a bias that fit are then taken in, one by one.
E[x²] − E[x]² is never lifted: it cancels where the canonical operator does not, so the two are not the same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ..dtypes import dtype
from .engine import Rule
from .site import Condition, Site, floats

#: d / sqrt(v + eps) in the spellings seen; ``g`` is a scale that is multiplied into the inverse first.
_ROOT = "a = Add(v, eps)\n"
_INVERSE = (
    "r = Reciprocal(Sqrt(a))",
    "r = Div(1.0, Sqrt(a))",
    "r = Pow(a, -0.5)",
    "r = fusionreg.Rsqrt(a)",
)


def _tails(d: str) -> Iterator[tuple[str, bool]]:
    """(text, whether it has a scale of its own)."""
    yield f"{_ROOT}y = Div({d}, Sqrt(a))", False
    yield f"{_ROOT}y = Div({d}, Pow(a, 0.5))", False
    for inverse in _INVERSE:
        yield f"{_ROOT}{inverse}\ny = Mul({d}, r)", False
        yield f"{_ROOT}{inverse}\ny = Mul({d}, Mul(r, gamma))", True


def _statistics(site: Site) -> Mapping[str, Any] | None:
    """Attributes of the canonical operator, and ones for its scale; None when the axes are not the last ones."""
    import numpy as np

    shape, epsilon = site.shape("x"), site.number("eps")
    count = site.last_axes("axes")
    if shape is None or count is None or epsilon is None or not epsilon >= 0.0:
        return None
    if any(site.last_axes(name) != count for name in ("axes2", "axes3") if name in site.found.inputs):
        return None
    tail = shape[len(shape) - count :]
    found: dict[str, Any] = {"axis": -count, "epsilon": epsilon}
    if "gamma" not in site.found.inputs:
        if any(isinstance(d, str) for d in tail):
            return None
        found["ones"] = np.ones(tail, dtype(site.value("x").dtype).numpy)
    return found


def tail_shaped(name: str) -> Condition:
    """A scale or bias has exactly the normalised extents: nothing that merely broadcasts."""

    def holds(site: Site) -> bool:
        shape, given = site.shape("x"), site.shape(name)
        axis = site.attribute("axis") if "axis" in site.found.attributes else None
        count = site.last_axes("axes") if axis is None else -axis if axis < 0 else None
        return shape is not None and given is not None and bool(count) and given == shape[len(shape) - (count or 0) :]

    return holds


def _core(name: str, op: str, head: str, d: str) -> Iterator[Rule]:
    for tail, scaled in _tails(d):
        text = f"{head}\n{tail}"
        if scaled:
            replacement = f"y = {op}(x, gamma, axis=axis, epsilon=epsilon)"
            yield Rule(name, text, replacement, (floats("x", "gamma"), tail_shaped("gamma")), _statistics)
        else:
            yield Rule(name, text, f"y = {op}(x, ones, axis=axis, epsilon=epsilon)", (floats("x"),), _statistics)


def _layer_norm() -> Iterator[Rule]:
    mean = "m = ReduceMean(x, axes)\nd = Sub(x, m)\n"
    # some exporters compute x - mean twice; a variance that is one call of the framework has a mean of its own
    twins = ("", "d2 = Sub(x, m)\n", "d2 = Sub(x, ReduceMean(x, axes3))\n")
    for again, square in product(twins, ("Pow({0}, 2.0)", "Mul({0}, {0})")):
        head = f"{mean}{again}v = ReduceMean({square.format('d2' if again else 'd')}, axes2)"
        yield from _core("layer_norm", "LayerNormalization", head, "d")


def _rms_norm() -> Iterator[Rule]:
    for square in ("Pow({0}, 2.0)", "Mul({0}, {0})"):
        yield from _core("rms_norm", "RMSNormalization", f"v = ReduceMean({square.format('x')}, axes)", "x")
        for inverse in _INVERSE:  # x is cast for its squares, and once more for the product with the inverse
            yield Rule(
                "rms_norm_of_a_cast",
                'c = Cast(z, to="float32")\nx = Cast(z, to="float32")\n'
                f"v = ReduceMean({square.format('c')}, axes)\n{_ROOT}{inverse}\ny = Mul(x, r)",
                'y = RMSNormalization(Cast(z, to="float32"), ones, axis=axis, epsilon=epsilon)',
                (floats("x"),),
                _statistics,
            )


def _same_as_computed(site: Site) -> bool:
    """Casts to float32 around the operator say what it does by itself for a 16-bit float."""
    x, y = site.value("x").dtype, site.value("y").dtype
    return x == y and x in ("float16", "bfloat16")


def _ones_like_tail(site: Site) -> Mapping[str, Any] | None:
    import numpy as np

    shape, axis = site.shape("x"), site.attribute("axis")
    if shape is None or axis >= 0 or any(isinstance(d, str) for d in shape[axis:]):
        return None
    return {"ones": np.ones(shape[axis:], dtype(site.value("x").dtype).numpy)}


def _affine(op: str) -> Iterator[Rule]:
    """A scale, then a bias, taken into a normalisation that has none yet."""
    call = "axis=axis, epsilon=epsilon)"
    yield Rule(
        "scale",
        f"y = Mul({op}(x, 1.0, {call}, gamma)",
        f"y = {op}(x, gamma, {call}",
        (floats("x", "gamma"), tail_shaped("gamma")),
    )
    if op == "LayerNormalization":
        yield Rule(
            "bias",
            f"y = Add({op}(x, gamma, {call}, beta)",
            f"y = {op}(x, gamma, beta, {call}",
            (floats("x", "gamma", "beta"), tail_shaped("beta")),
        )
    yield Rule(
        "casts",
        f'y = Cast({op}(Cast(x, to="float32"), 1.0, {call}, to=kind)',
        f"y = {op}(x, ones, {call}",
        (_same_as_computed,),
        _ones_like_tail,
    )


def _softmax_axis(site: Site) -> Mapping[str, Any] | None:
    """One axis, the same in every maximum and the sum."""
    rank, named = site.rank("x"), [site.ints(name) for name in site.found.inputs if name.startswith("axes")]
    if rank is None or any(axes is None or len(axes) != 1 for axes in named):
        return None
    found = {axes[0] % rank for axes in named if axes}
    return {"axis": found.pop() - rank} if len(found) == 1 else None


#: The last two as a program has it that writes them out twice.
_SHIFTED = (
    "e = Exp(Sub(x, ReduceMax(x, axes)))\ns = ReduceSum(e, axes2)\n",
    "m = ReduceMax(x, axes)\ne = Exp(Sub(x, m))\ns = ReduceSum(Exp(Sub(x, m)), axes2)\n",
    "e = Exp(Sub(x, ReduceMax(x, axes)))\ns = ReduceSum(Exp(Sub(x, ReduceMax(x, axes3))), axes2)\n",
)


def _groups(site: Site) -> Mapping[str, Any] | None:
    """Reshape to (N, G, …), InstanceNormalization and back is GroupNormalization where G divides C."""
    import numpy as np

    x, r, y = site.shape("x"), site.shape("r"), site.shape("y")
    if x is None or r is None or y != x or len(x) < 3 or len(r) < 3 or r[0] != x[0]:
        return None
    channels, groups = x[1], r[1]
    if not isinstance(channels, int) or not isinstance(groups, int) or groups < 1 or channels % groups:
        return None
    kind = dtype(site.value("x").dtype).numpy
    return {"groups": groups, "ones": np.ones(channels, kind), "zeros": np.zeros(channels, kind)}


def _per_channel(name: str) -> Condition:
    """Shape (C, 1, …) or (1, C, 1, …): one number a channel and nothing else."""

    def holds(site: Site) -> bool:
        x, given = site.shape("x"), site.shape(name)
        if x is None or given is None or len(given) > len(x):
            return False
        return (1,) * (len(x) - len(given)) + given == (1, x[1]) + (1,) * (len(x) - 2)

    return holds


def _heads_behind(site: Site) -> bool:
    """Of heads that a Transpose has put in front of tokens: the last axis is the same one before it."""
    producer = site.graph.producers.get(site.name("x"))
    split = site.attribute("perm") == (0, 2, 1, 3) and producer is not None and producer.op in ("Reshape", "Split")
    return split and site.rank("x") == 4 and site.attribute("axis") in (-1, 3)


#: Rows that are normalised are the same before heads are put in front of tokens and after it; fusions have it before.
HEADS: tuple[Rule, ...] = tuple(
    Rule(
        "norm_of_heads",
        f"y = {norm.format('Transpose(x, perm=perm)')}",
        f"y = Transpose({norm.format('x')}, perm=perm)",
        (_heads_behind,),
    )
    for norm in (
        "RMSNormalization({}, gamma, axis=axis, epsilon=epsilon)",
        'Cast(RMSNormalization(Cast({}, to="float32"), gamma, axis=axis, epsilon=epsilon), to=kind)',
    )
)

_GROUP = "num_groups=groups, epsilon=epsilon)"

RULES: tuple[Rule, ...] = (
    *_layer_norm(),
    *_rms_norm(),
    *_affine("LayerNormalization"),
    *_affine("RMSNormalization"),
    *(
        Rule("softmax", shifted + y, "y = Softmax(x, axis=axis)", (floats("x"),), _softmax_axis)
        for shifted in _SHIFTED
        for y in ("y = Div(e, s)", "y = Mul(e, Reciprocal(s))")
    ),
    Rule(
        "group_norm",
        "r = Reshape(x, s1)\ni = InstanceNormalization(r, 1.0, 0.0, epsilon=epsilon)\ny = Reshape(i, s2)",
        f"y = GroupNormalization(x, ones, zeros, {_GROUP}",
        (floats("x"),),
        _groups,
    ),
    Rule(
        "group_norm_scale",
        f"y = Mul(GroupNormalization(x, 1.0, 0.0, {_GROUP}, gamma)",
        f"y = GroupNormalization(x, Reshape(gamma, (-1,)), zeros, {_GROUP}",
        (floats("x", "gamma"), _per_channel("gamma")),
        lambda site: _zeros(site),
    ),
    Rule(
        "group_norm_bias",
        f"y = Add(GroupNormalization(x, gamma, 0.0, {_GROUP}, beta)",
        f"y = GroupNormalization(x, gamma, Reshape(beta, (-1,)), {_GROUP}",
        (floats("x", "gamma", "beta"), _per_channel("beta")),
    ),
)


def _zeros(site: Site) -> Mapping[str, Any] | None:
    import numpy as np

    shape = site.shape("x")
    if shape is None or not isinstance(shape[1], int):
        return None
    return {"zeros": np.zeros(shape[1], dtype(site.value("x").dtype).numpy)}
