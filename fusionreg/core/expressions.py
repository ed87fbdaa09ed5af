"""The one expression language of specs: constraints, ``requires``, geometry, constants. Floor 0.

A subset of Python's expressions, parsed once with :mod:`ast`, checked node by node against a whitelist, and compiled
to a code object; never evaluated as text again. What is allowed:

- integers, floats, strings, ``True``, ``False``, and names of the problem (axes, attributes, choices, dtype variables,
  parameters, constants), and ``multiprocessors`` of the device where a launch is laid out;
- ``+ - * / // %``, unary ``-`` and ``+``, comparisons (chained too), ``and or not``, ``a if c else b``;
- ``in`` and ``not in`` with a literal tuple or list on the right;
- calls of :data:`FUNCTIONS` and of the predicates in :data:`PREDICATES`. A predicate's first argument is the bare name
  of a tensor (of a feature for ``has``) and is passed as that name's text.

There is no ``**``, no attribute, no subscript, no lambda, no comprehension, and no name with a leading underscore.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

from .dtypes import dtype
from .errors import ExpressionError, FusionregError, UnknownNameError
from .frozen import FrozenDict

MAX_TEXT = 4000
INT_MAX = 2**63 - 1

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z", re.ASCII)
_AT: dict[str, Any] = {"lineno": 1, "col_offset": 0}  # which compile() wants of every node
_PLAIN = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_COMPARE = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)


def ceildiv(a: int, b: int) -> int:
    """The quotient rounded up, exact for any integers."""
    return -(-a // b)


def align(x: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``x``."""
    return ceildiv(x, multiple) * multiple


def log2(x: int) -> int | float:
    """An integer when ``x`` is a power of two, a float otherwise."""
    if isinstance(x, int) and x > 0 and x & (x - 1) == 0:
        return x.bit_length() - 1
    return math.log2(x)


def next_pow2(x: int) -> int:
    """The least power of two that is not below ``x``; 1 for ``x`` below 1."""
    return 1 << max(0, int(x) - 1).bit_length()


def bits(name: str) -> int:
    """Storage width of a dtype."""
    return dtype(name).bits


#: Function name → (implementation, least and most number of arguments).
FUNCTIONS: Mapping[str, tuple[Callable[..., Any], int, int]] = FrozenDict(
    {
        "ceildiv": (ceildiv, 2, 2),
        "min": (min, 2, 16),
        "max": (max, 2, 16),
        "align": (align, 2, 2),
        "log2": (log2, 1, 1),
        "abs": (abs, 1, 1),
        "sqrt": (math.sqrt, 1, 1),
        "next_pow2": (next_pow2, 1, 1),
        "gcd": (math.gcd, 2, 2),
        "bits": (bits, 1, 1),
    }
)

#: Predicate name → number of arguments; the environment supplies each as a callable.
PREDICATES: Mapping[str, int] = FrozenDict(
    {"contiguous": 1, "aligned": 2, "rank": 1, "present": 1, "stride": 2, "shape": 2, "form": 1, "has": 1}
)

_GLOBALS = {"__builtins__": {}, **{name: entry[0] for name, entry in FUNCTIONS.items()}}


