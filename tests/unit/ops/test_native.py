"""What torch computes with one kernel is what the vocabulary means, but for roundings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fusionreg.core.evaluate.evaluator import Evaluator, Run
from fusionreg.core.ir import GraphBuilder, Value
from fusionreg.core.ops import default_vocabulary, native
from fusionreg.core.ops.tables import without_tf32

OPS = default_vocabulary()
MAP, FILTERS = (2, 4, 7, 6), (6, 2, 3, 3)
WINDOW = {"kernel_shape": (3, 3)}
CASES: list[tuple[str, list[tuple[int, ...]], dict[str, Any], bool]] = [
    *((op, [MAP, (4, 1, 1)], {}, True) for op in ("Add", "Sub", "Mul", "Div")),
    *((op, [MAP], {}, True) for op in ("Relu", "Sigmoid", "Tanh", "Swish", "GlobalAveragePool")),
    ("Swish", [MAP], {"alpha": 1.5}, False),
    ("MatMul", [(2, 5, 3), (2, 7, 5)], {"transA": 1, "transB": 1}, True),
    ("Conv", [MAP, FILTERS, (6,)], {"group": 2, "pads": (1, 1, 1, 1), "strides": (2, 1), "dilations": (1, 2)}, True),
    ("Conv", [MAP, FILTERS], {"group": 2, "auto_pad": "SAME_LOWER", "strides": (2, 2)}, True),
    ("Conv", [MAP, FILTERS], {"group": 2, "pads": (2, 0, 1, -1)}, True),
    ("MaxPool", [MAP], {**WINDOW, "pads": (1, 1, 1, 1), "strides": (2, 2)}, True),
    ("MaxPool", [MAP], {**WINDOW, "pads": (0, 0, 1, 1)}, False),
    ("MaxPool", [MAP], {**WINDOW, "ceil_mode": 1, "strides": (2, 2)}, False),
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("op", "shapes", "attributes", "known"), CASES)
def test_one_kernel_is_the_operator(
    op: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any], known: bool, dtype: str, monkeypatch: Any
) -> None:
    """Also with a NaN; the evaluator takes it where it would run on a GPU."""
    b = GraphBuilder("g")
    names = [f"x{i}" for i in range(len(shapes))]
    for name, shape in zip(names, shapes, strict=True):
        b.input(name, dtype, shape)
    b.node(op, names, [Value("y", dtype, None)], attrs=attributes)
    graph, rng = b.build(["y"]), np.random.default_rng(0)
    feed = {n: torch.from_numpy(rng.standard_normal(s).astype(dtype)) for n, s in zip(names, shapes, strict=True)}
    feed["x0"].view(-1)[8] = torch.nan
    want = Evaluator(graph, ops=OPS).run(feed)["y"]
    assert want.isnan().any()
    taken = []
    monkeypatch.setattr(native, "run", lambda *a, own=native.run: taken.append(own(*a)) or taken[-1])
    init = Run.__init__

    def on_gpu(self: Run, *args: Any) -> None:
        init(self, *args)
        self.cuda = True

    monkeypatch.setattr(Run, "__init__", on_gpu)
    got = Evaluator(graph, ops=OPS).run(feed)["y"]
    assert [x is not None for x in taken] == [known]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, equal_nan=True)


def test_integers_and_mixed_operands_are_left_to_the_vocabulary() -> None:
    x = torch.ones(3)
    assert native.run("Add", [x.int(), x.int()], {}) is None and native.run("Add", [x, x.half()], {}) is None


@pytest.mark.parametrize("flag", ["enabled", "benchmark", "deterministic"])
def test_cudnn_stays_as_it_was(flag: str) -> None:
    """Its context turns off what is not named: convolutions ran without cuDNN, twenty times as slow."""
    cudnn = torch.backends.cudnn
    for on in (True, False):
        with cudnn.flags(**{"enabled": True, "benchmark": False, flag: on}):
            with without_tf32(torch, torch.ones(1)):
                assert getattr(cudnn, flag) == on and not cudnn.allow_tf32
            with without_tf32(torch, torch.ones(1).half()):
                assert cudnn.allow_tf32
