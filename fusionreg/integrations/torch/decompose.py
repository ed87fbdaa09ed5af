"""Operators without a row of their own: traced through torch's decompositions into operators that have one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict

from . import schemas
from .emitter import Emitter
from .program import Call, Meta, Program, Ref, TensorMeta, refs, substitute

_EVAL = "Call module.eval() before exporting"


@dataclass(frozen=True)
class Inner:
    """One call of a decomposition, with the program that describes its values."""

    call: Call
    program: Program


def decompose(call: Call, program: Program, e: Emitter) -> list[Inner]:
    """The calls that ``call`` is made of.

    Raises:
        ModelError: torch has no decomposition of it, its extents are symbolic, or it draws random numbers.
    """
    e.call, e.metas = call, ()
    advice = "Rewrite this part of the model with other operators"
    if not call.target.startswith(("aten.", "prims.")):
        raise e.refuse("an operator without a form here", "one of the table", advice)
    if not schemas.callable_safely(call.target):
        raise e.refuse("an operator that reaches outside the model", "pure computation", advice)
    names = list(dict.fromkeys(refs(tuple(call.args.values()))))
    metas = [program.metas[n] for n in names]
    fixed = all(isinstance(m, TensorMeta) and all(isinstance(d, int) for d in m.shape) for m in metas)
    if not fixed:
        raise e.refuse("an operator without a form here, over symbolic extents", "extents known at export", advice)
    graph = _trace(call, names, metas, e, advice)
    return _read(graph, call, program, names, e)


def _random(target: str) -> bool:
    aten = target.startswith(("aten.", "prims."))
    return aten and torch.Tag.nondeterministic_seeded in schemas.overload(target).tags


def _trace(call: Call, names: list[str], metas: list[Any], e: Emitter, advice: str) -> torch.fx.GraphModule:
    from torch._decomp import core_aten_decompositions
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import make_fx

    overload = schemas.overload(call.target)

    def run(*tensors: torch.Tensor) -> Any:
        values = dict(zip(names, tensors, strict=True))
        filled = {k: _fill(v, values) for k, v in call.args.items()}
        return overload(**filled)

    made = make_fx(run, decomposition_table=dict(core_aten_decompositions()), tracing_mode="fake")
    try:
        with tracing(None), unset_fake_temporarily():  # whatever is being compiled has symbols for extents
            return made(*(torch.empty(m.shape, dtype=schemas.torch_dtype(m.dtype), device="cpu") for m in metas))
    except Exception as error:  # whatever torch raises on an operator it cannot trace
        if _random(call.target):
            raise e.refuse("an operator that draws random numbers", "a deterministic model", _EVAL) from error
        raise e.refuse(
            f"an operator without a form here ({type(error).__name__})", "one of the table", advice
        ) from error


def _fill(value: Any, values: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, list | tuple):
        return [_fill(v, values) for v in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


def _read(graph: torch.fx.GraphModule, call: Call, program: Program, names: list[str], e: Emitter) -> list[Inner]:
    """The traced graph as calls whose names do not meet the program's; its results take the names of ``call``."""
    from .read_fx import GraphReader

    label = next(filter(None, call.outputs), "v")
    reader = GraphReader(program.name)
    reader.taken.update(names)  # the program's own names, which the calls read
    results = reader.graph(graph.graph, graph, [Ref(n) for n in names])
    inner = {c.target for c in reader.calls}
    if any(_random(target) for target in inner):
        raise e.refuse("an operator that draws random numbers", "a deterministic model", _EVAL)
    if call.target in inner or any(isinstance(r, torch.Tensor) for c in reader.calls for r in c.args.values()):
        raise e.refuse("an operator without a form here", "one of the table", "Rewrite this part of the model")
    rename = {name: f"{label}.{name}" for c in reader.calls for name in c.outputs}
    for result, name in zip(results, call.outputs, strict=False):
        if isinstance(result, Ref) and name and result.name in rename:
            rename[result.name] = name
    metas: dict[str, Meta] = {n: program.metas[n] for n in names}
    metas |= {rename[n]: m for n, m in reader.metas.items() if n in rename}
    metas |= {o: program.metas[o] for o in call.outputs if o in program.metas}
    described = program.with_(metas=FrozenDict(metas))
    calls = [
        Call(
            c.target,
            FrozenDict({k: substitute(v, rename) for k, v in c.args.items()}),
            tuple(rename[o] for o in c.outputs),
            call.source,
        )
        for c in reader.calls
    ]
    passed = [
        Call("aten.alias.default", FrozenDict({"self": substitute(r, rename)}), (name,), call.source)
        for r, name in zip(results, call.outputs, strict=False)
        if isinstance(r, Ref) and name and rename.get(r.name) != name
    ]
    return [Inner(c, described) for c in [*calls, *passed]]
