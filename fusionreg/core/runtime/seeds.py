"""Seed and offset of a dropout, drawn from the generator of the caller's own array library. Floor 6."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import ArgumentError

#: Drawn words are below this: they are int64, and not negative.
LIMIT = 2**63 - 1


def draw(like: Any, generator: Any = None) -> Any:
    """``rng`` for one call of a fusion with dropout: int64[2] in the library and on the device of ``like``.

    Two words from ``generator``: of torch arrays a ``torch.Generator``, of CuPy or NumPy arrays that library's; None is
    the library's default one, which its own ``manual_seed`` or ``random.seed`` sets. It is an ordinary operator of that
    library: captured into a CUDA graph, torch advances its generator with every replay, so that replays differ. The
    backward pass takes the same array again: it makes the same mask.

    :class:`ArgumentError` for an array of no library.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.randint(LIMIT, (2,), dtype=torch.int64, device=like.device, generator=generator)
    import numpy

    if cupy is not None and isinstance(like, cupy.ndarray):
        with like.device:
            if generator is not None:
                return generator.integers(0, LIMIT, size=2, dtype=cupy.int64)
            words = cupy.random.randint(0, 2**32, size=4, dtype=cupy.uint32)
            return words.view(cupy.int64) & LIMIT
    if isinstance(like, numpy.ndarray):
        if generator is not None:
            return generator.integers(0, LIMIT, size=2, dtype="int64")
        return numpy.random.randint(0, LIMIT, size=2, dtype="int64")
    kind = f"{type(like).__module__}.{type(like).__name__}"
    raise ArgumentError("cannot draw", "seed and offset", f"a {kind}", "a NumPy, torch or CuPy array")
