"""What the array API lacks, one named table per array library. Floor 1.

Every table has exactly the names in :data:`NAMES`; ``meaning`` functions reach them as ``xp.<name>``. A table is built
from a module that is already imported (``sys.modules``), so nothing here imports torch or CuPy.

======================  =================================================================================
``erf(x)``              the error function
``erfc(x)``             1 - erf(x), accurate where that cancels
``fmod(a, b)``          remainder with the sign of ``a`` (C's ``fmod``), integers included
``matmul(a, b)``        NumPy's matmul, of integers too
``einsum(eq, *xs)``     Einstein summation
``take_along(x,i,a)``   ``take_along_axis``; indices are non-negative int64
``windows(x,k,s,d)``    sliding windows over the last ``len(k)`` axes with strides ``s`` and dilations ``d``:
                        shape ``(..., *positions, *k)``
``conv(x,w,s,d,g)``     correlation of ``x[N C *S]``, already padded, with ``w[M C/g *k]``
``scatter(x,i,u,r)``    a copy of 1-d ``x`` with ``u`` stored (r="none"), added, multiplied, or combined by min/max at
                        positions ``i`` (non-negative int64); the later of equal indices wins for "none"
======================  =================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

NAMES = ("erf", "erfc", "fmod", "matmul", "einsum", "take_along", "windows", "conv", "scatter")
Table = Mapping[str, Callable[..., Any]]


def numpy_table() -> Table:
    """NumPy, with SciPy for erf."""
    import numpy as np
    from numpy.lib.stride_tricks import sliding_window_view
    from scipy.special import erf, erfc

    def scatter(x: Any, index: Any, updates: Any, reduction: str) -> Any:
        x = x.copy()
        if reduction == "none":
            x[index] = updates
        else:
            ufunc = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}[reduction]
            ufunc.at(x, index, updates)
        return x

    windows = _windows_by(sliding_window_view)
    return _table(
        erf=erf,
        erfc=erfc,
        fmod=np.fmod,
        matmul=np.matmul,
        einsum=np.einsum,
        take_along=np.take_along_axis,
        windows=windows,
        conv=_conv_by(np.matmul, windows),
        scatter=scatter,
    )


def cupy_table() -> Table:
    """CuPy, with cupyx for erf and scatter."""
    cupy = sys.modules["cupy"]
    from importlib import import_module

    special = import_module("cupyx.scipy.special")
    sliding = import_module("cupy.lib.stride_tricks").sliding_window_view

    def scatter(x: Any, index: Any, updates: Any, reduction: str) -> Any:
        x = x.copy()
        if reduction == "none":  # equal indices race: keep the last of each run
            order = cupy.argsort(index, kind="stable")
            index, updates = index[order], updates[order]
            last = cupy.ones(index.shape, dtype=bool)
            last[:-1] = index[1:] != index[:-1]
            x[index[last]] = updates[last]
        elif reduction == "mul":  # cupy has no atomic multiply: one pass per repetition of an index
            order = cupy.argsort(index, kind="stable")
            index, updates = index[order], updates[order]
            while index.size:
                first = cupy.concatenate([cupy.ones(1, dtype=bool), index[1:] != index[:-1]])
                x[index[first]] *= updates[first]
                index, updates = index[~first], updates[~first]
        else:
            {"add": cupy.add, "min": cupy.minimum, "max": cupy.maximum}[reduction].at(x, index, updates)
        return x

    windows = _windows_by(sliding)
    return _table(
        erf=special.erf,
        erfc=special.erfc,
        fmod=cupy.fmod,
        matmul=cupy.matmul,
        einsum=cupy.einsum,
        take_along=cupy.take_along_axis,
        windows=windows,
        conv=_conv_by(cupy.matmul, windows),
        scatter=scatter,
    )


def torch_table() -> Table:
    """torch: its own convolutions up to three spatial axes."""
    torch = sys.modules["torch"]
    convs = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)

    def windows(x: Any, kernel: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]) -> Any:
        first = x.ndim - len(kernel)
        for i, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True)):
            x = x.unfold(first + i, (k - 1) * d + 1, s)[..., ::d]
        return x

    def matmul(a: Any, b: Any) -> Any:
        if not a.is_cuda or a.dtype.is_floating_point or a.dtype.is_complex:
            return torch.matmul(a, b)
        return torch.matmul(a.double(), b.double()).to(a.dtype)  # CUDA has none for integers; exact below 2**53

    general = _conv_by(matmul, windows)

    def conv(x: Any, w: Any, strides: Any, dilations: Any, group: int) -> Any:
        n = x.ndim - 2
        if not 1 <= n <= 3 or not x.numel() or not w.numel() or not x.dtype.is_floating_point:
            return general(x, w, strides, dilations, group)
        with without_tf32(torch, x):
            return convs[n - 1](x, w, None, tuple(strides), 0, tuple(dilations), group)

    def scatter(x: Any, index: Any, updates: Any, reduction: str) -> Any:
        if reduction == "none":
            # index_put leaves the winner among equal indices open: keep the last of each run explicitly
            order = torch.argsort(index, stable=True)
            index, updates = index[order], updates[order]
            last = torch.ones_like(index, dtype=torch.bool)
            last[:-1] = index[1:] != index[:-1]
            return x.clone().index_put((index[last],), updates[last])
        how = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}[reduction]
        return x.scatter_reduce(0, index, updates, how)

    return _table(
        erf=torch.erf,
        erfc=torch.special.erfc,
        fmod=torch.fmod,
        matmul=matmul,
        einsum=torch.einsum,
        take_along=torch.take_along_dim,
        windows=windows,
        conv=conv,
        scatter=scatter,
    )


def without_tf32(torch: Any, x: Any) -> AbstractContextManager[Any]:
    """A context in which cuDNN multiplies float32 as it is. Flags of that library that are not named are turned off."""
    if x.dtype is not torch.float32:
        return nullcontext()
    cudnn = torch.backends.cudnn
    kept = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
    found: AbstractContextManager[Any] = cudnn.flags(**kept, allow_tf32=False)
    return found


def _table(**functions: Callable[..., Any]) -> Table:
    assert set(functions) == set(NAMES)
    return MappingProxyType(functions)


def _windows_by(sliding: Callable[..., Any]) -> Callable[..., Any]:
    def windows(x: Any, kernel: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]) -> Any:
        n = len(kernel)
        extents = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
        view = sliding(x, extents, axis=tuple(range(x.ndim - n, x.ndim)))
        steps = [slice(None, None, s) for s in strides] + [slice(None, None, d) for d in dilations]
        return view[(..., *steps)]

    return windows


def _conv_by(matmul: Callable[..., Any], windows: Callable[..., Any]) -> Callable[..., Any]:
    """Convolution as windows times weights."""

    def conv(x: Any, w: Any, strides: Any, dilations: Any, group: int) -> Any:
        n, (batch, channels), (filters, per_group) = x.ndim - 2, x.shape[:2], w.shape[:2]
        view = windows(x, tuple(w.shape[2:]), tuple(strides), tuple(dilations))
        positions = tuple(view.shape[2 : 2 + n])
        view = view.reshape((batch, group, channels // group, *positions, *w.shape[2:]))
        order = (0, 1, *range(3, 3 + n), 2, *range(3 + n, 3 + 2 * n))
        view = view.permute(*order) if hasattr(view, "permute") else view.transpose(order)
        depth, places = per_group, 1
        for k in w.shape[2:]:
            depth *= k
        for p in positions:
            places *= p
        columns = view.reshape((batch, group, places, depth))
        weights = w.reshape((1, group, filters // group, depth)).swapaxes(-1, -2)
        y = matmul(columns, weights).swapaxes(-1, -2)
        return y.reshape((batch, filters, *positions))

    return conv
