"""The original program run by torch itself, operator by operator: an independent reference.

It shares nothing with the conversion: no vocabulary, no lifting, no functionalisation. In-place operators write
copies of the buffers and arguments, never the caller's.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import FrozenDict

from . import schemas, symbols
from .aten import SILENT
from .program import Call, NumberMeta, Program, Ref, TensorMeta

_SYMBOLIC: Mapping[str, Callable[..., Any]] = FrozenDict(
    {
        **{
            f"_operator.{n}": getattr(operator, n)
            for n in (
                "eq", "ne", "le", "ge", "lt", "gt", "neg", "pos", "mul", "add", "sub", "floordiv", "mod", "pow",
                "truediv", "and_", "or_", "lshift", "rshift",
            )
        },
        "math.trunc": math.trunc,
        "math.ceil": math.ceil,
        "math.floor": math.floor,
        "torch.sym_not": lambda a: not a,
        "torch.sym_int": int,
        "torch.sym_float": float,
        "torch.sym_ite": lambda a, b, c: b if a else c,
        "torch.sym_max": max,
        "torch.sym_min": min,
        "torch.sym_sqrt": math.sqrt,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What running a program gave: the leaves it returns, and the new content of what it wrote by target name."""

    leaves: tuple[Any, ...]
    buffers: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]


def run(program: Program, leaves: Sequence[Any], device: str | torch.device | None = None) -> Any:
    """What the exported program returns for the leaves of a call, nested as at export; see :func:`execute`."""
    return program.result_structure.unflatten(execute(program, leaves, device).leaves)


def execute(program: Program, leaves: Sequence[Any], device: str | torch.device | None = None) -> Outcome:
    """Runs the program on torch.

    Args:
        program: as read, writes and all.
        leaves: one per user input: tensors, and the numbers fixed at export (ignored).
        device: where to run; the device of the first tensor unless given.

    Raises:
        ModelError: an operator that is not pure computation, or that fails; names it and its line.
    """
    tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
    where = torch.device(device or (tensors[0].device if tensors else "cpu"))
    env: dict[str, Any] = {}
    users = iter(leaves)
    for spec in program.inputs:
        if spec.kind == "literal":
            env[spec.name] = spec.value
            next(users)
        elif spec.kind == "user":
            value = next(users)
            env[spec.name] = value.detach().to(where).clone() if isinstance(value, torch.Tensor) else value
        else:
            env[spec.name] = program.weights[spec.target].detach().to(where)
    _own_what_is_written(program, env)
    remaining = Counter(name for call in program.calls for name in call.refs())
    kept = {o.value.name for o in program.outputs if isinstance(o.value, Ref)} | {i.name for i in program.inputs}
    with torch.no_grad():
        for call in program.calls:
            if call.target not in SILENT:
                _run_call(call, env, where, program.name)
            for name in call.refs():
                remaining[name] -= 1
                if not remaining[name] and name not in kept:
                    env.pop(name, None)
    given = {o: env[o.value.name] if isinstance(o.value, Ref) else o.value for o in program.outputs}
    states = {i.target: env[i.name] for i in program.inputs if i.kind in ("parameter", "buffer", "constant")}
    arguments = {i.name: env[i.name] for i in program.inputs if i.kind == "user"}
    states |= {o.target: value for o, value in given.items() if o.kind == "buffer"}
    arguments |= {o.target: value for o, value in given.items() if o.kind == "input"}
    return Outcome(tuple(given[o] for o in program.outputs if o.kind == "user"), states, arguments)


def _own_what_is_written(program: Program, env: dict[str, Any]) -> None:
    """Copies of the module's tensors when anything in the program writes in place."""
    if not any(_may_write(call) for call in program.calls):
        return
    copies: dict[int, torch.Tensor] = {}
    for spec in program.inputs:
        value = env.get(spec.name)
        if spec.kind in ("parameter", "buffer", "constant") and isinstance(value, torch.Tensor):
            env[spec.name] = copies.setdefault(id(program.weights[spec.target]), value.clone())


def _may_write(call: Call) -> bool:
    aten = call.target.startswith(("aten.", "prims."))
    return aten and (bool(schemas.written(call.target)) or bool(call.args.get("training")))


