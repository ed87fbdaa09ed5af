"""Iteration spaces: which axes remain, in which order, and what a kernel is compiled for."""

from __future__ import annotations

import random

import pytest

from fusionreg.core.errors import MisfitError
from fusionreg.core.frozen import EMPTY, FrozenDict
from fusionreg.core.problem import Tensor
from fusionreg.core.problem.iteration import iteration, reciprocal, space
from fusionreg.core.problem.types import Problem, row_major


def problem(*inputs, out=None, dtype="float32"):
    """A problem of tensors given as (shape, strides) or (shape, strides, alignment) or a Tensor; the output is last."""

    def tensor(given):
        if isinstance(given, Tensor):
            return given
        shape, strides, *alignment = given
        return Tensor(dtype, shape, strides or row_major(shape), *alignment)

    if out is None:
        rank = max(len(tensor(i).shape) for i in inputs)
        shapes = [(1,) * (rank - len(tensor(i).shape)) + tensor(i).shape for i in inputs]
        out = (tuple(max(d) for d in zip(*shapes, strict=True)), None)
    tensors = {f"in{i}": tensor(t) for i, t in enumerate(inputs)} | {"out0": tensor(out)}
    return Problem(
        fusion="acme.region", dtypes=EMPTY, axes=EMPTY, leading=(), attributes=EMPTY, choices=EMPTY,
        tensors=FrozenDict(tensors), forms=EMPTY, shapes=EMPTY, inputs=len(inputs), target="sm_90a",
        multiprocessors=132,
    )  # fmt: skip


def seen(*inputs, **options):
    found = space(problem(*inputs, **options))
    return found.extents, found.strides


def test_contiguous_operands_are_one_axis():
    assert seen(((2, 3, 4), None), ((2, 3, 4), None)) == ((24,), ((1,), (1,), (1,)))


def test_a_bias_keeps_its_axis():
    assert seen(((2, 3, 4), None), ((4,), None)) == ((6, 4), ((4, 1), (0, 1), (4, 1)))


def test_a_channel_keeps_three_axes():
    assert seen(((2, 3, 4, 5), None), ((3, 1, 1), None)) == ((2, 3, 20), ((60, 20, 1), (0, 1, 0), (60, 20, 1)))


def test_axes_of_one_position_are_dropped_whatever_their_strides():
    assert seen(((1, 6, 1, 4), (77, 4, 99, 1)), ((4,), None)) == ((6, 4), ((4, 1), (0, 1), (4, 1)))


def test_an_expanded_operand_is_a_broadcast():
    assert seen(((3, 4), None), ((3, 4), (0, 1))) == seen(((3, 4), None), ((4,), None))


def test_permuted_alike_is_contiguous():
    columns = ((5, 7), (1, 5))
    assert seen(columns, columns, out=columns) == ((35,), ((1,), (1,), (1,)))


def test_the_last_axis_is_the_one_that_most_bytes_lie_along():
    rows, columns = ((8, 6), None), ((8, 6), (1, 8))
    assert seen(rows, columns)[0] == (8, 6)
    found = space(problem(columns, columns))
    assert found.extents == (6, 8) and found.strides[-1] == (1, 6)  # the output is what lies across
    it = found.structure
    assert [it.transposed(o) for o in it.operands] == [False, False, True] and it.across == 0


def test_transposed_operands():
    it = iteration(problem(((8, 6), None), ((8, 6), (1, 8))))
    assert [it.transposed(o) for o in it.operands] == [False, True, False]
    plain = iteration(problem(((8, 6), None), ((8, 1), None)))
    assert plain.across == -1 and not any(plain.transposed(o) for o in plain.operands)


def test_one_position_and_none():
    assert seen(((), None), ((1, 1), None), out=((1, 1), None)) == ((1,), ((1,), (1,), (1,)))
    found = space(problem(((0, 4), None), ((4,), None), out=((0, 4), None)))
    assert found.env["elements"] == 0 and not found.structure.wide


