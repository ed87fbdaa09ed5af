"""The two records a plugin ships, and the smaller ones in them. Floor 1.

A :class:`FusionSpec` says *what* is fused, a :class:`KernelSpec` *how*. Both are frozen, hashable, refuse unknown
fields and round-trip through JSON. Reading one compiles and runs nothing: texts stay texts until the registry
validates them (``core/validate/``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from .frozen import EMPTY, FrozenDict
from .records import Identifier, Layout, Name, Record, Scalar, Texts
from .workload import Workload

API = 1


class AttributeSpec(Record):
    """One attribute of a fusion: a number or word that a site binds, and a direct call passes."""

    type: Literal["int", "float", "bool", "str"]
    """Its type."""
    default: Scalar | None = None
    """What a direct call means by leaving it out; None makes it required."""
    choices: tuple[Scalar, ...] = ()
    """The values allowed; empty allows all of the type."""
    static: bool = False
    """Whether kernels are compiled per value (True: a template constant) or take it at launch (False)."""
    double: bool = False
    """Whether kernels take a float as ``double`` at launch, whatever the tensors: where ``1 - value`` must be right."""
    summary: str = ""
    """One line for ``show`` and for docstrings."""


class Case(Record):
    """One conformance case beyond those that are derived from the spec."""

    name: str
    """Unique among the fusion's cases."""
    axes: FrozenDict[str, int] = EMPTY
    """Extent of each axis; axes left out get the default extent."""
    attributes: FrozenDict[str, Scalar] = EMPTY
    """Attributes and choices by name."""
    absent: tuple[str, ...] = ()
    """Optional inputs that are left out."""
    values: FrozenDict[str, str] = EMPTY
    """Input name → one of the named value generators of ``core/conformance`` (default ``normal``)."""
    layouts: FrozenDict[str, Layout] = EMPTY
    """Input name → how it lies in memory (default ``contiguous``)."""
    batch: tuple[int, ...] = ()
    """Leading extents bound to ``...``."""
    summary: str = ""
    """What it catches."""


class Tolerance(Record):
    """A looser error bound than the general rule of conformance, with the reason it is needed."""

    dtype: str
    """The output dtype it holds for."""
    ulp: float
    """Allowed error in units of the last place of that dtype, beside the general rule."""
    inputs: float = 0.0
    """Inputs of that dtype may be off by so many units of their last place: what the chain's results then change by
    counts as its error. For results that are small differences of large terms, which the chain may hit by luck."""
    absolute: float = 0.0
    """Allowed error in the output's own unit, beside all that: of an approximation whose error is bounded in absolute
    terms, where results may be smaller than the bound."""
    reason: str
    """Why the general rule cannot hold."""


#: In ``KernelSpec.regions``: the whole pattern; in ``KernelSpec.strides``: every tensor.
WHOLE = "*"

#: What expressions of a kernel for whole regions may read beside the problem.
ITERATION = {
    "elements": "positions of the iteration space",
    "columns": "extent of its last axis, along which most bytes are contiguous",
    "depth": "extent of the axis that transposed operands are contiguous along; 1 where there are none",
    "element_bytes": "bytes of the widest dtype of the tensors that are repeated nowhere",
    "widest": "most consecutive elements that one access may move, by extents, strides and alignments",
    "tile_widest": "the same where transposed operands pass through shared memory",
    "staged_bytes": "bytes of one element of each transposed operand together; 0 where there are none",
    "returned_bytes": "the same of those among them that are outputs",
    "turns": "extent of the first axis",
    "loose": "1 where a tensor is neither contiguous nor repeated along the first axis, else 0",
    "crossing": "1 where vectors run past the ends of rows, else 0",
    "traffic": "bytes of all tensors",
    "gathered_bytes": "bytes of one element of each operand that a vector takes an element at a time, together",
    "scattered": "bytes of memory sectors between the elements of operands that stride along the last axis",
}
#: Those of them that depend on the structure of the iteration alone: constants and ``block`` may read these.
STRUCTURAL = frozenset({"element_bytes", "staged_bytes"})


