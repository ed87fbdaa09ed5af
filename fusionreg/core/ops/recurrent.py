"""RNN, GRU and LSTM. ``x[T B I]``, ``w[D G·H I]``, ``r[D G·H H]``; D is 2 where both directions run. Floor 1.

``sequence_lens`` stay on the device: past its length a sequence keeps its state, and its outputs are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .activations import sigmoid_of, softplus_of
from .define import operator, specs_in
from .inference import Attributes, Constants, Extent, Inputs, Type, fail, operand, product

_SHARED: Mapping[str, Any] = {
    "activation_alpha": (),
    "activation_beta": (),
    "activations": (),
    "clip": None,
    "direction": "forward",
    "hidden_size": None,
    "layout": 0,
}

State = tuple[Any, ...]
Activation = Callable[[Any, Any], Any]


def _scaled_tanh(alpha: float, beta: float) -> Activation:
    return lambda xp, x: alpha * xp.ns.tanh(beta * x)


def _hard_sigmoid(alpha: float, beta: float) -> Activation:
    return lambda xp, x: xp.ns.clip(alpha * x + beta, 0.0, 1.0)


def _below(value: Callable[[Any, Any], Any]) -> Activation:
    return lambda xp, x: xp.ns.where(x < 0, value(xp, x), x)


#: Activation → (default alpha, default beta, what makes it); None where it takes no such number.
_ACTIVATIONS: Mapping[str, tuple[float | None, float | None, Callable[[Any, Any], Activation]]] = {
    "affine": (1.0, 0.0, lambda a, b: lambda xp, x: a * x + b),
    "elu": (1.0, None, lambda a, b: _below(lambda xp, x: a * xp.ns.expm1(x))),
    "hardsigmoid": (0.2, 0.5, _hard_sigmoid),
    "leakyrelu": (0.01, None, lambda a, b: _below(lambda xp, x: a * x)),
    "relu": (None, None, lambda a, b: _below(lambda xp, x: xp.ns.zeros_like(x))),
    "scaledtanh": (1.0, 1.0, _scaled_tanh),
    "sigmoid": (None, None, lambda a, b: sigmoid_of),
    "softplus": (None, None, lambda a, b: softplus_of),
    "softsign": (None, None, lambda a, b: lambda xp, x: x / (1.0 + xp.ns.abs(x))),
    "tanh": (None, None, lambda a, b: lambda xp, x: xp.ns.tanh(x)),
    "thresholdedrelu": (1.0, None, lambda a, b: lambda xp, x: xp.ns.where(x <= a, xp.ns.zeros_like(x), x)),
}


def _activations(attributes: Mapping[str, Any], default: Sequence[str], directions: int) -> list[list[Activation]]:
    """The activations of every direction; alpha and beta go, in order, to those that take one."""
    names = tuple(attributes["activations"]) or tuple(default) * directions
    if len(names) == 2 * len(default):  # RNN's default is that of two directions
        names = names[: len(default) * directions]
    if len(names) != len(default) * directions:
        fail(f"{len(names)} activations", f"{len(default)} for each of {directions} directions")
    numbers = [list(attributes["activation_alpha"]), list(attributes["activation_beta"])]
    made = []
    for name in names:
        row = _ACTIVATIONS.get(name.lower())
        if row is None:
            fail(f"activation {name!r}", "one of ONNX's")
        given = [
            (queue.pop(0) if queue else usual) if usual is not None else None
            for usual, queue in zip(row[:2], numbers, strict=True)
        ]
        made.append(row[2](*given))
    n = len(default)
    return [made[i * n : (i + 1) * n] for i in range(directions)]


def _type(gates: int, states: int) -> Callable[[Inputs, Attributes, Constants], list[Type]]:
    def infer(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
        x, w, r = (operand(inputs, i) for i in range(3))
        if attributes["direction"] not in ("forward", "reverse", "bidirectional"):
            fail(f"direction {attributes['direction']!r}", "forward, reverse or bidirectional")
        directions: Extent = 2 if attributes["direction"] == "bidirectional" else 1
        hidden: Extent = attributes["hidden_size"]
        for v, rank in ((x, 3), (w, 3), (r, 3)):
            if v.shape is not None and len(v.shape) != rank:
                fail(f"{v.name} of rank {len(v.shape)}", f"rank {rank}")
        if r.shape is not None:
            if isinstance(r.shape[0], int) and r.shape[0] != directions:
                fail(f"weights of {r.shape[0]} directions", f"{directions} for {attributes['direction']}")
            if isinstance(r.shape[2], int) and hidden not in (None, r.shape[2]):
                fail(f"hidden_size {hidden}", f"{r.shape[2]}, as the recurrence weights have")
            hidden = r.shape[2] if hidden is None else hidden
            rows = product((gates, hidden))
            if isinstance(rows, int) and isinstance(r.shape[1], int) and rows != r.shape[1]:
                fail(f"{r.shape[1]} rows of recurrence weights", f"{gates} · {hidden}")
        steps, batch = (None, None) if x.shape is None else x.shape[:2]
        if attributes["layout"]:
            batch, steps = steps, batch
            return [(x.dtype, (batch, steps, directions, hidden)), *[(x.dtype, (batch, directions, hidden))] * states]
        return [(x.dtype, (steps, directions, batch, hidden)), *[(x.dtype, (directions, batch, hidden))] * states]

    return infer


def _gates(xp: Any, x: Any, count: int) -> list[Any]:
    """``x`` cut into ``count`` equal parts along its last axis."""
    n = x.shape[-1] // count
    return [x[..., i * n : (i + 1) * n] for i in range(count)]


def _run(
    xp: Any,
    x: Any,
    w: Any,
    r: Any,
    lens: Any,
    initial: Sequence[Any],
    attributes: Mapping[str, Any],
    cell: Callable[[int, Any, State], State],
    input_bias: Callable[[int], Any],
) -> State:
    """All steps in all directions: outputs and last states.

    ``cell(d, g, state)`` makes direction ``d``'s next state from ``g = x·wᵀ + input_bias(d)``, one row a sequence.
    """
    layout, hidden, directions = attributes["layout"], r.shape[2], r.shape[0]
    if layout:
        x = xp.ns.permute_dims(x, (1, 0, 2))
    steps, batch = x.shape[:2]
    zeros = xp.full((batch, hidden), 0.0, x)
    outputs, finals = [], []
    for d in range(directions):
        given = xp.matmul(x, xp.ns.matrix_transpose(w[d])) + input_bias(d)
        state = tuple(zeros if s is None else (s[:, d] if layout else s[d]) for s in initial)
        ys = [zeros] * steps
        backward = attributes["direction"] == "reverse" or d == 1
        for t in reversed(range(steps)) if backward else range(steps):
            after = cell(d, given[t], state)
            if lens is not None:
                live = (lens > t)[:, None]
                ys[t] = xp.ns.where(live, after[0], zeros)
                state = tuple(xp.ns.where(live, new, old) for new, old in zip(after, state, strict=True))
            else:
                ys[t], state = after[0], after
        outputs.append(xp.ns.stack(ys, axis=0) if steps else xp.full((0, batch, hidden), 0.0, x))
        finals.append(state)
    y = xp.ns.stack(outputs, axis=1)
    last = [xp.ns.stack([f[i] for f in finals], axis=0) for i in range(len(initial))]
    if layout:
        y = xp.ns.permute_dims(y, (2, 0, 1, 3))
        last = [xp.ns.permute_dims(s, (1, 0, 2)) for s in last]
    return (y, *last)


def _clipped(xp: Any, x: Any, clip: float | None) -> Any:
    return xp.ns.clip(x, -clip, clip) if clip else x


def _biases(bias: Any, d: int) -> tuple[Any, Any]:
    """Input and recurrence bias of one direction."""
    if bias is None:
        return 0.0, 0.0
    half = bias.shape[1] // 2
    return bias[d, :half], bias[d, half:]


def _recurrent(xp: Any, state: Any, r: Any) -> Any:
    return xp.matmul(state, xp.ns.matrix_transpose(r))


@operator(
    "RNN",
    "x w r bias? sequence_lens? initial_h?",
    outputs="y? y_h?",
    infer=_type(1, 1),
    attributes={**_SHARED, "activations": ("Tanh", "Tanh")},
)
def rnn(xp: Any, x: Any, w: Any, r: Any, bias: Any = None, lens: Any = None, h: Any = None, **attributes: Any) -> Any:
    """As ONNX RNN: h' = f(x·wᵀ + h·rᵀ + biases)."""
    functions = _activations(attributes, ("Tanh",), r.shape[0])

    def cell(d: int, g: Any, state: State) -> State:
        return (functions[d][0](xp, _clipped(xp, g + _recurrent(xp, state[0], r[d]), attributes["clip"])),)

    return _run(xp, x, w, r, lens, (h,), attributes, cell, lambda d: sum(_biases(bias, d)))


