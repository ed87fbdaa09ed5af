"""Calls of libraries that stand for kernels: what a plugin gives, and what they are known by. Floor 3."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SpecError

if TYPE_CHECKING:
    from ..problem import Problem

#: ``prepared(pointers, workspace, stream)`` enqueues the call: addresses of the present inputs, then of the outputs, in
#: the spec's order; the address of the kernel's scratch memory, 0 where it has none; a raw stream, whose device is
#: current where there are several. Threads may call it at once. It allocates nothing and waits for nothing, so that a
#: graph can capture it. :class:`LaunchError`.
PreparedCall = Callable[[Sequence[int], int, int], None]

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")


class LibraryCall(ABC):
    """A function of a library as a kernel: ``KernelSpec(library="blas.matmul", …)`` names it.

    Making one loads nothing: the library is looked for when it is first asked for.
    """

    #: ``library.function``; unique among all plugins.
    name: str
    #: Modules beside the one of the class that the call is made of: evidence falls when their code changes.
    modules: tuple[str, ...] = ()

    @abstractmethod
    def missing(self) -> str:
        """Why this machine cannot make the call, as half a sentence; "" where it can."""

    @abstractmethod
    def version(self) -> str:
        """Of the library found, for evidence and reports; asked only where it is not missing."""

    def refusal(self, problem: Problem) -> str:
        """Why the call cannot be ``problem``, beside what the kernel ``requires``; "" when it can. Needs no library."""
        return ""

    @abstractmethod
    def prepare(self, problem: Problem, device: int, workspace: int) -> PreparedCall:
        """The call for one problem, with ``workspace`` bytes of scratch memory; the device's context is current.

        :class:`UnsupportedError` where the library has none, which lets the next kernel run.
        """

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the name and the code that makes the call, without comments and docstrings."""
        parts = [self.name]
        for module in (type(self).__module__, *self.modules):
            found = importlib.util.find_spec(module)
            if found is None or found.origin is None:
                raise SpecError("bad library call", self.name, f"module {module} has no source", "modules in files")
            parts.append(_code(Path(found.origin).read_text("utf-8")))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            texts = [s for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
            node.body = [s for s in body if s not in texts]  # type: ignore[attr-defined]
    return _dump(tree)


def _dump(node: object) -> str:
    """As ``ast.dump``, but the same in every Python: empty fields, as later versions add them, are left out."""
    if isinstance(node, list):
        return "[" + ", ".join(map(_dump, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({', '.join(f'{name}={_dump(value)}' for name, value in fields)})"


def wrong_name(call: LibraryCall) -> str:
    """Why its name is none, "" when it is one."""
    name = getattr(call, "name", None)
    if isinstance(name, str) and _NAME.fullmatch(name):
        return ""
    return f"the library call {name!r} — a name such as blas.matmul"
