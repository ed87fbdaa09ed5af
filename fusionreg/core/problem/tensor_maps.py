"""Tensor maps of a kernel on a problem: what TMA is told of a tensor, and whether it can address that. Floor 4.

Rules: CUDA driver API, ``cuTensorMapEncodeTiled``; everything here is known before there are addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any

from ..dtypes import dtype
from ..errors import MisfitError
from ..targets import MAP_BOX, MAP_GRANULE, MAP_RANK, MAP_SWIZZLES, target
from .geometry import environment, integer
from .types import Problem, Tensor

if TYPE_CHECKING:
    from ..registry.catalog import KernelEntry
    from ..spec import TensorMap

#: Bits of one element that TMA knows.
WIDTHS = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class TensorMapLayout:
    """One tensor map without its address.

    Attributes:
        name: the kernel's parameter.
        operand: the tensor.
        dtype: of the tensor.
        dims: extents in elements, the contiguous axis first.
        strides: in bytes, of every axis but the first.
        box: extents of a tile in elements.
        swizzle: bytes of the span that is permuted: 0, 32, 64 or 128.
        l2_promotion: bytes: 0, 64, 128 or 256.
        fill: ``zeros`` or ``nan``: what a load gives beyond the tensor's ends.
    """

    name: str
    operand: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    l2_promotion: int = 128
    fill: str = "zeros"

    @property
    def element_bytes(self) -> int:
        return dtype(self.dtype).bytes

    def violation(self, alignment: int) -> str:
        """The rule of TMA that it breaks over an address of this alignment, as half a sentence; "" for none."""
        rank, width = len(self.dims), dtype(self.dtype).bits
        rows = self.box[0] * self.element_bytes if self.box else 0
        if width not in WIDTHS or dtype(self.dtype).kind == "c":
            return f"its dtype is {self.dtype}, which TMA does not know"
        if not 1 <= rank <= MAP_RANK or len(self.box) != rank or len(self.strides) != rank - 1:
            return f"{rank} axes, {len(self.strides)} strides, a box of {len(self.box)}: TMA takes 1 to {MAP_RANK} axes"
        if alignment % MAP_GRANULE:
            return f"its address is aligned to {alignment} bytes, TMA needs {MAP_GRANULE}"
        for axis, extent in enumerate(self.dims):
            if not 1 <= extent < 1 << 32:
                return f"axis {axis} has extent {extent}, TMA takes 1 to 2^32 - 1"
        for axis, stride in enumerate(self.strides, 1):
            if not 0 < stride < 1 << 40 or stride % MAP_GRANULE:
                return f"axis {axis} has a stride of {stride} bytes, TMA takes multiples of {MAP_GRANULE} below 2^40"
        for axis, extent in enumerate(self.box):
            if not 1 <= extent <= MAP_BOX:
                return f"the box has extent {extent} on axis {axis}, TMA takes 1 to {MAP_BOX}"
        if self.swizzle not in MAP_SWIZZLES:
            return f"a swizzle of {self.swizzle} bytes, TMA has {', '.join(map(str, MAP_SWIZZLES))}"
        if rows % MAP_GRANULE:
            return f"the rows of the box have {rows} bytes, TMA needs a multiple of {MAP_GRANULE}"
        if self.swizzle and rows > self.swizzle:
            return f"the rows of the box have {rows} bytes, a swizzle of {self.swizzle} takes no more than that"
        if self.fill == "nan" and not dtype(self.dtype).floating:
            return f"NaN beyond the ends of {self.dtype}"
        return ""


def tensor_maps(kernel: KernelEntry, problem: Problem, params: Mapping[str, Any]) -> tuple[TensorMapLayout, ...]:
    """The maps of ``kernel`` on ``problem``, those of absent operands left out.

    :class:`MisfitError` (``facts``: tensor, map) where TMA cannot address an operand, :class:`LaunchError` where an
    expression gives no integer, :class:`ExpressionError` where one fails.
    """
    if not kernel.spec.tensor_maps:
        return ()
    if "tma" not in target(problem.target).features:
        raise MisfitError("cannot map", f"tensors for {kernel.key}", f"tensor maps, which {problem.target} lacks")
    env, _ = environment(kernel, problem, params)
    found = []
    for spec in kernel.spec.tensor_maps:
        tensor = problem.tensors.get(spec.operand)
        if tensor is None:
            continue
        made = _layout(kernel, spec, tensor, env)
        wrong = made.violation(tensor.alignment)
        if wrong:
            raise MisfitError(
                "cannot map", f"{spec.operand} for {kernel.key}", f"tensor map {spec.name} of {spec.operand}: {wrong}",
                "a tensor that TMA can address", tensor=spec.operand, map=spec.name,
            )  # fmt: skip
        found.append(made)
    return tuple(found)


def _layout(kernel: KernelEntry, spec: TensorMap, tensor: Tensor, env: Mapping[str, Any]) -> TensorMapLayout:
    values = kernel.tensor_maps[spec.name](env)
    width = dtype(tensor.dtype).bytes

    def many(field: str, count: int) -> tuple[int, ...]:
        return tuple(integer(kernel, f"{spec.name}.{field}{i}", values[f"{field}{i}"]) for i in range(count))

    box = many("box", len(spec.box))
    if spec.dims:
        dims = many("dims", len(spec.dims))
        strides = many("strides", len(spec.strides)) if spec.strides else tuple(accumulate(dims[:-1], mul))
    else:
        dims = tuple(reversed(tensor.shape))
        contiguous, *strides_ = _strides(tensor) or [1]
        strides = many("strides", len(spec.strides)) if spec.strides else tuple(strides_)
        if contiguous != 1:
            raise MisfitError(
                "cannot map", f"{spec.operand} for {kernel.key}",
                f"tensor map {spec.name} of {spec.operand}: its last axis has stride {contiguous}, TMA needs 1",
                "a tensor that TMA can address", tensor=spec.operand, map=spec.name,
            )  # fmt: skip
    swizzle = integer(kernel, f"{spec.name}.swizzle", values["swizzle"])
    in_bytes = tuple(s * width for s in strides)
    return TensorMapLayout(
        spec.name, spec.operand, tensor.dtype, dims, in_bytes, box, swizzle, spec.l2_promotion, spec.fill
    )


def _strides(tensor: Tensor) -> Sequence[int]:
    """Strides in elements, last axis first. That of an axis of extent 1 says nothing: it becomes one that TMA takes."""
    granule = max(1, MAP_GRANULE // dtype(tensor.dtype).bytes)
    found: list[int] = []
    reach = 1
    for axis, (extent, stride) in enumerate(zip(reversed(tensor.shape), reversed(tensor.strides), strict=True)):
        if extent == 1:
            stride = 1 if axis == 0 else -(-reach // granule) * granule
        found.append(stride)
        reach = max(reach, stride * extent)
    return found
