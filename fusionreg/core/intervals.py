"""What an expression can be when only some of its names have values: proves conditions impossible. Floor 0.

An abstract value is a plain value, an :class:`Interval` of numbers, or :data:`UNKNOWN`. Everything said here is sound:
a condition called impossible holds for no problem. Not everything impossible is found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

_MONOTONE = ("min", "max", "next_pow2", "log2", "sqrt")


def evaluate(text: str, env: Mapping[str, Any]) -> Any:
    """The abstract value of a (valid) expression; names and predicates that ``env`` lacks are unknown."""
    return _value(ast.parse(text.strip(), mode="eval").body, env)


def comparisons(text: str) -> Iterator[tuple[str, Any]]:
    """Every (name, literal) that the expression compares, by ``==``, ``!=``, ``<``, ``in`` or the like."""
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = [s.id for s in sides if isinstance(s, ast.Name)]
            words = [s for side in sides for s in (side.elts if isinstance(side, ast.Tuple | ast.List) else [side])]
            for name in names:
                yield from ((name, w.value) for w in words if isinstance(w, ast.Constant))


def computed(text: str) -> frozenset[str]:
    """Names that the expression computes with: operands of ``+ - * / // %``."""
    nodes = [n for n in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(n, ast.BinOp)]
    return frozenset(side.id for n in nodes for side in (n.left, n.right) if isinstance(side, ast.Name))


