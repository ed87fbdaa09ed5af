"""What an expression can be when only some of its names have values: proves conditions impossible. Floor 0.

An abstract value is a plain value, an :class:`Interval` of numbers, or :data:`UNKNOWN`. Everything said here is sound:
a condition called impossible holds for no problem. Not everything impossible is found.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, inf
from typing import Any, Final

from .expressions import FUNCTIONS, PREDICATES


@dataclass(frozen=True, slots=True)
class Interval:
    """All numbers from ``lo`` to ``hi``, both included."""

    lo: float
    hi: float


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = _Unknown()
EXTENT: Final = Interval(0, inf)

Abstract = Callable[[Mapping[str, Any]], Any]
"""An expression made ready: from the values of names to its abstract value."""

_MONOTONE = ("min", "max", "next_pow2", "log2", "sqrt")


def evaluate(text: str, env: Mapping[str, Any]) -> Any:
    """The abstract value of a (valid) expression; names and predicates that ``env`` lacks are unknown."""
    return _ready(text)(env)


@lru_cache(maxsize=4096)
def _ready(text: str) -> Abstract:
    return _abstract(ast.parse(text.strip(), mode="eval").body)


@lru_cache(maxsize=4096)
def comparisons(text: str) -> tuple[tuple[str, Any], ...]:
    """Every (name, literal) that the expression compares, by ``==``, ``!=``, ``<``, ``in`` or the like."""
    found: list[tuple[str, Any]] = []
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = [s.id for s in sides if isinstance(s, ast.Name)]
            words = [s for side in sides for s in (side.elts if isinstance(side, ast.Tuple | ast.List) else [side])]
            found += ((name, w.value) for name in names for w in words if isinstance(w, ast.Constant))
    return tuple(found)


@lru_cache(maxsize=4096)
def computed(text: str) -> frozenset[str]:
    """Names that the expression computes with: operands of ``+ - * / // %``."""
    nodes = [n for n in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(n, ast.BinOp)]
    return frozenset(side.id for n in nodes for side in (n.left, n.right) if isinstance(side, ast.Name))


