"""Arithmetic on symbolic sizes: 0-d int64 (float64, bool) values of the graph, read from the tensors at run time."""

from __future__ import annotations

from typing import Any

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, Operand, V


def size(e: Emitter, self: V, dim: int, **_: Any) -> int | V:
    return e.size(self, self.axis(dim))


def numel(e: Emitter, self: V, **_: Any) -> V:
    return e.op("Size", self)


def _both(a: Operand, b: Operand) -> str:
    floating = any(isinstance(x, float) or (isinstance(x, V) and x.floating) for x in (a, b))
    return "float64" if floating else "int64"


def arithmetic(op: str) -> Any:
    def emit(e: Emitter, a: Operand, b: Operand, **_: Any) -> V:
        dtype = _both(a, b)
        return e.op(op, e.operand(a, dtype), e.operand(b, dtype))

    return emit


def compare(op: str, negate: bool = False) -> Any:
    def emit(e: Emitter, a: Operand, b: Operand, **_: Any) -> V:
        dtype = _both(a, b)
        y = e.op(op, e.operand(a, dtype), e.operand(b, dtype))
        return e.op("Not", y) if negate else y

    return emit


def floordiv(e: Emitter, a: Operand, b: Operand, **_: Any) -> V:
    """Python's //: towards minus infinity, where ONNX's integer Div truncates."""
    dtype = _both(a, b)
    x, y = e.operand(a, dtype), e.operand(b, dtype)
    if dtype == "float64":
        return e.op("Floor", e.op("Div", x, y))
    return e.op("Div", e.op("Sub", x, e.op("Mod", x, y)), y)


def truediv(e: Emitter, a: Operand, b: Operand, **_: Any) -> V:
    return e.op("Div", e.operand(a, "float64"), e.operand(b, "float64"))


def power(e: Emitter, a: Operand, b: Operand, **_: Any) -> V:
    dtype = _both(a, b)
    if b == 0.5 and not isinstance(b, V):
        return e.op("Sqrt", e.operand(a, dtype))
    return e.op("Pow", e.operand(a, dtype), e.operand(b, dtype))


def negate(e: Emitter, a: V, **_: Any) -> V:
    return e.op("Neg", a)


def to_float(e: Emitter, a: Operand, **_: Any) -> V:
    return e.operand(a, "float64")


def to_int(e: Emitter, a: Operand, **_: Any) -> V:
    return e.operand(a, "int64")


def rounded(op: str) -> Any:
    def emit(e: Emitter, a: Operand, **_: Any) -> V:
        return e.cast(e.op(op, e.operand(a, "float64")), "int64")

    return emit


def sqrt(e: Emitter, a: Operand, **_: Any) -> V:
    return e.op("Sqrt", e.operand(a, "float64"))


def logical(op: str) -> Any:
    def emit(e: Emitter, a: Operand, b: Operand, **_: Any) -> V:
        return e.op(op, e.operand(a, "bool"), e.operand(b, "bool"))

    return emit


def invert(e: Emitter, a: V, **_: Any) -> V:
    return e.op("Not", a)


def choose(e: Emitter, a: V, b: Operand, c: Operand, **_: Any) -> V:
    dtype = _both(b, c)
    return e.op("Where", a, e.operand(b, dtype), e.operand(c, dtype))


def item(e: Emitter, self: V, **_: Any) -> V:
    raise e.refuse("a number read out of a tensor", "control by shapes alone", "Keep the value a tensor in the model")


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        "aten.sym_size.int": size,
        "aten.size.int": size,
        "aten.sym_numel.default": numel,
        "aten.item.default": item,
        "aten._local_scalar_dense.default": item,
        "_operator.add": arithmetic("Add"),
        "_operator.sub": arithmetic("Sub"),
        "_operator.mul": arithmetic("Mul"),
        "_operator.mod": arithmetic("Mod"),
        "_operator.floordiv": floordiv,
        "_operator.truediv": truediv,
        "_operator.pow": power,
        "_operator.neg": negate,
        "_operator.pos": to_int,
        "_operator.eq": compare("Equal"),
        "_operator.ne": compare("Equal", negate=True),
        "_operator.lt": compare("Less"),
        "_operator.le": compare("LessOrEqual"),
        "_operator.gt": compare("Greater"),
        "_operator.ge": compare("GreaterOrEqual"),
        "_operator.and_": logical("And"),
        "_operator.or_": logical("Or"),
        "math.trunc": to_int,
        "math.floor": rounded("Floor"),
        "math.ceil": rounded("Ceil"),
        "torch.sym_int": to_int,
        "torch.sym_float": to_float,
        "torch.sym_sqrt": sqrt,
        "torch.sym_not": invert,
        "torch.sym_max": arithmetic("Max"),
        "torch.sym_min": arithmetic("Min"),
        "torch.sym_ite": choose,
    }
)
