"""Activations, most of which ONNX has by name."""

from __future__ import annotations

from typing import Any

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V
from ..program import TensorMeta


def plain(op: str, **attrs: Any) -> Any:
    def emit(e: Emitter, self: V, **_: Any) -> V:
        return e.op(op, self, **attrs)

    return emit


def to_float(op: str) -> Any:
    def emit(e: Emitter, self: V, **_: Any) -> V:
        return e.op(op, e.cast(self, e.out.dtype))

    return emit


def gelu(e: Emitter, self: V, approximate: str = "none", **_: Any) -> V:
    return e.op("Gelu", self, approximate=approximate)


def leaky_relu(e: Emitter, self: V, negative_slope: float = 0.01, **_: Any) -> V:
    return e.op("LeakyRelu", self, alpha=float(negative_slope))


def elu(e: Emitter, self: V, alpha: float = 1, scale: float = 1, input_scale: float = 1, **_: Any) -> V:
    if input_scale != 1:
        raise e.refuse(f"input_scale={input_scale}", "1")
    y = e.op("Elu", self, alpha=float(alpha))
    return y if scale == 1 else e.op("Mul", y, e.number(scale, self.dtype))


def celu(e: Emitter, self: V, alpha: float = 1.0, **_: Any) -> V:
    return e.op("Celu", self, alpha=float(alpha))


def hardtanh(e: Emitter, self: V, min_val: float = -1, max_val: float = 1, **_: Any) -> V:
    return e.op("Clip", self, e.number(min_val, self.dtype), e.number(max_val, self.dtype))


def relu6(e: Emitter, self: V, **_: Any) -> V:
    return hardtanh(e, self, 0, 6)


def softplus(e: Emitter, self: V, beta: float = 1, threshold: float = 20, **_: Any) -> V:
    if beta == 1:
        return e.op("Softplus", self)
    scaled = e.op("Softplus", e.op("Mul", self, e.number(beta, self.dtype)))
    return e.op("Div", scaled, e.number(beta, self.dtype))


def log_sigmoid(e: Emitter, self: V, **_: Any) -> V:
    return e.op("Neg", e.op("Softplus", e.op("Neg", self)))


def glu(e: Emitter, self: V, dim: int = -1, **_: Any) -> V:
    axis = self.axis(dim)
    half = self.shape[axis]
    if not isinstance(half, int):
        raise e.refuse(f"a symbolic extent {half} along dim {dim}", "an extent known at export")
    a, b = e.op("Split", self, e.ints([half // 2, half // 2]), axis=axis, outputs=2)
    return e.op("Mul", a, e.op("Sigmoid", b))


def prelu(e: Emitter, self: V, weight: V, **_: Any) -> V:
    if weight.rank == 1 and self.rank > 2 and weight.shape[0] != 1:
        weight = e.reshape(weight, [-1] + [1] * (self.rank - 2), (*weight.shape, *[1] * (self.rank - 2)))
    return e.op("PRelu", self, weight)


def threshold(e: Emitter, self: V, threshold: float, value: float, **_: Any) -> V:
    low = e.op("LessOrEqual", self, e.number(threshold, self.dtype))
    return e.op("Where", low, e.number(value, self.dtype), self)


def softmax(op: str) -> Any:
    def emit(e: Emitter, self: V, dim: int, dtype: Any = None, half_to_float: bool = False, **_: Any) -> V:
        x = e.cast(self, e.out.dtype)
        return e.op(op, x, axis=-1 if x.axis(dim) == x.rank - 1 else x.axis(dim))

    return emit


def dropout(e: Emitter, input: V, p: float, train: bool | None, **_: Any) -> V | tuple[V, ...]:
    """Inference only: identity. What draws random numbers is refused, since no reference could repeat them."""
    if train and p != 0:
        raise e.refuse("dropout in training mode", "a module in inference mode", "Call module.eval() before exporting")
    if len(e.metas) == 2:
        mask = e.metas[1]
        assert isinstance(mask, TensorMeta)
        shape = e.op("Shape", input)
        return input, e.op("Expand", e.number(True, "bool"), shape, shape=input.shape)
    return input


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        "aten.relu.default": plain("Relu"),
        "aten.relu6.default": relu6,
        "aten.gelu.default": gelu,
        "aten.silu.default": plain("Swish"),
        "aten.sigmoid.default": to_float("Sigmoid"),
        "aten.tanh.default": to_float("Tanh"),
        "aten.hardswish.default": plain("HardSwish"),
        "aten.hardsigmoid.default": plain("HardSigmoid", alpha=1 / 6, beta=0.5),
        "aten.hardtanh.default": hardtanh,
        "aten.leaky_relu.default": leaky_relu,
        "aten.elu.default": elu,
        "aten.celu.default": celu,
        "aten.selu.default": plain(
            "Selu", alpha=1.6732632423543772848170429916717, gamma=1.0507009873554804934193349852946
        ),
        "aten.mish.default": plain("Mish"),
        "aten.softplus.default": softplus,
        "aten.softsign.default": plain("Softsign"),
        "aten.log_sigmoid.default": log_sigmoid,
        "aten.glu.default": glu,
        "aten.prelu.default": prelu,
        "aten._prelu_kernel.default": prelu,
        "aten.threshold.default": threshold,
        "aten.softmax.int": softmax("Softmax"),
        "aten._softmax.default": softmax("Softmax"),
        "aten.log_softmax.int": softmax("LogSoftmax"),
        "aten._log_softmax.default": softmax("LogSoftmax"),
        "aten.dropout.default": dropout,
        "aten.feature_dropout.default": dropout,
        "aten.alpha_dropout.default": dropout,
        "aten.native_dropout.default": dropout,
    }
)
