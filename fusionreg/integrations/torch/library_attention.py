"""Gradients of attention as torch's own backends compute them: part of :mod:`.library_peers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusionreg.core.ir import Graph, Node

from .peer_attention import PLAIN

#: Name of the competitor → the backend.
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def gradients(graph: Graph, node: Node) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each backend's name, and its gradients as a function of the node's inputs. None for what torch's function does
    not take, and where there is no GPU: the backends have no other device."""
    q, k, v = (graph.values[name] for name in node.inputs[1:4])
    shapes = [tuple(x.shape or ()) for x in (q, k, v)]
    whole = len(graph.nodes) == 1 and {*node.inputs} <= {*graph.inputs} and len(node.inputs) == 6
    causal = bool(node.attrs.get("is_causal"))
    plain = all(node.attrs.get(name, value) == value for name, value in PLAIN.items())
    if not whole or not plain or q.dtype not in ("float16", "bfloat16") or not torch.cuda.is_available():
        return
    if causal and shapes[0][2] != shapes[1][2]:
        return
    given = {"is_causal": causal, "scale": node.attrs.get("scale"), "enable_gqa": shapes[0][1] != shapes[1][1]}
    for name, backend in _BACKENDS.items():
        yield name, _of(backend, given)


def _of(backend: SDPBackend, given: dict[str, Any]) -> Callable[..., Any]:
    """The forward pass of each set of arrays runs once, at its first call; what it saved serves all further ones."""
    passed: dict[int, tuple[Any, Any]] = {}

    def call(dy: Any, q: Any, k: Any, v: Any, y: Any, lse: Any) -> Any:
        if q.data_ptr() not in passed:
            leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
            with torch.enable_grad(), sdpa_kernel(backend):
                passed[q.data_ptr()] = leaves, F.scaled_dot_product_attention(*leaves, **given)
        leaves, out = passed[q.data_ptr()]
        return torch.autograd.grad(out, leaves, dy, retain_graph=True)

    return call
