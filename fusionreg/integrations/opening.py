"""Which frontend reads a model, and what a caller gets back around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionreg.core.errors import MissingDependencyError, ModelError
from fusionreg.core.frozen import EMPTY

from .declared import Declared

if TYPE_CHECKING:
    from fusionreg.core.ir import Graph
    from fusionreg.core.matcher.match import Match
    from fusionreg.core.ops import Vocabulary


#: Suffixes of the files that are read; nothing in them is executed.
FILES = (".onnx", ".pt2")


def _same(model: Any) -> Any:
    return model


@dataclass(frozen=True)
class Opened:
    """A model as a frontend read it.

    Attributes:
        name: for people: the file's name or the module's class.
        graph: lifted, with types.
        example: seed → arrays to run it on, by input name: at 0 those that the model came with, where it came with
            any; random ones otherwise.
        reference: runs the *original* artefact on such inputs and returns arrays by output name; None where there is
            none, and then ``reason`` says why.
        wrap: turns a ``FusedModel`` into the kind of callable that the original was.
        original: the artefact.
        saver: writes a ``FusedModel`` back in the original's format, where that exists.
        strides: value of the graph → its strides in elements, where it is known to lie otherwise than row by row.
    """

    name: str
    graph: Graph
    example: Callable[[int], Mapping[str, Any]]
    reference: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    reason: str = ""
    wrap: Callable[[Any], Any] = _same
    original: Any = None
    saver: Callable[[Any, Any], None] | None = None
    strides: Mapping[str, tuple[int, ...]] = EMPTY

    def laid(self, match: Match) -> Mapping[str, tuple[int, ...]]:
        """Those of a match's operands that are known to lie otherwise than row by row."""
        return {tensor: self.strides[name] for tensor, name in match.inputs.items() if name in self.strides}


def open_model(
    model: Any,
    example: tuple[Any, ...] = (),
    *,
    ops: Vocabulary,
    dynamic_shapes: Any = None,
    declared: Sequence[Declared] = (),
) -> Opened:
    """Reads ``model`` with the frontend of its kind.

    Args:
        model: path of an ``.onnx`` or ``.pt2`` file, ``"package.module:factory"``, or an object of ONNX or torch; what
            was opened already is given back.
        example: example inputs, for a ``torch.nn.Module``.
        dynamic_shapes: which of their axes may vary, as ``torch.export.export`` takes it.
        declared: types of the inputs, for ``"package.module:factory"``.

    Raises: :class:`ModelError` for something that no frontend reads, :class:`MissingDependencyError` naming the extra.
    Reading a file executes nothing from it; ``package.module:factory`` runs that module's code.
    """
    if isinstance(model, Opened):
        return model
    if isinstance(model, str | Path):
        return _open_path(str(model), ops, declared)
    kind = type(model).__module__.partition(".")[0]
    if kind in ("onnx", "onnx_ir"):
        return _onnx().open_object(model, ops=ops)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module | torch.export.ExportedProgram):
        return _torch().open_object(model, example, ops=ops, dynamic_shapes=dynamic_shapes)
    raise ModelError(
        "cannot read model",
        type(model).__name__,
        f"an object of {type(model).__module__}",
        "a path, an ONNX model, a torch.export.ExportedProgram or a torch.nn.Module",
    )


def is_live(model: Any) -> bool:
    """Whether it is a ``"package.module:factory"``, which reading runs."""
    return isinstance(model, str) and Path(model).suffix not in FILES and ":" in model and not Path(model).exists()


def _open_path(text: str, ops: Vocabulary, declared: Sequence[Declared]) -> Opened:
    path = Path(text)
    if path.suffix in FILES:
        if not path.is_file():
            raise ModelError("cannot read model", text, "no such file", "a readable file", "Check the path")
        if declared:
            found = f"the input {declared[0].name!r} declared for a file"
            raise ModelError("cannot read model", text, found, "the inputs that it has", "Leave out --input")
        return (_onnx() if path.suffix == ".onnx" else _torch()).open_path(path, ops=ops)
    if is_live(text):
        return _live().open_target(text, ops=ops, declared=declared)
    raise ModelError(
        "cannot read model", text, f"the suffix {path.suffix!r}", "a .onnx file, a .pt2 file or package.module:factory"
    )


def _onnx() -> Any:
    try:
        from fusionreg.integrations.onnx import opening
    except ImportError as error:
        raise _missing("onnx", error) from error
    return opening


def _torch() -> Any:
    try:
        from fusionreg.integrations.torch import opening
    except ImportError as error:
        raise _missing("torch", error) from error
    return opening


def _live() -> Any:
    try:
        from fusionreg.integrations.torch import live
    except ImportError as error:
        raise _missing("torch", error) from error
    return live


def _missing(extra: str, error: ImportError) -> MissingDependencyError:
    return MissingDependencyError(
        "cannot read model",
        "",
        f"{error.name or error} is not installed",
        f"the extra {extra!r}",
        f"Run: pip install 'fusionreg[{extra}]'",
        extra=extra,
    )
