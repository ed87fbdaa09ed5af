"""Seed and offset come from the generator of the caller's own library, and differ from call to call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionreg import load_registry
from fusionreg.core.errors import ArgumentError
from fusionreg.core.runtime.seeds import draw


def test_torch_draws_from_its_generator():
    x = torch.zeros(3)
    torch.manual_seed(7)
    first, second = draw(x), draw(x)
    assert first.dtype == torch.int64 and tuple(first.shape) == (2,) and first.device == x.device
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(draw(x), first)
    mine = torch.Generator().manual_seed(1)
    assert torch.equal(draw(x, mine), draw(x, torch.Generator().manual_seed(1)))
    assert (first >= 0).all()


def test_numpy_draws_from_its_generator():
    x = np.zeros(3)
    np.random.seed(7)
    first, second = draw(x), draw(x)
    assert first.dtype == np.int64 and first.shape == (2,) and not np.array_equal(first, second)
    np.random.seed(7)
    assert np.array_equal(draw(x), first)
    a, b = (draw(x, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(a, b) and (a >= 0).all()


def test_other_arrays_are_an_error():
    with pytest.raises(ArgumentError, match=r"a builtins\.list — a NumPy, torch or CuPy array"):
        draw([1.0])


def test_a_mask_is_made_again_from_the_same_words():
    registry = load_registry(device="sim")
    x = np.ones((4, 64), dtype="float32")
    rng = registry.rng(x)
    once, again = (registry.call("norm.swish_dropout", x, rng, p=0.5) for _ in range(2))
    other = registry.call("norm.swish_dropout", x, registry.rng(x), p=0.5)
    assert np.array_equal(once, again) and not np.array_equal(once, other)
    gradient = registry.call("norm.swish_dropout_backward", np.ones_like(x), x, rng, p=0.5)
    assert np.array_equal(gradient != 0, once != 0), "one mask in both directions"