class Conditions:
    """Conditions that must hold together, parsed once.

    Attributes:
        names: every variable and predicate that they read.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        trees = [(text, ast.parse(text.strip(), mode="eval").body) for text in texts]
        self._atoms = [(text, atom) for text, tree in trees for atom in _atoms(tree)]
        self.names = frozenset(n.id for _, tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name))

    def impossible(self, env: Mapping[str, Any]) -> str | None:
        """The first that cannot hold together with those before it, None when nothing proves that one cannot."""
        known = dict(env)
        residues: dict[str, list[tuple[int, int]]] = {}
        while True:
            before = dict(known)
            for text, atom in self._atoms:
                if _truth(_value(atom, known)) is False or not _narrow(atom, known) or not _residue(atom, residues):
                    return text
            # what a later one narrowed may rule out an earlier one; bounds only ever shrink to literals of the texts
            if known == before:
                return None


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


def _narrow(atom: ast.expr, known: dict[str, Any]) -> bool:
    """Narrows the interval of the name that ``atom`` compares with a number; False when nothing is left."""
    if not isinstance(atom, ast.Compare) or type(atom.ops[0]) not in _FLIP:
        return True
    left, op, right = atom.left, type(atom.ops[0]), atom.comparators[0]
    if isinstance(right, ast.Name) and not isinstance(left, ast.Name):
        left, op, right = right, _FLIP[op], left
    bound = _value(right, known)
    if not isinstance(left, ast.Name) or isinstance(bound, bool | str) or not isinstance(bound, int | float):
        return True
    interval = known.get(left.id, UNKNOWN)
    if not isinstance(interval, Interval):
        return True
    whole = isinstance(bound, int)  # extents are integers: K < 64 is K <= 63
    lo, hi = interval.lo, interval.hi
    if op in (ast.Eq, ast.Gt, ast.GtE):
        lo = max(lo, bound + 1 if op is ast.Gt and whole else bound)
    if op in (ast.Eq, ast.Lt, ast.LtE):
        hi = min(hi, bound - 1 if op is ast.Lt and whole else bound)
    known[left.id] = bound if lo == hi == bound else Interval(lo, hi)
    return lo <= hi


def _residue(atom: ast.expr, residues: dict[str, list[tuple[int, int]]]) -> bool:
    """Remembers ``name % m == r``; False when it contradicts what is remembered."""
    if not isinstance(atom, ast.Compare) or not isinstance(atom.ops[0], ast.Eq):
        return True
    left, right = atom.left, atom.comparators[0]
    if not (isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and isinstance(left.left, ast.Name)):
        return True
    m, r = _value(left.right, {}), _value(right, {})
    if type(m) is not int or type(r) is not int or m < 1:
        return True
    seen = residues.setdefault(left.left.id, [])
    seen.append((m, r))
    return all((r - other) % gcd(m, modulus) == 0 for modulus, other in seen)


def _value(node: ast.expr, env: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return env.get(node.id, UNKNOWN)
    if isinstance(node, ast.BoolOp):
        return _bool([_value(v, env) for v in node.values], isinstance(node.op, ast.And))
    if isinstance(node, ast.IfExp):
        test = _truth(_value(node.test, env))
        yes, no = _value(node.body, env), _value(node.orelse, env)
        return yes if test is True or _same(yes, no) else no if test is False else UNKNOWN
    if isinstance(node, ast.UnaryOp):
        operand = _value(node.operand, env)
        if isinstance(node.op, ast.Not):
            truth = _truth(operand)
            return UNKNOWN if truth is None else not truth
        if isinstance(node.op, ast.UAdd) or not isinstance(operand, Interval):
            return (
                operand if isinstance(operand, _Unknown) or isinstance(node.op, ast.UAdd) else _safe(lambda: -operand)
            )
        return Interval(-operand.hi, -operand.lo)
    if isinstance(node, ast.BinOp):
        return _arithmetic(type(node.op), _value(node.left, env), _value(node.right, env))
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        pairs = zip(sides, node.ops, sides[1:], strict=False)
        return _bool([_compare(type(op), left, right, env) for left, op, right in pairs], True)
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name), ast.dump(node)
    return _call(node.func.id, node.args, env)


def _call(name: str, args: Sequence[ast.expr], env: Mapping[str, Any]) -> Any:
    if name in PREDICATES:
        subject = args[0].id if isinstance(args[0], ast.Name) else ast.literal_eval(args[0])
        rest = [_value(a, env) for a in args[1:]]
        if name in env and not any(isinstance(r, Interval | _Unknown) for r in rest):
            return _safe(lambda: env[name](subject, *rest))
        return EXTENT if name == "shape" else UNKNOWN
    values = [_value(a, env) for a in args]
    if any(isinstance(v, _Unknown) for v in values):
        return UNKNOWN
    function = FUNCTIONS[name][0]
    if not any(isinstance(v, Interval) for v in values):
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


def _arithmetic(op: type[ast.operator], left: Any, right: Any) -> Any:
    if isinstance(left, _Unknown | str) or isinstance(right, _Unknown | str):
        return UNKNOWN
    functions = {
        ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
        ast.Div: lambda a, b: a / b, ast.FloorDiv: lambda a, b: a // b, ast.Mod: lambda a, b: a % b,
    }  # fmt: skip
    f = functions[op]
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


def _compare(op: type[ast.cmpop], left: ast.expr, right: ast.expr, env: Mapping[str, Any]) -> Any:
    a = _value(left, env)
    if op in (ast.In, ast.NotIn):
        members = [_value(e, env) for e in right.elts] if isinstance(right, ast.Tuple | ast.List) else [UNKNOWN]
        found = _bool([_order(ast.Eq, a, m) for m in members], False)
        return found if op is ast.In or isinstance(found, _Unknown) else not found
    return _order(op, a, _value(right, env))


def _order(op: type[ast.cmpop], a: Any, b: Any) -> Any:
    if isinstance(a, _Unknown) or isinstance(b, _Unknown):
        return UNKNOWN
    tests = {
        ast.Eq: lambda x, y: x == y, ast.NotEq: lambda x, y: x != y, ast.Lt: lambda x, y: x < y,
        ast.LtE: lambda x, y: x <= y, ast.Gt: lambda x, y: x > y, ast.GtE: lambda x, y: x >= y,
    }  # fmt: skip
    if not isinstance(a, Interval) and not isinstance(b, Interval):
        return _safe(lambda: tests[op](a, b))
    if isinstance(a, str) or isinstance(b, str):
        return {ast.Eq: False, ast.NotEq: True}.get(op, UNKNOWN)
    x = a if isinstance(a, Interval) else Interval(a, a)
    y = b if isinstance(b, Interval) else Interval(b, b)
    if op in (ast.Eq, ast.NotEq):
        return (op is ast.NotEq) if x.hi < y.lo or y.hi < x.lo else UNKNOWN
    if op in (ast.Gt, ast.GtE):
        x, y, op = y, x, _FLIP[op]
    test = tests[op]
    return True if test(x.hi, y.lo) else False if not test(x.lo, y.hi) else UNKNOWN


def _bool(values: Sequence[Any], conjunction: bool) -> Any:
    truths = [_truth(v) for v in values]
    if (not conjunction) in truths:
        return not conjunction
    return UNKNOWN if None in truths else conjunction


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
