"""Batch normalisation in training, its saved statistics and its gradient, against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionreg.core.ops import default_vocabulary, numpy_backend

OPS, XP = default_vocabulary(), numpy_backend()
SHAPES = pytest.mark.parametrize("shape", [(7, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 2)], ids=str)


def meaning(op, *arrays, **attributes):
    spec = OPS[op]
    return spec.meaning(XP, *arrays, **{**spec.attributes, **attributes})


def operands(shape):
    rng = np.random.default_rng(len(shape))
    x, (scale, bias, mean, var) = rng.standard_normal(shape), rng.standard_normal((4, shape[1]))
    return x, scale, bias, mean, var**2


@SHAPES
@pytest.mark.parametrize("momentum", [0.0, 0.7, 1.0])
def test_forward(shape, momentum) -> None:
    x, scale, bias, mean, var = operands(shape)
    y, new_mean, new_var, saved, inverse = meaning(
        "BatchNormalization", x, scale, bias, mean, var, momentum=momentum, training_mode=1, unbiased=1
    )
    running = [torch.tensor(v) for v in (mean, var)]
    wanted, wanted_mean, wanted_inverse = torch.native_batch_norm(
        *(torch.tensor(v) for v in (x, scale, bias)), *running, True, 1.0 - momentum, 1e-5
    )
    all_wanted = (wanted, *running, wanted_mean, wanted_inverse)
    for got, want in zip((y, new_mean, new_var, saved, inverse), all_wanted, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-12, atol=1e-12)
    biased = meaning("BatchNormalization", x, scale, bias, mean, var, momentum=momentum, training_mode=1)[2]
    count = x.size // shape[1]
    np.testing.assert_allclose(biased - momentum * var, (new_var - momentum * var) * (count - 1) / count, atol=1e-12)


def test_one_element_a_channel() -> None:
    x, scale, bias, mean, var = operands((1, 4))
    found = meaning("BatchNormalization", x, scale, bias, mean, var, training_mode=1, unbiased=1)
    assert np.isnan(found[2]).all() and np.array_equal(found[0][0], bias)
    found = meaning("BatchNormalization", x, scale, bias, mean, var, training_mode=1)
    np.testing.assert_allclose(found[2], 0.9 * var)


@SHAPES
def test_gradient_and_the_forward_pass_again(shape) -> None:
    x, scale, bias, mean, var = operands(shape)
    dy = np.random.default_rng(9).standard_normal(shape)
    y, _, _, saved, inverse = meaning("BatchNormalization", x, scale, bias, mean, var, training_mode=1)
    again = meaning("fusionreg::BatchNormalizationApply", x, scale, bias, saved, inverse)
    np.testing.assert_allclose(again, y, atol=1e-12)
    leaves = [torch.tensor(v, requires_grad=True) for v in (x, scale, bias)]
    torch.nn.functional.batch_norm(leaves[0], None, None, *leaves[1:], True).backward(torch.tensor(dy))
    found = meaning("fusionreg::BatchNormalizationGrad", dy, x, scale, saved, inverse)
    for got, leaf in zip(found, leaves, strict=True):
        np.testing.assert_allclose(got, leaf.grad.numpy(), rtol=1e-10, atol=1e-12)
