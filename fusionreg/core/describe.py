"""A fusion in words and lists, for ``fusionreg show``. Floor 7."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError, UnknownNameError
from .proof import evidence
from .proof.units import first_units
from .render import KernelSource
from .targets import SHIPPED, accepts, target

if TYPE_CHECKING:
    from .registry.entries import FusionEntry, KernelEntry, Slot
    from .spec import TensorMap, Workload


def sources(entry: FusionEntry, *, arch: str, kernel: str = "", dtype: str = "") -> Iterator[KernelSource]:
    """The rendered unit of each kernel that ``arch`` accepts, for one dtype (the first by default).

    Of an open fusion, that of its first region.

    Raises: :class:`UnknownNameError` for a kernel, architecture or dtype that nothing has, :class:`ArgumentError` when
    none of the kernels takes these.
    """
    entry = entry.members[0] if entry.spec.open else entry
    known = sorted({name for names in entry.spec.dtypes.values() for name in names})
    if dtype and dtype not in known:
        raise UnknownNameError.among(f"dtype of {entry.name}", dtype, known)
    empty = True
    for k in [entry.kernel(kernel)] if kernel else entry.kernels:
        units = [u for u in first_units(entry, k, arch) if not dtype or dtype in u.dtypes.split(",")]
        for unit in units[:1]:
            empty = False
            yield unit.source
    if empty:
        whom = f"{entry.name}/{kernel}" if kernel else entry.name
        raise ArgumentError(
            "cannot render", whom, f"no kernel for {dtype or 'any dtype'} on {arch}", "a combination that `show` lists"
        )


def text(entry: FusionEntry) -> str:
    """Several lines: what it fuses, the tensors, what makes it legal, and its kernels."""
    spec = entry.spec
    lines = [f"{spec.name} {spec.version} ({entry.plugin})", spec.summary, ""]
    if spec.open:
        lines += ["any point-wise operators over one iteration space: it becomes a fusion of its own for each program"]
    for i, pattern in enumerate(() if spec.open else spec.pattern):
        lines += [f"pattern{'' if i == 0 else f' (spelling {i + 1})'}", *(f"  {line}" for line in pattern.splitlines())]
    lines += _section("inputs", {f"{n}?" if n in entry.optional else n: t for n, t in spec.inputs.items()})
    lines += _section("outputs", spec.outputs)
    lines += _section("dtypes", {k: " ".join(v) for k, v in spec.dtypes.items()})
    lines += _section("axes", spec.axes)
    lines += _section("choices", {k: " ".join(v) for k, v in entry.choices.items()})
    attributes = {n: f"{a.type} = {a.default!r}  {a.summary}".rstrip() for n, a in spec.attributes.items()}
    lines += _section("attributes", attributes)
    lines += _section("legal when", dict.fromkeys(spec.constraints, ""))
    if spec.backward is not None:
        lines += _section("gradients", {spec.backward.fusion: ""})
    if entry.slots:
        lines += _section("slots", {n: _standing(slot) for n, slot in entry.slots.items()})
    lines += _section("regions", {m.name: m.spec.summary for m in entry.members})
    lines += _section("workloads", {w.name: _workload(w) for w in spec.workloads})
    for kernel in entry.kernels:
        lines += _kernel(entry, kernel)
    return "\n".join(lines)


def _standing(slot: Slot) -> str:
    reads = f"reads {', '.join(slot.inputs)}" if slot.inputs else "reads nothing else"
    return f"{len(slot.steps)} operators; {reads}" + (f"; writes {', '.join(slot.outputs)}" if slot.outputs else "")


def _workload(workload: Workload) -> str:
    words = {**workload.dtypes, **workload.axes, **workload.attributes, **workload.forms}
    said = [workload.row, "CUDA graph" if workload.mode == "g" else "", " ".join(f"{k}={v}" for k, v in words.items())]
    said += [f"batch={workload.batch}" if workload.batch else "", f"without {', '.join(workload.absent)}"]
    said = said[:-1] if not workload.absent else said
    return "  ".join(filter(None, [*said, f"goal {workload.goal}" if workload.goal else ""]))


def _kernel(entry: FusionEntry, kernel: KernelEntry) -> list[str]:
    spec = kernel.spec
    targets = [t for t in SHIPPED if any(accepts(d, target(t)) for d in spec.targets)]
    rows: dict[str, Any] = {
        "made for" if kernel.library else "compiled for": " ".join(targets),
        "rounding": spec.rounding,
        "evidence": evidence.state(entry, kernel),
        "calls": spec.library,
        "grid, block": f"({', '.join(spec.grid)}), ({', '.join(spec.block)})" if spec.grid else "",
        "cluster": ", ".join(spec.cluster),
        "shared memory": spec.shared_memory if spec.shared_memory != "0" else "",
        "workspace": spec.workspace if spec.workspace != "0" else "",
        "launch": " ".join(f for f in ("cooperative", "programmatic") if getattr(spec, f)),
        "tensor maps": "; ".join(map(_tensor_map, spec.tensor_maps)),
        "strided": " ".join(spec.strides),
        "point-wise code": " ".join(spec.regions),
        "parameters": "; ".join(f"{k}: {' '.join(map(str, v))}" for k, v in spec.params.items()),
        "pending": spec.pending,
        "simulator": spec.simulator,
    }
    lines = _section(f"kernel {kernel.name} of {kernel.plugin}: {spec.summary}", {k: v for k, v in rows.items() if v})
    return lines + [f"  requires {condition}" for condition in spec.requires]


def _tensor_map(m: TensorMap) -> str:
    dims = f", dims ({', '.join(m.dims)})" if m.dims else ""
    strides = f", strides ({', '.join(m.strides)})" if m.strides else ""
    fill = ", NaN beyond the ends" if m.fill == "nan" else ""
    return f"{m.name} of {m.operand}{dims}{strides}, box ({', '.join(m.box)}), swizzle {m.swizzle}{fill}"


def _section(title: str, rows: Mapping[str, Any]) -> list[str]:
    width = max(map(len, rows), default=0)
    return ["", title, *(f"  {name:<{width}}  {value}".rstrip() for name, value in rows.items())] if rows else []
