"""What a template sees of a kernel whose whole pattern is point-wise: the variable ``region``. Floor 4.

The pattern becomes one device function; its operands become views over the iteration (``problem/iteration.py``). A
template loops over the views and lets them write their offsets; how many elements move at a time, and in what order, is
the template's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..dtypes import dtype
from ..errors import FusionregError, RenderError
from ..problem import Problem
from ..problem.iteration import Iteration, Operand, Step, iteration
from .ctypes import compute_type
from .pointwise import device_function, pattern_graph
from .prelude import Argument
from .values import Code, identifier

if TYPE_CHECKING:
    from ..registry.catalog import FusionEntry, KernelEntry

#: C++ name of the generated function.
FUNCTION = "fr_region"


@dataclass(frozen=True)
class View:
    """An operand in a template.

    Attributes:
        name: C++ name of its pointer.
        type: its element's CUDA type.
        compute: the C++ type that its values are computed in.
        bytes: of one element.
        output: whether it is written.
        scalar: whether all positions read the same element.
        whole: whether it is contiguous over the whole space: its offset is the position.
        moves: what of it a vector of positions takes: a ``run`` of neighbours, ``one`` element, or ``each`` by its own.
        along: how it moves along the last axis: 0 not at all, 1 to the next element, 2 by a stride.
        transposed: whether it is contiguous along ``region.across`` and strides along the last axis.
        steps: as ``along``, of every axis.
    """

    name: Code
    type: Code
    compute: Code
    bytes: int
    output: bool
    scalar: bool
    whole: bool
    moves: str
    along: int
    transposed: bool
    steps: tuple[int, ...]

    def stride(self, axis: int) -> Code:
        """Elements from one position to the next along an axis (from the last one if negative), as C++."""
        axis %= len(self.steps)
        step = self.steps[axis]
        return Code(f"{self.name}_stride_{axis}" if step == Step.GENERAL else str(int(step)))

    @property
    def first(self) -> bool:
        """Whether it moves along the first axis."""
        return self.steps[0] != Step.BROADCAST

    def value(self, element: str) -> Code:
        """An element of it in the C++ type that its values are computed in."""
        return Code(element if self.compute == self.type else f"fr::to_float({element})")

    def offset(self, *without: int, index: str = "i") -> Code:
        """Its offset at the indices ``i0``, ``i1`` … (another letter: ``index``), as C++, leaving out some axes."""
        axes = [a for a in range(len(self.steps)) if a not in {w % len(self.steps) for w in without}]
        terms = [
            f"{index}{a}" if self.steps[a] == Step.CONTIGUOUS else f"{index}{a} * {self.name}_stride_{a}"
            for a in axes
            if self.steps[a] != Step.BROADCAST
        ]
        return Code(" + ".join(terms) or "0")


@dataclass(frozen=True)
class Region:
    """The variable ``region`` of a template.

    Attributes:
        function: definition of the device function.
        inputs, outputs, operands: the views; ``operands`` are all of them.
        rank: number of axes; ``fr_extent_0`` … are their extents, ``fr_elements`` the product of them.
        across: the axis that transposed operands are contiguous along, -1 where there are none.
        flat: whether vectors run through the whole space without regard to the ends of rows.
        long: whether no vector then reaches beyond the next row.
        wide: whether indices take 64 bits.
        index: the C++ type of indices.
    """

    function: Code
    operands: tuple[View, ...]
    rank: int
    across: int
    flat: bool
    long: bool
    wide: bool

    @property
    def inputs(self) -> tuple[View, ...]:
        return tuple(v for v in self.operands if not v.output)

    @property
    def outputs(self) -> tuple[View, ...]:
        return tuple(v for v in self.operands if v.output)

    @property
    def index(self) -> Code:
        return Code("long long" if self.wide else "int")

    @property
    def axes(self) -> tuple[int, ...]:
        """Axis numbers, slow to fast."""
        return tuple(range(self.rank))

    def apply(self, vector: str, single: str, scalar: str, output: str, row: str = "") -> Code:
        """C++ statements that compute the outputs of one position from the inputs.

        The texts say where an operand's element is held, with ``@`` for its name: an input's in general, where a vector
        of positions has one element of it, where all positions have the same; an output's. ``row``: the value, in the
        type that it is computed in, of an input that is the same along a row, where vectors go over the ends of rows;
        as in general if it is left out.
        """
        given = []
        for v in self.inputs:
            text = scalar if v.scalar else single if v.moves == "one" else vector
            ready = bool(row) and not v.scalar and v.moves == "each" and not v.along
            held = str(row if ready else text).replace("@", v.name)
            given.append(held if ready else v.value(held))
        return self._called(given, output)

    def applied(self, value: str, scalar: str, output: str) -> Code:
        """As :meth:`apply`; ``value``: of every input that is no scalar, in the type that it is computed in."""
        given = [v.value(scalar.replace("@", v.name)) if v.scalar else value.replace("@", v.name) for v in self.inputs]
        return self._called(given, output)

    def _called(self, given: Sequence[str], output: str) -> Code:
        lines = [f"{v.compute} fr_to_{v.name};" for v in self.outputs]
        lines.append(f"{FUNCTION}({', '.join([*given, *(f'fr_to_{v.name}' for v in self.outputs)])});")
        for v in self.outputs:
            result = f"fr_to_{v.name}" if v.compute == v.type else f"fr::from_float<{v.type}>(fr_to_{v.name})"
            lines.append(f"{output.replace('@', v.name)} = {result};")
        return Code(" ".join(lines))

    def split(self, position: str, index: str = "i") -> Code:
        """C++ statements that make the indices ``i0`` … (another letter: ``index``) of ``position``, an expression of
        type ``index``."""
        unsigned = "unsigned long long" if self.wide else "unsigned"
        lines = []
        rest = str(position)
        for axis in reversed(range(1, self.rank)):
            lines.append(
                f"const {self.index} {index}q{axis} = fr::divided(static_cast<{unsigned}>({rest}), "
                f"static_cast<{unsigned}>(fr_multiplier_{axis}), static_cast<int>(fr_shift_{axis}));"
            )
            lines.append(f"const {self.index} {index}{axis} = {rest} - {index}q{axis} * fr_extent_{axis};")
            rest = f"{index}q{axis}"
        lines.append(f"const {self.index} {index}0 = {rest};")
        return Code(" ".join(lines))


def arguments(entry: FusionEntry, kernel: KernelEntry, problem: Problem, workspace: bool) -> tuple[Argument, ...]:
    """The parameters of a kernel over the problem's iteration: pointers, then extents, reciprocals and strides."""
    it = iteration(problem)
    found: list[Argument] = []
    for o in it.operands:
        cuda = dtype(o.dtype).cuda
        ctype = f"{cuda}* __restrict__" if o.output else f"const {cuda}* __restrict__"
        found.append(Argument("output" if o.output else "input", o.name, ctype, o.dtype))
    ctype = "long long" if it.wide else "int"
    found.append(Argument("iteration", "elements", ctype))
    found += [Argument("iteration", "extent", ctype, index=a) for a in range(it.rank)]
    for axis in range(1, it.rank):
        found += [Argument("iteration", what, ctype, index=axis) for what in ("multiplier", "shift")]
    for o in it.operands:
        found += [Argument("step", o.name, ctype, index=a) for a, s in enumerate(o.steps) if s is Step.GENERAL]
    if workspace:
        found.append(Argument("workspace", "workspace", "unsigned char*"))
    return tuple(found)


def region(entry: FusionEntry, problem: Problem, whom: str) -> Region:
    """The region of a problem; :class:`RenderError` where its pattern has no CUDA form."""
    it = iteration(problem)
    try:
        text = device_function(FUNCTION, pattern_graph(entry, problem), entry.ops)
    except RenderError:
        raise
    except FusionregError as e:
        raise RenderError("cannot render", whom, str(e), "point-wise operators that have a CUDA form") from None
    views = tuple(_view(it, o, whom) for o in it.operands)
    return Region(Code(text), views, it.rank, it.across, it.flat, it.long, it.wide)


def _view(it: Iteration, o: Operand, whom: str) -> View:
    return View(
        name=Code(identifier(o.name, whom)),
        type=Code(dtype(o.dtype).cuda),
        compute=Code(compute_type(o.dtype)),
        bytes=o.bytes,
        output=o.output,
        scalar=o.scalar,
        whole=o.whole,
        moves=it.moves(o),
        along=int(o.steps[-1]),
        transposed=it.transposed(o),
        steps=tuple(map(int, o.steps)),
    )