@operator(
    "GRU",
    "x w r bias? sequence_lens? initial_h?",
    outputs="y? y_h?",
    infer=_type(3, 1),
    attributes={**_SHARED, "linear_before_reset": 0},
)
def gru(xp: Any, x: Any, w: Any, r: Any, bias: Any = None, lens: Any = None, h: Any = None, **attributes: Any) -> Any:
    """As ONNX GRU: gates z, r, h; linear_before_reset=1 resets the candidate's recurrence after its product."""
    functions, clip, n = _activations(attributes, ("Sigmoid", "Tanh"), r.shape[0]), attributes["clip"], r.shape[2]

    def cell(d: int, g: Any, state: State) -> State:
        (old,), (f, tanh), (_, rb) = state, functions[d], _biases(bias, d)
        both = _recurrent(xp, old, r[d, : 2 * n]) + (0.0 if bias is None else rb[: 2 * n])
        z, reset = (f(xp, _clipped(xp, v, clip)) for v in _gates(xp, g[..., : 2 * n] + both, 2))
        last, last_bias = r[d, 2 * n :], 0.0 if bias is None else rb[2 * n :]
        if attributes["linear_before_reset"]:
            part = reset * (_recurrent(xp, old, last) + last_bias)
        else:
            part = _recurrent(xp, reset * old, last) + last_bias
        new = tanh(xp, _clipped(xp, g[..., 2 * n :] + part, clip))
        return ((1.0 - z) * new + z * old,)

    return _run(xp, x, w, r, lens, (h,), attributes, cell, lambda d: _biases(bias, d)[0])


