"""cuDNN's graphs through its Python frontend, where that is installed: graphs of tensors that are given by address.

https://docs.nvidia.com/deeplearning/cudnn/frontend. The frontend finds libcudnn itself: in the environment's packages,
or as torch has loaded it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Any

from fusionreg.core.errors import LaunchError, MissingDependencyError, UnsupportedError
from fusionreg.core.problem import Tensor

#: The oldest frontend that these calls are known to work with.
OLDEST = (1, 32)

#: Dtype → its name in the frontend.
DATA_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}


class Cudnn:
    """The frontend's module, with a handle for each device. Its handles carry the stream: one call at a time."""

    def __init__(self, module: Any) -> None:
        self.module, self.lock = module, Lock()
        self._handles: dict[int, Any] = {}

    def version(self) -> str:
        return f"cuDNN {self.module.backend_version()}, frontend {self.module.__version__}"

    def handle(self, device: int) -> Any:
        """That of the device, whose context is current."""
        if device not in self._handles:
            self._handles[device] = self.module.create_handle()
        return self._handles[device]

    def data_type(self, name: str) -> Any:
        return getattr(self.module.data_type, DATA_TYPES[name])


@cache
def cudnn() -> Cudnn:
    """:class:`MissingDependencyError` where the frontend is not installed, too old, or has no library."""
    try:
        import cudnn as module

        found = tuple(int(n) for n in re.findall(r"\d+", module.__version__)[:2])
        module.backend_version()
    except Exception as e:  # no module, or none that can be loaded here: ImportError, OSError, RuntimeError
        raise _missing(f"{type(e).__name__}: {e}") from e
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise _missing(f"the frontend is {module.__version__}, and {oldest} is the oldest that will do")
    return Cudnn(module)


def _missing(why: str) -> MissingDependencyError:
    return MissingDependencyError(
        "cannot call", "cuDNN", why, "its Python frontend", "Install nvidia-cudnn-frontend and nvidia-cudnn-cu13"
    )


class Graph:
    """One graph of cuDNN on the tensors of one problem. Only addresses differ from call to call.

    Args:
        tensors: by name, in the order in which their addresses come.
        make: given the frontend's graph and its tensors of the inputs by name, adds the operation; returns what it
            gives by the names of the outputs.
        outputs: names of those.

    Raises: :class:`UnsupportedError` where cuDNN has no plan for it within ``workspace`` bytes.
    """

    def __init__(
        self,
        library: Cudnn,
        device: int,
        tensors: Mapping[str, Tensor],
        outputs: Sequence[str],
        make: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
        workspace: int,
        whom: str,
    ) -> None:
        self.library, self.whom = library, whom
        try:
            with library.lock:
                self._handle = library.handle(device)
                self._build(tensors, outputs, make, workspace)
        except Exception as e:  # the frontend has errors of its own, and those of its C++ part
            said = f"cuDNN says {str(e).strip().partition(chr(10))[0][:300]}"
            raise UnsupportedError("cannot prepare", whom, said, "a problem that it has a plan for") from e

    def _build(
        self, tensors: Mapping[str, Tensor], outputs: Sequence[str],
        make: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]], workspace: int,
    ) -> None:  # fmt: skip
        module, kind = self.library.module, self.library.data_type
        single = kind("float32")
        graph = module.pygraph(
            io_data_type=kind(next(iter(tensors.values())).dtype), intermediate_data_type=single,
            compute_data_type=single, handle=self._handle,
        )  # fmt: skip
        given = {
            name: graph.tensor(name=name, dim=_four(t.shape), stride=_four(t.strides), data_type=kind(t.dtype))
            for name, t in tensors.items()
            if name not in outputs
        }
        made = make(graph, given)
        for name in outputs:
            t, result = tensors[name], made[name]
            result.set_output(True).set_dim(_four(t.shape)).set_stride(_four(t.strides))
            result.set_data_type(kind(t.dtype))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([module.heur_mode.A, module.heur_mode.FALLBACK])
        graph.deselect_workspace_greater_than(workspace)
        graph.check_support()
        graph.build_plans()
        self.workspace = int(graph.get_workspace_size())
        if self.workspace > workspace:
            raise ValueError(f"the plan takes {self.workspace} bytes of scratch memory, {workspace} are there")
        self._graph, self._ids = graph, [{**given, **made}[name].get_uid() for name in tensors]

    def __call__(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
        library = self.library
        try:
            with library.lock:
                library.module.set_stream(handle=self._handle, stream=stream)
                self._graph.execute(dict(zip(self._ids, pointers, strict=True)), workspace, handle=self._handle)
        except Exception as e:
            raise LaunchError("cannot launch", self.whom, f"cuDNN says {e}", "a call that it takes") from e


def _four(numbers: Sequence[int]) -> list[int]:
    """Of a tensor of four axes; cuDNN's statistics have a last one of extent 1."""
    return [*numbers, 1][:4]
