"""The generated part of a unit: headers, types, constants, and the kernel's parameter list. Floor 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..dtypes import dtype
from ..errors import RenderError
from ..problem import Problem
from ..tensors import Form
from .values import Code, TypeName, c_text, float_literal, guarded, identifier

if TYPE_CHECKING:
    from ..registry.catalog import FusionEntry, KernelEntry

Kind = Literal["input", "output", "stride", "axis", "attribute", "workspace", "iteration", "step", "tensor_map"]

#: The C++ type of a tensor map as a parameter; ``tma.cuh`` of the device library declares it.
TENSOR_MAP = "const __grid_constant__ fr::TensorMap"


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel parameter, in order.

    Attributes:
        kind: what it is.
        name: the tensor (input, output, stride, step), axis or attribute; ``workspace`` for scratch memory; the name
            of a tensor map; of an iteration ``elements``, ``extent``, ``multiplier`` or ``shift``.
        ctype: the C++ type it is passed as: a pointer, ``long long``, ``int``, ``float``, ``double``, or a tensor map.
        dtype: dtype name of what a pointer points to, "" otherwise.
        index: the axis of a stride; of a step, extent, multiplier or shift, the axis of the iteration.
        slot: of a stride, the slot at which the tensor stands for all that lie alike there.
    """

    kind: Kind
    name: str
    ctype: str
    dtype: str = ""
    index: int = 0
    slot: str = ""

    @property
    def pointer(self) -> bool:
        return self.kind in ("input", "output", "workspace")

    @property
    def parameter(self) -> str:
        """Its C++ name."""
        if self.kind in ("stride", "step"):
            return f"{self.slot or self.name}_stride_{self.index}"
        if self.kind == "iteration":
            return f"fr_{self.name}" if self.name == "elements" else f"fr_{self.name}_{self.index}"
        return self.name


def arguments(entry: FusionEntry, kernel: KernelEntry, problem: Problem, workspace: bool) -> tuple[Argument, ...]:
    """The parameters of ``kernel`` on ``problem``: present inputs, outputs, strides, axes, attributes, workspace."""
    spec = kernel.spec
    present = {name: t for name, t in problem.tensors.items() if t is not None}
    found = list(pointers(problem, False))
    for name in spec.strides:
        for stands, t in list(problem.in_place(name).items())[:1]:
            slot = name if stands != name else ""
            found += [Argument("stride", stands, "long long", index=i, slot=slot) for i in range(len(t.shape))]
    for name in problem.loose:
        if name in present:
            form = entry.inputs[name].forms[problem.forms[name]]
            found += [Argument("stride", name, "long long", index=i) for i in strided_axes(form)]
    found += [Argument("axis", a, "long long") for a in axes(entry, problem) if a not in spec.specialize]
    real = "double" if wide(problem) else "float"
    ctypes = {"int": "long long", "float": real, "bool": "int"}
    for name, attribute in entry.spec.attributes.items():
        if not attribute.static:
            if attribute.type not in ctypes:
                raise RenderError(
                    "cannot render", kernel.key, f"attribute {name} of type {attribute.type} is no launch argument",
                    "static=True on it", variable=name,
                )  # fmt: skip
            found.append(Argument("attribute", name, "double" if attribute.double else ctypes[attribute.type]))
    if workspace:
        found.append(Argument("workspace", "workspace", "unsigned char*"))
    found += [Argument("tensor_map", m.name, TENSOR_MAP) for m in spec.tensor_maps if m.operand in present]
    return tuple(found)


def pointers(problem: Problem, workspace: bool) -> tuple[Argument, ...]:
    """Of present inputs and outputs, and of scratch memory."""
    inputs = set(list(problem.tensors)[: problem.inputs])
    found: list[Argument] = []
    for name, t in problem.tensors.items():
        if t is not None:
            cuda, reads = dtype(t.dtype).cuda, name in inputs
            ctype = f"const {cuda}* __restrict__" if reads else f"{cuda}* __restrict__"
            found.append(Argument("input" if reads else "output", name, ctype, t.dtype))
    return (*found, *([Argument("workspace", "workspace", "unsigned char*")] if workspace else []))


def strided_axes(form: Form) -> list[int]:
    """The axes of a loose operand along which it is not repeated."""
    return [i for i, axis in enumerate(form.axes) if isinstance(axis, str)]


