"""The numerics contract: when an output counts as right. Floor 7.

- Values: |got - exact| <= 2 E + 1 ulp of the output dtype, where ``exact`` is the pattern in float64 and E the error
  of the unfused chain at the same dtypes, pooled (:func:`pooled`): one element of the chain may be right by luck.
- Where the chain overflowed but the exact result did not, the bound is 2 ulp; for an output wider than a float on the
  way to it 2 E + 1 ulp, if that is more: it was that float that overflowed.
- Where it overflowed at a cast of the graph's own (:data:`OVERFLOWED_CAST`), the chain's special value is right too.
- Special values follow the exact result rounded once to the output dtype (``once``), or the unfused chain (``per_op``).
- For float64 outputs the reference is no wider than the kernel; :data:`OWN_ERROR` allows for it.
- A NaN never disappears and never appears; integers and bools are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..dtypes import DType, dtype
from ..spec import Tolerance
from .values import largest, tiny

#: A pool of fewer elements says too little about the chain's error.
POOL = 32

#: Rows of fewer elements that say anything, which zeros do not, count as one with the next ones of that kind: a value
#: that cancelled has no fair share of its own.
NARROW = 16

#: A row may lend the others an error of at most this many times what is usual among rows, relative to their size.
UNUSUAL = 16.0

#: Usual is what this fraction of the rows stays below: dropout alone makes rows of two kinds, half of them each.
USUAL = 0.75


#: In ``allowed``: a cast to a narrower float overflowed on the way to this element. A kernel that rounds there, as the
#: graph says, gives what the chain gives.
OVERFLOWED_CAST = np.inf

#: Error of the float64 reference itself, relative to the largest value of a row; it matters for float64 outputs alone.
OWN_ERROR = 16 * 2.0**-52


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of one output: a status name and, where it failed, the worst element as a sentence."""

    status: str
    max_abs: float = 0.0
    max_rel: float = 0.0
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "PASSED"


def ulp(values: np.ndarray, kind: DType) -> np.ndarray:
    """The distance between neighbouring numbers of a float dtype at each value's magnitude, in float64."""
    magnitude = np.clip(np.abs(values.astype(np.float64)), tiny(kind), largest(kind))
    return np.exp2(np.floor(np.log2(magnitude)) - kind.mantissa)


def rounded(exact: np.ndarray, kind: DType) -> np.ndarray:
    """Float64 rounded once to ``kind``, to nearest even, as float64 again."""
    with np.errstate(over="ignore", invalid="ignore"):
        if kind.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            return _round_direct(exact, kind)  # ml_dtypes goes through float32 and would round twice
        return exact.astype(kind.numpy).astype(np.float64)


def _round_direct(exact: np.ndarray, kind: DType) -> np.ndarray:
    step = ulp(exact, kind)
    result = np.rint(exact / step) * step
    result = np.where(np.isfinite(exact), result, exact)
    overflow = np.nan if kind.name == "float8_e4m3fn" else np.inf  # e4m3 has no infinity
    return np.where(np.abs(result) > largest(kind), np.copysign(overflow, exact), result)


def pooled(errors: Sequence[np.ndarray], exact: Sequence[np.ndarray], *, alone: bool = False) -> np.ndarray:
    """The chain's error that each element of the first run is held against, from one or more equal runs.

    An element, and with structured values a whole row, of the chain may be right by luck. So it is the largest error of
    the element's own row (last axis), or what other rows show relative to their largest value, whichever is more; a
    freak row lends the others at most :data:`UNUSUAL` times what is usual. A row that cancels, so that the chain's
    error exceeds all its values, says nothing relative to them: such rows lend one another their error as it is.
    Errors that are not finite (an overflowed chain) do not count.

    Args:
        alone: whether rows hold few values on purpose, so that no larger one hides their error; such rows stay apart
            as far as they are wide.
    """
    if not errors[0].size:
        return errors[0]
    width = errors[0].shape[-1] if errors[0].ndim else 1
    rows = errors[0].size // width
    telling = np.full(rows, width) if alone else ((errors[0] != 0) | (exact[0] != 0)).reshape(rows, width).sum(axis=1)
    teams = _teams(telling)

    def of_rows(values: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(values), np.abs(values), 0.0).reshape(rows, width).max(axis=1)

    def largest_of(values: np.ndarray) -> np.ndarray:
        found = np.zeros(teams.max() + 1)
        np.maximum.at(found, teams, of_rows(values))
        return found

    worst, largest = [largest_of(e) for e in errors], [largest_of(x) for x in exact]
    pairs = zip(worst, largest, strict=True)
    ratios = np.concatenate([np.divide(w, s, out=np.zeros_like(w), where=s > 0) for w, s in pairs])
    noise = _usual(np.concatenate([np.where(w > s, w, 0.0) for w, s in zip(worst, largest, strict=True)]))
    shown = np.where(largest[0] < noise, np.maximum(worst[0], noise), worst[0])
    allowed = np.maximum(shown[teams], _usual(ratios) * of_rows(exact[0]))
    return np.broadcast_to(allowed[:, None], (rows, width)).reshape(errors[0].shape)