def test_extents_and_strides_are_no_structure():
    a = iteration(problem(((8, 16), None), ((16,), None)))
    b = iteration(problem(((5, 32), (40, 1)), ((32,), None)))
    assert a == iteration(problem(((3, 64), None), ((64,), None))) and hash(a) == hash(a)
    assert a != b  # padded rows are no longer one run, and code depends on that


@pytest.mark.parametrize(
    ("inputs", "widest", "flat"),  # 16 floats are four accesses
    [
        ((((8, 16), None), ((8, 16), None)), 16, True),
        ((((8, 16), None, 8), ((8, 16), None)), 2, True),
        ((((8, 16), None, 4), ((8, 16), None)), 1, True),
        ((((8, 16), None), ((16,), None)), 16, False),
        ((((8, 15), None), ((15,), None)), 16, True),  # past the ends of rows
        ((((8, 14), None), ((14,), None)), 2, False),
        ((((8, 16), (18, 1)), ((16,), None)), 2, False),
        ((((8, 16), (17, 1)), ((16,), None)), 16, True),  # the output has runs, the input goes one by one
        ((((8, 16), (32, 2)), ((16,), None)), 16, False),  # one by one, beside runs of the others
    ],
)
def test_widest_run(inputs, widest, flat):
    found = space(problem(*inputs))
    assert found.structure.flat == flat
    assert found.widest == widest


def test_wide_when_a_position_or_an_offset_is():
    assert not iteration(problem(((2**20, 2**10), None))).wide
    assert iteration(problem(((2**21, 2**10), None))).wide
    assert iteration(problem(((2, 4), (2**31, 1)))).wide
    assert iteration(problem(((2, 4), (-(2**31), 1)))).wide
    assert not iteration(problem(((1, 4), (2**31, 1)))).wide


def test_what_does_not_broadcast():
    with pytest.raises(MisfitError, match="in1 has shape"):
        space(problem(((4, 8), None), ((4, 7), None), out=((4, 8), None)))


@pytest.mark.parametrize("wide", [False, True])
def test_reciprocals_divide(wide):
    bits = 64 if wide else 32
    limit = 2 ** (bits - 1)
    rng = random.Random(0)
    divisors = [1, 2, 3, 5, 7, 10, 641, 2**16 - 1, 2**16 + 1, limit - 1, *(rng.randrange(1, limit) for _ in range(200))]
    for d in divisors:
        multiplier, shift = reciprocal(d, wide)
        assert -limit <= multiplier < limit and 0 <= shift < bits
        multiplier %= 2**bits
        for n in {0, 1, d - 1, d, d + 1, limit - 1, limit - d, *(rng.randrange(limit) for _ in range(20))}:
            if 0 <= n < limit:
                high = n * multiplier >> bits
                assert high + n < 2**bits and (high + n) >> shift == n // d, (n, d)


def test_random_layouts_reach_every_element():
    """Offsets over the iteration are, as a multiset of tuples, those over the original axes."""
    rng = random.Random(1)
    for _ in range(300):
        rank = rng.randint(0, 4)
        shape = tuple(rng.choice([1, 2, 3]) for _ in range(rank))
        tensors = []
        for _ in range(3):
            order = list(range(rank))
            rng.shuffle(order)
            strides, step = [0] * rank, 1
            for a in order:
                strides[a] = step * rng.choice([1, 1, -1])
                step *= shape[a] * rng.choice([1, 1, 2])
            tensors.append((shape, tuple(0 if rng.random() < 0.15 else s for s in strides)))
        p = problem(*tensors, out=(shape, row_major(shape)))
        found = space(p)
        iterations_offsets = _offsets(found.extents, found.strides)
        strides = [t.strides for t in p.tensors.values()]
        assert sorted(iterations_offsets) == sorted(_offsets(shape, strides))


def _offsets(extents, strides):
    found = [(0,) * len(strides)]
    for a, n in enumerate(extents):
        found = [tuple(o + i * s[a] for o, s in zip(at, strides, strict=True)) for at in found for i in range(n)]
    return found

