"""Blocks to and from channels, triangles, and dropout in inference. Floor 1."""

from __future__ import annotations

from typing import Any

from ..errors import GraphError
from .define import operator, specs_in
from .inference import Attributes, Constants, Extent, Inputs, Type, fail, operand, same, times


def _space_type(deeper: bool) -> Any:
    def infer(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
        x, b = operand(inputs, 0), attributes["blocksize"]
        if x.shape is None:
            return [(x.dtype, (None,) * 4)]
        n, c, h, w = x.shape
        if deeper:
            return [(x.dtype, (n, times(c, b * b), _over(h, b), _over(w, b)))]
        return [(x.dtype, (n, _over(c, b * b), times(h, b), times(w, b)))]

    return infer


def _over(extent: Extent, n: int) -> Extent:
    if isinstance(extent, int) and extent % n:
        fail(f"extent {extent}", f"a multiple of {n}")
    return extent // n if isinstance(extent, int) else extent if n == 1 else None


@operator(
    "DepthToSpace", "x", infer=_space_type(False), attributes={"blocksize": "<required>", "mode": "DCR"}, moves=True
)
def depth_to_space(xp: Any, x: Any, *, blocksize: int, mode: str) -> Any:
    n, c, h, w = x.shape
    b, depth = blocksize, c // blocksize**2
    if mode == "DCR":
        y = xp.ns.permute_dims(xp.ns.reshape(x, (n, b, b, depth, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        y = xp.ns.permute_dims(xp.ns.reshape(x, (n, depth, b, b, h, w)), (0, 1, 4, 2, 5, 3))
    return xp.ns.reshape(y, (n, depth, h * b, w * b))


@operator(
    "SpaceToDepth", "x", infer=_space_type(True), attributes={"blocksize": "<required>", "mode": "DCR"}, moves=True
)
def space_to_depth(xp: Any, x: Any, *, blocksize: int, mode: str) -> Any:
    n, c, h, w = x.shape
    b = blocksize
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    y = xp.ns.permute_dims(xp.ns.reshape(x, (n, c, h // b, b, w // b, b)), order)
    return xp.ns.reshape(y, (n, c * b * b, h // b, w // b))


@operator("Trilu", "x k?", infer=same, attributes={"upper": 1}, moves=True, host=("k",))
def trilu(xp: Any, x: Any, k: Any = None, *, upper: int) -> Any:
    rows, columns = x.shape[-2:]
    offset = max(-rows - columns, min(rows + columns, 0 if k is None else xp.ints(k)[0]))
    distance = xp.arange(columns)[None, :] - xp.arange(rows)[:, None]
    keep = distance >= offset if upper else distance <= offset
    return xp.ns.where(keep, x, xp.ns.zeros_like(x))


def _dropout_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    return [(x.dtype, x.shape), ("bool", x.shape)]


@operator(
    "Dropout",
    "x ratio? training_mode?",
    outputs="y mask?",
    infer=_dropout_type,
    attributes={"seed": 0},
    moves=True,
    host=("training_mode",),
)
def dropout(xp: Any, x: Any, ratio: Any = None, training_mode: Any = None, *, seed: int) -> Any:
    """As ONNX Dropout in inference: the identity and a mask of ones. Training raises: ONNX fixes no random stream."""
    if training_mode is not None and xp.ints(training_mode)[0] and (ratio is None or xp.scalar(ratio) != 0):
        raise GraphError("cannot evaluate", "Dropout", "training mode", "inference: ONNX defines no random stream")
    return x, xp.ns.ones_like(x, dtype=xp.storage("bool"))


OPS = specs_in(globals())
