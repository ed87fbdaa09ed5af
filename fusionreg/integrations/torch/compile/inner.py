"""Who runs what is not fused. Both compile what autograd makes of a graph, its forward and its backward part each by
itself: no gradients are left to ask for there, so that what has no backward fusion is fused first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fusionreg
from fusionreg.core.errors import ArgumentError

from .. import operators
from .calls import boxed

if TYPE_CHECKING:
    from .options import Options

#: A part, and which it is (``forward``, ``backward``, ``inference``) → the same with fused calls.
Refit = Callable[[torch.fx.GraphModule, str], torch.fx.GraphModule]


def eager(gm: torch.fx.GraphModule, inputs: Sequence[Any], refit: Refit | None) -> Callable[..., Any]:
    """The graph's callable: torch's own kernels, one by one."""

    def compiler(stage: str) -> Callable[..., Any]:
        return lambda module, inputs: boxed(refit(module, stage) if refit else module)

    made = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference")
    )
    return made(gm, list(inputs))


def tuned(options: Options, mode: str | None) -> bool:
    """Whether Inductor would take the fastest of many products, its own among them: those of Triton have what follows
    them in one kernel."""
    if options.inner != "inductor":
        return False
    from torch._inductor import config

    patches = _settings(options, mode)
    return any(patches.get(name, getattr(config, name)) for name in ("max_autotune", "max_autotune_gemm"))


def _settings(options: Options, mode: str | None) -> dict[str, Any]:
    """What Inductor is asked to set.

    Raises: :class:`ArgumentError` for options that it has not, and values of other types than it takes.
    """
    try:
        return dict(torch._TorchCompileInductorWrapper(mode, dict(options.inner_options), None).config)
    except (AttributeError, RuntimeError) as error:
        found = f"inner_options {dict(options.inner_options)!r}: {str(error).partition(', known options')[0]}"
        expected = "names and types of torch._inductor.config"
        raise ArgumentError("cannot compile", "backend fusionreg", found, expected) from error


def inductor(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, mode: str | None, refit: Refit | None, key: str
) -> Callable[..., Any]:
    """The graph's callable, compiled by Inductor; as ``torch.compile`` alone does it where there is no ``refit``.

    Its cache of graphs holds good: it is asked for graphs that have the fused calls in them already, under a key that
    ``key`` is part of. That of autograd is not asked: what it would give back was matched in another process, and may
    call operators that nobody has registered in this one.
    """
    compiler: Any = lookup_backend("inductor")
    patches = _settings(options, mode)
    if refit is None:
        return compiler(gm, list(inputs), config_patches=patches)

    def compile_part(module: torch.fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        stage = "backward" if given.get("is_backward") else "inference" if given.get("is_inference") else "forward"
        return compile_fx_inner(_prepared(refit(module, stage)), inputs, **given)

    patches |= _marked(patches, key)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return compiler(gm, list(inputs), inner_compile=compile_part, config_patches=patches)


#: Where Inductor takes passes from, each of which has a say in the keys of its caches.
_SLOTS = (
    "post_grad_custom_post_pass", "post_grad_custom_pre_pass", "joint_custom_post_pass", "joint_custom_pre_pass"
)  # fmt: skip


def _marked(patches: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Settings that make ``key`` part of the key of everything that is compiled; nothing of the user's gives way."""
    from torch._inductor import config

    for slot in _SLOTS:
        if not patches.get(slot, getattr(config, slot)):
            return {slot: _mark(key)}
    return {"fx_graph_cache": False, "fx_graph_remote_cache": False}


@cache
def _mark(key: str) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Mark(CustomGraphPass):
        """Changes nothing: the calls are in the graph already."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> str:
            return key

    return Mark()


@cache
def _sources() -> str:
    """A digest of what operators do while they are traced: it is in compiled graphs, and must not outlive a change."""
    found = hashlib.sha256(fusionreg.__version__.encode())
    for file in sorted(Path(operators.__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def key_of(registry: Any, options: Options) -> str:
    """What compiled graphs depend on beside what is in them: this package, the fusions, how they were chosen."""
    made = operators.Operators.of(registry)
    text = "\n".join((_sources(), made.digest, options.policy, options.device))
    return hashlib.sha256(text.encode()).hexdigest()


_ATEN = torch.ops.aten
#: What stands around fused calls, and Inductor wants in the parts that it has taken everything else apart into.
_COMPOSITE = frozenset(
    (
        _ATEN.to.dtype, _ATEN._to_copy.default, _ATEN.linear.default, _ATEN.matmul.default, _ATEN.transpose.int,
        _ATEN.reshape_as.default,
    )
)  # fmt: skip


#: What a traced call keeps of its operands, by torch's name.
_TRACED = "eager_input_vals"
#: Where torch's own operators live: Inductor knows what layouts those want.
_BUILT_IN = frozenset(("aten", "prim", "prims"))


def _prepared(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """In place: such calls by what they are made of; and beside each operator that wants its operands as they were
    traced, how those lie, which Inductor does not look up."""
    from torch._inductor.decomposition import select_decomp_table

    graph = module.graph
    found = [n for n in graph.nodes if n.op == "call_function" and n.target in _COMPOSITE]
    given = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    placed = [n for n in graph.nodes if _foreign(n.target) and _TRACED not in n.meta]
    if not found and not placed:
        return module
    with torch.no_grad():
        FakeTensorProp(module, detect_fake_mode(given)).propagate_dont_convert_inputs(*given)
        for node in placed:
            node.meta[_TRACED] = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        for node in found:
            inner = make_fx(_call(node), select_decomp_table())(*(n.meta["val"] for n in node.all_input_nodes)).graph
            values = dict(zip(inner.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
            with graph.inserting_before(node):
                for part in inner.nodes:
                    if part.op == "call_function":
                        values[part] = graph.node_copy(part, values.__getitem__)
            (end,) = inner.find_nodes(op="output")
            node.replace_all_uses_with(values[end.args[0]])
            graph.erase_node(node)
    module.recompile()
    return module


def _foreign(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _BUILT_IN


def _call(node: torch.fx.Node) -> Callable[..., Any]:
    """A node as a function of the values of its operands."""
    target: Any = node.target

    def run(*values: Any) -> Any:
        known = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
        return target(*args, **kwargs)

    return run


__all__ = ["Refit", "eager", "inductor", "key_of", "tuned"]
