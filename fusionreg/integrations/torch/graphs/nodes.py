"""What a CUDA graph consists of, asked of the driver while it is being captured."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from fusionreg.core.runtime.driver import driver

#: ``CUgraphNodeType`` → a word.
_KINDS = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty", 6: "event", 7: "event"}
_ACTIVE, _PROGRAMMATIC = 1, 1
_P = ctypes.POINTER(ctypes.c_size_t)
_SIGNATURES: dict[str, list[Any]] = {
    "cuStreamGetCaptureInfo_v2": [ctypes.c_void_p] * 6,
    "cuGraphGetNodes": [ctypes.c_void_p, ctypes.c_void_p, _P],
    "cuGraphNodeGetType": [ctypes.c_void_p, ctypes.c_void_p],
    "cuGraphChildGraphNodeGetGraph": [ctypes.c_void_p, ctypes.c_void_p],
    "cuGraphGetEdges_v2": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, _P],
}


@dataclass(frozen=True, slots=True)
class Nodes:
    """How many nodes of each kind a graph has, those of child graphs among them.

    Attributes:
        kernels: kernel launches.
        copies: memory copies and fills.
        others: all else (host functions, events, empty nodes).
        programmatic: dependencies between kernels that let the later one start early.
    """

    kernels: int = 0
    copies: int = 0
    others: int = 0
    programmatic: int = 0


def of_capture(stream: int) -> Nodes | None:
    """The nodes that are in the graph so far which ``stream`` is being captured into; None where the driver is silent.

    It must be asked before the capture ends: torch keeps the executable graph alone.
    """
    try:
        library = driver().library
        functions = {name: _function(library, name, arguments) for name, arguments in _SIGNATURES.items()}
    except AttributeError:  # a driver before CUDA 12.3
        return None
    status, graph = ctypes.c_int(), ctypes.c_void_p()
    code = functions["cuStreamGetCaptureInfo_v2"](
        stream, ctypes.byref(status), None, ctypes.byref(graph), None, None
    )
    return None if code or status.value != _ACTIVE else _count(functions, graph.value)


def _function(library: Any, name: str, arguments: list[Any]) -> Any:
    """A function of the driver under a prototype of our own: that of the library object is for others."""
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)((name, library))


def _count(functions: dict[str, Any], graph: int | None) -> Nodes | None:
    count = ctypes.c_size_t()
    if functions["cuGraphGetNodes"](graph, None, ctypes.byref(count)):
        return None
    nodes = (ctypes.c_void_p * max(1, count.value))()
    if count.value and functions["cuGraphGetNodes"](graph, nodes, ctypes.byref(count)):
        return None
    found = {"kernel": 0, "copy": 0, "other": 0}
    programmatic = _programmatic(functions, graph)
    for node in nodes[: count.value]:
        kind = ctypes.c_int()
        if functions["cuGraphNodeGetType"](node, ctypes.byref(kind)):
            return None
        word = _KINDS.get(kind.value, "other")
        child = ctypes.c_void_p()
        if word == "graph" and not functions["cuGraphChildGraphNodeGetGraph"](node, ctypes.byref(child)):
            inner = _count(functions, child.value)
            if inner is not None:
                found["kernel"] += inner.kernels
                found["copy"] += inner.copies
                found["other"] += inner.others
                programmatic += inner.programmatic
                continue
        found[word if word == "kernel" else "copy" if word in ("memcpy", "memset") else "other"] += 1
    return Nodes(found["kernel"], found["copy"], found["other"], programmatic)


def _programmatic(functions: dict[str, Any], graph: int | None) -> int:
    count = ctypes.c_size_t()
    get = functions["cuGraphGetEdges_v2"]
    if get(graph, None, None, None, ctypes.byref(count)) or not count.value:
        return 0
    n = count.value
    ends = [(ctypes.c_void_p * n)() for _ in range(2)]
    data = (ctypes.c_uint8 * (8 * n))()  # CUgraphEdgeData: from_port, to_port, type, five reserved bytes
    if get(graph, *ends, data, ctypes.byref(count)):
        return 0
    return sum(data[8 * i + 2] == _PROGRAMMATIC for i in range(n))
