"""Inputs of a model from a ``.npz`` file, or from arrays by name."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from fusionreg.core.dtypes import dtype
from fusionreg.core.errors import ArgumentError
from fusionreg.core.ir import Value
from fusionreg.integrations import Opened


def arrays_from(item: str | Path | Mapping[str, Any], opened: Opened, seed: int = 0) -> dict[str, Any]:
    """Arrays by input name; inputs that ``item`` leaves out are those that the model is run on with ``seed``.

    A ``.npz`` is read without pickle: nothing in it is executed. bfloat16 and float8, which NumPy saves as bare bytes,
    are taken as such.

    Raises: :class:`ArgumentError` for a file that cannot be read, an array of no input, another dtype or shape; a
    missing file is an :class:`OSError`.
    """
    said = "inputs" if isinstance(item, Mapping) else str(item)
    given = dict(item) if isinstance(item, Mapping) else _read(Path(item))
    graph = opened.graph
    known = [*graph.inputs, *sorted(graph.overridable - set(graph.inputs))]
    for name, array in given.items():
        if name not in known:
            close = get_close_matches(name, known, 1)
            expected = f"did you mean {close[0]}" if close else f"one of {', '.join(known)}"
            raise ArgumentError("cannot use", said, f"an array {name!r}, which is no input", expected, name=name)
        given[name] = _fitting(array, graph.values[name], said)
    if set(graph.inputs) - graph.overridable <= set(given):
        return given
    return {**opened.example(seed), **given}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = np.load(path, allow_pickle=False)
        if not isinstance(found, np.lib.npyio.NpzFile):
            raise ArgumentError("cannot use", str(path), "a single array", "a .npz with arrays by input name")
        with found:
            return {name: found[name] for name in found.files}
    except (ValueError, EOFError, zipfile.BadZipFile, KeyError) as e:
        if isinstance(e, ArgumentError):
            raise
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise ArgumentError("cannot use", str(path), first, "a .npz of plain arrays, as numpy.savez writes it") from e


def _fitting(array: Any, value: Value, said: str) -> Any:
    """``array`` as the input ``value`` takes it."""
    kind = dtype(value.dtype)
    if isinstance(array, np.ndarray) and array.dtype.kind == "V" and array.dtype.itemsize * 8 == kind.bits:
        array = array.view(kind.numpy)
    if isinstance(array, np.ndarray) and array.dtype.name != kind.name and kind.name != "string":
        raise ArgumentError("cannot use", said, f"{value.name} is {array.dtype.name}", f"{kind.name}", "Cast it")
    shape = tuple(array.shape)
    fits = value.shape is None or (
        len(shape) == len(value.shape)
        and all(not isinstance(d, int) or d == s for d, s in zip(value.shape, shape, strict=True))
    )
    if not fits:
        wanted = " ".join(map(str, value.shape or ()))
        raise ArgumentError("cannot use", said, f"{value.name} is [{' '.join(map(str, shape))}]", f"[{wanted}]")
    return array