@operator(
    "LSTM",
    "x w r bias? sequence_lens? initial_h? initial_c? peepholes?",
    outputs="y? y_h? y_c?",
    infer=_type(4, 2),
    attributes={**_SHARED, "input_forget": 0},
)
def lstm(
    xp: Any,
    x: Any,
    w: Any,
    r: Any,
    bias: Any = None,
    lens: Any = None,
    h: Any = None,
    c: Any = None,
    peepholes: Any = None,
    **attributes: Any,
) -> Any:
    """As ONNX LSTM: gates i, o, f, c; peepholes i, o, f; input_forget=1 forgets what the input gate takes in."""
    functions, clip = _activations(attributes, ("Sigmoid", "Tanh", "Tanh"), r.shape[0]), attributes["clip"]

    def cell(d: int, g: Any, state: State) -> State:
        (old, memory), (f, squash, out) = state, functions[d]
        i, o, forget, new = _gates(xp, g + _recurrent(xp, old, r[d]), 4)
        if peepholes is not None:
            pi, po, pf = _gates(xp, peepholes[d], 3)
            i, forget = i + pi * memory, forget + pf * memory
        i = f(xp, _clipped(xp, i, clip))
        forget = 1.0 - i if attributes["input_forget"] else f(xp, _clipped(xp, forget, clip))
        memory = forget * memory + i * squash(xp, _clipped(xp, new, clip))
        if peepholes is not None:
            o = o + po * memory
        return f(xp, _clipped(xp, o, clip)) * out(xp, memory), memory

    return _run(xp, x, w, r, lens, (h, c), attributes, cell, lambda d: sum(_biases(bias, d)))


OPS = specs_in(globals())
