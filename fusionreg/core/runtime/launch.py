"""Prepared launches: everything that a call of one layout needs, made once. Floor 6.

A prepared launch is called with the arrays of a call (or with arrays of the very same layout) and gives the outputs.
There are five kinds: a GPU kernel, a call of a library (``library_launch``), a kernel in the simulator, the unfused
operators (``unfused``), and nothing to do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from ..problem import Problem, TensorMapLayout
from ..problem.geometry import Launch
from ..problem.iteration import space
from ..problem.types import row_major
from ..render import Argument
from .device_launch import DeviceLaunch, Opening
from .driver import INVALID_CONTEXT, Config, config
from .tensor_maps import MapEncoder

if TYPE_CHECKING:
    import numpy as np

    from .libraries import Library, Place

_VALUES = {"long long": ctypes.c_longlong, "int": ctypes.c_int, "float": ctypes.c_float, "double": ctypes.c_double}


class Prepared(Protocol):
    """What the dispatcher keeps per layout.

    Attributes:
        kernel: ``fusion/kernel``; "" for the unfused operators.
        reason: why the unfused operators run, "" otherwise.
        calls: how often it ran.
        guard: asks whether a call must be looked at closely, where its layouts do not say all (gradients, conjugates).
    """

    kernel: str
    reason: str
    calls: int
    guard: Callable[[], bool] | None

    def outputs(self) -> tuple[Any, ...]:
        """New arrays for the outputs."""
        ...

    def run(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Runs on ``inputs`` (in the spec's order, None for absent) and returns the outputs."""
        ...

    def binder(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Callable[[], Any]:
        """A function that runs again on these very arrays."""
        ...


class Allocation:
    """Makes the outputs of a layout, and scratch memory."""

    def __init__(self, library: Library, place: Place, problem: Problem, workspace: int = 0) -> None:
        names = problem.output_names
        self.makers = tuple(
            library.allocator(problem.shapes[n], t.dtype, place, problem.strides.get(n))
            for n in names
            if (t := problem.tensors[n]) is not None
        )
        self.strides = tuple(problem.strides.get(n, row_major(problem.shapes[n])) for n in names)
        self.library = library
        self.workspace = library.allocator((workspace,), "uint8", place) if workspace else None

    def outputs(self) -> tuple[Any, ...]:
        makers = self.makers
        return (makers[0](),) if len(makers) == 1 else tuple([make() for make in makers])

    def finished(self, found: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Values that operators gave, each as an output: copied where it lies otherwise, or where another array is."""
        taken = [a for a in inputs if a is not None]
        outputs = []
        for value, make, strides in zip(found, self.makers, self.strides, strict=True):
            if self.library.tensor(value).strides != strides or any(self.library.shares(value, a) for a in taken):
                value, given = make(), value
                value[...] = given
            taken.append(value)
            outputs.append(value)
        return tuple(outputs)


class Nothing:
    """A call without an element to compute: its outputs are empty, and nothing is launched.

    ``kernel`` is the one that would have run; it is not counted as used.
    """

    guard: Callable[[], bool] | None = None

    def __init__(self, kernel: str, allocation: Allocation) -> None:
        self.kernel, self.calls = kernel, 0
        self.reason = "" if kernel else "there is nothing to compute"
        self.outputs = allocation.outputs

    def run(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return outputs

    def binder(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Callable[[], Any]:
        return lambda: None


class GpuLaunch(DeviceLaunch):
    """A loaded kernel with its configuration and parameters packed; a call writes pointers and the stream."""

    def __init__(
        self,
        opening: Opening,
        *,
        function: int,
        module: Any,
        launch: Launch,
        arguments: Sequence[Argument],
        values: dict[str, Any],
        inputs: Sequence[str],
        maps: Sequence[TensorMapLayout] = (),
    ) -> None:
        super().__init__(opening)
        self.module, self.function, self.launch = module, function, launch
        self.arguments, self.values = tuple(arguments), values
        self.sources = tuple(
            i for i, name in enumerate(inputs) if any(a.kind == "input" and a.name == name for a in arguments)
        )
        pointed, by_name = [a.name for a in arguments if a.pointer], {m.name: m for m in maps}
        #: of every tensor map: its parameter, the slot of its operand's address, and what encodes it
        self.maps = tuple(
            (i, pointed.index(m.operand), MapEncoder(self.driver, m, self.kernel, self.in_context))
            for i, a in enumerate(arguments)
            if a.kind == "tensor_map"
            for m in (by_name[a.name],)
        )
        self._lock = (
            Lock()
        )  # the packed structures are one per layout, and the driver call drops the interpreter's lock
        self.config, self.slots, self.parameters, self._keep = self.pack()
        self._config, self._parameters = ctypes.addressof(self.config), ctypes.addressof(self.parameters)
        self._launch = self.driver.launch

    def pack(self) -> tuple[Config, Any, Any, list[Any]]:
        """The configuration, pointer slots (inputs, outputs, workspace), the parameter array, and what it points to."""
        launch = self.launch
        packed = config(
            launch.grid, launch.block, launch.shared_memory, launch.cluster, launch.cooperative, launch.programmatic
        )
        pointers = [a for a in self.arguments if a.pointer]
        slots = (ctypes.c_uint64 * max(1, len(pointers)))()
        parameters = (ctypes.c_void_p * max(1, len(self.arguments)))()
        keep: list[Any] = []
        at = 0
        for i, a in enumerate(self.arguments):
            if a.pointer:
                parameters[i] = ctypes.addressof(slots) + 8 * at
                at += 1
            elif a.kind != "tensor_map":  # which a launch points to, as it depends on an address
                value: Any = _VALUES[a.ctype](self.values[a.parameter])
                keep.append(value)
                parameters[i] = ctypes.addressof(value)
        return packed, slots, parameters, keep

    def run(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        pointer, slots = self.pointer, self.slots
        scratch = None if self.scratch is None else self.scratch()
        with self._lock:
            at = 0
            for i in self.sources:
                slots[at] = pointer(inputs[i])
                at += 1
            for y in outputs:
                slots[at] = pointer(y)
                at += 1
            if scratch is not None:
                slots[at] = pointer(scratch)
            for i, slot, encoder in self.maps:
                self.parameters[i] = encoder.at(slots[slot])
            self.config.stream = self.stream(self.device)
            if self.several_devices:
                code = self._launch_on_device(self._config, self._parameters)
            else:
                code = self._launch(self._config, self.function, self._parameters, None)
        if code:
            self._failed(code, self._config, self._parameters)
        self.calls += 1
        return outputs

    def binder(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Callable[[], Any]:
        packed, slots, parameters, keep = self.pack()
        scratch = None if self.scratch is None else self.scratch()
        pointed = [*(inputs[i] for i in self.sources), *outputs, *([scratch] if scratch is not None else [])]
        for at, array in enumerate(pointed):
            slots[at] = self.pointer(array)
        for i, slot, encoder in self.maps:  # memory of its own, which no other call's arrays push out
            block = encoder.encoded(slots[slot])
            parameters[i] = block.address
            keep.append(block)
        at_config, at_parameters = ctypes.addressof(packed), ctypes.addressof(parameters)
        launch, function, stream, device, lock = self._launch, self.function, self.stream, self.device, Lock()
        several, alive = self.several_devices, (slots, parameters, keep, pointed, self)

        def again() -> None:
            with lock:
                packed.stream = stream(device)
                code = self._launch_on_device(at_config, at_parameters) if several else launch(
                    at_config, function, at_parameters, None
                )  # fmt: skip
            if code:
                self._failed(code, at_config, at_parameters)

        again.alive = alive  # type: ignore[attr-defined]
        return again

    def _launch_on_device(self, at_config: int, at_parameters: int) -> int:
        return self.in_context(lambda: self._launch(at_config, self.function, at_parameters, None))

    def _failed(self, code: int, at_config: int, at_parameters: int) -> None:
        """Once more where this thread merely had no context yet; :class:`LaunchError` otherwise."""
        if code == INVALID_CONTEXT and not self.driver.current():
            code = self._launch_on_device(at_config, at_parameters)
        shape = (
            f"grid {self.launch.grid}, block {self.launch.block}, {self.launch.shared_memory} bytes of shared memory"
        )
        self.driver.check(code, f"{self.kernel} ({shape})")


class SimulatorLaunch:
    """A kernel that the simulator executes on NumPy arrays, or on CPU tensors of torch through NumPy."""

    reason = ""
    guard: Callable[[], bool] | None = None

    def __init__(
        self,
        *,
        kernel: str,
        simulated: Any,
        launch: Launch,
        arguments: Sequence[Argument],
        values: dict[str, Any],
        inputs: Sequence[str],
        output_names: Sequence[str],
        library: Library,
        place: Place,
        allocation: Allocation,
        checks: Any,
        maps: Sequence[TensorMapLayout] = (),
    ) -> None:
        self.kernel, self.calls, self.simulated, self.launch = kernel, 0, simulated, launch
        self.arguments, self.values = tuple(arguments), values
        self.inputs, self.output_names = tuple(inputs), tuple(output_names)
        self.host, self.checks = library.host, checks
        self.outputs, self.maps = allocation.outputs, tuple(maps)
        self.report: Any = None

    def run(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        import numpy as np

        arrays = {**dict(zip(self.inputs, inputs, strict=False)), **dict(zip(self.output_names, outputs, strict=True))}
        arrays = {name: self.host(a) for name, a in arrays.items() if a is not None}
        scratch = np.empty(self.launch.workspace, np.uint8)
        values = simulated_arguments(self.arguments, self.values, arrays, scratch, self.maps)
        options = {} if self.checks is None else {"checks": self.checks}
        self.report = self.simulated.launch(values, self.launch, **options)
        self.calls += 1
        return outputs

    def binder(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Callable[[], Any]:
        return lambda: self.run(inputs, outputs)


class Densified:
    """Another prepared launch, on contiguous copies of some inputs; only models ask for it, calls never copy."""

    guard: Callable[[], bool] | None = None

    def __init__(self, inner: Prepared, indices: Sequence[int], allocation: Allocation) -> None:
        """``allocation``: of the problem as it came, whose outputs may lie otherwise than those of the copies."""
        self.inner, self.indices, self.library = inner, tuple(indices), allocation.library
        self._finished = allocation.finished
        self.kernel, self.reason, self.calls = inner.kernel, inner.reason, 0
        self._outputs = inner.outputs

    def outputs(self) -> tuple[Any, ...]:
        return self._outputs()

    def _dense(self, inputs: Sequence[Any]) -> list[Any]:
        dense = list(inputs)
        for i in self.indices:
            dense[i] = self.library.contiguous(dense[i])
        return dense

    def run(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls += 1
        return self._finished(self.inner.run(self._dense(inputs), outputs), ())

    def binder(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Callable[[], Any]:
        return lambda: self.run(inputs, outputs)


def simulated_arguments(
    arguments: Sequence[Argument],
    values: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    scratch: np.ndarray,
    maps: Sequence[TensorMapLayout],
) -> list[Any]:
    """What a simulated launch takes: by parameter a number of ``values``, an array, ``scratch``, or a tensor map."""
    from ..simulator.tensor_map import MapArgument

    layouts = {m.name: m for m in maps}
    found: list[Any] = []
    for a in arguments:
        if a.kind == "tensor_map":
            found.append(MapArgument(layouts[a.name], arrays[layouts[a.name].operand]))
        elif a.kind == "workspace":
            found.append(scratch)
        else:
            found.append(arrays[a.name] if a.pointer else values[a.parameter])
    return found


def argument_values(problem: Problem, arguments: Sequence[Argument]) -> dict[str, Any]:
    """C++ parameter name → value, of every parameter that is a number."""
    found: dict[str, Any] = {}
    for a in arguments:
        if a.kind == "stride":
            tensor = problem.tensors[a.name]
            found[a.parameter] = 0 if tensor is None else tensor.strides[a.index]
        elif a.kind == "step":
            found[a.parameter] = space(problem).stride(a.name, a.index)
        elif a.kind == "iteration":
            found[a.parameter] = space(problem).value(a.name, a.index)
        elif a.kind == "axis":
            found[a.parameter] = problem.axes[a.name]
        elif a.kind == "attribute":
            found[a.parameter] = problem.attributes[a.name]
    return found
