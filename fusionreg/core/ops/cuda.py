"""Point-wise operators as CUDA text, for generated device functions. Floor 1.

``OpSpec.cuda`` is a text for floats, or texts by the kinds of dtypes that they serve (letters of ``DType.kind``)::

    cuda="x / (1.0f + fabsf(x))"
    cuda={"f": "fabsf(x)", "i": "x < 0 ? 0 - U(x) : x", "u": "x"}

The kind that counts is that of the last operand. A text is a C++ expression; steps ``name = expression;`` may stand
before it, and each names a value that the rest may read. What else a text may read:

* the operator's inputs, each a variable of its compute type: ``float`` for floats up to 32 bits, ``double`` for
  float64, the dtype's own C++ type for integers and bool. Of a variadic operator ``a`` is what the operands so far gave
  and ``b`` the next one; ``COUNT`` is the number of operands and ``LAST`` whether ``b`` is the last of them.
* attributes that are numbers. Of one that holds text, ``NAME_word`` tells whether it is ``word``; a word that no text
  mentions and that is not the default is refused.
* ``HAS_name``: whether the optional input ``name`` is there; if not, ``name`` stands for 0.
* ``CONSTANT_name``: whether the input ``name`` is a constant of the graph.
* ``T``, the operands' type, and ``U``, the unsigned one that integers compute in, so that they wrap: of 32 bits, or 64
  where ``T`` has 64.

A text for floats is written in ``float``. In float64 its literals lose their ``f`` and its functions too (``expf``
becomes ``exp``), so constants are written with 17 digits. The functions are C's (:data:`FUNCTIONS`) and those of
:data:`SHARED`; a text that calls others (``fr::``, intrinsics) serves no float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..errors import SpecError
from ..spec import REQUIRED, OpSpec

#: The functions of C that a text may call, in float.
FUNCTIONS = frozenset(
    """acosf acoshf asinf asinhf atanf atan2f atanhf cbrtf ceilf copysignf cosf coshf erff erfcf expf exp2f expm1f fabsf
    floorf fmaf fmodf hypotf logf log10f log1pf log2f powf rintf rsqrtf sinf sinhf sqrtf tanf tanhf truncf""".split()  # noqa: SIM905  as a list literal it is a screenful
)

#: Functions of ``templates/pointwise.cuh.j2``, for float and double.
SHARED = frozenset({"fr::inverse_of_1_to_2", "fr::over_constant"})

KINDS = "fiub"

_TOKEN = re.compile(
    r"(?P<name>(?:[A-Za-z_]\w*::)*[A-Za-z_]\w*)|(?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?[fuUlL]*)"
    r"|(?P<other>\s+|[-+*/%<>=!&|^~?:(),.])"
)
_STEP = re.compile(r"\s*(?P<name>[a-z]\w*)\s*=(?!=)(?P<value>.*)", re.S)
_CALL = re.compile(r"\s*\(")
_FLOAT = re.compile(r"(\d+\.\d*|\.\d+)(e[+-]?\d+)?f", re.I)


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a text.

    Attributes:
        text: as written.
        kind: ``name`` of a value or type, ``call`` of a function, ``number`` or ``other``.
    """

    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class Step:
    """One expression of a text: a named value, or, with an empty name, the result."""

    name: str
    tokens: tuple[Token, ...]

    def written(self, put: Callable[[str], str], double: bool = False) -> str:
        """C++ of it; ``put`` gives what stands for a name. ``double``: in float64 instead of float."""
        return "".join(_written(t, put, double) for t in self.tokens).strip()


def _written(token: Token, put: Callable[[str], str], double: bool) -> str:
    if token.kind == "name" or token.text in ("T", "U"):
        return put(token.text)
    if double and token.text in FUNCTIONS:
        return token.text[:-1]
    return token.text[:-1] if double and token.kind == "number" and _FLOAT.fullmatch(token.text) else token.text


def text_for(spec: OpSpec, kind: str) -> str:
    """The text that serves operands of this kind; "" when there is none."""
    return next((text for kinds, text in spec.cuda.items() if kind in kinds), "")


