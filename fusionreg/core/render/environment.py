"""The sandboxed Jinja environment that templates run in: strict names, no file outside, every line marked. Floor 4."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import RenderError, UnknownNameError
from . import lines
from .values import Code, c_text, float_literal, identifier

#: Filters and tests that turn a misspelled name into silence: everything a template may read is always defined.
_SILENT_FILTERS = ("default", "d")
_SILENT_TESTS = ("defined", "undefined")

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")


def shared_library() -> Path:
    """The folder of the shared device library: in the package, else beside the checkout."""
    inside = Path(__file__).resolve().parents[2] / "templates"
    return inside if inside.is_dir() else inside.parents[1] / "templates"


class _Undefined(jinja2.StrictUndefined):
    """Fails at every use, and tells which name it was."""

    __slots__ = ()

    def _fail_with_undefined_error(self, *args: Any, **kwargs: Any) -> Any:
        error = jinja2.UndefinedError(self._undefined_message)
        error.variable = self._undefined_name  # type: ignore[attr-defined]
        raise error


def _undefined_operations() -> None:
    """StrictUndefined binds its operators to the base's method; bind them to ours."""
    for name in dir(jinja2.StrictUndefined):
        if getattr(jinja2.StrictUndefined, name) is jinja2.Undefined._fail_with_undefined_error:
            setattr(_Undefined, name, _Undefined._fail_with_undefined_error)


_undefined_operations()


class _Loader(jinja2.BaseLoader):
    """Reads ``x.cu.j2`` and ``x.cuh`` below the plugin's package, its ``templates`` folder or the shared library."""

    def __init__(self, root: Path, shared: Path) -> None:
        self.places = [
            (root, root.name),
            (root / "templates", f"{root.name}/templates"),
            (shared, "fusionreg/templates"),
        ]
        self.roots = [root.resolve(), root.resolve(), shared.resolve()]
        self._within: dict[tuple[str, int, int], Path] = {}  # files found to lie in their folder, by path and inode

    def find(self, name: str) -> tuple[Path, str]:
        """The file of a template name, and the name that error messages show. :class:`RenderError` otherwise."""

        def fail(found: str, expected: str) -> RenderError:
            return RenderError("cannot read template", repr(name), found, expected, template=name)

        if not name or name.startswith("/") or "\\" in name or any(p in ("", ".", "..") for p in name.split("/")):
            raise fail("the path leaves its folder", "a path below the plugin's package")
        for (place, label), root in zip(self.places, self.roots, strict=True):
            for candidate in (name, f"{name}.j2"):
                text = f"{place}/{candidate}"
                if not os.path.isfile(text):
                    continue
                info = os.lstat(text)
                key = text, info.st_dev, info.st_ino
                if key not in self._within:
                    if not Path(text).resolve().is_relative_to(root):
                        raise fail("it is a link to a file elsewhere", f"a file inside {label}")
                    self._within[key] = Path(text)
                return self._within[key], f"{label}/{candidate}"
        close = UnknownNameError.among("template", name, self.list_templates())
        places = ", ".join(label for _, label in self.places)
        raise fail(f"no such file in {places}", close.expected if close.facts["close"] else "")

    def list_templates(self) -> list[str]:
        found = set()
        for place, _ in self.places[1:]:
            found |= {p.relative_to(place).as_posix() for p in place.rglob("*.j2")} if place.is_dir() else set()
        return sorted(found | {n.removesuffix(".j2") for n in found if n.endswith(".cuh.j2")})

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Any]:
        path, label = self.find(template)
        try:
            data = path.read_bytes()
            text = data.decode("utf-8-sig").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError) as e:
            raise RenderError("cannot read template", repr(template), str(e), "UTF-8 text", template=label) from None
        bad = _CONTROL.search(text)
        if bad:
            line = text.count("\n", 0, bad.start()) + 1
            raise RenderError(
                "cannot read template", label, f"control character {bad[0]!r} in line {line}", "plain text",
                template=label, line=line,
            )  # fmt: skip
        return text, label, lambda: _unchanged(path, data)  # by content: an edit may keep the time stamp


