"""Convolution, pooling, resampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V


def spread(values: Any, n: int) -> list[int]:
    """A setting per spatial axis from one number, a list of one, or a list of ``n``."""
    items = [values] if isinstance(values, int) else list(values)
    return [int(v) for v in (items * n if len(items) == 1 else items)]


def conv(e: Emitter, x: V, weight: V, bias: V | None, stride: Any, padding: Any, dilation: Any, groups: int) -> V:
    """Convolution over the last ``weight.rank - 2`` axes; an unbatched input gets a batch axis and loses it again."""
    n = weight.rank - 2
    batched = x.rank == weight.rank
    x = x if batched else e.unsqueeze(x, 0)
    strides, dilations = spread(stride, n), spread(dilation, n)
    if isinstance(padding, str):
        sizes = [int(k) for k in weight.shape[2:]]
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, sizes, strict=True)]
        pads = [t // 2 for t in total] + [t - t // 2 for t in total]
    else:
        pads = spread(padding, n) * 2
    y = e.op("Conv", x, weight, bias, **_window(strides, dilations, pads, n), group=groups)
    return y if batched else e.squeeze(y, 0)


def _window(strides: list[int], dilations: list[int], pads: list[int], n: int) -> dict[str, Any]:
    """Attributes of a window, those that say nothing left out."""
    settings: dict[str, Any] = {}
    if strides != [1] * n:
        settings["strides"] = tuple(strides)
    if dilations != [1] * n:
        settings["dilations"] = tuple(dilations)
    if any(pads):
        settings["pads"] = tuple(pads)
    return settings


def conv_forward(
    e: Emitter,
    input: V,
    weight: V,
    bias: V | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    **_: Any,
) -> V:
    return conv(e, input, weight, bias, stride, padding, dilation, groups)


def convolution(
    e: Emitter,
    input: V,
    weight: V,
    bias: V | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    **_: Any,
) -> V:
    if transposed:
        return conv_transpose(e, input, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(e, input, weight, bias, stride, padding, dilation, groups)


def conv_transpose(
    e: Emitter,
    input: V,
    weight: V,
    bias: V | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    **_: Any,
) -> V:
    n = weight.rank - 2
    batched = input.rank == weight.rank
    x = input if batched else e.unsqueeze(input, 0)
    settings = _window(spread(stride, n), spread(dilation, n), spread(padding, n) * 2, n)
    extra = spread(output_padding, n)
    if any(extra):
        settings["output_padding"] = tuple(extra)
    y = e.op("ConvTranspose", x, weight, bias, **settings, group=groups)
    return y if batched else e.squeeze(y, 0)


def _pooled(e: Emitter, op: str, x: V, n: int, **settings: Any) -> V:
    batched = x.rank == n + 2
    y = e.op(op, x if batched else e.unsqueeze(x, 0), **settings)
    return y if batched else e.squeeze(y, 0)


def _pool_window(
    x: V, kernel_size: Any, stride: Any, padding: Any, dilation: Any, n: int, ceil_mode: bool = False
) -> dict[str, Any]:
    kernel = spread(kernel_size, n)
    strides = spread(stride, n) if stride not in (None, [], ()) else kernel
    if ceil_mode:  # torch clips a window larger than the padded input
        sizes = [
            (s + 2 * p) if isinstance(s, int) else k
            for s, p, k in zip(x.shape[-n:], spread(padding, n), kernel, strict=True)
        ]
        kernel = [min(k, s) for k, s in zip(kernel, sizes, strict=True)] if spread(dilation, n) == [1] * n else kernel
    return {"kernel_shape": tuple(kernel), **_window(strides, spread(dilation, n), spread(padding, n) * 2, n)}


def max_pool(n: int) -> Any:
    def emit(
        e: Emitter,
        self: V,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        **_: Any,
    ) -> Any:
        settings = _pool_window(self, kernel_size, stride, padding, dilation, n, ceil_mode)
        y = _pooled(e, "MaxPool", self, n, **settings, ceil_mode=int(ceil_mode))
        return (y, None) if len(e.metas) == 2 else y

    return emit


def avg_pool(n: int) -> Any:
    def emit(
        e: Emitter,
        self: V,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        **_: Any,
    ) -> V:
        if divisor_override is not None:
            raise e.refuse(f"divisor_override={divisor_override}", "the mean over the window")
        settings = _pool_window(self, kernel_size, stride, padding, 1, n, ceil_mode)
        return _pooled(
            e, "AveragePool", self, n, **settings, ceil_mode=int(ceil_mode), count_include_pad=int(count_include_pad)
        )

    return emit


def adaptive_avg_pool(n: int) -> Any:
    """Equal windows are an AveragePool, one window the global one; uneven windows are averaging matrices."""

    def emit(e: Emitter, self: V, output_size: Any, **_: Any) -> V:
        sizes = list(self.shape[-n:])
        wanted = [s if w is None else w for s, w in zip(sizes, output_size, strict=True)]
        if all(w == 1 for w in wanted):
            return _pooled(e, "GlobalAveragePool", self, n)
        if not all(isinstance(s, int) and isinstance(w, int) for s, w in zip(sizes, wanted, strict=True)):
            raise e.refuse(f"symbolic extents {sizes}", "extents known at export")
        pairs = [(int(s), int(w)) for s, w in zip(sizes, wanted, strict=True)]
        if all(s == w for s, w in pairs):
            return self
        if all(s % w == 0 for s, w in pairs):
            kernel = tuple(s // w for s, w in pairs)
            return _pooled(e, "AveragePool", self, n, kernel_shape=kernel, strides=kernel)
        y = self
        for i, (size, want) in enumerate(pairs):
            axis = self.rank - n + i
            last = (*[a for a in range(y.rank) if a != axis], axis)
            back = [last.index(a) for a in range(y.rank)]
            y = e.transpose(e.op("MatMul", e.transpose(y, last), e.const(_averages(size, want), self.dtype)), back)
        return y

    return emit


def _averages(size: int, want: int) -> np.ndarray:
    """(size want): column j averages the elements of window j."""
    matrix = np.zeros((size, want))
    for j in range(want):
        lo, hi = j * size // want, -(-(j + 1) * size // want)
        matrix[lo:hi, j] = 1.0 / (hi - lo)
    return matrix


def adaptive_max_pool(n: int) -> Any:
    def emit(e: Emitter, self: V, output_size: Any, **_: Any) -> Any:
        if all(w == 1 for w in output_size):
            y = _pooled(e, "GlobalMaxPool", self, n)
        else:
            pairs = list(zip(self.shape[-n:], output_size, strict=True))
            if not all(isinstance(s, int) and s % w == 0 for s, w in pairs):
                raise e.refuse(f"windows of {self.shape[-n:]} into {list(output_size)}", "equal windows")
            kernel = tuple(int(s) // w for s, w in pairs)
            y = _pooled(e, "MaxPool", self, n, kernel_shape=kernel, strides=kernel)
        return (y, None) if len(e.metas) == 2 else y

    return emit


def resample(mode: str) -> Any:
    """upsample_*: sizes or scale factors, for the spatial axes."""

    def emit(
        e: Emitter,
        self: V | None = None,
        input: V | None = None,
        output_size: Any = None,
        align_corners: bool = False,
        scale_factors: Any = None,
        **scales: Any,
    ) -> V:
        x = self if self is not None else input
        assert x is not None
        n = x.rank - 2
        factors = scale_factors or [scales.get(f"scales_{d}") for d in "dhw"[3 - n :]]
        if n == 1 and scale_factors is None:
            factors = [scales.get("scales")]
        settings: dict[str, Any] = {"mode": mode}
        if mode == "nearest":
            settings |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        elif align_corners:
            settings["coordinate_transformation_mode"] = "align_corners"
        else:
            settings["coordinate_transformation_mode"] = "half_pixel"
        if mode == "cubic":
            settings["cubic_coeff_a"] = -0.75
        if all(isinstance(f, float) for f in factors) and (output_size is None or _symbolic(output_size)):
            scale = e.const(np.asarray([1.0, 1.0, *factors], np.float32), "float32")
            return e.op("Resize", x, None, scale, shape=e.out.shape, **settings)
        wanted: Sequence[Any] = output_size if output_size is not None else e.out.shape[2:]
        sizes = e.ints([e.size(x, 0), e.size(x, 1), *wanted])
        return e.op("Resize", x, None, None, sizes, shape=e.out.shape, **settings)

    return emit


def _symbolic(values: Sequence[Any]) -> bool:
    return any(not isinstance(v, int) for v in values)


def _table() -> dict[str, Any]:
    table: dict[str, Any] = {"aten.convolution.default": convolution, "aten._convolution.default": convolution}
    for n in (1, 2, 3):
        table |= {
            f"aten.conv{n}d.default": conv_forward,
            f"aten.conv{n}d.padding": conv_forward,
            f"aten.conv_transpose{n}d.default" if n == 1 else f"aten.conv_transpose{n}d.input": conv_transpose,
            f"aten.max_pool{n}d.default": max_pool(n),
            f"aten.max_pool{n}d_with_indices.default": max_pool(n),
            f"aten.avg_pool{n}d.default": avg_pool(n),
            f"aten.adaptive_avg_pool{n}d.default": adaptive_avg_pool(n),
            f"aten._adaptive_avg_pool{n}d.default": adaptive_avg_pool(n),
            f"aten.adaptive_max_pool{n}d.default": adaptive_max_pool(n),
            f"aten.upsample_nearest{n}d.default": resample("nearest"),
            f"aten.upsample_nearest{n}d.vec": resample("nearest"),
        }
    for name, mode in (
        ("linear1d", "linear"),
        ("bilinear2d", "linear"),
        ("trilinear3d", "linear"),
        ("bicubic2d", "cubic"),
    ):
        table |= {f"aten.upsample_{name}.default": resample(mode), f"aten.upsample_{name}.vec": resample(mode)}
    return table


TABLE: FrozenDict[str, Any] = FrozenDict(_table())