class TensorMap(Record):
    """How the tensor memory accelerator (TMA) of ``sm_90`` and later cuts a tensor into tiles: one kernel parameter.

    The kernel gets it as ``const __grid_constant__ fr::TensorMap NAME``, for a template that includes ``tma.cuh``;
    where the operand is absent, or other tensors stand in a slot in its place, the parameter is left out. A kernel does
    not accept a problem that TMA cannot address: strides that are no multiple of 16 bytes, ….
    """

    name: Identifier
    """Of the parameter."""
    operand: Identifier
    """The input or output whose memory it describes."""
    dims: Texts = ()
    """Extents in elements, the contiguous axis first; the operand's own, last axis first, where they are left out."""
    strides: Texts = ()
    """Of every axis but the contiguous first one, in elements; the operand's own where ``dims`` are left out too, else
    those of a tensor without gaps."""
    box: Texts
    """Extents of a tile in elements, one for each axis."""
    swizzle: str = "0"
    """Bytes of the span within which a tile's 16-byte pieces are permuted in shared memory: 0 for none, 32, 64 or 128;
    an expression."""
    l2_promotion: Literal[0, 64, 128, 256] = 128
    """Bytes that a load brings into the L2 cache at least."""
    fill: Literal["zeros", "nan"] = "zeros"
    """What a load gives beyond the tensor's ends."""


class KernelSpec(Record):
    """One kernel: which template, on which problems, with which geometry."""

    name: Identifier
    """Unique among the kernels of its fusion."""
    fusion: Name | None = None
    """The fusion it implements; may be left out inside ``FusionSpec.kernels``."""
    template: str = ""
    """Path of the ``.cu.j2`` below the plugin's package or its ``templates`` folder."""
    library: str = ""
    """In place of a template the library call that the kernel is, as a plugin's ``register_library_calls`` names it;
    beside it stand what the kernel ``requires``, ``strides``, ``workspace``, ``estimate``, and words."""
    summary: str = ""
    """One line for ``show``."""
    targets: Texts = ("sm_80+",)
    """Architectures: ``sm_80+`` for that one and later, or one exact name such as ``sm_90a``."""
    rounding: Literal["once", "per_op"] = "once"
    """``once``: wide inside and one cast at the end; ``per_op``: rounds where the unfused chain rounds."""
    requires: Texts = ()
    """Conditions on the problem, all of which must hold; over symbolic axes they become guards."""
    strides: Texts = ()
    """Tensors that may be strided; each gets one ``long long NAME_stride_i`` parameter per axis, in elements.
    All others must be contiguous. ``*``: all tensors, for a kernel whose ``regions`` is ``*``."""
    spaces: FrozenDict[Identifier, Texts] = EMPTY
    """Input → memory spaces beside ``device`` in which the kernel reads it where it lies: ``pinned_host``."""
    regions: Texts = ()
    """Where generated point-wise code stands in the template. ``*``: the whole pattern is point-wise; the kernel then
    iterates over ``region`` (see "Point-wise kernels"), its parameters are those of the iteration, and its expressions
    may read the iteration's names."""
    keeps: Texts = ()
    """Inputs among ``regions`` whose value, computed by operators in front, the template stores, too, where others read
    it: by ``keep`` of the slot, once for each element, where ``kept("x")``."""
    params: FrozenDict[str, tuple[Scalar, ...]] = EMPTY
    """Tunable parameters: the values to choose from, the first being the default."""
    valid: Texts = ()
    """Conditions over params, dtypes and target that a combination must meet."""
    constants: FrozenDict[str, str] = EMPTY
    """Further template variables, each an expression over params, attributes, choices and specialised axes."""
    specialize: Texts = ()
    """Axes whose extent becomes a compile-time constant; all others are launch arguments."""
    grid: Texts = ()
    """One to three expressions."""
    block: Texts = ()
    """One to three expressions over params and constants."""
    cluster: Texts = ()
    """Thread-block cluster shape; empty for none."""
    shared_memory: str = "0"
    """Bytes of dynamic shared memory."""
    workspace: str = "0"
    """Bytes of scratch that the caller's allocator gives and the kernel gets as its last pointer, ``workspace``."""
    cooperative: bool = False
    """Launched cooperatively: the whole grid is resident and may synchronise."""
    tensor_maps: tuple[TensorMap, ...] = ()
    """Tensors that it moves by TMA; parameters after all others, in this order."""
    programmatic: bool = False
    """It may start before the kernel in front of it ends (programmatic dependent launch): the template calls
    ``fr::grid_dependency_wait()`` before its first access to a tensor."""
    min_blocks: int = Field(default=0, ge=0, le=32)
    """Second argument of ``__launch_bounds__``; 0 leaves it out."""
    max_registers: int = Field(default=0, ge=0, le=255)
    """Register cap per thread; 0 leaves it to the compiler."""
    estimate: str = ""
    """Expected seconds on the target, an expression; empty uses the general model."""
    simulator: str = ""
    """Why the simulator cannot execute it; empty when it can."""
    pending: str = ""
    """Why dispatch must not choose it yet; empty when it may."""
    slots_pending: str = ""
    """Why dispatch must not choose it yet where operators stand at its slots; empty when it may."""
    keeps_pending: str = ""
    """Why dispatch must not choose it yet where it stores a value of ``keeps``; empty when it may."""


