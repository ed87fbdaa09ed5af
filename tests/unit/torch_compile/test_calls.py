"""What runs between fused calls: a function that makes the calls of a graph and nothing else."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusionreg.integrations.torch.compile.calls import boxed

A = torch.ops.aten
SEEN: list[Any] = []
LIBRARY = torch.library.Library("fusionreg_calls", "DEF")
LIBRARY.define("probe(Tensor x) -> Tensor")
LIBRARY.impl("probe", lambda x: (SEEN.append(SEEN[0]() is None), x + 1)[1], "CompositeExplicitAutograd")
LIBRARY._register_fake("probe", torch.empty_like)


def traced(f: Callable[..., Any], *given: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(f, tracing_mode="fake")(*given)


def python_calls(f: Callable[[], Any]) -> int:
    """How many functions of Python run."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
    return count - 1  # f itself


def everything(x: torch.Tensor, w: torch.Tensor) -> Any:
    a, b = A.split.Tensor(x @ w, 2, 0)
    kept = A.masked_fill.Scalar(a, a > 0.5, float("-inf"))
    y, mean, _ = A.native_layer_norm(b, [4], None, None, 1e-5)
    total = A.sum.dim_IntList(y, [0], True, dtype=torch.float64)
    made = A.full([2, 4], 1.5, dtype=torch.float32, device=x.device, pin_memory=False)
    return [A.view(kept, [8]), total, A._to_copy(mean, dtype=torch.float16), made + A.slice(x, 0, 0, 4, 2), x]


def test_the_function_gives_what_the_graph_gives() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    module = traced(everything, x, w)
    given = [x, w]
    got, expected = boxed(module)(given), module(x, w)
    assert given == []
    for mine, other in zip(got, expected, strict=True):
        assert torch.equal(mine, other) and mine.dtype == other.dtype and mine.stride() == other.stride()
    assert got[-1] is x


def test_no_python_runs_between_the_calls() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    module = traced(lambda x, w: (((x @ w) * 2.0 + x).view(16).sigmoid(), x.sum(0, True)), x, w)
    run = boxed(module)
    assert python_calls(lambda: run([x, w])) == 1
    assert python_calls(lambda: module(x, w)) > 6
    called = {id(value) for value in run.__globals__.values()}
    targets = [n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert not any(id(t._op) in called for t in targets), "torch's own functions, as eager calls them"


def test_a_function_that_would_do_something_else_is_not_called() -> None:
    """``torch.mul`` by a number is another overload; a default device is for nobody's tensors here."""
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 4))
        graph = torch.fx.Graph()
        a = graph.placeholder("x")
        twice = graph.call_function(A.mul.Scalar, (a, 2.0))
        made = graph.call_function(A.ones.default, ([2, 4],))
        for node in (a, twice, made):
            node.meta["val"] = x
        graph.output((twice, made))
    names = boxed(torch.fx.GraphModule({}, graph)).__globals__  # type: ignore[attr-defined]
    called = [id(value) for value in names.values()]
    assert id(A.mul.Scalar._op) in called and id(A.ones.default._op) in called


def test_a_value_is_let_go_of_after_its_last_use() -> None:
    x = torch.ones(3)
    module = traced(lambda x: torch.ops.fusionreg_calls.probe((x * 2.0) + 1.0), x)
    given = [torch.ones(3)]
    SEEN[:] = [weakref.ref(given[0])]
    assert torch.equal(boxed(module)(given), torch.full((3,), 4.0))
    assert SEEN[1] is True


def test_other_modules_run_as_they_are() -> None:
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    assert torch.equal(boxed(module)([torch.tensor([-1.0, 2.0])]), torch.tensor([0.0, 2.0]))
