"""What opsets 7 to 10 wrote differently: attributes that are inputs today, Upsample, the first Resize.

Opset 6 and before broadcast by an attribute instead of by shape; those are not read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .adapters import Call


def adapt(call: Call, version: int) -> None:
    """Brings ``call``, written for opset ``version``, to the form of opset 11."""
    row = _EARLY.get(call.op)
    if row is not None and version < row[0]:
        row[1](call)


def _clip(call: Call) -> None:
    kind = call.value(call.input(0)).dtype
    for index, name in ((1, "min"), (2, "max")):
        if name in call.attrs:
            call.set_input(index, call.constant(np.asarray(call.attrs.pop(name)).astype(kind), name))


def _pad(call: Call) -> None:
    call.set_input(1, call.int64s(call.attrs.pop("pads"), "pads"))
    value = call.attrs.pop("value", 0.0)
    if value:
        call.set_input(2, call.constant(np.asarray(value).astype(call.value(call.input(0)).dtype), "value"))


def _slice(call: Call) -> None:
    starts = call.attrs.pop("starts")
    axes = call.attrs.pop("axes", range(len(starts)))
    for index, (values, stem) in enumerate(((starts, "starts"), (call.attrs.pop("ends"), "ends"), (axes, "axes"))):
        call.set_input(index + 1, call.int64s(values, stem))


def _topk(call: Call) -> None:
    call.set_input(1, call.int64s([call.attrs.pop("k")], "k"))


def _scatter(call: Call) -> None:
    call.op = "ScatterElements"


def _batch_normalization(call: Call) -> None:
    if call.attrs.pop("spatial", 1) != 1:
        raise call.error("BatchNormalization with spatial = 0", "statistics over the image too")


def _resize(call: Call) -> None:
    """(x, scales), output pixel i standing at i / scale: nearest rounds down when enlarging, up when shrinking."""
    x, scales = call.input(0), call.input(1)
    enlarges = call.op == "Upsample"  # its scales are at least 1, known or not
    if enlarges:
        call.op = "Resize"
        if "scales" in call.attrs:
            scales = call.constant(np.asarray(call.attrs.pop("scales"), np.float32), "scales")
    known = call.known(scales)
    if known is None and not enlarges:
        raise call.error("scales that are computed", "constant scales before opset 11")
    factors = np.ones(0) if known is None else known
    shrinks = bool((factors < 1).any())
    if shrinks and bool((factors > 1).any()):
        raise call.error("scales that enlarge and shrink", "one of the two before opset 11")
    call.inputs[:] = [x, "", scales]
    call.attrs["coordinate_transformation_mode"] = "asymmetric"
    call.attrs["nearest_mode"] = "ceil" if shrinks else "floor"
    call.attrs["mode"] = "nearest" if call.attrs.get("mode", "nearest") == "nearest" else "linear"


def _scan(call: Call) -> None:
    raise call.error("Scan of opset 8", "Scan without a batch axis, of opset 9 or later")


_EARLY: dict[str, tuple[int, Callable[[Call], None]]] = {
    "Clip": (11, _clip),
    "Pad": (11, _pad),
    "Slice": (10, _slice),
    "TopK": (10, _topk),
    "Upsample": (11, _resize),
    "Resize": (11, _resize),
    "Scatter": (11, _scatter),
    "BatchNormalization": (9, _batch_normalization),
    "Scan": (9, _scan),
}
