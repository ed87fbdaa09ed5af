"""Attention as torch's own backends compute it, its gradients and that of sequences one behind the other: part of
:mod:`.library_peers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusionreg.core.ir import Graph, Node

from .peer_attention import PLAIN

try:
    from torch.nn.attention import varlen
except ImportError:  # torch before 2.10
    varlen = None  # type: ignore[assignment]

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


def of_sequences(graph: Graph, node: Node) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The same of sequences that lie one behind the other, forward and backward: torch's ``varlen_attn``, which is
    FlashAttention unless torch prefers another. None for what it does not take, and where there is no GPU."""
    backward = node.op == "fusionreg::VarlenAttentionGrad"
    q, k = (graph.values[name] for name in node.inputs[backward : backward + 2])
    whole = len(graph.nodes) == 1 and {*node.inputs} <= {*graph.inputs}
    plain = whole and not node.attrs.get("softcap") and q.dtype in ("float16", "bfloat16")
    if not plain or varlen is None or not torch.cuda.is_available():
        return
    left, right = (int(node.attrs.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    given = {
        "window_size": (left, 0 if node.attrs.get("is_causal") else right),
        "scale": node.attrs.get("scale"),
        **({"enable_gqa": True} if (q.shape or (0, 0))[1] != (k.shape or (0, 0))[1] else {}),
        **({"return_aux": varlen.AuxRequest(lse=True)} if not backward and len(graph.outputs) > 1 else {}),
    }
    yield "flash", _gradients_of_sequences(given) if backward else _sequences(given)


def _sequences(given: dict[str, Any]) -> Callable[..., Any]:
    longest: dict[int, tuple[int, int]] = {}

    def call(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        if cu_q.data_ptr() not in longest:  # read once: that waits for the device
            longest[cu_q.data_ptr()] = tuple(int(cu.diff().max()) for cu in (cu_q, cu_k))  # type: ignore[assignment]
        return varlen.varlen_attn(q, k, v, cu_q, cu_k, *longest[cu_q.data_ptr()], **given)

    return call


def _gradients_of_sequences(given: dict[str, Any]) -> Callable[..., Any]:
    forward = _sequences(given)
    passed: dict[int, tuple[Any, Any]] = {}

    def call(dy: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, cu_q: Any, cu_k: Any) -> Any:
        if q.data_ptr() not in passed:
            leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
            with torch.enable_grad():
                passed[q.data_ptr()] = leaves, forward(*leaves, cu_q, cu_k)
        leaves, out = passed[q.data_ptr()]
        return torch.autograd.grad(out, leaves, dy, retain_graph=True)

    return call