class _Checker(ast.NodeTransformer):
    """Whitelists the tree and turns each name into a look-up of ``_env``, lazily, in place."""

    def __init__(self, text: str, known: Collection[str] | None, tensors: Collection[str] | None, whom: str) -> None:
        self.text, self.known, self.tensors_known, self.whom = text, known, tensors, whom
        self.names: set[str] = set()
        self.tensors: set[str] = set()
        self.features: set[str] = set()
        self.predicates: set[str] = set()

    def fail(self, found: str, expected: str, **facts: Any) -> ExpressionError:
        whom = f"{self.text!r} in {self.whom}" if self.whom else repr(self.text)
        return ExpressionError("bad expression", whom, found, expected, text=self.text, **facts)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        raise self.fail(f"{type(node).__name__} is not allowed", "arithmetic, comparisons, and/or/not, if/else, calls")

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, bool | int | float | str):
            raise self.fail(f"constant {node.value!r}", "a number, a string, True or False")
        if isinstance(node.value, int) and abs(node.value) > INT_MAX:
            raise self.fail(f"integer {node.value}", "one that fits 64 bits")
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        self._check(node.id, self.known, "name")
        self.names.add(node.id)
        return _lookup(node.id)

    def _check(self, name: str, known: Collection[str] | None, kind: str) -> None:
        if not _NAME.match(name):
            raise self.fail(f"name {name!r}", "letters, digits and underscores, a letter first")
        if name in FUNCTIONS or name in PREDICATES:
            raise self.fail(f"{name!r} without a call", f"{name}(…)")
        if known is not None and name not in known:
            hint = UnknownNameError.among(kind, name, known)
            raise self.fail(f"unknown {kind} {name!r}", hint.expected, name=name)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if not isinstance(node.op, _PLAIN):
            raise self.fail(f"operator {type(node.op).__name__} is not allowed", "one of + - * / // %")
        for side in (node.left, node.right):
            if isinstance(side, ast.Constant) and isinstance(side.value, str):
                raise self.fail(f"arithmetic on {side.value!r}", "numbers")
        return ast.BinOp(self.visit(node.left), node.op, self.visit(node.right), **_AT)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if not isinstance(node.op, ast.USub | ast.UAdd | ast.Not):
            raise self.fail(f"operator {type(node.op).__name__} is not allowed", "-, + or not")
        return ast.UnaryOp(node.op, self.visit(node.operand), **_AT)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        return ast.BoolOp(node.op, [self.visit(v) for v in node.values], **_AT)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return ast.IfExp(self.visit(node.test), self.visit(node.body), self.visit(node.orelse), **_AT)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        right: list[ast.expr] = []
        for op, side in zip(node.ops, node.comparators, strict=True):
            if not isinstance(op, _COMPARE):
                raise self.fail(f"comparison {type(op).__name__} is not allowed", "== != < <= > >= in, not in")
            if isinstance(op, ast.In | ast.NotIn):
                if not isinstance(side, ast.Tuple | ast.List) or not side.elts:
                    raise self.fail("`in` without a list of values", 'a tuple: T in ("float16", "bfloat16")')
                right.append(ast.Tuple([self.visit(e) for e in side.elts], ast.Load(), **_AT))
            else:
                right.append(self.visit(side))
        return ast.Compare(self.visit(node.left), node.ops, right, **_AT)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
        if name not in FUNCTIONS and name not in PREDICATES:
            hint = UnknownNameError.among("function", name, [*FUNCTIONS, *PREDICATES])
            raise self.fail(f"unknown function {name!r}", hint.expected, name=name)
        if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            raise self.fail(f"{name}() with keyword or starred arguments", "positional arguments")
        least, most = FUNCTIONS[name][1:] if name in FUNCTIONS else (PREDICATES[name],) * 2
        if not least <= len(node.args) <= most:
            span = f"{least} to {most}" if most > least else str(least)
            raise self.fail(f"{name}() with {len(node.args)} arguments", span)
        if name in FUNCTIONS:
            return ast.Call(ast.Name(name, ast.Load(), **_AT), [self.visit(a) for a in node.args], [], **_AT)
        self.predicates.add(name)
        subject = self._subject(name, node.args[0])
        rest = [self.visit(a) for a in node.args[1:]]
        return ast.Call(_lookup(name), [ast.Constant(subject, **_AT), *rest], [], **_AT)

    def _subject(self, function: str, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            name = node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        else:
            raise self.fail(f"{function}({ast.unparse(node)})", "a bare name as its first argument")
        if function == "has":
            from .targets import TARGETS

            self._check(name, sorted(frozenset().union(*(t.features for t in TARGETS.values()))), "feature")
            self.features.add(name)
        else:
            self._check(name, self.tensors_known, "tensor")
            self.tensors.add(name)
        return name


def _lookup(name: str) -> ast.Subscript:
    return ast.Subscript(ast.Name("_env", ast.Load(), **_AT), ast.Constant(name, **_AT), ast.Load(), **_AT)


def _parse(text: str, checker: _Checker) -> ast.expr:
    if not isinstance(text, str) or not text.strip():
        raise checker.fail("it is empty", "an expression")
    if len(text) > MAX_TEXT:
        raise checker.fail(f"{len(text)} characters", f"at most {MAX_TEXT}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return checker.visit(tree.body)
    except SyntaxError as e:
        raise checker.fail(f"{e.msg} at column {e.offset}", "a Python expression") from None
    except (ValueError, RecursionError, MemoryError) as e:
        raise checker.fail(f"it does not parse ({type(e).__name__})", "an expression, not nested too deeply") from None


class _Parsed(NamedTuple):
    """What an expression's text says, whoever may read which names."""

    names: frozenset[str]
    tensors: frozenset[str]
    features: frozenset[str]
    predicates: frozenset[str]
    function: FunctionType


@lru_cache(maxsize=1 << 14)
def _parsed(text: str) -> _Parsed:
    """Of an expression that may read every name: most stand in several kernels."""
    checker = _Checker(text, None, None, "")
    function = _function(_parse(text, checker), text)
    names, tensors, features, predicates = checker.names, checker.tensors, checker.features, checker.predicates
    return _Parsed(frozenset(names), frozenset(tensors), frozenset(features), frozenset(predicates), function)


def _function(body: ast.expr, name: str) -> FunctionType:
    arguments = ast.arguments([], [ast.arg("_env", **_AT)], None, [], [], None, [])
    tree = ast.Expression(ast.Lambda(arguments, body, **_AT))
    try:
        code = compile(tree, f"<{name}>", "eval")
    except (RecursionError, MemoryError) as e:
        raise ExpressionError("bad expression", name, type(e).__name__, "one that is not nested too deeply") from None
    return eval(code, _GLOBALS)  # the tree was built node by node above: nothing but whitelisted operations


class Expression:
    """One parsed expression; immutable, hashable, equal by text.

    Attributes:
        text: as written, stripped.
        names: the variables it reads.
        tensors: the tensors that its predicates name.
        features: the target features that ``has`` names.
        predicates: the predicates it calls; the environment must supply each as a callable.
        whom: whose it is, for messages.
        function: what it compiled to.
    """

    __slots__ = ("features", "function", "names", "predicates", "tensors", "text", "whom")

    text: str
    names: frozenset[str]
    tensors: frozenset[str]
    features: frozenset[str]
    predicates: frozenset[str]
    whom: str
    function: FunctionType

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        known: Collection[str] | None = None,
        tensors: Collection[str] | None = None,
        whom: str = "",
    ) -> Expression:
        """The expression; :class:`ExpressionError` when it is no expression of the language or names what is unknown.

        ``known``: variables that exist; ``tensors``: tensors that exist; None leaves that unchecked.
        """
        try:
            found = _parsed(text.strip()) if isinstance(text, str) else None
        except ExpressionError:
            found = None
        if (
            found is None
            or (known is not None and not all(name in known for name in found.names))
            or (tensors is not None and not all(name in tensors for name in found.tensors))
        ):
            _parse(text, _Checker(text, known, tensors, whom))  # which raises, and says where the expression stands
            found = _parsed(text.strip())
        self = object.__new__(cls)
        for field, value in zip(("text", "whom", *_Parsed._fields), (text.strip(), whom, *found), strict=True):
            object.__setattr__(self, field, value)
        return self

    def __call__(self, env: Mapping[str, Any]) -> Any:
        """Its value; names are looked up only where evaluation reaches them. :class:`ExpressionError` when it fails."""
        try:
            value = self.function(env)
        except Exception as e:
            raise _failed(self, env, e) from None
        if type(value) is int and not -INT_MAX <= value <= INT_MAX:
            raise _failed(self, env, OverflowError("the result does not fit 64 bits"))
        return value

    def pretty(self, env: Mapping[str, Any]) -> str:
        """The text with the values it read, e.g. ``K % 8 == 0 (K = 12)``."""
        shown = [f"{n} = {env[n]}" for n in sorted(self.names) if n in env]
        return f"{self.text} ({', '.join(shown)})" if shown else self.text

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Expression is immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __reduce__(self):
        return _unpickle, (self.text, self.whom)


def _unpickle(text: str, whom: str) -> Expression:
    return Expression.parse(text, whom=whom)


class ExpressionSet:
    """Several named expressions in one code object: the hot path evaluates a kernel's whole geometry with one call.

    Attributes:
        expressions: the members by name, for messages and for explaining one at a time.
        names, tensors, predicates: as for :class:`Expression`, of all members together.
    """

    __slots__ = ("_function", "expressions", "names", "predicates", "tensors", "whom")

    def __init__(
        self,
        items: Mapping[str, str],
        known: Collection[str] | None = None,
        whom: str = "",
        *,
        tensors: Collection[str] | None = None,
    ) -> None:
        parsed = {
            name: Expression.parse(text, known=known, tensors=tensors, whom=f"{whom} {name}".strip())
            for name, text in items.items()
        }
        self.expressions: Mapping[str, Expression] = FrozenDict(parsed)
        self.names = frozenset().union(*(e.names for e in parsed.values()))
        self.tensors = frozenset().union(*(e.tensors for e in parsed.values()))
        self.predicates = frozenset().union(*(e.predicates for e in parsed.values()))
        self.whom = whom
        self._function: FunctionType | None = None  # compiled by the first call: most kernels are never launched

    def __call__(self, env: Mapping[str, Any]) -> dict[str, Any]:
        """Name → value of every member; :class:`ExpressionError` naming the one that fails."""
        try:
            values = (self._function or self._together())(env)
            for value in values.values():
                if type(value) is int and not -INT_MAX <= value <= INT_MAX:
                    raise OverflowError
        except Exception:
            return {name: e(env) for name, e in self.expressions.items()}  # again one by one: the culprit raises
        return values

    def _together(self) -> FunctionType:
        bodies = [_parse(e.text, _Checker(e.text, None, None, self.whom)) for e in self.expressions.values()]
        whole = ast.Dict([ast.Constant(n, **_AT) for n in self.expressions], bodies, **_AT)
        self._function = _function(whole, self.whom or "expressions")
        return self._function

    def __len__(self) -> int:
        return len(self.expressions)

    def __repr__(self) -> str:
        return f"ExpressionSet({ ({n: e.text for n, e in self.expressions.items()})!r})"

    def __reduce__(self):
        return ExpressionSet, ({n: e.text for n, e in self.expressions.items()}, None, self.whom)


def _failed(expression: Expression, env: Mapping[str, Any], error: Exception) -> ExpressionError:
    whom = f"{expression.text!r} in {expression.whom}" if expression.whom else repr(expression.text)
    shown = ", ".join(f"{n} = {env[n]!r}" for n in sorted(expression.names) if n in env)
    facts: dict[str, Any] = {
        "text": expression.text,
        "values": FrozenDict({n: env[n] for n in expression.names if n in env}),
    }
    if isinstance(error, KeyError) and not isinstance(error, FusionregError):
        found = f"{error.args[0]!r} has no value"
        return ExpressionError("cannot evaluate", whom, found, "a value for every name", **facts)
    reason = str(error) if isinstance(error, FusionregError) else f"{error or type(error).__name__}"
    return ExpressionError("cannot evaluate", whom, f"{reason} with {shown}" if shown else reason, **facts)