@lru_cache(maxsize=1024)
def steps(text: str) -> tuple[Step, ...]:
    """The steps of a text, the result last; :class:`SpecError` when it has characters that no text needs."""
    found: list[Step] = []
    parts = text.split(";")
    for i, part in enumerate(parts):
        step = _STEP.fullmatch(part)
        if (step is None) != (i == len(parts) - 1):
            raise SpecError("bad CUDA text", "", f"{part.strip()!r}", "steps `name = value;`, then one expression")
        found.append(Step(step["name"] if step else "", tuple(_tokens(step["value"] if step else part))))
    return tuple(found)


def _tokens(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise SpecError("bad CUDA text", "", f"{text[at]!r} in {text.strip()!r}", "an expression of names, numbers")
        at = match.end()
        kind = str(match.lastgroup)
        yield Token(match[0], "call" if kind == "name" and _CALL.match(text, at) else kind)


def serves_double(text: str) -> bool:
    """Whether a text for floats can be written in float64."""
    calls = (t.text for step in steps(text) for t in step.tokens if t.kind == "call")
    return all(name in FUNCTIONS or name in SHARED or name in ("T", "fr::infinity") for name in calls)


def words(spec: OpSpec, attribute: str) -> frozenset[str]:
    """The words that a text attribute may hold: its default, and those that some text asks for."""
    names = (t.text for text in spec.cuda.values() for step in steps(text) for t in step.tokens)
    asked = {n.removeprefix(f"{attribute}_") for n in names if n.startswith(f"{attribute}_")}
    default = spec.attributes[attribute]
    return frozenset(asked if default == REQUIRED else asked | {default})


def operand_names(spec: OpSpec) -> tuple[str, ...]:
    """What a text calls the operands: ``a`` and ``b`` for a variadic operator."""
    return ("a", "b") if spec.inputs[-1].endswith("*") else tuple(name.rstrip("?") for name in spec.inputs)


def check_cuda(spec: OpSpec) -> None:
    """:class:`SpecError` unless every text of the operator parses and reads only what a text may read."""
    if not spec.cuda:
        return
    if not spec.pointwise or not spec.inputs or len(spec.outputs) != 1:
        raise _wrong(spec, "CUDA text for an operator that is not point-wise", "pointwise=True, inputs and one output")
    letters = "".join(spec.cuda)
    if not set(letters) <= set(KINDS) or len(set(letters)) != len(letters) or "" in spec.cuda:
        raise _wrong(spec, f"texts for the kinds {list(spec.cuda)}", f"each of {', '.join(KINDS)} once at most")
    if any(name.endswith("*") for name in spec.inputs[1:]):
        raise _wrong(spec, "a variadic input after others", "variadic operands alone, or none")
    for text in spec.cuda.values():
        try:
            parsed = steps(text)
        except SpecError as error:
            raise _wrong(spec, error.found, error.expected) from None
        known = set(_known(spec))
        for step in parsed:
            for token in step.tokens:
                _check_token(spec, token, known)
            if step.name in known:
                raise _wrong(spec, f"a step named {step.name!r}", "a name that nothing else has")
            known.add(step.name)


def _known(spec: OpSpec) -> Iterator[str]:
    yield from ("T", "U", "true", "false", *operand_names(spec))
    yield from (f"HAS_{name[:-1]}" for name in spec.inputs if name.endswith("?"))
    yield from (f"CONSTANT_{name}" for name in operand_names(spec))
    if spec.inputs[-1].endswith("*"):
        yield from ("COUNT", "LAST")
    yield from (k for k, v in spec.attributes.items() if not isinstance(v, str) or v == REQUIRED)


def _check_token(spec: OpSpec, token: Token, known: set[str]) -> None:
    name = token.text
    if token.kind == "call":
        if name not in FUNCTIONS and name not in ("T", "U", "sizeof") and not name.startswith(("fr::", "__")):
            raise _wrong(spec, f"the function {name!r}", "one of C in float, of namespace fr, or an intrinsic")
    elif token.kind == "name" and name not in known:
        texts = [k for k, v in spec.attributes.items() if isinstance(v, str)]
        if not any(name.startswith(f"{k}_") for k in texts):
            raise _wrong(spec, f"unknown name {name!r}", "an input, attribute or earlier step")


def _wrong(spec: OpSpec, found: str, expected: str) -> SpecError:
    return SpecError("bad CUDA text", spec.name, found, expected, field="cuda")
