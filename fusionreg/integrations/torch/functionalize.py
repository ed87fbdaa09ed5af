"""Programs without writes: in-place operators become values, views of what was written are taken again.

Matching and evaluation need a graph of values. Here every write makes a new value of the tensor and, through the
inverse of each view, of the tensor it is a view of; a view read after a write is taken from the new value. Buffers
and arguments that end up written become further results of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import FrozenDict

from . import schemas
from .program import Call, Meta, OutputSpec, Program, Ref, TensorMeta, refs, substitute

_BATCH_NORM = "aten.batch_norm.default"
_SAME = ("alias", "detach", "contiguous", "to", "lift_fresh", "positive", "dropout", "type_as")
_SHAPED = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")


def functionalize(program: Program) -> Program:
    """The program with no write left; itself when it has none.

    Raises:
        ModelError: a write through a view that has no inverse here, or whose sharing of memory is not decidable.
    """
    if not any(_writes(call) for call in program.calls):
        return program
    return _Functionalizer(program).run()


def _writes(call: Call) -> bool:
    if call.target == _BATCH_NORM:
        return bool(call.args.get("training")) and call.args.get("running_mean") is not None
    return call.target.startswith(("aten.", "prims.")) and bool(schemas.written(call.target))


@dataclass
class _View:
    """How a value is seen in another: the call that took it, and which of its results it is."""

    base: str
    call: Call
    index: int
    sure: bool = True


@dataclass
class _Functionalizer:
    program: Program
    calls: list[Call] = field(default_factory=list)
    metas: dict[str, Meta] = field(default_factory=dict)
    views: dict[str, _View] = field(default_factory=dict)
    latest: dict[str, str] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    generation: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def run(self) -> Program:
        self.metas.update(self.program.metas)
        for call in self.program.calls:
            self._call(call)
        outputs = [
            OutputSpec(o.kind, substitute(o.value, self._current(o.value)), o.target) for o in self.program.outputs
        ]
        done = {(o.kind, o.target) for o in outputs}
        for spec in self.program.inputs:
            if self.generation.get(spec.name, 0):
                kind, target = ("input", spec.name) if spec.kind == "user" else ("buffer", spec.target)
                if (kind, target) not in done:
                    outputs.append(OutputSpec(kind, Ref(self.resolve(spec.name)), target))  # type: ignore[arg-type]
        return self.program.with_(calls=tuple(self.calls), metas=FrozenDict(self.metas), outputs=tuple(outputs))

    def _call(self, call: Call) -> None:
        current = self._current(tuple(call.args.values()))
        args: FrozenDict[str, Any] = FrozenDict({k: substitute(v, current) for k, v in call.args.items()})
        if not _writes(call):
            self.calls.append(Call(call.target, args, call.outputs, call.source))
            self._note_view(call)
        elif call.target == _BATCH_NORM:
            self._batch_norm(call, args)
        else:
            self._in_place(call, args)

    def _in_place(self, call: Call, args: FrozenDict[str, Any]) -> None:
        names = schemas.written(call.target)
        written = call.args.get(names[0])
        namespace, name, variant = call.target.split(".")
        if len(names) != 1 or not name.endswith("_") or not isinstance(written, Ref):
            raise self._refuse(call, f"a write to {', '.join(names)}", "operators that return their result")
        result = call.outputs[0] if call.outputs and call.outputs[0] else self._fresh(written.name)
        target = f"{namespace}.{name[:-1]}.{variant}"
        self.metas[result] = self.metas[written.name]
        self.calls.append(Call(target, args, (result,), call.source))
        self.write(written.name, result, call)
        if result in call.outputs:  # the result of an in-place call is the tensor itself
            self.views[result] = _View(
                written.name, Call("aten.alias.default", FrozenDict({"self": written}), (result,)), 0
            )
            self.latest[result], self.seen[result] = result, self.generation[self._root(result)]

    def _batch_norm(self, call: Call, args: FrozenDict[str, Any]) -> None:
        """Training: the running statistics are written although the schema does not say so."""
        mean, var = call.args["running_mean"], call.args["running_var"]
        fresh = [self._fresh(r.name) for r in (mean, var)]
        for new, old in zip(fresh, (mean, var), strict=True):
            self.metas[new] = self.metas[old.name]
        kept = {k: v for k, v in args.items() if k != "cudnn_enabled"}
        outputs = (call.outputs[0], "", "", *fresh)
        self.calls.append(
            Call("aten._native_batch_norm_legit_functional.default", FrozenDict(kept), outputs, call.source)
        )
        for new, old in zip(fresh, (mean, var), strict=True):
            self.write(old.name, new, call)

    def write(self, name: str, new: str, call: Call) -> None:
        """Makes ``new`` the value of ``name`` and, through its views, of everything it is seen in."""
        chain: list[tuple[_View, str]] = []
        at = name
        while at in self.views:
            view = self.views[at]
            if not view.sure:
                raise self._refuse(
                    call, f"a write through {view.call.target}, which may or may not copy", "a plain view"
                )
            chain.append((view, self.resolve(view.base)))
            at = view.base
        self.generation[at] = generation = self.generation.get(at, 0) + 1
        self.latest[name], self.seen[name] = new, generation
        value = new
        for view, base in chain:
            value = self._undo(view, base, value, call)
            self.latest[view.base], self.seen[view.base] = value, generation

    def _undo(self, view: _View, base: str, value: str, call: Call) -> str:
        name = view.call.target.split(".")[1]
        undo = _INVERSE.get(name)
        made = undo(view, Ref(base), Ref(value), self.metas) if undo else None
        if made is None:
            raise self._refuse(
                call, f"a write through a view by {view.call.target}", "views of select, slice, reshape or transpose"
            )
        if isinstance(made, Ref):
            return made.name
        result = self._fresh(view.base)
        self.metas[result] = self.metas[view.base]
        self.calls.append(Call(made[0], FrozenDict(made[1]), (result,), call.source))
        return result

    def resolve(self, name: str) -> str:
        """The name that holds the present content of ``name``, taking its view again when it is out of date."""
        view = self.views.get(name)
        now = self.generation.get(self._root(name), 0)
        if self.seen.get(name, 0) == now:
            return self.latest.get(name, name)
        if view is None:
            return self.latest.get(name, name)
        base = self.resolve(view.base)
        results = tuple(self._fresh(o) if o else "" for o in view.call.outputs)
        for new, old in zip(results, view.call.outputs, strict=True):
            if new:
                self.metas[new] = self.metas[old]
        args: FrozenDict[str, Any] = FrozenDict(
            {k: substitute(v, {view.base: base}) for k, v in view.call.args.items()}
        )
        self.calls.append(Call(view.call.target, args, results, view.call.source))
        self.latest[name], self.seen[name] = results[view.index], now
        return results[view.index]

    def _root(self, name: str) -> str:
        while name in self.views:
            name = self.views[name].base
        return name

    def _current(self, value: Any) -> dict[str, str]:
        return {name: self.resolve(name) for name in refs(value) if isinstance(self.metas.get(name), TensorMeta)}

    def _note_view(self, call: Call) -> None:
        if not call.target.startswith("aten."):
            return
        name = call.target.split(".")[1]
        slot = "input" if name == "dropout" else schemas.aliased(call.target)
        base = call.args.get(slot) if slot else None
        if not isinstance(base, Ref):
            return
        shares = _shares(call, self.metas[base.name], self.metas.get(next(filter(None, call.outputs), "")))
        if shares is False:
            return
        now = self.generation.get(self._root(base.name), 0)
        for i, out in enumerate(call.outputs):
            if out:
                self.views[out] = _View(base.name, call, i, bool(shares))
                self.latest[out], self.seen[out] = out, now

    def _fresh(self, stem: str) -> str:
        while True:
            self.count += 1
            name = f"{stem}__{self.count}"
            if name not in self.metas:
                return name

    def _refuse(self, call: Call, found: str, expected: str) -> ModelError:
        return ModelError(
            "cannot convert", f"{self.program.name}: {call.target} at {call.source}", found, expected,
            "Call run_decompositions({}) on the exported program first", operator=call.target, source=call.source,
        )  # fmt: skip


def _shares(call: Call, base: Meta, result: Meta | None) -> bool | None:
    """Whether the result shares memory with its base; None when the record does not tell."""
    name = call.target.split(".")[1]
    if not isinstance(base, TensorMeta) or not isinstance(result, TensorMeta):
        return None
    if name in ("to", "type_as"):
        return base.dtype == result.dtype and not call.args.get("copy")
    if name == "dropout":
        return not call.args.get("train") or call.args.get("p") == 0
    if name == "contiguous":
        return None if base.strides is None else base.strides == result.strides
    if name in ("reshape", "flatten", "unflatten", "reshape_as"):
        if base.shape == result.shape:
            return True
        numbers = (*base.shape, *result.shape, *(base.strides or ("?",)))
        if not all(isinstance(n, int) for n in numbers):
            return None
        try:
            torch.empty_strided(base.shape, base.strides, device="meta").view(result.shape)  # type: ignore[arg-type]
        except RuntimeError:
            return False
        return True
    return True


Undone = Ref | tuple[str, dict[str, Any]] | None
_Undo = Callable[[_View, Ref, Ref, Mapping[str, Meta]], Undone]


def _same(view: _View, base: Ref, value: Ref, metas: Mapping[str, Meta]) -> Undone:
    return value


def _reshaped(view: _View, base: Ref, value: Ref, metas: Mapping[str, Meta]) -> Undone:
    return "fusionreg.reshape_like.default", {"self": value, "other": base}


def _turned(view: _View, base: Ref, value: Ref, metas: Mapping[str, Meta]) -> Undone:
    return view.call.target, {**view.call.args, "self": value}


def _permuted(view: _View, base: Ref, value: Ref, metas: Mapping[str, Meta]) -> Undone:
    dims = view.call.args["dims"]
    order = [d % len(dims) for d in dims]
    return "aten.permute.default", {"self": value, "dims": tuple(order.index(i) for i in range(len(order)))}


def _selected(view: _View, base: Ref, value: Ref, metas: Mapping[str, Meta]) -> Undone:
    return "aten.select_scatter.default", {**view.call.args, "self": base, "src": value}


def _sliced(view: _View, base: Ref, value: Ref, metas: Mapping[str, Meta]) -> Undone:
    return "aten.slice_scatter.default", {**view.call.args, "self": base, "src": value}


def _narrowed(view: _View, base: Ref, value: Ref, metas: Mapping[str, Meta]) -> Undone:
    args = view.call.args
    if not isinstance(args["start"], int) or not isinstance(args["length"], int):
        return None
    where = {"dim": args["dim"], "start": args["start"], "end": args["start"] + args["length"]}
    return "aten.slice_scatter.default", {"self": base, "src": value, **where}


def _part(view: _View, base: Ref, value: Ref, metas: Mapping[str, Meta]) -> Undone:
    """One piece of a split: its place follows from the extents of the pieces before it."""
    meta = metas[view.base]
    assert isinstance(meta, TensorMeta)
    axis = int(view.call.args.get("dim", 0)) % len(meta.shape)
    extents = []
    for out in view.call.outputs[: view.index + 1]:
        piece = metas.get(out)
        if not isinstance(piece, TensorMeta) or not isinstance(piece.shape[axis], int):
            return None
        extents.append(int(piece.shape[axis]))
    where = {"dim": axis, "start": sum(extents[:-1]), "end": sum(extents)}
    return "aten.slice_scatter.default", {"self": base, "src": value, **where}


def _unbound(view: _View, base: Ref, value: Ref, metas: Mapping[str, Meta]) -> Undone:
    where = {"dim": view.call.args.get("dim", 0), "index": view.index}
    return "aten.select_scatter.default", {"self": base, "src": value, **where}


_INVERSE: Mapping[str, _Undo] = FrozenDict(
    {
        **dict.fromkeys(_SAME, _same),
        **dict.fromkeys(_SHAPED, _reshaped),
        **dict.fromkeys(("transpose", "t", "mT", "swapaxes", "swapdims", "numpy_T"), _turned),
        "permute": _permuted,
        "select": _selected,
        "slice": _sliced,
        "narrow": _narrowed,
        **dict.fromkeys(("split", "split_with_sizes", "chunk"), _part),
        "unbind": _unbound,
    }
)
