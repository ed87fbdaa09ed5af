"""The fusions of a registry as operators of torch, each registered at its first use.

The kernel of an operator calls the registry's runtime directly: beside it, a call costs one turn through torch's
dispatcher. Operators live as long as torch's own namespace, which remembers every one that was looked up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import cached_property
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library, fallthrough_kernel

from fusionreg.core.errors import ArgumentError
from fusionreg.core.ir import Graph
from fusionreg.core.matcher.match import Match
from fusionreg.core.planner.training import Backward
from fusionreg.core.registry.entries import FusionEntry
from fusionreg.core.runtime.seeds import draw
from fusionreg.core.validate.gradients import Gradients, gradients

from . import autocast, autograd
from .chains import Chains
from .direct import direct
from .fake import fake
from .schema import NAMESPACE, digest, operator_name, schema

if TYPE_CHECKING:
    from fusionreg.api import Registry

_TRACEABLE = torch.Tag.pt2_compliant_tag

_DEVICES = ("CPU", "CUDA")

_VMAP_MODE = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)

#: Attribute of an operator: what calls it without a turn through the dispatcher, where nothing would see to it there.
CALL = "_fusionreg_call"
#: The overload of an operator whose operands stay where they are.
LAID = "laid"

_RNG = "rng(Tensor like, int site) -> Tensor"


class Operators:
    """``operators["norm.layernorm"]`` → ``torch.ops.fusionreg.norm_layernorm.default``, differentiable where a
    backward fusion is named.

    A second spec of a name, and the same one of another registry, gets an operator of its own: its name ends in a
    digest of the spec.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._made: dict[tuple[str, str], Any] = {}
        self._of: dict[str, Chains] = {}
        self._backwards: dict[Any, Backward | str] = {}
        self._lock = RLock()

    @classmethod
    def of(cls, registry: Registry) -> Operators:
        """The operators of a registry, the same each time."""
        found: Operators = registry.__dict__.get("_torch_operators") or registry.__dict__.setdefault(
            "_torch_operators", cls(registry)
        )
        return found

    def __getitem__(self, fusion: str) -> torch._ops.OpOverload:
        """The operator of a fusion, derived ones included; :class:`UnknownNameError`, :class:`ArgumentError` for an
        open fusion."""
        return self._operator(fusion, "")

    def laid(self, fusion: str) -> torch._ops.OpOverload:
        """The same for operands that lie as they should: Inductor leaves them so, and moves none of them."""
        return self._operator(fusion, LAID if self._entry(fusion).spec.layouts else "")

    def _operator(self, fusion: str, overload: str) -> torch._ops.OpOverload:
        key = fusion, overload
        found = self._made.get(key)
        if found is None:
            with self._lock:
                found = self._made.get(key) or self._made.setdefault(key, self._make(self._entry(fusion), overload))
        return found

    def fusion_of(self, op: Any) -> str | None:
        """The fusion that an operator is made of; None for one of anybody else."""
        return next((fusion for (fusion, _), made in self._made.items() if made is op), None)

    @cached_property
    def rng(self) -> torch._ops.OpOverload:
        """``rng(Tensor like, int site) -> Tensor``: seed and offset for one call with dropout, int64[2].

        On the device of ``like``, from torch's generator there. ``site`` has no meaning but to tell calls apart: a
        tracer takes two calls with the same arguments for one.
        """
        with self._lock:
            if not hasattr(getattr(torch.ops, NAMESPACE), "rng"):
                library = Library(NAMESPACE, "FRAGMENT")
                library.define(_RNG, tags=(_TRACEABLE, torch.Tag.nondeterministic_seeded))
                for key in _DEVICES:
                    library.impl("rng", _draw, key)
                library.impl("rng", fallthrough_kernel, "Autograd")
                library._register_fake("rng", _fake_rng)
                torch.library.register_vmap(f"{NAMESPACE}::rng", _batched_rng, lib=library)
                _keep(torch.ops.fusionreg.rng.default, library)
            return torch.ops.fusionreg.rng.default

    @cached_property
    def digest(self) -> str:
        """Of all that calls of these operators depend on while they are traced: the specs of the registry."""
        found = hashlib.sha256()
        for name, entry in sorted(self.registry.catalog.fusions.items()):
            found.update(f"{name} {digest(entry)}\n".encode())
        return found.hexdigest()

    def backward(self, match: Match, graph: Graph, wanted: Collection[str]) -> Backward | str:
        """How a fused call in a match's place computes the gradients of the inputs ``wanted``, or why it should not.

        A fusion that has been extended by what stands around it gives way to the one that names a backward fusion: the
        graphs that autograd makes are matched again, and either call is extended there.
        """
        entry = self._entry(match.fusion)
        known = self._gradients(entry)
        plain = self._entry(entry.base).spec.backward if known is None and entry.base else None
        if plain is not None:
            return f"{plain.fusion} computes the gradients of {entry.base} alone, which what is around it joins later"
        if known is not None:
            absent = [n for n in entry.inputs if n not in match.inputs]
            called = known.call(match, self._entry(known.fusion))
            return known.refusal(wanted, absent) or Backward(known.fusion, call=called, graph=graph)
        types = {n: graph.values[v] for n, v in match.inputs.items()}
        key = (
            match.fusion, tuple((n, v.dtype, v.shape) for n, v in types.items()), match.choices, match.dtypes,
            tuple((k, repr(v)) for k, v in match.attributes.items()), tuple(wanted),
        )  # fmt: skip
        if key not in self._backwards:  # layers repeat
            chain = self._chains(entry).made(
                {n: v.dtype for n, v in types.items()}, {n: v.shape or () for n, v in types.items()},
                {**match.dtypes, **match.attributes, **match.choices}, wanted,
            )  # fmt: skip
            self._backwards[key] = chain if isinstance(chain, str) else chain.backward
        return self._backwards[key]

    def _entry(self, fusion: str) -> FusionEntry:
        return self.registry.catalog[fusion]

    def _gradients(self, entry: FusionEntry) -> Gradients | None:
        return gradients(entry, self.registry.catalog.fusions)

    def _chains(self, entry: FusionEntry) -> Chains:
        return self._of.setdefault(entry.name, Chains(entry, self.registry.catalog.ops))

    def _make(self, entry: FusionEntry, overload: str) -> torch._ops.OpOverload:
        if entry.spec.open:
            members = ", ".join(m.name for m in entry.members)
            raise ArgumentError(
                "no operator", f"for {entry.name}", "an open fusion has no tensors of its own",
                f"one with a program: {members}", fusion=entry.name,
            )  # fmt: skip
        library = Library(NAMESPACE, "FRAGMENT")
        word = self[entry.name]._opname if overload else _free_name(entry)
        name = f"{word}.{overload}" if overload else word
        library.define(f"{name}{schema(entry)}", tags=(_TRACEABLE, _layout(entry, overload)))
        op = getattr(getattr(getattr(torch.ops, NAMESPACE), word), overload or "default")
        run, fusion, found = self.registry.runtime.run, entry.name, self._gradients(entry)

        def on(*tensors: Any, **attributes: Any) -> Any:
            return run(fusion, tensors, attributes)

        for key in _DEVICES:
            library.impl(name, on, key)
        library._register_fake(name, fake(entry))
        behind = None if found is None else self.laid(found.fusion) if overload else self[found.fusion]
        backward = getattr(behind, CALL, None)
        on_autograd, plain = autograd.kernel(op, run, entry, found, backward, self._chains(entry))
        op._fusionreg_plain = plain
        setattr(op, CALL, direct(op, entry.inputs))
        library.impl(name, on_autograd, "Autograd", with_keyset=True)
        for key, device in autocast.KEYS.items():
            library.impl(name, autocast.rule(op, entry, device), key)
        _keep(op, library)
        return op


