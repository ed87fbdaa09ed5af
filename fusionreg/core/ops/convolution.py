"""Convolutions. ``x[N C *S]``, ``w[M C/group *k]``; any number of spatial axes. Floor 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Extent, Inputs, Type, fail, operand, times

GEOMETRY: Mapping[str, Any] = {
    "auto_pad": "NOTSET",
    "dilations": (),
    "group": 1,
    "kernel_shape": (),
    "pads": (),
    "strides": (),
}


def per_axis(given: Sequence[int], n: int, default: int = 1) -> tuple[int, ...]:
    """An attribute with one number per spatial axis; empty means ``default`` for each."""
    return tuple(given) or (default,) * n


def window_pads(
    attributes: Mapping[str, Any], extents: Sequence[Extent], kernel: Sequence[int]
) -> tuple[tuple[Extent, Extent], ...]:
    """Padding (before, after) of every spatial axis, None where ``auto_pad`` needs an unknown extent."""
    n, mode = len(kernel), attributes["auto_pad"]
    if mode in ("NOTSET", ""):
        pads = per_axis(attributes["pads"], 2 * n, 0)
        return tuple((pads[i], pads[n + i]) for i in range(n))
    if mode == "VALID":
        return ((0, 0),) * n
    found: list[tuple[Extent, Extent]] = []
    strides, dilations = per_axis(attributes["strides"], n), per_axis(attributes["dilations"], n)
    for extent, k, s, d in zip(extents, kernel, strides, dilations, strict=True):
        if s == 1:
            total = (k - 1) * d
        elif isinstance(extent, int):
            total = max(0, (-(-extent // s) - 1) * s + (k - 1) * d + 1 - extent)
        else:
            found.append((None, None))
            continue
        small, large = total // 2, total - total // 2
        found.append((small, large) if mode == "SAME_UPPER" else (large, small))
    return tuple(found)


def window_count(
    extent: Extent, k: int, stride: int, dilation: int, pads: tuple[Extent, Extent], ceil: int = 0
) -> Extent:
    """How many windows fit along one axis, when it can be told."""
    before, after = pads
    if not isinstance(before, int) or not isinstance(after, int):
        return None
    rest = before + after - (k - 1) * dilation - 1
    if not isinstance(extent, int):
        return extent if stride == 1 and rest == -1 else None
    if extent + rest < 0:
        fail(f"a window of {(k - 1) * dilation + 1} over {extent} + {before} + {after}", "a window that fits")
    if not ceil:
        return (extent + rest) // stride + 1
    count = -(-(extent + rest) // stride) + 1
    return count - 1 if (count - 1) * stride >= extent + before else count  # no window starts in the padding after


def same_count(mode: str, extent: Extent, stride: int, found: Extent) -> Extent:
    """With SAME padding and stride 1 the extent stays, even where it is symbolic."""
    return extent if mode.startswith("SAME") and stride == 1 else found


def pad_spatial(xp: Any, x: Any, pads: Sequence[tuple[int, int]], value: Any) -> Any:
    """``x`` padded on its last ``len(pads)`` axes with ``value``; negative numbers cut."""
    first = x.ndim - len(pads)
    for axis, (before, after) in enumerate(pads, start=first):
        extent = x.shape[axis]
        x = x[(slice(None),) * axis + (slice(max(0, -before), extent - max(0, -after)),)]
        parts = [x]
        if before > 0:
            parts.insert(0, xp.full((*x.shape[:axis], before, *x.shape[axis + 1 :]), value, x))
        if after > 0:
            parts.append(xp.full((*x.shape[:axis], after, *x.shape[axis + 1 :]), value, x))
        x = xp.ns.concat(parts, axis=axis) if len(parts) > 1 else x
    return x


def conv_shape(inputs: Inputs, attributes: Attributes) -> tuple[Extent, ...] | None:
    """The shape of inputs 0 and 1 convolved."""
    x, w = operand(inputs, 0), operand(inputs, 1)
    if x.shape is None:
        return None
    n = len(x.shape) - 2
    if n < 1:
        fail(f"an input of rank {len(x.shape)}", "batch, channels and at least one spatial axis")
    filters = w.shape[0] if w.shape is not None else None
    kernel = tuple(attributes["kernel_shape"]) or (w.shape[2:] if w.shape is not None else ())
    if len(kernel) != n:
        if w.shape is None:
            return (x.shape[0], None, *(None,) * n)
        fail(f"a kernel with {len(kernel)} spatial axes", f"{n}")
    channels, group = x.shape[1], attributes["group"]
    wanted = times(w.shape[1], group) if w.shape is not None else None
    if isinstance(channels, int) and isinstance(wanted, int) and channels != wanted:
        fail(f"{channels} channels for weights of {wanted} in {group} groups", "equal numbers")
    if not all(isinstance(k, int) for k in kernel):
        return (x.shape[0], filters, *(None,) * n)
    numbers = tuple(k for k in kernel if isinstance(k, int))
    pads = window_pads(attributes, x.shape[2:], numbers)
    strides, dilations = per_axis(attributes["strides"], n), per_axis(attributes["dilations"], n)
    rows = zip(x.shape[2:], numbers, strides, dilations, pads, strict=True)
    mode = attributes["auto_pad"]
    return (x.shape[0], filters, *(same_count(mode, e, s, window_count(e, k, s, d, p)) for e, k, s, d, p in rows))


def _conv_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [(operand(inputs, 0).dtype, conv_shape(inputs, attributes))]


def _channels(xp: Any, bias: Any, rank: int) -> Any:
    return xp.ns.reshape(bias, (1, bias.shape[0], *[1] * (rank - 2)))


def correlate(xp: Any, x: Any, w: Any, attributes: Mapping[str, Any]) -> Any:
    """``x``, padded with 0 as the attributes say, convolved with ``w``."""
    n = x.ndim - 2
    pads = window_pads(attributes, x.shape[2:], tuple(w.shape[2:]))
    x = pad_spatial(xp, x, [(int(a or 0), int(b or 0)) for a, b in pads], 0)
    strides, dilations = per_axis(attributes["strides"], n), per_axis(attributes["dilations"], n)
    return xp.conv(x, w, strides, dilations, attributes["group"])


@operator("Conv", "x w bias?", infer=_conv_type, attributes=GEOMETRY)
def conv(xp: Any, x: Any, w: Any, bias: Any = None, **attributes: Any) -> Any:
    y = correlate(xp, x, w, attributes)
    return y if bias is None else y + _channels(xp, bias, y.ndim)


def _conv_integer_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [("int32", conv_shape(inputs, attributes))]


@operator("ConvInteger", "x w x_zero_point? w_zero_point?", infer=_conv_integer_type, attributes=GEOMETRY)
def conv_integer(xp: Any, x: Any, w: Any, zx: Any = None, zw: Any = None, **attributes: Any) -> Any:
    x, w = xp.cast(x, "int32"), xp.cast(w, "int32")
    if zx is not None:
        x = x - xp.cast(zx, "int32")
    if zw is not None:
        zw = xp.cast(zw, "int32")
        w = w - (xp.ns.reshape(zw, (-1, *[1] * (w.ndim - 1))) if zw.ndim == 1 else zw)
    return correlate(xp, x, w, attributes)


def _transposed_pads(
    attributes: Mapping[str, Any], extents: Sequence[Extent], kernel: Sequence[int]
) -> list[tuple[Extent, tuple[Extent, Extent]]]:
    """Output extent and (before, after) padding per spatial axis of ConvTranspose."""
    n, mode = len(kernel), attributes["auto_pad"]
    strides, dilations = per_axis(attributes["strides"], n), per_axis(attributes["dilations"], n)
    extra, wanted = per_axis(attributes["output_padding"], n, 0), tuple(attributes["output_shape"])[-n:]
    pads = per_axis(attributes["pads"], 2 * n, 0)
    found: list[tuple[Extent, tuple[Extent, Extent]]] = []
    for i, extent in enumerate(extents):
        full = times(extent, strides[i])
        reach = extra[i] + (kernel[i] - 1) * dilations[i] + 1 - strides[i]
        whole = full + reach if isinstance(full, int) else full if reach == 0 else None
        if wanted or mode.startswith("SAME"):
            out: Extent = wanted[i] if wanted else times(extent, strides[i])
            if not isinstance(whole, int) or not isinstance(out, int):
                found.append((out, (None, None)))
                continue
            total = whole - out  # negative where zeros are added
            small, large = total // 2, total - total // 2
            found.append((out, (small, large) if mode == "SAME_UPPER" else (large, small)))
        else:
            before, after = (0, 0) if mode == "VALID" else (pads[i], pads[n + i])
            cut = before + after
            found.append((whole - cut if isinstance(whole, int) else whole if not cut else None, (before, after)))
    return found


def _conv_transpose_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, w = operand(inputs, 0), operand(inputs, 1)
    if x.shape is None or w.shape is None:
        return [(x.dtype, None)]
    kernel = tuple(attributes["kernel_shape"]) or w.shape[2:]
    filters = times(w.shape[1], attributes["group"])
    if not all(isinstance(k, int) for k in kernel):
        return [(x.dtype, (x.shape[0], filters, *(None,) * len(kernel)))]
    numbers = [k for k in kernel if isinstance(k, int)]
    rows = _transposed_pads(attributes, x.shape[2:], numbers)
    return [(x.dtype, (x.shape[0], filters, *(out for out, _ in rows)))]


@operator(
    "ConvTranspose",
    "x w bias?",
    infer=_conv_transpose_type,
    attributes={**GEOMETRY, "output_padding": (), "output_shape": ()},
)
def conv_transpose(xp: Any, x: Any, w: Any, bias: Any = None, **attributes: Any) -> Any:
    """As ONNX ConvTranspose: x spread out by the strides, correlated with the flipped weights ``w[C M/group *k]``."""
    n, group, kernel = x.ndim - 2, attributes["group"], tuple(w.shape[2:])
    strides, dilations = per_axis(attributes["strides"], n), per_axis(attributes["dilations"], n)
    extra = per_axis(attributes["output_padding"], n, 0)
    rows = _transposed_pads(attributes, tuple(x.shape[2:]), kernel)
    for axis, s in enumerate(strides, start=2):
        x = _spread(xp, x, axis, s)
    spans = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    pads = [(r - int(b or 0), r - int(a or 0) + e) for (_, (b, a)), r, e in zip(rows, spans, extra, strict=True)]
    x = pad_spatial(xp, x, pads, 0)
    per_group = w.shape[1]
    w = xp.ns.reshape(w, (group, w.shape[0] // group, per_group, *kernel))
    w = xp.ns.reshape(xp.ns.moveaxis(w, 2, 1), (group * per_group, -1, *kernel))
    w = xp.ns.flip(w, axis=tuple(range(2, 2 + n)))
    y = xp.conv(x, w, (1,) * n, dilations, group)
    return y if bias is None else y + _channels(xp, bias, y.ndim)


def _spread(xp: Any, x: Any, axis: int, stride: int) -> Any:
    """``stride - 1`` zeros between neighbours along an axis."""
    extent = x.shape[axis]
    if stride == 1 or extent == 0:
        return x
    wide = xp.ns.expand_dims(x, axis=axis + 1)
    gaps = xp.full((*wide.shape[: axis + 1], stride - 1, *wide.shape[axis + 2 :]), 0, x)
    y = xp.ns.reshape(
        xp.ns.concat([wide, gaps], axis=axis + 1), (*x.shape[:axis], extent * stride, *x.shape[axis + 1 :])
    )
    return y[(slice(None),) * axis + (slice(0, (extent - 1) * stride + 1),)]


OPS = specs_in(globals())
