"""Tensor texts of a spec, ``T[... M K]``: parsing, and binding axes to concrete or symbolic shapes. Floor 1.

- ``T`` is a dtype variable of the fusion or a dtype by name; axes are names or literal extents.
- ``...`` folds any number of axes into the named one before it (``T[N C S ...]``), or after it where it stands first:
  every tensor with ``...`` has the same folded extents, and a kernel sees that axis multiplied by their product. A
  tensor that names that axis without ``...`` fits only if that is 1. Beside a literal 1 (``T[N C 1 ...]``) it stands
  for ones in the place of those extents: what is broadcast along the folded axis.
- ``|`` separates forms, tried in order: ``T[] | T[N] | T[M 1]``.
- a tensor may carry extra leading extents 1 beyond a form without ``...``: (1, 1, N) binds ``T[N]``, (1,) ``T[]``.
- a memory space may follow: ``T[N K] pinned_host``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from .errors import ArgumentError, SpecError
from .frozen import FrozenDict

Dim = int | str
Shape = tuple[Dim, ...]

#: The one of the host that a GPU reads in place.
HOST = "pinned_host"
#: The one that the driver moves to whoever touches it: for a GPU an ordinary address.
MANAGED = "managed"
SPACES = ("device", HOST, MANAGED)

_FORM = re.compile(r"\s*([A-Za-z][A-Za-z0-9_]*)\s*\[([^\[\]|]*)\]\s*", re.ASCII)
_AXIS = re.compile(r"[A-Za-z][A-Za-z0-9_]*|[1-9][0-9]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Form:
    """One shape a tensor may have: its axes (names or literal extents), whether it has ``...``, and how many of the
    axes stand before that."""

    axes: tuple[Dim, ...]
    leading: bool = False
    before: int = 0

    def __str__(self) -> str:
        words = [str(a) for a in self.axes]
        return " ".join([*words[: self.before], "...", *words[self.before :]] if self.leading else words)

    @property
    def folds(self) -> str:
        """The axis that ``...`` multiplies into, "" for ones."""
        return str(self.axes[max(self.before - 1, 0)]) if self.leading and not self.ones else ""

    @property
    def ones(self) -> bool:
        """Whether ``...`` stands for ones: beside a literal extent."""
        return self.leading and isinstance(self.axes[max(self.before - 1, 0)], int)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a for a in self.axes if isinstance(a, str))

    def bind(self, shape: Shape) -> tuple[dict[str, Dim], Shape | None] | None:
        """Axis name → extent, and the extents of ``...`` (None without it); None when the shape does not fit."""
        extra = len(shape) - len(self.axes)
        if extra < 0 or (not self.leading and any(d != 1 for d in shape[:extra])):
            return None
        folded = shape[self.before : self.before + extra]
        if self.ones and any(d != 1 for d in folded):
            return None
        bound: dict[str, Dim] = {}
        named = (*shape[: self.before], *shape[self.before + extra :])
        for axis, extent in zip(self.axes, named, strict=True):
            if isinstance(axis, int):
                if axis != extent:
                    return None
            elif bound.setdefault(axis, extent) != extent:
                return None
        return bound, folded if self.leading else None


@dataclass(frozen=True, slots=True)
class TensorType:
    """A parsed tensor text.

    Attributes:
        text: as written.
        dtype: a dtype variable, or a dtype by name.
        forms: the shapes it may have, tried in order.
        space: memory space it lives in.
    """

    text: str
    dtype: str
    forms: tuple[Form, ...]
    space: str = "device"

    @classmethod
    def parse(cls, text: str, whom: str = "") -> TensorType:
        """The type; :class:`SpecError` when the text is none."""

        def fail(found: str, expected: str = "e.g. T[... M K], T[] | T[N], T[N K] pinned_host") -> SpecError:
            return SpecError("bad tensor", f"{text!r} in {whom}" if whom else repr(text), found, expected, text=text)

        body, space = text, "device"
        if match := re.search(r"\]\s*([A-Za-z_]+)\s*\Z", text):
            space, body = match[1], text[: match.start(1)]
            if space not in SPACES:
                raise fail(f"memory space {space!r}", f"one of {', '.join(SPACES)}")
        dtypes, forms = [], []
        for part in body.split("|"):
            match = _FORM.fullmatch(part)
            if not match:
                raise fail(f"{part.strip()!r} is no form")
            dtypes.append(match[1])
            forms.append(_form(match[2], fail))
        if len(set(dtypes)) > 1:
            raise fail(f"forms of different dtypes {', '.join(sorted(set(dtypes)))}", "one dtype for all forms")
        if len(set(forms)) < len(forms):
            raise fail("a form stands twice", "different forms")
        return cls(text.strip(), dtypes[0], tuple(forms), space)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis names of all forms, in order of first appearance."""
        return tuple(dict.fromkeys(n for f in self.forms for n in f.names))

    @property
    def leading(self) -> bool:
        """Whether any form has ``...``."""
        return any(f.leading for f in self.forms)

    def __str__(self) -> str:
        return self.text


