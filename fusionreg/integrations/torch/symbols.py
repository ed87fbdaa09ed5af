"""Texts of symbolic extents. They are names here: compared, shown, never evaluated."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from fusionreg.core.errors import ModelError

_LIMIT = 4096
_INFIX: dict[str, str] = {"Mul": "*", "Add": " + "}


def readable(text: str) -> str:
    """``Mul(Integer(2), Symbol('s0', integer=True))`` or ``2*s0`` → ``2*s0``.

    Export writes symbolic extents as sympy source; torch's own loader hands it to sympy's evaluator, which is
    Python's ``eval``. Here the text is only parsed, and every form but names, numbers and calls is refused.

    Raises:
        ModelError: the text is anything else.
    """
    try:
        if len(text) > _LIMIT:
            raise ValueError("too long")
        return _show(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ModelError(
            "cannot read", "symbolic extent", repr(text[:80]), f"names, numbers and operators ({e})"
        ) from e


def _show(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Constant(value=bool() | int() | float() as value):
            return str(value)
        case ast.UnaryOp(operand=operand):
            return f"-{_group(operand)}" if isinstance(node.op, ast.USub) else f"not {_group(operand)}"
        case ast.BinOp(left=left, right=right):
            return f"{_group(left)}{_OPERATORS[type(node.op)]}{_group(right)}"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"{_group(left)} {_COMPARISONS[type(op)]} {_group(right)}"
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str() as name)]) if name.isidentifier():
            return name
        case ast.Call(
            func=ast.Name(id="Integer" | "Float"), args=[ast.Constant(value=int() | float() | str() as value), *_]
        ):
            return str(float(value) if isinstance(value, str) else value)
        case ast.Call(func=ast.Name(id=name), args=args) if name in _INFIX:
            return _INFIX[name].join(_group(a) if name == "Mul" else _show(a) for a in args)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if all(k.arg for k in keywords):
            return f"{name}({', '.join(map(_show, args))})"
    raise ValueError(f"{type(node).__name__} is not allowed")


def extent(text: str, known: Mapping[str, int]) -> int | None:
    """The number that a readable extent stands for, where its symbols are known and it is made of + - * // alone."""
    try:
        return _value(ast.parse(text, mode="eval").body, known)
    except (KeyError, ZeroDivisionError, SyntaxError):
        return None


def _value(node: ast.expr, known: Mapping[str, int]) -> int | None:
    match node:
        case ast.Name(id=name):
            return known[name]
        case ast.Constant(value=int() as value):
            return value
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() as op, right=right):
            a, b = _value(left, known), _value(right, known)
            return None if a is None or b is None else _ARITHMETIC[type(op)](a, b)
    return None


_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_OPERATORS = {
    ast.Add: " + ",
    ast.Sub: " - ",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Div: "/",
    ast.Mod: "%",
    ast.Pow: "**",
}
_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


def _group(node: ast.expr) -> str:
    text = _show(node)
    plain: Callable[[str], bool] = lambda s: s.replace("_", "").replace(".", "").isalnum() or s.endswith(")")  # noqa: E731
    return text if plain(text) else f"({text})"
