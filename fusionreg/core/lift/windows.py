"""Convolutions and pools in one spelling: padding as numbers, nothing that the weights say again. Floor 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..ops.convolution import per_axis, window_count, window_pads
from .engine import Rule
from .site import Site

_SAME = "strides=strides, dilations=dilations"


def _padding(site: Site, kernel: tuple[int, ...]) -> tuple[int, ...] | None:
    """``pads`` in numbers, None where ``auto_pad`` depends on an extent that is not known."""
    shape = site.shape("x")
    if shape is None or len(shape) != len(kernel) + 2:
        return None
    names = ("auto_pad", "pads", "strides", "dilations")
    both = window_pads({n: site.attribute(n) for n in names}, shape[2:], kernel)
    flat = tuple(side[i] for i in (0, 1) for side in both)
    return tuple(p for p in flat if isinstance(p, int)) if all(isinstance(p, int) for p in flat) else None


def _convolution(site: Site) -> Mapping[str, Any] | None:
    """What a convolution's kernel is, its weights tell."""
    kernel, weights = tuple(site.attribute("kernel_shape")), site.shape("w")
    if weights is None or (site.attribute("auto_pad") == "NOTSET" and not kernel):
        return None
    extents = tuple(d for d in weights[2:] if isinstance(d, int))
    if len(extents) < len(weights) - 2 or (kernel and kernel != extents):
        return None
    pads = _padding(site, extents)
    return None if pads is None else {"pads": pads if any(pads) else ()}


def _pool(site: Site) -> Mapping[str, Any] | None:
    if site.attribute("auto_pad") == "NOTSET":
        return None
    pads = _padding(site, tuple(site.attribute("kernel_shape")))
    return None if pads is None else {"pads": pads if any(pads) else ()}


def _ceiled(site: Site) -> Mapping[str, Any] | None:
    """Windows that ``ceil_mode`` lets end beyond the padding, as so much more padding: nothing to a largest value, nor
    to an average that does not count it."""
    kernel, shape = tuple(site.attribute("kernel_shape")), site.shape("x")
    if not site.attribute("ceil") or shape is None or site.attribute("auto_pad") != "NOTSET":
        return None
    n, pads = len(kernel), _padding(site, kernel)
    if pads is None or any(d != 1 for d in site.attribute("dilations")):
        return None
    after = []
    steps = per_axis(site.attribute("strides"), n)
    for extent, k, step, before, end in zip(shape[2:], kernel, steps, pads[:n], pads[n:], strict=True):
        count = window_count(extent, k, step, 1, (before, end), ceil=1)
        if not isinstance(count, int) or not isinstance(extent, int):
            return None
        after.append(max(end, (count - 1) * step + k - extent - before))
    if site.found.attributes.get("counted") and tuple(after) != pads[n:]:
        return None
    return {"pads": (*pads[:n], *after) if any((*pads[:n], *after)) else ()}


def _padded(site: Site) -> Mapping[str, Any] | None:
    """Zeros around the places of ``x``, which the convolution can put there itself."""
    given, shape, value = site.ints("around"), site.shape("x"), site.found.inputs.get("value")
    if given is None or shape is None or site.attribute("auto_pad") not in ("NOTSET", "VALID"):
        return None
    if value is not None and not _zero(site):
        return None
    n = len(shape) - 2
    before, after = given[: len(shape)], given[len(shape) :]
    if len(given) != 2 * len(shape) or any(p < 0 for p in given) or any((*before[:2], *after[:2])):
        return None
    own = per_axis(site.attribute("pads"), 2 * n, 0) if site.attribute("auto_pad") == "NOTSET" else (0,) * (2 * n)
    pads = tuple(a + b for a, b in zip(own, (*before[2:], *after[2:]), strict=True))
    return {"pads": pads if any(pads) else ()}


def _zero(site: Site) -> bool:
    array = site.array("value")
    return array is not None and array.size == 1 and float(array.reshape(-1)[0]) == 0.0


def _rules() -> Iterator[Rule]:
    found = f"kernel_shape=kernel_shape, auto_pad=auto_pad, pads=pads, {_SAME}"
    for bias in ("", ", bias"):
        yield Rule(
            "window_in_numbers",
            f"y = Conv(x, w{bias}, {found}, group=group)",
            f"y = Conv(x, w{bias}, pads=pads, {_SAME}, group=group)",
            derive=_convolution,
        )
        for value in ("", ", value"):
            yield Rule(
                "padded_convolution",
                f"y = Conv(Pad(x, around{value}), w{bias}, {found}, group=group)",
                f"y = Conv(x, w{bias}, kernel_shape=kernel_shape, pads=pads, {_SAME}, group=group)",
                derive=_padded,
                shared=True,
            )
    for pool, more in (("MaxPool", ""), ("AveragePool", ", count_include_pad=counted")):
        yield Rule(
            "window_in_numbers",
            f"y = {pool}(x, {found}, ceil_mode=ceil{more})",
            f"y = {pool}(x, kernel_shape=kernel_shape, pads=pads, {_SAME}, ceil_mode=ceil{more})",
            derive=_pool,
        )
        yield Rule(
            "pool_of_whole_windows",
            f"y = {pool}(x, {found}, ceil_mode=ceil{more})",
            f"y = {pool}(x, kernel_shape=kernel_shape, pads=pads, {_SAME}{more})",
            derive=_ceiled,
        )
        yield Rule(
            "no_dilation",
            f"y = {pool}(x, {found}, ceil_mode=ceil{more})",
            f"y = {pool}(x, {found.removesuffix(', dilations=dilations')}, ceil_mode=ceil{more})",
            (lambda site: {*site.attribute("dilations")} == {1},),
        )
    yield Rule(
        "momentum_of_inference",
        "y = BatchNormalization(x, scale, bias, mean, var, epsilon=epsilon, momentum=momentum)",
        "y = BatchNormalization(x, scale, bias, mean, var, epsilon=epsilon)",
        (lambda site: bool(site.attribute("momentum") != 0.9),),
    )


RULES = tuple(_rules())
"""Where they fit, a convolution has ``pads`` alone."""
