"""One call, looked at closely: the slow path that runs once per layout. Floor 6."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..problem import Tensor
from ..tensors import HOST
from .libraries import Library, Place, library_of, overlapping, self_overlapping, unknown_array

if TYPE_CHECKING:
    from ..registry.catalog import FusionEntry


@dataclass(frozen=True)
class Call:
    """The arrays of a call, checked: one library, one place, every one fit for a kernel.

    Attributes:
        arrays: input name → array, absent ones missing.
        tensors: the same, and the caller's own outputs, as tensors.
        library, place: of all of them.
        guard: asks whether arrays of these layouts must be looked at again; None where the layouts say all.
    """

    arrays: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    library: Library
    place: Place
    guard: Callable[[], bool] | None


def look_at(entry: FusionEntry, arrays: Sequence[Any], out: Sequence[Any] | None) -> Call:
    """Checks what does not depend on shapes; :class:`ArgumentError` otherwise."""
    fusion, names = entry.spec.name, tuple(entry.inputs)
    if entry.spec.open:
        members = ", ".join(m.name for m in entry.members)
        raise _wrong(fusion, "an open fusion has no tensors of its own", f"one with a program: {members}")
    if len(arrays) > len(names):
        raise _wrong(fusion, f"{len(arrays)} arrays", f"at most {len(names)}: {', '.join(names)}")
    if out is not None and len(out) != len(entry.outputs):
        raise _wrong(fusion, f"{len(out)} arrays in out=", f"{len(entry.outputs)}: {', '.join(entry.outputs)}")
    given = {name: a for name, a in zip(names, arrays, strict=False) if a is not None}
    if not given:
        raise _wrong(fusion, "no array", f"arrays for {', '.join(names)}")
    outputs = dict(zip(entry.outputs, out or (), strict=False))
    everything = {**given, **outputs}
    first = next(iter(given))
    library: Library | None = None
    for name, array in everything.items():
        found = library_of(type(array))
        if found is None:
            raise unknown_array(fusion, name, array)
        if library is not None and found is not library:
            raise _wrong(
                fusion, f"{name} is a {found.name} array", f"a {library.name} array, as {first} is", tensor=name
            )
        library = found
        unfit = found.unfit(array)
        if unfit:
            raise _wrong(fusion, f"{name} cannot be passed: {unfit}", "a plain dense array", tensor=name)
    assert library is not None
    place = _place(entry, everything, library)
    if library.grad_enabled() and any(library.wants_grad(a) for a in given.values()):
        raise no_backward(fusion)
    tensors = {name: library.tensor(a) for name, a in everything.items()}
    for name in _beside(entry, everything, library) if place.kind != "cpu" else ():
        tensors[name] = replace(tensors[name], space=HOST)
    _check_outputs(entry, outputs, everything, tensors, library)
    return Call(given, tensors, library, place, library.guard(given.values()))


def no_backward(fusion: str) -> ArgumentError:
    return ArgumentError(
        "cannot call", fusion, "an input requires a gradient", "inputs without one: the kernel has no backward",
        "Call it under torch.no_grad(), or pass x.detach()", fusion=fusion,
    )  # fmt: skip


def _beside(entry: FusionEntry, everything: Mapping[str, Any], library: Library) -> list[str]:
    """Inputs in pinned host memory, of those that some kernel reads there."""
    read = {n for k in entry.kernels for n, spaces in k.spec.spaces.items() if HOST in spaces}
    arrays = {n: everything[n] for n in entry.inputs if n in read and n in everything}
    return [n for n, a in arrays.items() if library.place(a).kind == "cpu" and library.space(a) == HOST]


def _place(entry: FusionEntry, everything: Mapping[str, Any], library: Library) -> Place:
    """The one place of all arrays; inputs declared for another memory space must be there instead, and those in host
    memory that a kernel reads there may be."""
    fusion, seen = entry.spec.name, None
    beside = _beside(entry, everything, library)
    elsewhere = [n for n in everything if n in entry.inputs and entry.inputs[n].space != "device"]
    for name, array in everything.items():
        if name in beside or name in elsewhere:
            continue
        place = library.place(array)
        if seen is not None and place != seen[1]:
            expected = f"{seen[1]}, as {seen[0]} is"
            if any(HOST in k.spec.spaces.get(name, ()) for k in entry.kernels):
                expected += f", or {HOST} memory"
            raise _wrong(fusion, f"{name} is on {place}", expected, tensor=name, device=str(place))
        seen = seen or (name, place)
    found = seen[1] if seen else library.place(next(iter(everything.values())))
    for name in elsewhere if found.kind != "cpu" else ():  # in the simulator all memory is one
        declared = entry.inputs[name].space
        if library.space(everything[name]) != declared:
            raise _wrong(fusion, f"{name} is not in {declared} memory", f"{declared} memory", tensor=name)
    return found


def _check_outputs(
    entry: FusionEntry,
    outputs: Mapping[str, Any],
    everything: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    library: Library,
) -> None:
    for name in outputs:
        if self_overlapping(tensors[name]):
            raise _wrong(
                entry.name, f"output {name} overlaps itself (strides {tensors[name].strides})", "memory of its own"
            )
    check_overlap(entry, everything, tensors, set(outputs), library)


def check_overlap(
    entry: FusionEntry, arrays: Mapping[str, Any], tensors: Mapping[str, Tensor], outputs: set[str], library: Library
) -> None:
    """:class:`ArgumentError` when an output of the caller's shares memory with another array of the call.

    One that the fusion may update in place may be that input itself.
    """
    fusion = entry.name
    if outputs:
        known = [(n, library.pointer(a), tensors[n]) for n, a in arrays.items()]
        where = {n: (at, t) for n, at, t in known}
        same = {i for o, i in entry.spec.aliases.items() if o in outputs and i in where and where[o] == where[i]}
        found = overlapping([row for row in known if row[0] not in same], outputs)
        if found:
            raise _wrong(
                fusion, f"{found[0]} and {found[1]} overlap", "outputs with memory of their own", tensor=found[1]
            )


def _wrong(fusion: str, found: str, expected: str, **facts: object) -> ArgumentError:
    facts.setdefault("fusion", fusion)
    error = ArgumentError("cannot call", fusion, found, expected)
    error.facts.update(facts)
    return error
