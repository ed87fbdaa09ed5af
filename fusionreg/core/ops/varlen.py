"""Attention of sequences that lie one behind the other in one tensor, and its gradients. Floor 1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from . import attention as dense
from .define import operator, specs_in
from .inference import Attributes, Constants, Inputs, Type, operand

#: Those that say which keys a query sees, and what becomes of its scores.
_SEEN = {n: a for n, a in dense.ATTENTION.items() if n in dense.POSITIONS}


def _varlen_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    q, v = operand(inputs, 0), operand(inputs, 2)
    known = q.shape is not None and v.shape is not None and len(q.shape) == len(v.shape) == 3
    y = (*q.shape[:2], v.shape[2]) if known else None  # type: ignore[index]
    of_heads = (q.shape[1], q.shape[0]) if known else None  # type: ignore[index]
    return [(q.dtype, y), ("float64" if q.dtype == "float64" else "float32", of_heads)]


@operator(
    "fusionreg::VarlenAttention",
    "q k v cu_q cu_k",
    outputs="y log_sum_exp?",
    infer=_varlen_type,
    attributes=_SEEN,
)
def varlen_attention(xp: Any, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, **attributes: Any) -> Any:
    """Attention of each sequence by itself, the tokens of all one behind the other (FlashAttention's ``cu_seqlens``).

    q[Q H D], k[K G D], v[K G E]; sequence i from ``cu[i]`` to ``cu[i + 1]``, empty where it would end before it begins.
    Its last query is at its last key; a query without keys, or of no sequence, gives 0, and -inf of ``log_sum_exp``
    [H Q].
    """
    zeros = xp.full((q.shape[0], q.shape[1], v.shape[2]), 0.0, q)
    nothing = xp.full((q.shape[0], q.shape[1]), -math.inf, q)
    others = {n: a for n, a in dense.ATTENTION.items() if n not in dense.POSITIONS}
    parts, sums, at = [], [], 0
    for some, of_keys in _sequences(q, k, cu_q, cu_k):
        one = [_by_head(xp, x) for x in (q[some], k[of_keys], v[of_keys])]
        lengths = xp.full((1,), of_keys.stop - of_keys.start, xp.arange(1))
        y, *_, lse = dense.attention.meaning(xp, *one, None, None, None, lengths, **attributes, **others)
        parts += [zeros[at : some.start], xp.ns.permute_dims(y[0], (1, 0, 2))]
        sums += [nothing[at : some.start], xp.ns.permute_dims(lse[0], (1, 0))]
        at = some.stop
    y = xp.ns.concat([*parts, zeros[at:]], axis=0)
    return y, xp.ns.permute_dims(xp.ns.concat([*sums, nothing[at:]], axis=0), (1, 0))


def _sequences(q: Any, k: Any, cu_q: Any, cu_k: Any, apart: bool = False) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each sequence that has queries; ``apart``: no key is of two, whatever ``cu_k`` says."""
    queries, keys = ([min(max(int(n), 0), x.shape[0]) for n in cu] for cu, x in ((cu_q, q), (cu_k, k)))
    for i in range(len(queries) - 1):
        begin, end = max(queries[: i + 1]), queries[i + 1]
        if end > begin:
            first = max(keys[: i + 1]) if apart else keys[i]
            yield slice(begin, end), slice(first, max(first, keys[i + 1]))


def _by_head(xp: Any, x: Any) -> Any:
    """``[S H D]`` as ``[1 H S D]``."""
    return xp.ns.permute_dims(x, (1, 0, 2))[None]


def _varlen_grad_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [(x.dtype, x.shape) for x in (operand(inputs, i) for i in (1, 2, 3))]


@operator(
    "fusionreg::VarlenAttentionGrad",
    "dy q k v y log_sum_exp cu_q cu_k",
    outputs="dq dk? dv?",
    infer=_varlen_grad_type,
    attributes=_SEEN,
)
def varlen_attention_grad(
    xp: Any, dy: Any, q: Any, k: Any, v: Any, y: Any, log_sum_exp: Any, cu_q: Any, cu_k: Any, *, is_causal: int,
    left_window_size: int, right_window_size: int, scale: float | None, softcap: float,
) -> Any:  # fmt: skip
    """The gradients of VarlenAttention: those of AttentionGrad for each sequence, 0 for tokens of none.

    Keys of a sequence are no other's: they begin where those before end, should ``cu_k`` fall.
    """
    windows = is_causal, left_window_size, right_window_size
    found = [[x[:0]] for x in (q, k, v)]  # parts of each gradient, and zeros between them
    reached = [0, 0]

    def zeros(which: int, until: int) -> None:
        begin = reached[which > 0]
        found[which].append(xp.full((max(until - begin, 0), *(q, k, v)[which].shape[1:]), 0.0, q))

    for some, of_keys in _sequences(q, k, cu_q, cu_k, apart=True):
        its_dy, its_q, its_k, its_v, its_y = (
            _by_head(xp, x) for x in (dy[some], q[some], k[of_keys], v[of_keys], y[some])
        )
        offset = (of_keys.stop - of_keys.start) - (some.stop - some.start)
        lse = log_sum_exp[None, :, some]
        gradients = dense.gradients_of(
            xp, its_dy, its_q, its_k, its_v, its_y, lse, None, offset, windows, scale, softcap
        )
        for which, x in enumerate(gradients):
            zeros(which, (of_keys if which else some).start)
            found[which].append(xp.ns.permute_dims(x[0], (1, 0, 2)))
        reached = [some.stop, of_keys.stop]
    for which, x in enumerate((q, k, v)):
        zeros(which, x.shape[0])
    return tuple(xp.ns.concat(parts, axis=0) for parts in found)


OPS = specs_in(globals())
