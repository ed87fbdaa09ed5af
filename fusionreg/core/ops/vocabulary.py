"""The operator vocabulary: an immutable mapping from name to :class:`~fusionreg.core.spec.OpSpec`. Floor 1."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ..dtypes import from_onnx
from ..errors import GraphError, SpecError, UnknownNameError
from ..frozen import FrozenDict
from ..ir import Value
from ..spec import REQUIRED, OpSpec
from .inference import Type

MODULES = (
    "elementwise",
    "activations",
    "linear",
    "reductions",
    "normalization",
    "shaping",
    "rearranging",
    "convolution",
    "pooling",
    "indexing",
    "resizing",
    "quantization",
    "losses",
    "attention",
    "varlen",
    "gradients",
    "recurrent",
    "sampling",
    "selecting",
    "spectral",
    "random",
    "routing",
    "experts",
    "expert_gradients",
    "masking",
)

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
"""Operators that run sub-graphs: the evaluator knows them, no :class:`OpSpec` does."""

_STREAM = "its random stream is the library's own: ONNX defines none, so no second implementation can be compared"
UNDEFINED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), _STREAM
    )
)
"""Operators of ONNX that have no one meaning, and why: left out of the vocabulary for good."""

DTYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision"})
"""Attributes that hold a dtype: its name here (``"float16"``), a number in ONNX."""


class Vocabulary(Mapping[str, OpSpec]):
    """Operators by name; looking up an unknown one raises :class:`UnknownNameError` with the nearest names."""

    __slots__ = ("_ops",)

    def __init__(self, ops: Iterable[OpSpec] = ()) -> None:
        self._ops: dict[str, OpSpec] = {}
        for spec in ops:
            if spec.name in self._ops:
                raise SpecError("operator defined twice", spec.name, "a second OpSpec", "one per name", field="name")
            self._ops[spec.name] = spec

    def __getitem__(self, name: str) -> OpSpec:
        try:
            return self._ops[name]
        except KeyError:
            raise UnknownNameError.among("operator", name, self._ops) from None

    def __contains__(self, name: object) -> bool:
        return name in self._ops

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)

    def __repr__(self) -> str:
        return f"<Vocabulary of {len(self)} operators>"

    def with_ops(self, ops: Iterable[OpSpec]) -> Vocabulary:
        """A larger vocabulary; :class:`SpecError` when a name is taken."""
        return Vocabulary([*self._ops.values(), *ops])


@cache
def default_vocabulary() -> Vocabulary:
    """ONNX's operators (newest meaning: axes as inputs) and those of domain ``fusionreg``."""
    modules = (import_module(f".{name}", __package__) for name in MODULES)
    return Vocabulary(spec for module in modules for spec in module.OPS)


def complete(spec: OpSpec, given: Mapping[str, Any], whom: str = "") -> FrozenDict[str, Any]:
    """Every attribute of ``spec``: the given value or the default.

    Raises:
        GraphError: an attribute that the operator does not have, or a required one that is missing.
    """
    unknown = [name for name in given if name not in spec.attributes]
    if unknown:
        known = ", ".join(spec.attributes) or "none"
        raise GraphError("unknown attribute", whom or spec.name, f"{unknown[0]!r} of {spec.name}", f"one of: {known}")
    merged = {**spec.attributes, **given}
    missing = [name for name, value in merged.items() if value == REQUIRED]
    if missing:
        raise GraphError("missing attribute", whom or spec.name, f"no {missing[0]!r}", f"required by {spec.name}")
    return FrozenDict(merged)


def normalise(spec: OpSpec, raw: Mapping[str, Any]) -> FrozenDict[str, Any]:
    """ONNX attribute values in this vocabulary's form, attributes equal to their default left out.

    Lists become tuples, bytes become text, dtype numbers become names, a float32 number becomes the shortest decimal
    that means it (so that ONNX's 1e-5 equals Python's), and the one-element tensor of ``ConstantOfShape.value`` becomes
    ``value`` (a number) and ``dtype``.
    """
    out: dict[str, Any] = {}
    for name, value in raw.items():
        if name in DTYPE_ATTRIBUTES and isinstance(value, int) and not isinstance(value, bool):
            value = from_onnx(value).name if value else ""
        elif isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, float):
            value = _shortest(value)
        elif hasattr(value, "dtype") and hasattr(value, "reshape"):
            out["dtype"] = value.dtype.name
            value = value.reshape(-1)[0].item()
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = tuple(
                v.decode() if isinstance(v, bytes) else _shortest(v) if isinstance(v, float) else v for v in value
            )
        out[name] = value
    return FrozenDict({k: v for k, v in out.items() if k not in spec.attributes or not _equal(v, spec.attributes[k])})


def _shortest(value: float) -> float:
    """The decimal of fewest digits whose float32 is ``value``; ``value`` itself when it is no float32."""

    def single(x: float) -> float:
        try:
            return struct.unpack("f", struct.pack("f", x))[0]
        except OverflowError:
            return math.inf

    if not math.isfinite(value) or single(value) != value:
        return value
    return next(x for digits in range(1, 18) if single(x := float(f"{value:.{digits}g}")) == value)


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def infer(
    spec: OpSpec,
    inputs: Sequence[Value | None],
    attributes: Mapping[str, Any],
    constants: Mapping[int, Any] | None = None,
    count: int | None = None,
    whom: str = "",
) -> list[Type]:
    """Dtypes and shapes of the outputs, unknown extents None.

    ``attributes`` may leave out defaults; ``count`` is the number of outputs wanted (trailing ones are cut, those of a
    variadic output are repeated).

    Raises:
        GraphError: operands, attributes or counts that do not fit; the message names ``whom``.
    """
    attributes = complete(spec, attributes, whom)
    check_inputs(spec, [v is not None for v in inputs], whom)
    try:
        types = spec.infer(inputs, attributes, constants or {})
    except GraphError as error:
        if error.whom:
            raise
        found = f"{spec.name}: {error.found}"
        raise GraphError(error.what, whom or spec.name, found, error.expected, node=whom) from None
    if count is None:
        return types
    if len(types) < count and spec.outputs[-1].endswith("*"):
        types = types + [types[-1]] * (count - len(types))
    if count > len(types):
        raise GraphError("too many outputs", whom or spec.name, f"{count} of {spec.name}", f"at most {len(types)}")
    return types[:count]


def named(names: Sequence[str], types: Sequence[Type]) -> list[Value]:
    """Values for the outputs; the unknown extent ``i`` of value ``v`` is called ``v.i``."""
    return [
        Value(
            name, dt, None if shape is None else tuple(f"{name}.{i}" if d is None else d for i, d in enumerate(shape))
        )
        for name, (dt, shape) in zip(names, types, strict=True)
    ]


def check_inputs(spec: OpSpec, given: Sequence[bool], whom: str = "") -> None:
    """:class:`GraphError` unless the present (True) and omitted operands fit the operator's inputs."""
    variadic = bool(spec.inputs) and spec.inputs[-1].endswith("*")
    fixed = spec.inputs[:-1] if variadic else spec.inputs
    if len(given) > len(fixed) and not variadic:
        raise GraphError("too many inputs", whom or spec.name, f"{len(given)} of {spec.name}", f"at most {len(fixed)}")
    for i, name in enumerate(fixed):
        if not name.endswith("?") and not (i < len(given) and given[i]):
            raise GraphError("missing input", whom or spec.name, f"no {name!r} (input {i})", f"required by {spec.name}")