class Conditions:
    """Conditions that must hold together, made ready once.

    Attributes:
        names: every variable and predicate that they read.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        trees = [(text, ast.parse(text.strip(), mode="eval").body) for text in texts]
        self._atoms = [_Atom(text, atom) for text, tree in trees for atom in _atoms(tree)]
        self.names = frozenset(n.id for _, tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name))

    def impossible(self, env: Mapping[str, Any]) -> str | None:
        """The first that cannot hold together with those before it, None when nothing proves that one cannot."""
        known = dict(env)
        residues: dict[str, list[tuple[int, int]]] = {}
        narrowed = True
        while narrowed:
            narrowed = False
            for atom in self._atoms:
                if _truth(atom.value(known)) is False:
                    return atom.text
                if atom.bounded:
                    before = known.get(atom.bounded)
                    if not atom.narrow(known):
                        return atom.text
                    narrowed = narrowed or known.get(atom.bounded) != before
                if atom.residue and not _agree(*atom.residue, residues):
                    return atom.text
            # what a later one narrowed may rule out an earlier one; bounds only ever shrink to literals of the texts
        return None


@lru_cache(maxsize=1024)
def conditions(texts: tuple[str, ...]) -> Conditions:
    """:class:`Conditions`, made ready once for all who ask: each case of a fusion does."""
    return Conditions(texts)


def impossible(conditions: Sequence[str], env: Mapping[str, Any]) -> str | None:
    """:meth:`Conditions.impossible`, for a single use."""
    return Conditions(conditions).impossible(env)


def _atoms(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for value in node.values:
            yield from _atoms(value)
    elif isinstance(node, ast.Compare) and len(node.ops) > 1:
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            yield ast.Compare(left, [op], [right])
    else:
        yield node


_FLIP = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Eq: ast.Eq}


class _Atom:
    """One condition that is no conjunction, ready to be tried.

    Attributes:
        text: the whole condition that it is of.
        value: its abstract value.
        bounded: the name that it compares with something, "" where it does not.
        residue: (name, m, r) where it says ``name % m == r``.
    """

    def __init__(self, text: str, node: ast.expr) -> None:
        self.text, self.value, self.bounded = text, _abstract(node), ""
        self.residue = _residue(node)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _FLIP:
            left, self._op, right = node.left, type(node.ops[0]), node.comparators[0]
            if isinstance(right, ast.Name) and not isinstance(left, ast.Name):
                left, self._op, right = right, _FLIP[self._op], left
            if isinstance(left, ast.Name):
                self.bounded, self._bound = left.id, _abstract(right)

    def narrow(self, known: dict[str, Any]) -> bool:
        """Narrows the interval of the name that is compared, where it is with a number; False when nothing is left."""
        interval = known.get(self.bounded)
        if not isinstance(interval, Interval):
            return True
        bound, op = self._bound(known), self._op
        if isinstance(bound, bool | str) or not isinstance(bound, int | float):
            return True
        whole = isinstance(bound, int)  # extents are integers: K < 64 is K <= 63
        lo, hi = interval.lo, interval.hi
        if op in (ast.Eq, ast.Gt, ast.GtE):
            lo = max(lo, bound + 1 if op is ast.Gt and whole else bound)
        if op in (ast.Eq, ast.Lt, ast.LtE):
            hi = min(hi, bound - 1 if op is ast.Lt and whole else bound)
        known[self.bounded] = bound if lo == hi == bound else Interval(lo, hi)
        return lo <= hi


def _residue(atom: ast.expr) -> tuple[str, int, int] | None:
    if not isinstance(atom, ast.Compare) or not isinstance(atom.ops[0], ast.Eq):
        return None
    left, right = atom.left, atom.comparators[0]
    if not (isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and isinstance(left.left, ast.Name)):
        return None
    m, r = _abstract(left.right)({}), _abstract(right)({})
    return (left.left.id, m, r) if type(m) is int and type(r) is int and m >= 1 else None


def _agree(name: str, m: int, r: int, residues: dict[str, list[tuple[int, int]]]) -> bool:
    """Remembers ``name % m == r``; False when it contradicts what is remembered."""
    seen = residues.setdefault(name, [])
    seen.append((m, r))
    return all((r - other) % gcd(m, modulus) == 0 for modulus, other in seen)


def _abstract(node: ast.expr) -> Abstract:
    if isinstance(node, ast.Constant):
        value = node.value
        return lambda env: value
    if isinstance(node, ast.Name):
        name = node.id
        return lambda env: env.get(name, UNKNOWN)
    if isinstance(node, ast.BoolOp):
        return _bool([_abstract(v) for v in node.values], isinstance(node.op, ast.And))
    if isinstance(node, ast.IfExp):
        return _either(_abstract(node.test), _abstract(node.body), _abstract(node.orelse))
    if isinstance(node, ast.UnaryOp):
        operand, sign = _abstract(node.operand), type(node.op)
        return lambda env: _unary(sign, operand(env))
    if isinstance(node, ast.BinOp):
        left, right, op = _abstract(node.left), _abstract(node.right), type(node.op)
        return lambda env: _arithmetic(op, left(env), right(env))
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        pairs = [_compare(type(op), a, b) for a, op, b in zip(sides, node.ops, sides[1:], strict=False)]
        return pairs[0] if len(pairs) == 1 else _bool(pairs, True)
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name), ast.dump(node)
    return _predicate(node.func.id, node.args) if node.func.id in PREDICATES else _call(node.func.id, node.args)


def _either(test: Abstract, body: Abstract, orelse: Abstract) -> Abstract:
    def value(env: Mapping[str, Any]) -> Any:
        truth = _truth(test(env))
        if truth is not None:
            return body(env) if truth else orelse(env)
        yes = body(env)
        return yes if _same(yes, orelse(env)) else UNKNOWN

    return value


def _unary(op: type[ast.unaryop], operand: Any) -> Any:
    if op is ast.Not:
        truth = _truth(operand)
        return UNKNOWN if truth is None else not truth
    if op is ast.UAdd or isinstance(operand, _Unknown):
        return operand
    return Interval(-operand.hi, -operand.lo) if isinstance(operand, Interval) else _safe(lambda: -operand)


def _predicate(name: str, args: Sequence[ast.expr]) -> Abstract:
    subject = args[0].id if isinstance(args[0], ast.Name) else ast.literal_eval(args[0])
    others = [_abstract(a) for a in args[1:]]

    def value(env: Mapping[str, Any]) -> Any:
        rest = [o(env) for o in others]
        if name in env and not any(isinstance(r, Interval | _Unknown) for r in rest):
            return _safe(lambda: env[name](subject, *rest))
        return EXTENT if name == "shape" else UNKNOWN

    return value


def _call(name: str, args: Sequence[ast.expr]) -> Abstract:
    operands, function = [_abstract(a) for a in args], FUNCTIONS[name][0]
    return lambda env: _applied(name, function, [o(env) for o in operands])


def _applied(name: str, function: Any, values: list[Any]) -> Any:
    kinds = [type(v) for v in values]
    if _Unknown in kinds:
        return UNKNOWN
    if Interval not in kinds:
        return _safe(lambda: function(*values))
    if name in _MONOTONE:
        lows = [v.lo if isinstance(v, Interval) else v for v in values]
        highs = [v.hi if isinstance(v, Interval) else v for v in values]
        lo = _safe(lambda: function(*lows))
        hi = inf if any(h == inf for h in highs) and name != "min" else _safe(lambda: function(*highs))
        return UNKNOWN if isinstance(lo, _Unknown) or isinstance(hi, _Unknown) else Interval(lo, hi)
    if name in ("ceildiv", "align") and isinstance(values[0], Interval) and type(values[1]) is int and values[1] > 0:
        lo, hi = (v if abs(v) == inf else function(int(v), values[1]) for v in (values[0].lo, values[0].hi))
        return Interval(lo, hi)
    return UNKNOWN


_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _arithmetic(op: type[ast.operator], left: Any, right: Any) -> Any:
    if isinstance(left, _Unknown | str) or isinstance(right, _Unknown | str):
        return UNKNOWN
    f = _ARITHMETIC[op]
    if not isinstance(left, Interval) and not isinstance(right, Interval):
        return _safe(lambda: f(left, right))
    a = left if isinstance(left, Interval) else Interval(left, left)
    b = right if isinstance(right, Interval) else Interval(right, right)
    if op is ast.Mod:
        return Interval(0, min(a.hi, b.hi - 1)) if a.lo >= 0 and b.lo >= 1 else UNKNOWN
    if op in (ast.Div, ast.FloorDiv) and b.lo <= 0:
        return UNKNOWN
    ends = [_corner(op, f, x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return UNKNOWN if any(e != e for e in ends) else Interval(min(ends), max(ends))


def _corner(op: type[ast.operator], f: Any, x: float, y: float) -> float:
    if op is ast.Mult and 0 in (x, y):
        return 0
    if op in (ast.Div, ast.FloorDiv) and abs(y) == inf:
        return 0 if abs(x) != inf else float("nan")
    if op is ast.FloorDiv and abs(x) == inf:
        return x
    return f(x, y)


def _compare(op: type[ast.cmpop], left: ast.expr, right: ast.expr) -> Abstract:
    a = _abstract(left)
    if op in (ast.In, ast.NotIn):
        members = [_abstract(e) for e in right.elts] if isinstance(right, ast.Tuple | ast.List) else [lambda _: UNKNOWN]

        def among(env: Mapping[str, Any]) -> Any:
            value = a(env)
            found = _joined((_order(ast.Eq, value, m(env)) for m in members), False)
            return found if op is ast.In or isinstance(found, _Unknown) else not found

        return among
    b = _abstract(right)
    return lambda env: _order(op, a(env), b(env))


_TESTS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def _order(op: type[ast.cmpop], a: Any, b: Any) -> Any:
    if isinstance(a, _Unknown) or isinstance(b, _Unknown):
        return UNKNOWN
    if not isinstance(a, Interval) and not isinstance(b, Interval):
        return _safe(lambda: _TESTS[op](a, b))
    if isinstance(a, str) or isinstance(b, str):
        return {ast.Eq: False, ast.NotEq: True}.get(op, UNKNOWN)
    x = a if isinstance(a, Interval) else Interval(a, a)
    y = b if isinstance(b, Interval) else Interval(b, b)
    if op in (ast.Eq, ast.NotEq):
        return (op is ast.NotEq) if x.hi < y.lo or y.hi < x.lo else UNKNOWN
    if op in (ast.Gt, ast.GtE):
        x, y, op = y, x, _FLIP[op]
    test = _TESTS[op]
    return True if test(x.hi, y.lo) else False if not test(x.lo, y.hi) else UNKNOWN


def _bool(parts: Sequence[Abstract], conjunction: bool) -> Abstract:
    return lambda env: _joined((part(env) for part in parts), conjunction)


def _joined(values: Iterable[Any], conjunction: bool) -> Any:
    """All of them, or any."""
    known = True
    for value in values:
        truth = _truth(value)
        if truth is (not conjunction):
            return truth
        known = known and truth is not None
    return conjunction if known else UNKNOWN


def _truth(value: Any) -> bool | None:
    if isinstance(value, Interval):
        return True if value.lo > 0 or value.hi < 0 else None
    return None if isinstance(value, _Unknown) else bool(value)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _safe(compute: Any) -> Any:
    """The value; unknown where computing it fails, which is not this module's to report."""
    try:
        return compute()
    except Exception:
        return UNKNOWN
