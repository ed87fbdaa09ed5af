"""What must hold of a kernel's tensor maps before there is a problem. Floor 3."""

from __future__ import annotations

from ..errors import UnknownNameError
from ..registry.entries import FusionEntry
from ..spec import WHOLE, KernelSpec, TensorMap
from ..targets import MAP_BOX, MAP_RANK, MAP_SWIZZLES
from .names import Problems


def check_tensor_maps(problems: Problems, spec: KernelSpec, fusion: FusionEntry) -> None:
    """Notes what is wrong with the numbers of expressions, with names, and with literals that TMA cannot take."""
    if spec.tensor_maps and WHOLE in spec.regions:
        problems.add("tensor_maps", f"beside regions = {WHOLE!r}", "a kernel whose tensors have shapes of their own")
    names = [m.name for m in spec.tensor_maps]
    for name in sorted({n for n in names if names.count(n) > 1}):
        problems.add("tensor_maps", f"the name {name!r} stands twice", "each once")
    for i, m in enumerate(spec.tensor_maps):
        _check(problems, f"tensor_maps[{i}]", m, fusion)


def _check(problems: Problems, at: str, m: TensorMap, fusion: FusionEntry) -> None:
    if m.operand not in fusion.tensors:
        known = UnknownNameError.among("tensor", m.operand, fusion.tensors).expected
        problems.add(f"{at}.operand", f"unknown tensor {m.operand!r}", known)
        return
    rank = len(m.box)
    if not 1 <= rank <= MAP_RANK:
        problems.add(f"{at}.box", f"{rank} expressions", f"1 to {MAP_RANK}, one for each axis")
    ranks = {len(m.dims)} if m.dims else {len(form.axes) for form in fusion.tensors[m.operand].forms}
    if rank not in ranks:
        problems.add(f"{at}.box", f"{rank} expressions", f"{' or '.join(map(str, sorted(ranks)))}: one for each axis")
    if m.strides and len(m.strides) != rank - 1:
        problems.add(f"{at}.strides", f"{len(m.strides)} expressions", f"{rank - 1}: of every axis but the first")
    for text in m.box:
        if text.strip().isdigit() and not 1 <= int(text) <= MAP_BOX:
            problems.add(f"{at}.box", text, f"1 to {MAP_BOX}")
    if m.swizzle.strip().isdigit() and int(m.swizzle) not in MAP_SWIZZLES:
        problems.add(f"{at}.swizzle", m.swizzle, f"one of {', '.join(map(str, MAP_SWIZZLES))}")
