"""torch's operator schemas: overload by name, arguments by name, what an overload writes and what it aliases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import torch

from fusionreg.core.errors import ModelError

#: Arguments of text type that select a mode. An overload with any other text argument may reach outside the
#: program (``aten.from_file`` opens a file), so it is never called on behalf of a model.
MODES = frozenset(
    (
        "approximate", "rounding_mode", "mode", "padding_mode", "padding", "indexing", "equation", "ord", "reduce",
        "side", "reduction", "UPLO", "normalization", "interpolation",
    )
)  # fmt: skip

_NUMPY = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
_TORCH = {name: dtype for dtype, name in _NUMPY.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``"bfloat16"``; :class:`ModelError` for a type the product has no row for."""
    try:
        return _NUMPY[dtype]
    except KeyError:
        raise ModelError("unsupported dtype", "", str(dtype), f"one of {', '.join(_TORCH)}", dtype=str(dtype)) from None


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` → ``torch.bfloat16``."""
    return _TORCH[name]


def known(overload: torch._ops.OpOverload) -> bool:
    """Whether it is torch's own: of its tensor library, or attention of sequences one behind the other."""
    return overload.namespace in ("aten", "prims") or overload.name() == "torch_attn::_varlen_attn"


@cache
def overload(target: str) -> torch._ops.OpOverload:
    """The overload named ``aten.add.Tensor``; :class:`ModelError` where this torch lacks it."""
    namespace, name, variant = target.split(".")
    if namespace == "torch_attn":  # is there once its module is
        with suppress(ImportError):
            import_module("torch.nn.attention.varlen")
    if namespace in ("aten", "prims", "torch_attn"):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        found = getattr(packet, variant, None)
        if isinstance(found, torch._ops.OpOverload):
            return found
    raise ModelError(
        "unknown operator", target, f"torch {torch.__version__} has no such overload", "an operator of this torch",
        "Install the torch that exported the model, or a newer one", operator=target,
    )  # fmt: skip


def bind(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Positional and keyword arguments by schema name."""
    names = [a.name for a in overload(target)._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


@cache
def defaults(target: str) -> dict[str, Any]:
    """Default of each argument that has one."""
    return {a.name: a.default_value for a in overload(target)._schema.arguments if a.has_default_value()}


@cache
def written(target: str) -> tuple[str, ...]:
    """Names of the arguments that the overload writes in place."""
    return tuple(a.name for a in overload(target)._schema.arguments if a.alias_info and a.alias_info.is_write)


@cache
def aliased(target: str) -> str:
    """Name of the argument that the results are views of, "" when they are fresh."""
    schema = overload(target)._schema
    for result in schema.returns:
        if result.alias_info is None:
            continue
        for a in schema.arguments:
            if a.alias_info and set(a.alias_info.before_set) & set(result.alias_info.before_set):
                return a.name
    # Tensor(a)[] results (split, unbind) carry no alias set on the list itself.
    views = [a.name for a in schema.arguments if a.alias_info and not a.alias_info.is_write]
    return views[0] if views and schema.returns else ""


@cache
def callable_safely(target: str) -> bool:
    """Whether calling the overload with a model's arguments can only compute: it reads tensors or makes plain ones,
    and takes no text beyond a mode's name."""
    schema = overload(target)._schema
    for a in schema.arguments:
        kind = str(a.type)
        if "str" in kind and a.name not in MODES:
            return False
        if any(word in kind for word in ("Storage", "Stream", "Generator", "__torch__", "Any", "PyObject")) and (
            not kind.startswith("Optional") or not a.has_default_value()
        ):
            return False
    return True
