"""Numbers of 4 bits, two to a byte."""

from __future__ import annotations

import numpy as np
import torch

from fusionreg.core.ir import Value
from fusionreg.core.ops import backend_of, default_vocabulary, infer, numpy_backend

UNPACK = default_vocabulary()["fusionreg::UnpackInt4"]


def test_every_byte() -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    found = UNPACK.meaning(numpy_backend(), packed)
    wanted = [[v for byte in row for v in (int(byte) % 16 - 8, int(byte) // 16 - 8)] for row in packed]
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found, wanted)
    tensor = torch.from_numpy(packed)
    np.testing.assert_array_equal(UNPACK.meaning(backend_of(tensor), tensor).numpy(), wanted)


def test_its_type() -> None:
    x = Value("x", "uint8", (3, None, 40))
    assert [(v[0], v[1]) for v in infer(UNPACK, [x], {}, {})] == [("int8", (3, None, 80))]