def _teams(telling: np.ndarray) -> np.ndarray:
    """A number for each row, equal for those that are pooled: a row that tells enough has its own, the others are taken
    together in their order, until they tell at least as much as it."""
    few = telling < NARROW
    shared = np.where(few, telling, 0)
    total = int(shared.sum())
    last = max(0, total // (2 * NARROW) - 1)  # with what is left over
    together = np.minimum((np.cumsum(shared) - shared) // (2 * NARROW), last)
    return np.where(few, together, last + np.cumsum(~few))


def _usual(shown: np.ndarray) -> float:
    """The largest of the positive numbers, but no freak among them."""
    shown = shown[shown > 0]
    return min(shown.max(), UNUSUAL * float(np.quantile(shown, USUAL))) if shown.size else 0.0


def compare(
    got: np.ndarray,
    exact: np.ndarray,
    chain: np.ndarray,
    *,
    rounding: str,
    allowed: np.ndarray | None = None,
    slack: Tolerance | None = None,
) -> Comparison:
    """Holds a kernel's output against the reference.

    Args:
        got: what the kernel wrote.
        exact: the pattern in float64 (integers and bools in their own dtype).
        chain: the unfused operators at the kernel's dtypes.
        rounding: ``once`` or ``per_op``.
        allowed: the chain's pooled error, or :data:`OVERFLOWED_CAST`; 0 where the chain overflowed on the way to an
            output that is no wider. By default from this run alone.
        slack: the spec's own tolerance for the output's dtype, beside the general rule.
    """
    if got.shape != exact.shape:
        return Comparison("INCORRECT_SHAPE", reason=f"shape {got.shape}, expected {exact.shape}")
    if got.dtype != chain.dtype:
        return Comparison("INCORRECT_DTYPE", reason=f"dtype {got.dtype}, expected {chain.dtype}")
    kind = dtype(got.dtype.name)
    if kind.kind == "c":
        parts = [compare(f(got), f(exact), f(chain), rounding=rounding, slack=slack) for f in (np.real, np.imag)]
        return max(parts, key=lambda c: (not c.passed, c.max_abs))
    if kind.kind != "f":
        wrong = got != chain
        return _verdict(wrong, got, chain, np.abs(got.astype(np.float64) - chain.astype(np.float64)), "equal")
    g, e, c = (a.astype(np.float64) for a in (got, exact, chain))
    special = rounded(e, kind) if rounding == "once" else c
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(g - e)
        overflowed = ~np.isfinite(c) & np.isfinite(e)
        bound = np.where(overflowed, 0.0, pooled([np.abs(c - e)], [e])) if allowed is None else allowed
        cast = overflowed & np.isinf(bound)
        step = ulp(e, kind)
        tolerance = 2.0 * np.where(cast, 0.0, bound) + step
        tolerance = np.where(overflowed, np.maximum(tolerance, 2.0 * step), tolerance)
        if slack is not None:
            tolerance = tolerance + slack.ulp * step + slack.absolute
        if kind.name == "float64" and e.size:  # the reference is no wider: it has rounding errors of its own
            sizes = np.where(np.isfinite(e), np.abs(e), 0.0)
            tolerance = tolerance + OWN_ERROR * (sizes.max(axis=-1, keepdims=True) if e.ndim else sizes)
        close = error <= tolerance
        # an infinity is right where the special value says so, or where the exact one is within the bound of overflow
        near = np.isfinite(e) & (np.abs(e) + tolerance >= largest(kind)) & (np.sign(g) == np.sign(e))
        infinite = np.where(np.isinf(special), (g == special) | (near & np.isfinite(g) & close), np.isinf(g) & near)
        decided = np.isinf(special) | np.isinf(g)
        wrong = np.where(
            np.isnan(special) | np.isnan(g), np.isnan(special) != np.isnan(g), ~np.where(decided, infinite, close)
        )
        wrong &= ~(cast & ((g == c) | (np.isnan(g) & np.isnan(c))))
        # an infinity times what only float64 tells from zero: NaN in any narrower arithmetic, the chain's too
        wrong &= ~(np.isnan(g) & np.isnan(c) & np.isinf(e))
    return _verdict(wrong, g, special, np.where(np.isfinite(error), error, 0.0), "the reference", e, tolerance)


def _verdict(
    wrong: np.ndarray,
    got: np.ndarray,
    expected: np.ndarray,
    error: np.ndarray,
    what: str,
    exact: np.ndarray | None = None,
    tolerance: np.ndarray | None = None,
) -> Comparison:
    if not error.size:
        return Comparison("PASSED")
    base = np.abs(expected if exact is None else exact).astype(np.float64)
    relative = np.divide(error, base, out=np.zeros_like(error, dtype=np.float64), where=(base > 0) & np.isfinite(base))
    max_abs, max_rel = float(error.max()), float(relative.max())
    if not wrong.any():
        return Comparison("PASSED", max_abs, max_rel)
    score = np.where(wrong, error if tolerance is None else error / np.maximum(tolerance, 1e-300), -1.0)
    score = np.where(wrong & ~np.isfinite(got.astype(np.float64)), np.inf, score)
    at = np.unravel_index(int(score.argmax()), wrong.shape)
    place = f"[{', '.join(map(str, at))}]"
    bound = f" within {float(tolerance[at]):.3g}" if tolerance is not None else ""
    wanted = expected[at] if exact is None or not np.isfinite(float(expected[at])) else exact[at]
    return Comparison(
        "INCORRECT_NUMERICAL",
        max_abs,
        max_rel,
        f"{int(wrong.sum())} of {wrong.size} elements differ; at {place} got {got[at]!s}, expected {wanted!s}{bound}",
    )