def axes(entry: FusionEntry, problem: Problem) -> tuple[str, ...]:
    """Axes that have an extent in this problem, in order of first appearance in the spec's inputs and outputs."""
    declared = dict.fromkeys(a for t in (*entry.inputs.values(), *entry.outputs.values()) for a in t.axes)
    return tuple(a for a in declared if a in problem.axes)


def wide(problem: Problem) -> bool:
    """Whether the problem computes in float64: then float attributes are passed as double."""
    return any(t is not None and t.dtype in ("float64", "complex128") for t in problem.tensors.values())


def variables(
    entry: FusionEntry, kernel: KernelEntry, problem: Problem, params: Mapping[str, Any], constants: Mapping[str, Any]
) -> dict[str, Any]:
    """What a template may read, guarded: dtypes, choices, static attributes, HAS_ flags, axes, params, constants."""
    whom, spec = kernel.key, entry.spec
    static = {n: v for n, v in problem.attributes.items() if spec.attributes[n].static}
    found: dict[str, Any] = {}
    for group in (
        {v: TypeName(problem.dtypes[v]) if v in problem.dtypes else None for v in spec.dtypes},
        {f"HAS_{name}": problem.tensors[name] is not None for name in entry.inputs},
        problem.choices, static,
        {a: problem.axes.get(a) for a in kernel.spec.specialize}, params, constants,
    ):  # fmt: skip
        for name, value in group.items():
            found[identifier(name, whom)] = guarded(name, value, whom)
    return found


def hints(entry: FusionEntry, kernel: KernelEntry) -> dict[str, str]:
    """Names that a template may take for variables, and what they are instead."""
    found = {
        n: f"C++ name {n}: it is a launch argument, not in `specialize`" for t in entry.inputs.values() for n in t.axes
    }
    found |= {n: f"C++ name {n}: the attribute is not static" for n, a in entry.spec.attributes.items() if not a.static}
    found |= {m.name: f"C++ name {m.name}: it is a tensor map" for m in kernel.spec.tensor_maps}
    return found | {n: f"C++ name {n}: it is the kernel's pointer" for n in (*entry.inputs, *entry.outputs)}


def headers(problem: Problem) -> list[str]:
    """CUDA headers that the dtypes need, in a fixed order."""
    names = {t.dtype for t in problem.tensors.values() if t is not None} | set(problem.dtypes.values())
    return sorted({dtype(n).header for n in names} - {""})


def definitions(entry: FusionEntry, problem: Problem, values: Mapping[str, Any], whom: str) -> list[str]:
    """C++ lines that define every variable of a template under its own name."""
    spec, double = entry.spec, wide(problem)
    lines: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, TypeName):
            lines.append(f"using {name} = {value.cuda};  // {value!s}")
        elif name.startswith("HAS_"):
            lines.append(f"#define {name} {int(value)}")
        elif name in problem.choices:
            keys = list(next(p.choices[name] for p in entry.patterns if name in p.choices))
            lines.append(
                f"enum : int {{ {', '.join(f'{name}_{identifier(k, whom)} = {i}' for i, k in enumerate(keys))} }};"
            )
            lines.append(f"static constexpr int {name} = {name}_{value};")
        elif isinstance(value, bool):
            lines.append(f"static constexpr bool {name} = {c_text(value, whom)};")
        elif isinstance(value, int):
            kind = (
                "int"
                if -(2**31) <= value < 2**31
                else "long long"
                if -(2**63) <= value < 2**63
                else "unsigned long long"
            )
            lines.append(f"static constexpr {kind} {name} = {c_text(value, whom)};")
        elif isinstance(value, float):
            kind = "double" if double else "float"
            lines.append(f"static constexpr {kind} {name} = {float_literal(value, double=double)};  // {value!r}")
        elif name in spec.attributes and spec.attributes[name].choices:  # a word: told apart by its index
            lines.append(f"static constexpr int {name} = {spec.attributes[name].choices.index(value)};  // {value}")
    return lines


def signature(entry_name: str, found: tuple[Argument, ...], threads: int, min_blocks: int, whom: str) -> Code:
    """``extern "C" __global__ void __launch_bounds__(…) name(parameters)``."""
    for a in found:
        if a.kind != "workspace":
            identifier(a.name, whom)
    bounds = f"{threads}, {min_blocks}" if min_blocks else str(threads)
    parameters = ", ".join(f"{a.ctype} {a.parameter}" for a in found)
    return Code(f'extern "C" __global__ void __launch_bounds__({bounds}) {entry_name}({parameters})')