def _form(text: str, fail) -> Form:
    words = text.split()
    before = words.index("...") if "..." in words else 0
    leading = "..." in words
    if leading:
        del words[before]
    for word in words:
        if not _AXIS.fullmatch(word):
            raise fail(f"axis {word!r}", "a name or a positive number, `...` at most once")
    axes = tuple(int(w) if w.isdigit() else w for w in words)
    beside = axes[max(before - 1, 0)] if axes else "nothing"
    if leading and not (axes and (beside == 1 or isinstance(beside, str))):
        raise fail(f"`...` beside {beside}", "a named axis, or 1, before `...`, or after it where it stands first")
    return Form(axes, leading, before)


@dataclass(frozen=True, slots=True)
class Bound:
    """What shapes say about a fusion's axes.

    Attributes:
        axes: axis name → extent, unfolded.
        leading: the extents that ``...`` stands for, wherever it stands; empty when nothing folds.
        forms: tensor name → the form it took.
        folds: the axis that those extents multiply into, "" when no tensor of the fusion has ``...``.
    """

    axes: FrozenDict[str, Dim]
    leading: Shape
    forms: FrozenDict[str, Form]
    folds: str = ""

    @property
    def folded(self) -> FrozenDict[str, int]:
        """Axes as a kernel sees them; TypeError where an extent is symbolic."""
        axes: dict[str, int] = {name: _number(extent) for name, extent in self.axes.items()}
        if self.folds:
            axes[self.folds] *= prod(map(_number, self.leading))
        return FrozenDict(axes)


def _number(extent: Dim) -> int:
    if isinstance(extent, str):
        raise TypeError(f"axis extent {extent!r} is symbolic")
    return extent


def folded_axis(types: Mapping[str, TensorType]) -> str:
    """The axis that ``...`` multiplies into, "" for none; :class:`SpecError` when tensors disagree about it."""
    found = {f.folds: name for name, t in types.items() for f in t.forms if f.folds}
    if len(found) > 1:
        shown = " and ".join(f"{axis!r} in {name}" for axis, name in found.items())
        raise SpecError("bad tensors", "", f"`...` folds into {shown}", "the same axis wherever `...` stands")
    return next(iter(found), "")


def bind(types: Mapping[str, TensorType], shapes: Mapping[str, Shape]) -> Bound:
    """Binds every tensor's shape to a form so that all agree; tensors without a shape are absent.

    The first combination in declared order wins. Extents may be symbolic names, equal only to themselves.
    :class:`ArgumentError` (``facts``: tensor, shape) when there is none.
    """
    folds = folded_axis(types)
    names = [n for n in types if n in shapes]
    names.sort(key=lambda n: any(f.ones for f in types[n].forms))  # ones fit whatever extents the others have
    best: list[tuple[int, bool, str]] = [(-1, False, "")]

    def clash(depth: int, reason: str, telling: bool = True) -> None:
        if (depth, telling) > best[0][:2]:
            best[0] = (depth, telling, reason)

    def search(depth: int, axes: dict[str, Dim], leading: Shape | None, forms: dict[str, Form]) -> Iterator[Bound]:
        if depth == len(names):
            if any(not f.leading and folds in f.names for f in forms.values()) and any(d != 1 for d in leading or ()):
                shown = f"extents {_show(leading or ())} of `...` fold into {folds}"
                clash(depth, f"{shown}, which a tensor without `...` names")
                return
            yield Bound(FrozenDict(axes), leading or (), FrozenDict(forms), folds if leading is not None else "")
            return
        name = names[depth]
        for form in types[name].forms:
            found = form.bind(shapes[name])
            if found is None:
                clash(depth, "it does not fit", telling=False)
                continue
            new, lead = found
            wrong = next((a for a in new if a in axes and axes[a] != new[a]), None)
            if wrong is not None:
                clash(depth, f"{wrong} = {new[wrong]} where {wrong} = {axes[wrong]} before")
            elif lead is not None and leading is not None and lead != leading and not (
                form.ones and len(lead) == len(leading)
            ):
                clash(depth, f"extents {_show(lead)} of `...` where they are {_show(leading)} before")
            else:
                now = leading if lead is None or (form.ones and leading is not None) else lead
                yield from search(depth + 1, axes | new, now, forms | {name: form})

    for bound in search(0, {}, None, {}):
        return bound
    depth, _, reason = best[0]
    name = names[min(max(depth, 0), len(names) - 1)]
    shape = shapes[name]
    found = f"{_show(shape)}: {reason}"
    raise ArgumentError("wrong shape", f"for {name}", found, types[name].text, tensor=name, shape=shape)


def expand(form: Form, axes: Mapping[str, Dim], leading: Shape = ()) -> Shape:
    """The shape of a tensor of this form, unfolded: with the extents of ``...`` where it stands."""
    named = tuple(axes[a] if isinstance(a, str) else a for a in form.axes)
    folded = (1,) * len(leading) if form.ones else leading
    return (*named[: form.before], *folded, *named[form.before :]) if form.leading else named


def _show(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
