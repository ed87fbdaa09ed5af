"""Names of a fusion and where each may be read; shared by the checks of fusions and of kernels. Floor 3."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ExpressionError, SpecError
from ..expressions import FUNCTIONS, PREDICATES, Expression, ExpressionSet
from ..intervals import comparisons, computed

#: Words that a template or the generated prelude already gives a meaning.
RESERVED = frozenset(
    {"entry", "signature", "include", "workspace", "multiprocessors", "fr", "any_of", "optional", "none", "target"}
    | {"self", "super", "loop", "caller", "varargs", "kwargs", "range", "dict", "lipsum", "cycler", "joiner"}
)

CPP = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
    concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete
    do double dynamic_cast else enum explicit export extern false float for friend goto half if inline int long main
    mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
    reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template this
    thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor
    xor_eq blockIdx blockDim gridDim threadIdx warpSize INFINITY NAN NULL False None True in is lambda def""".split()  # noqa: SIM905  as a list literal it is a hundred lines
)
"""Keywords of C++ and Python, and CUDA's built-in variables: none can be the name of a parameter or constant."""


@dataclass
class Problems:
    """Collects what is wrong with one spec, each with plugin, fusion and field."""

    plugin: str
    fusion: str
    kernel: str = ""
    found: list[SpecError] = field(default_factory=list)

    def add(self, at: str, found: str, expected: str = "", next_step: str = "") -> None:
        what = f"{self.fusion}/{self.kernel}" if self.kernel else self.fusion
        facts = {"plugin": self.plugin, "fusion": self.fusion, "kernel": self.kernel, "field": at}
        self.found.append(
            SpecError("bad spec", f"{what} of plugin {self.plugin}, {at}", found, expected, next_step, **facts)
        )

    def attempt(self, at: str, make: Callable[[], Any]) -> Any:
        """The value, or None after its :class:`SpecError` is noted at ``at``."""
        try:
            return make()
        except SpecError as error:
            found = f"{error.what} {error.whom}: {error.found}" if error.found else str(error)
            self.add(at, found, error.expected, error.next_step)
            self.found[-1].facts.update({k: v for k, v in error.facts.items() if k not in self.found[-1].facts})
            return None

    def expressions(self, at: str, items: Mapping[str, str], scope: Scope) -> ExpressionSet | None:
        """All parsed, or None; every problem is noted with the key of its expression."""
        parsed = {k: self.expression(f"{at}{k}", text, scope) for k, text in items.items()}
        return None if None in parsed.values() else ExpressionSet(items, whom=f"{self.fusion} {at}".strip())

    def expression(self, at: str, text: str, scope: Scope) -> Expression | None:
        """The parsed expression when every name in it is in ``scope``; None after what is wrong is noted."""
        known, tensors = scope.names, scope.tensors
        parsed = self.attempt(at, lambda: Expression.parse(text, known=known, tensors=tensors, whom=self.fusion))
        if parsed is None:
            return None
        before = len(self.found)
        for name in sorted(parsed.predicates - scope.predicates):
            self.add(
                at, f"{name}() is not known here", f"one of {', '.join(sorted(scope.predicates)) or 'no predicates'}"
            )
        for name, word in comparisons(text):
            if name in scope.words and word not in scope.words[name]:
                self.add(at, f"{name} is compared with {word!r}", f"one of {', '.join(scope.words[name])}")
        for name in sorted(computed(text) & set(scope.words)):
            self.add(at, f"arithmetic on {name!r}, which holds text", "numbers")
        if not parsed.names and not parsed.predicates:
            try:
                parsed({})
            except ExpressionError as error:
                self.add(at, error.found, "an expression that has a value")
        return parsed if len(self.found) == before else None


@dataclass(frozen=True)
class Scope:
    """What an expression may read.

    Attributes:
        names: variables.
        tensors: tensors that predicates may name.
        predicates: predicates that may be called.
        words: variable that holds text → the texts it can hold.
    """

    names: frozenset[str]
    tensors: frozenset[str] = frozenset()
    predicates: frozenset[str] = frozenset(PREDICATES)
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def plus(self, *names: str) -> Scope:
        return Scope(self.names | set(names), self.tensors, self.predicates, self.words)


def check_names(problems: Problems, kinds: Mapping[str, tuple[str, ...]], shared: frozenset[str] = frozenset()) -> None:
    """Notes every name that C++, templates or the expression language cannot use, and every one declared twice.

    ``kinds``: kind of name (a spec field) → its names. ``shared``: names that may stand in two kinds. A choice also
    gives ``CHOICE_KEY`` to each of its keys, so that those are names too.
    """
    seen: dict[str, str] = {}
    for kind, names in kinds.items():
        for name in names:
            if name in CPP or name in RESERVED or name in FUNCTIONS or name in PREDICATES:
                problems.add(kind, f"the name {name!r}", "one that is not reserved")
            elif re.search(r"__|_stride_\d+$|^HAS_|^fr_", name):
                problems.add(kind, f"the name {name!r}", "none with `__`, or of the form HAS_…, fr_… or …_stride_N")
            if seen.setdefault(name, kind) != kind and name not in shared:
                problems.add(kind, f"the name {name!r} stands in {seen[name]} too", "one meaning for every name")
