"""A live model, ``package.module:factory``: importing it and calling it **runs its author's code**."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch

from fusionreg.core.errors import FusionregError, ModelError
from fusionreg.core.ops import Vocabulary

from ..declared import FORM, Declared
from ..opening import Opened
from . import schemas
from .opening import open_object

PATH = "package.module:factory"
_FACTORY = "a callable without arguments that returns (module, example inputs), or a module"
_MISSING = object()
_GIVEN = f"Return (module, example inputs), or add --input {FORM.split(',')[0]}"


def open_target(target: str, *, ops: Vocabulary, declared: Sequence[Declared] = ()) -> Opened:
    """Imports ``package.module``, calls ``factory()`` there, and reads the module that it makes.

    The current folder is importable meanwhile, and what the code prints goes to stderr.

    Args:
        target: ``package.module:factory``; see :func:`resolve`.
        declared: the inputs of a call, by argument name, in place of any that the factory gives. Their values are made
            at random where the model is run.

    Raises: :class:`ModelError` for everything that is wrong with the target, the module that it makes, or its inputs.
    """
    with _current_folder(), redirect_stdout(sys.stderr):
        try:
            return _opened(target, declared, ops)
        except SystemExit as e:
            raise _error(target, f"tracing it raised {_told(e)}", "code that runs") from e


def _opened(target: str, declared: Sequence[Declared], ops: Vocabulary) -> Opened:
    model, args, kwargs = resolve(target)
    if isinstance(model, torch.export.ExportedProgram):
        if declared:
            raise _error(target, "an exported program, whose inputs are declared", "no --input")
        return open_object(model, ops=ops)
    if declared:
        return open_object(model, ((), _declared(target, model, declared)), ops=ops, drawn=True)
    if not args and not kwargs:
        raise _error(target, "a module without example inputs", "the arguments of one call", _GIVEN)
    return open_object(model, (args, kwargs), ops=ops)


def resolve(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model of a target, and the arguments of a call that come with it.

    ``factory`` is called without arguments and returns a module, ``(module, arguments)`` with a tuple or one tensor,
    ``(module, arguments, keyword arguments)``, or an exported program. A module or an exported program may also stand
    there itself.

    Raises: :class:`ModelError`: no such module or attribute, code that fails or exits, another result.
    """
    found = _imported(target)
    if isinstance(found, torch.nn.Module | torch.export.ExportedProgram):
        made = found
    elif not callable(found):
        raise _error(target, f"a {type(found).__name__}, which cannot be called", _FACTORY)
    else:
        _check_arguments(target, found)
        made = _running(target, "it raised", found)
    if isinstance(made, torch.nn.Module | torch.export.ExportedProgram):
        return made, (), {}
    if not isinstance(made, tuple) or not made or not isinstance(made[0], torch.nn.Module) or len(made) not in (2, 3):
        raise _error(target, f"it returned {_said(made)}", "a module, or (module, example inputs)")
    args = tuple(made[1]) if isinstance(made[1], tuple | list) else (made[1],)
    if len(made) == 2:
        return made[0], args, {}
    if not isinstance(made[2], dict) or not all(isinstance(k, str) for k in made[2]):
        raise _error(target, f"keyword arguments as {_said(made[2])}", "a dict of them by name")
    return made[0], args, made[2]


def _imported(target: str) -> Any:
    """The attribute that ``target`` names."""
    path, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in (*path.split("."), *attribute.split("."))):
        raise _error(target, "no import path", PATH)
    found = _running(target, "importing it raised", lambda: importlib.import_module(path))
    whom = path
    for part in attribute.split("."):
        value = _running(target, "it raised", partial(getattr, found, part, _MISSING))
        if value is _MISSING:
            close = get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], 1)
            hint = f"did you mean {close[0]}" if close else _FACTORY
            raise _error(target, f"AttributeError: {whom} has no {part!r}", hint)
        found, whom = value, f"{whom}.{part}"
    return found


def _check_arguments(target: str, factory: Callable[..., Any]) -> None:
    """:class:`ModelError` where the factory cannot be called without arguments."""
    try:
        inspect.signature(factory).bind()
    except TypeError as e:
        raise _error(target, f"TypeError: it takes arguments ({e})", _FACTORY) from None
    except ValueError:  # some of C tell nothing of their arguments
        return


def _running(target: str, what: str, code: Callable[[], Any]) -> Any:
    """What foreign code returns; whatever it raises, an exit included, as a :class:`ModelError` that names the line."""
    try:
        return code()
    except FusionregError:
        raise
    except (Exception, SystemExit) as e:
        raise _error(target, f"{what} {_told(e)}", "code that runs") from e


def _told(error: BaseException) -> str:
    """The exception as one line, with the line of the innermost frame that is not of this file or of the importer."""
    first = (str(error).strip().splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<frozen importlib")]
    own = [f for f in own if os.sep + "importlib" + os.sep not in f.filename]
    place = f" at {_near(own[-1].filename)}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{f': {first}' if first else ''}{place}"


def _near(path: str) -> str:
    """``path`` as seen from the current folder, where it lies below."""
    inside = path.startswith(os.getcwd() + os.sep)
    return os.path.relpath(path) if inside else path


def _said(value: Any) -> str:
    if not isinstance(value, tuple | list):
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__} of {', '.join(type(v).__name__ for v in value) or 'nothing'}"


def _declared(target: str, module: torch.nn.Module, declared: Sequence[Declared]) -> dict[str, torch.Tensor]:
    """Tensors of the declared types, by name of an argument of the module's ``forward``."""
    names = [d.name for d in declared]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise _error(target, f"the input {twice!r} twice", "each input once")
    parameters = inspect.signature(module.forward).parameters
    known = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = next((n for n in names if n not in known), None)
    if unknown is not None and not anything:
        found = f"no argument {unknown!r} of {type(module).__name__}.forward"
        raise _error(target, found, f"one of {', '.join(known)}")
    missing = [n for n in known if parameters[n].default is parameters[n].empty and n not in names]
    if missing:
        raise _error(target, f"no input for {', '.join(missing)}", f"--input {missing[0]}=SHAPE:DTYPE")
    ordered = sorted(declared, key=lambda d: known.index(d.name) if d.name in known else len(known))
    return {d.name: torch.zeros(d.shape, dtype=schemas.torch_dtype(d.dtype), device=_device(module)) for d in ordered}


def _device(module: torch.nn.Module) -> torch.device:
    weight = next((t for t in (*module.parameters(), *module.buffers())), None)
    return weight.device if weight is not None else torch.device("cpu")


def _error(target: str, found: str, expected: str, next_step: str = "") -> ModelError:
    return ModelError("cannot read model", target, found, expected, next_step, target=target)


@contextmanager
def _current_folder() -> Iterator[None]:
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)
