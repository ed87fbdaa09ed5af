"""Brings operators of older opsets to the meaning they have today.

One table, :data:`ADAPTERS`: operator → (opset it changed at, function). A node of an older opset passes through every
row above its version, in order. Only changes of *meaning or form* since opset 11 stand here; most versions of most
operators merely added element types. Checked against onnxruntime for opsets 11 to 21.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.errors import ModelError
from ...core.ir import Value


@dataclass
class Call:
    """One operator application on its way into the graph; adapters change it in place.

    Attributes:
        op: operator name.
        inputs: value names, ``""`` for an omitted one.
        attrs: attribute values.
        outputs: how many outputs the node names.
        read: which of them anything may read (a name is given).
        whom: the node, for messages.
        emit: adds a helper node with one output: (op, inputs, attrs) → name of its value.
        several: the same with so many outputs: (op, inputs, attrs, count) → their names.
        constant: adds a constant: (array, stem) → name.
        value: name → type.
        known: name → array of a constant that nobody can replace, else None.
        after: a node that must follow: (op, further inputs, attrs); it takes the first output, and writes its name.
        also: outputs of the node that are helper values: index → name. They stand beyond ``outputs``.
    """

    op: str
    inputs: list[str]
    attrs: dict[str, Any]
    outputs: int
    read: tuple[bool, ...]
    whom: str
    emit: Callable[[str, Sequence[str], Mapping[str, Any]], str]
    several: Callable[[str, Sequence[str], Mapping[str, Any], int], list[str]]
    constant: Callable[[np.ndarray, str], str]
    value: Callable[[str], Value]
    known: Callable[[str], np.ndarray | None]
    after: tuple[str, tuple[str, ...], dict[str, Any]] | None = None
    also: dict[int, str] = field(default_factory=dict)

    def input(self, index: int) -> str:
        """Name of an input, ``""`` when left out."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def set_input(self, index: int, name: str) -> None:
        self.inputs.extend([""] * (index + 1 - len(self.inputs)))
        self.inputs[index] = name

    def int64s(self, values: Sequence[int], stem: str) -> str:
        return self.constant(np.asarray(values, np.int64), stem)

    def error(self, found: str, expected: str) -> ModelError:
        return ModelError("cannot import node", self.whom, found, expected, op=self.op)


def adapt(call: Call, version: int) -> None:
    """Brings ``call``, written for opset ``version``, to today's form."""
    for changed, fix in ADAPTERS.get(call.op, ()):
        if version < changed:
            fix(call)
    if call.op == "Resize":  # any version: some exporters spell "not given" as an empty tensor
        _resize_empty_inputs(call)


def _attribute_to_input(attribute: str, index: int) -> Callable[[Call], None]:
    def fix(call: Call) -> None:
        if attribute in call.attrs:
            call.set_input(index, call.int64s(call.attrs.pop(attribute), attribute))

    return fix


def _split_num_outputs(call: Call) -> None:
    """Before 18 a Split without lengths made as many equal parts as it has outputs."""
    if not call.input(1):
        call.attrs["num_outputs"] = call.outputs


def _dropout(call: Call) -> None:
    """Before 12 the ratio was an attribute; inference, which gives the identity, was the only mode."""
    ratio = call.attrs.pop("ratio", 0.5)
    call.set_input(1, call.constant(np.asarray(ratio, np.float32), "ratio"))


def _coerced_softmax(call: Call) -> None:
    """Before 13 the input was seen as a matrix, axes from ``axis`` on being its columns."""
    axis = int(call.attrs.pop("axis", 1))
    shape = call.value(call.input(0)).shape
    if shape is not None and axis % len(shape) == len(shape) - 1 if shape else False:
        call.attrs["axis"] = -1
        return
    x = call.input(0)
    extents = call.emit("Shape", [x], {})
    call.inputs[0] = call.emit("Flatten", [x], {"axis": axis})
    call.attrs["axis"] = -1
    call.after = ("Reshape", (extents,), {"allowzero": 1})


def _batch_normalization(call: Call) -> None:
    """Before 14 outputs beyond the first asked for training, with a meaning that 14 changed."""
    if any(call.read[1:]):
        raise call.error("BatchNormalization of an opset before 14 in training mode", "inference, or opset 14")
    call.outputs = 1


def _group_normalization(call: Call) -> None:
    """Before 21 scale and bias had one element a group; now they have one a channel."""
    groups = int(call.attrs["num_groups"])
    shape = call.value(call.input(0)).shape
    channels = shape[1] if shape is not None and len(shape) > 1 else None
    if not isinstance(channels, int) or groups < 1 or channels % groups:
        raise call.error(f"GroupNormalization of opset 18 over {channels} channels", f"a multiple of {groups}, known")
    for index, stem in ((1, "scale"), (2, "bias")):
        name, each = call.input(index), channels // groups
        known = call.known(name)
        if known is not None:
            call.inputs[index] = call.constant(np.repeat(known, each), stem)
            continue
        column = call.emit("Reshape", [name, call.int64s([groups, 1], "shape")], {})
        wide = call.emit("Expand", [column, call.int64s([groups, each], "shape")], {})
        call.inputs[index] = call.emit("Reshape", [wide, call.int64s([channels], "shape")], {})


def _grid_sample(call: Call) -> None:
    names = {"bilinear": "linear", "bicubic": "cubic"}
    mode = call.attrs.get("mode", "bilinear")
    call.attrs["mode"] = names.get(mode, mode)


def _dft(call: Call) -> None:
    call.set_input(2, call.constant(np.asarray(call.attrs.pop("axis", 1), np.int64), "axis"))


def _roi_align(call: Call) -> None:
    call.attrs.setdefault("coordinate_transformation_mode", "output_half_pixel")


def _resize_empty_inputs(call: Call) -> None:
    for index in range(1, len(call.inputs)):
        known = call.known(call.inputs[index]) if call.inputs[index] else None
        if known is not None and known.size == 0:
            call.inputs[index] = ""
    while call.inputs and not call.inputs[-1]:
        call.inputs.pop()


_AXES = _attribute_to_input("axes", 1)

ADAPTERS: dict[str, tuple[tuple[int, Callable[[Call], None]], ...]] = {
    "Dropout": ((12, _dropout),),
    "Softmax": ((13, _coerced_softmax),),
    "LogSoftmax": ((13, _coerced_softmax),),
    "Hardmax": ((13, _coerced_softmax),),
    "Squeeze": ((13, _AXES),),
    "Unsqueeze": ((13, _AXES),),
    "ReduceSum": ((13, _AXES),),
    "Split": ((13, _attribute_to_input("split", 1)), (18, _split_num_outputs)),
    "BatchNormalization": ((14, _batch_normalization),),
    "RoiAlign": ((16, _roi_align),),
    **{
        f"Reduce{kind}": ((18, _AXES),)
        for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
    "GridSample": ((20, _grid_sample),),
    "DFT": ((20, _dft),),
    "GroupNormalization": ((21, _group_normalization),),
}