def _layout(entry: FusionEntry, overload: str) -> torch.Tag:
    """What Inductor may do with the layouts of operands. Where results lie as an operand does, any are good: maps that
    it moves to channels last stay so. Else those that it traced, which whoever makes an operand writes it in."""
    free = entry.spec.layouts and overload != LAID
    return torch.Tag.flexible_layout if free else torch.Tag.needs_exact_strides


def _free_name(entry: FusionEntry) -> str:
    """The operator's name, with a digest and a number where others have it already."""
    taken = getattr(torch.ops, NAMESPACE)
    first = operator_name(entry.name)
    if not hasattr(taken, first):
        return first
    second = f"{first}_{digest(entry)}"
    return next(n for i in count(1) if not hasattr(taken, n := second if i == 1 else f"{second}_{i}"))


def _keep(op: Any, library: Library) -> None:
    """Keeps the registrations as long as the operator, which graphs and torch's namespace hold."""
    op._fusionreg_library = library


def _draw(like: torch.Tensor, site: int) -> torch.Tensor:
    return draw(like)


def _fake_rng(like: torch.Tensor, site: int) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device=like.device)


def _batched_rng(info: Any, in_dims: Any, like: torch.Tensor, site: int) -> tuple[torch.Tensor, int | None]:
    """Under vmap, as its ``randomness`` says: one for each element, or one for all."""
    if info.randomness == "error":
        raise RuntimeError(
            'vmap: fusionreg.rng draws random numbers, and randomness is "error". Say "different" or "same" in vmap'
        )
    with torch._C._ExcludeDispatchKeyGuard(_VMAP_MODE):  # which would draw for all elements once more
        if info.randomness == "same":
            return draw(like), None
        return torch.stack([draw(like) for _ in range(info.batch_size)]), 0