class Region(Record):
    """Point-wise operators as a program: what an open fusion is at one site, or what stands around another one."""

    name: Identifier
    """The last word of the fusion's name: unique among its regions."""
    summary: str = ""
    """One line for ``list``."""
    pattern: str
    """The program, in pattern language."""
    inputs: FrozenDict[Identifier, str]
    """Tensor texts by name: one axis of the iteration space each, 1 where it is broadcast."""
    outputs: FrozenDict[Identifier, str]
    """Tensor texts by name; all have every axis of the iteration space."""
    dtypes: FrozenDict[Identifier, tuple[str, ...]] = EMPTY
    """Dtype variables and the dtypes each may take."""
    slots: Texts = ()
    """Of a fusion with a pattern of its own: the inputs and outputs of it that the operators stand in front of and
    behind. A line ``...`` of the program stands for that pattern, whose names it computes and reads."""
    extents: FrozenDict[Identifier, int] = EMPTY
    """Extents of axes in derived conformance cases, as of a fusion."""
    cases: tuple[Case, ...] = ()
    """Conformance cases beyond the derived ones."""
    tolerances: tuple[Tolerance, ...] = ()
    """Exceptions to the general error rule."""
    workloads: tuple[Workload, ...] = ()
    """Problems whose speed is measured."""
    tags: tuple[str, ...] = ()
    """Free words to filter by."""
    pending: str = ""
    """Why the kernels count as pending for this program; empty when they do not."""


class Backward(Record):
    """The fusion that computes the gradients of another one.

    By convention its inputs are ``d<output>``, the gradient of an output of the forward fusion, and inputs and outputs
    of the forward fusion by their own names; its outputs are ``d<input>``. What differs is listed here. An output whose
    gradient it does not read is not differentiable; an input whose gradient it does not give cannot have one.
    """

    fusion: Name
    """Its name."""
    inputs: FrozenDict[Identifier, Identifier] = EMPTY
    """Input of the backward fusion → the forward tensor that it is, where that has another name."""
    gradients: FrozenDict[Identifier, Identifier] = EMPTY
    """Forward input → the output of the backward fusion that is its gradient, where that is not ``d<input>``."""


#: The pattern of an open fusion: any point-wise operators.
REGION = "region"
#: The line of a region's program that stands for the pattern of the fusion that it is around.
BETWEEN = "..."