def _run_call(call: Call, env: dict[str, Any], where: torch.device, whom: str) -> None:
    site = f"{whom}: {call.target} at {call.source}"
    args = {k: _argument(v, env, where) for k, v in call.args.items()}
    if call.target in _SYMBOLIC:
        result = _SYMBOLIC[call.target](*args.values())
    else:
        if not schemas.callable_safely(call.target):
            found = "an operator that reaches outside the model"
            raise ModelError("cannot run", site, found, "pure computation", operator=call.target)
        try:
            result = schemas.overload(call.target)(**args)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as e:
            found = (str(e).splitlines() or [type(e).__name__])[0]
            raise ModelError("cannot run", site, found, "arguments as exported", operator=call.target) from e
    several = result if isinstance(result, tuple | list) else (result,)
    for name, value in zip(call.outputs, several, strict=False):
        if name:
            env[name] = value


def _argument(value: Any, env: Mapping[str, Any], where: torch.device) -> Any:
    if isinstance(value, Ref):
        return env[value.name]
    if isinstance(value, list | tuple):
        return [_argument(v, env, where) for v in value]
    return where if isinstance(value, torch.device) else value


def example_inputs(program: Program, seed: int = 0, sizes: Mapping[str, int] | None = None) -> list[Any]:
    """Leaves of a call: normal floats, coin-flip bools, whole numbers below 10 or the rows of their table.

    ``sizes``: extent of symbolic axes by name; those left out are 4, or as near to it as their range allows. Numbers
    fixed at export come as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = {name: min(max(4, low), high or max(4, low)) for name, (low, high) in program.ranges.items()}
    chosen |= sizes or {}
    rows = _rows(program)
    leaves: list[Any] = []
    for spec in program.user_inputs:
        meta = program.metas.get(spec.name)
        if spec.kind == "literal":
            leaves.append(spec.value)
        elif isinstance(meta, NumberMeta):
            leaves.append(chosen.get(str(meta.value), 4))
        elif isinstance(meta, TensorMeta):
            shape = [d if isinstance(d, int) else symbols.extent(d, chosen) or 4 for d in meta.shape]
            leaves.append(_drawn(shape, schemas.torch_dtype(meta.dtype), rows.get(spec.name, 10), generator))
    return leaves


def redrawn(program: Program, leaves: Sequence[Any], seed: int) -> list[Any]:
    """``leaves`` with other values: normal floats, and whole numbers below the rows of the table that they index.

    Everything else stays, since only the author knows what it means: other integers, bools, numbers, and floats with a
    value beyond :data:`ORDINARY`, as in a mask.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = _rows(program)
    made: list[Any] = []
    for spec, leaf in zip(program.user_inputs, leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and (spec.name in rows or _ordinary(leaf)):
            leaf = _drawn(leaf.shape, leaf.dtype, rows.get(spec.name, 10), generator).to(leaf.device)
        made.append(leaf)
    return made


#: Floats up to here may be any others; larger ones, or none that are finite, mean something.
ORDINARY = 1e3


def _ordinary(leaf: torch.Tensor) -> bool:
    if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex) or not leaf.numel():
        return False
    return bool((leaf.detach().abs().float() <= ORDINARY).all())


def _drawn(shape: Sequence[int], dtype: torch.dtype, below: int, generator: torch.Generator) -> torch.Tensor:
    shape = tuple(shape)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, below, shape, generator=generator).to(dtype)


def _rows(program: Program) -> dict[str, int]:
    """The number of rows of the smallest table that each whole-number argument indexes."""
    limits: dict[str, int] = {}
    origin = {spec.name: spec.name for spec in program.user_inputs}
    for call in program.calls:
        if call.target in _FOLLOWED and isinstance(call.args.get("self"), Ref):
            source = origin.get(call.args["self"].name)
            origin |= dict.fromkeys(call.outputs, source) if source else {}
        elif call.target == "aten.embedding.default":
            table, index = (program.metas.get(call.args[name].name) for name in ("weight", "indices"))
            name = origin.get(call.args["indices"].name)
            if name and isinstance(table, TensorMeta) and isinstance(table.shape[0], int) and index is not None:
                limits[name] = max(min(limits.get(name, table.shape[0]), table.shape[0]), 1)
    return limits


#: Operators behind which a whole-number argument is still the same indices.
_FOLLOWED = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "reshape.default", "to.dtype", "_to_copy.default", "unsqueeze.default", "clone.default",
        "slice.Tensor", "contiguous.default", "alias.default", "expand.default",
    )
)  # fmt: skip