def _unchanged(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


class _Marks(Extension):
    """Puts a line mark at every start of a line of template text, and in front of every expression."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        file = stream.filename or stream.name or "template"
        for token in stream:
            if token.type == "data":
                parts = token.value.split("\n")
                marked = [lines.mark(file, token.lineno + i) + part for i, part in enumerate(parts)]
                yield Token(token.lineno, "data", "\n".join(marked))
                continue
            if token.type == "variable_begin":
                yield Token(token.lineno, "data", lines.mark(file, token.lineno))
            yield token


class Environment(ImmutableSandboxedEnvironment):
    """One plugin's templates. :meth:`expand` is all that others call."""

    def __init__(self, root: Path, shared: Path) -> None:
        super().__init__(
            loader=_Loader(root, shared), undefined=_Undefined, extensions=[_Marks], finalize=c_text, autoescape=False,
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, cache_size=200,
        )  # fmt: skip
        for name in _SILENT_FILTERS:
            self.filters.pop(name)
        for name in _SILENT_TESTS:
            self.tests.pop(name)
        self.filters |= {
            "double": lambda x: Code(float_literal(float(x), double=True)),
            "identifier": lambda x: Code(identifier(x)),
            "bits": lambda x: x.bits,
            "bytes": lambda x: x.bytes,
        }
        self.undeclared: dict[str, dict[str, int]] = {}  # template → names it does not set itself → first line

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        try:
            free = meta.find_undeclared_variables(tree)
        except jinja2.TemplateSyntaxError as e:  # an unknown filter or test: found by a compiler that knows no file
            e.name, e.filename = name, filename
            raise
        first: dict[str, int] = {}
        for node in tree.find_all(nodes.Name):
            if node.name in free and node.ctx == "load":
                first.setdefault(node.name, node.lineno)
        self.undeclared[name or ""] = first
        return tree

    def expand(self, name: str, variables: Mapping[str, Any], hints: Mapping[str, str], whom: str) -> str:
        """The template's marked text. :class:`RenderError` naming template, line and variable.

        Args:
            name: the template, as the spec or ``include`` names it.
            variables: everything it may read; values by :func:`values.guarded`.
            hints: name → why it is not a template variable, for the message.
            whom: fusion and kernel.
        """
        try:
            template = self.get_template(name)
            self._check_names(name, template.filename or name, variables, hints, whom)
            return template.render(variables)
        except RenderError as e:
            raise _located(e, self, whom) from None
        except jinja2.TemplateSyntaxError as e:
            raise RenderError(
                "cannot render", whom, f"{e.filename or name}:{e.lineno}: {e.message}", "", "",
                template=e.filename or name, line=e.lineno, variable="",
            ) from None  # fmt: skip
        except Exception as e:  # a template may fail in any way that Python can
            variable = getattr(e, "variable", "") or ""
            file, line = _place(e, name)
            raise RenderError(
                "cannot render", whom, f"{file}:{line}: {e}", _expected(variable, variables, hints),
                template=file, line=line, variable=variable,
            ) from None  # fmt: skip

    def _check_names(
        self, name: str, file: str, variables: Mapping[str, Any], hints: Mapping[str, str], whom: str
    ) -> None:
        """Every name of the template is known, branches that this problem does not take included."""
        for variable, line in self.undeclared.get(name, {}).items():
            if variable not in variables and variable not in self.globals:
                raise RenderError(
                    "cannot render", whom, f"{file}:{line}: {variable!r} is undefined",
                    _expected(variable, variables, hints), template=file, line=line, variable=variable,
                )  # fmt: skip


def _expected(variable: str, variables: Iterable[str], hints: Mapping[str, str]) -> str:
    if not variable:
        return ""
    return hints.get(variable) or UnknownNameError.among("variable", variable, variables).expected


def _place(error: BaseException, default: str) -> tuple[str, int]:
    """Template and line of an error: Jinja gives every template frame the template's own file name and line."""
    place = default, 0
    tb = error.__traceback__
    while tb is not None:
        if "__jinja_template__" in tb.tb_frame.f_globals or tb.tb_frame.f_code.co_filename.endswith(".j2"):
            place = tb.tb_frame.f_code.co_filename, tb.tb_lineno
        tb = tb.tb_next
    return place


def _located(error: RenderError, environment: Environment, whom: str) -> RenderError:
    """The error with template and line added where it was raised without: by ``finalize``, a filter or ``include``."""
    if error.facts.get("line"):
        return error
    file, line = _place(error, str(error.facts.get("template", "")))
    if not line:
        return error
    return RenderError(
        error.what, error.whom or whom, f"{file}:{line}: {error.found}", error.expected, error.next_step,
        **{**error.facts, "template": file, "line": line},
    )  # fmt: skip


@lru_cache(maxsize=64)
def environment(root: Path, shared: Path) -> Environment:
    """The environment of a plugin's package folder; parsed templates stay with it and reload when a file changes."""
    return Environment(root, shared)