class FusionSpec(Record):
    """What is fused. The reference is the pattern itself, evaluated in float64 by the operator vocabulary."""

    api: Literal[1]
    """Version of this contract."""
    name: Name
    """``family.words``; the family is a prefix that the plugin's distribution owns."""
    version: str = Field(default="1.0.0", pattern=r"^\d+\.\d+\.\d+$")
    """Of this spec and its kernels together."""
    summary: str = ""
    """One line for ``list``."""
    pattern: Texts
    """One or more spellings in pattern language; the first is the reference. ``region`` alone makes the fusion *open*:
    it takes any point-wise operators that a site has, and becomes a fusion of its own for each such program."""
    inputs: FrozenDict[Identifier, str]
    """Tensor texts by name, in call order, e.g. ``T[... M K]``; none for an open fusion."""
    outputs: FrozenDict[Identifier, str]
    """Tensor texts by name, in the order a call returns them; none for an open fusion."""
    layouts: FrozenDict[Identifier, Identifier] = EMPTY
    """Output → the input of its rank whose memory order it takes, where that one lies without gaps and the caller
    brings no output: channels last gives channels last. All other outputs are row-major."""
    aliases: FrozenDict[Identifier, Identifier] = EMPTY
    """Output → the input of its type that a caller may bring as that output, too, to have it updated in place: kernels
    then write what changes alone. Where the output has memory of its own, all of it is written."""
    dtypes: FrozenDict[Identifier, tuple[str, ...]]
    """Dtype variables and the dtypes each may take."""
    regions: tuple[Region, ...] = ()
    """Programs that an open fusion, or the slots of this one's kernels, are proven and measured on."""
    axes: FrozenDict[Identifier, str] = EMPTY
    """One line on each axis, for ``show``; axes not listed are documented by their name alone."""
    extents: FrozenDict[Identifier, int] = EMPTY
    """Extents of axes in derived conformance cases, where the general ones (32, 48, 64, …) make many large tensors."""
    sizes: FrozenDict[Identifier, float] = EMPTY
    """What random values of inputs are multiplied by in conformance cases: of scales, whose own size is not one."""
    attributes: FrozenDict[Identifier, AttributeSpec] = EMPTY
    """What a site binds besides tensors."""
    constraints: Texts = ()
    """Conditions that make the fusion legal, all of which must hold. An axis of an output that no input tells is told
    by one of them: ``P == (H + 2 * pad - R) // stride + 1``."""
    backward: Backward | None = None
    """The fusion that computes its gradients; None where training does without it."""
    autocast: Literal["lower", "float32", "promote"] = "promote"
    """What torch's autocast does to floating inputs whose dtype is a variable: ``lower`` casts them to the autocast
    dtype, as for matrix products, but for those whose first dtype is float32; ``float32`` casts them up, ``promote``
    casts those of one variable to the widest."""
    cases: tuple[Case, ...] = ()
    """Conformance cases beyond the derived ones."""
    tolerances: tuple[Tolerance, ...] = ()
    """Exceptions to the general error rule."""
    workloads: tuple[Workload, ...] = ()
    """Problems whose speed is measured."""
    kernels: tuple[KernelSpec, ...] = ()
    """Kernels that come with it; other plugins may add more."""
    tags: tuple[str, ...] = ()
    """Free words to filter by."""

    @property
    def open(self) -> bool:
        """Whether it takes any point-wise operators rather than a pattern."""
        return self.pattern == (REGION,)


def _by_kind(value: Any) -> Any:
    return ({"f": value} if value else {}) if isinstance(value, str) else value


CudaTexts = Annotated[FrozenDict[str, str], BeforeValidator(_by_kind)]
"""CUDA texts by the kinds of dtypes they serve; one alone is for floats."""


class OpSpec(Record):
    """One operator of the vocabulary. Its meaning is a Python function, so it has no JSON form."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True)

    name: str = Field(pattern=r"^([a-z][\w.]*::)?[A-Z]\w*$")
    """ONNX's name, or ``domain::Name``."""
    inputs: tuple[str, ...]
    """Names in order: ``x``, ``bias?`` when optional, ``args*`` when variadic (last only)."""
    outputs: tuple[str, ...] = ("y",)
    """Names in order; ``y?`` when optional, ``outs*`` when variadic."""
    attributes: FrozenDict[str, Any] = EMPTY
    """Every attribute with its default; ``<required>`` for one without."""
    meaning: Any
    """``f(xp, *arrays, **attributes) -> array | tuple``; see ``core/ops``."""
    infer: Any
    """``f(inputs: list[Value | None], attributes, constants) -> list[(dtype, shape)]``; see ``core/ops``."""
    commutative: bool = False
    """Whether its first two inputs may be swapped."""
    pointwise: bool = False
    """Whether every output element depends on the broadcast-aligned input elements alone."""
    moves: bool = False
    """Whether it only moves, repeats or selects elements: any dtype passes through unchanged, nothing is rounded."""
    host: tuple[str, ...] = ()
    """Inputs handed over as they are, wherever they are: shapes, axes and the like, read as integers on the host."""
    cuda: CudaTexts = EMPTY
    """CUDA text for generated point-wise functions: an expression over the input names in float, or one per kind of
    dtype, e.g. ``{"f": "fabsf(x)", "u": "x"}``; empty when it has none. See ``core/ops/cuda.py``."""
    summary: str = ""
    """The definition, for an operator that ONNX lacks; a citation otherwise."""


REQUIRED = "<required>"
"""Default of an attribute that has none."""
