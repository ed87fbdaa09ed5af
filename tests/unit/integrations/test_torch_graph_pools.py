"""Graphs by signature: exact keys, a bounded number, shared memory; compiled graphs that fall back where they must."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from fake_graph import REFUSED, FakeDevice, FakeDevices

import fusionreg
from fusionreg.core.errors import ArgumentError
from fusionreg.integrations.torch.graphs import graphed
from fusionreg.integrations.torch.graphs.leaves import flatten, signature, unflatten


@pytest.fixture
def device():
    return FakeDevice()


def shaped(device, function, limit=3, **options):
    pool = fusionreg.GraphPool(limit)
    return fusionreg.capture(function, shapes=pool, devices=FakeDevices(device), **options), pool


def recorded(device) -> int:
    return device.log.count("record")


# --- signatures ------------------------------------------------------------------------------------------------------

X = torch.zeros(4, 6)
DIFFERENT = {
    "shape": ((X,), (torch.zeros(6, 4),)),
    "strides": ((X,), (torch.zeros(6, 4).t(),)),
    "dtype": ((X,), (X.int(),)),
    "device": ((X,), (X.to("meta"),)),
    "count": ((X,), (X, X)),
    "nesting": ((X, X), ([X, X],)),
    "list and tuple": (([X],), ((X,),)),
    "keys": (({"a": X},), ({"b": X},)),
    "a number": ((X, 1), (X, 2)),
    "int and float": ((X, 1), (X, 1.0)),
    "int and bool": ((X, 1), (X, True)),
    "signs of zero": ((X, 0.0), (X, -0.0)),
    "signs of a complex zero": ((X, complex(1, 0.0)), (X, complex(1, -0.0))),
    "none": ((X, None), (X, 0)),
    "numbers as tensors": ((X, torch.tensor(1.0)), (X, torch.tensor(2.0))),
    "dtypes of such": ((X, torch.tensor(1.0)), (X, torch.tensor(1.0, dtype=torch.float64))),
    "a number and its tensor": ((X, 1.0), (X, torch.tensor(1.0))),
    "words": ((X, "a"), (X, "b")),
}


def key(args, kwargs=None):
    return signature(*flatten(args, kwargs or {}))


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_keys_differ(one, other):
    assert key(one) != key(other) and key(one) == key(one) and hash(key(one)) == hash(key(one))


def test_keys_that_are_equal():
    assert key((X, torch.tensor(math.nan))) == key((X, torch.tensor(math.nan)))
    assert key((torch.zeros(4, 6), math.nan)) == key((torch.ones(4, 6), float("nan")))
    assert key((X,)) != key((), {"x": X})
    weight = torch.nn.Parameter(torch.zeros(3))
    elsewhere = torch.nn.Parameter(torch.zeros(3))
    args = [flatten((w,), {}) for w in (weight, elsewhere)]
    assert signature(*args[0], stays={0}) != signature(*args[1], stays={0}), "what is read in place has an address"
    with torch.no_grad():
        assert signature(*args[0]) == signature(*args[1])
    structure, leaves = flatten(([X, {"k": 2}],), {"word": "w"})
    assert unflatten(structure, leaves) == (([X, {"k": 2}],), {"word": "w"})


# --- pools -----------------------------------------------------------------------------------------------------------


def test_one_graph_per_signature(device):
    run, pool = shaped(device, lambda x, n=2: x * n)
    for rows in (2, 5, 2, 5):
        x = torch.full((rows, 3), float(rows))
        assert torch.equal(run(x), 2 * x) and torch.equal(run(x, n=3), 3 * x)
    assert len(pool) == 3 and pool.limit == 3
    run.pool.clear()
    assert torch.equal(run(X, n=4), 4 * X) and len(pool) == 1


def test_the_graph_used_longest_ago_goes(device):
    run, pool = shaped(device, torch.neg, limit=2)

    def rows():
        return [layouts for layouts, _ in pool.report.graphs]

    run(torch.ones(1)), run(torch.ones(2)), run(torch.ones(1))
    assert rows() == ["float32[2]", "float32[1]"]
    run(torch.ones(3))
    assert rows() == ["float32[1]", "float32[3]"] and recorded(device) == 3
    run(torch.ones(1))
    assert recorded(device) == 3
    run(torch.ones(2))
    report = pool.report
    assert (report.captured, report.evicted, recorded(device)) == (4, 2, 4)
    assert str(report).startswith("2 of at most 2 graphs, 4 captured, 2 evicted\nfloat32[1]\n  ")
    assert ".neg: 2 kernels" in str(report)


def test_graphs_of_a_pool_share_memory_and_results_are_copies(device):
    run, _ = shaped(device, lambda x: x + 1)
    kept = run(torch.zeros(2))
    run(torch.zeros(3))
    run(torch.full((2,), 5.0))
    assert kept.tolist() == [1, 1]
    assert device.pools[0] is None and device.pools[1] == f"pool {id(device)}"


def test_several_functions_in_one_pool(device):
    pool = fusionreg.GraphPool(2)
    one, two = (fusionreg.capture(f, X, shapes=pool, devices=FakeDevices(device)) for f in (torch.neg, torch.abs))
    assert recorded(device) == 2, "an example captures at once"
    x = torch.randn(4, 6)
    assert torch.equal(one(x), -x) and torch.equal(two(x), x.abs()) and recorded(device) == 2
    one(X[0])
    assert pool.report.evicted == 1


def test_modes_have_graphs_of_their_own(device):
    run, pool = shaped(device, lambda x: x * (2 if torch.is_grad_enabled() else 3))
    assert run(torch.ones(1)).item() == 2
    with torch.no_grad():
        assert run(torch.ones(1)).item() == 3
    with torch.inference_mode():
        assert run(torch.ones(1)).item() == 3
    assert run(torch.ones(1)).item() == 2 and len(pool) == 3


def test_pools_refuse(device):
    for limit in (0, "8"):
        with pytest.raises(ArgumentError, match=f"limit {limit!r} — a number, at least 1"):
            fusionreg.GraphPool(limit)
    with pytest.raises(ArgumentError, match="pool beside shapes"):
        fusionreg.capture(torch.neg, X, shapes=fusionreg.GraphPool(), pool="handle", devices=FakeDevices(device))
    run, pool = shaped(device, torch.neg)
    run(X)
    with pytest.raises(ArgumentError, match="requires grad"):
        run(X.clone().requires_grad_())
    assert len(pool) == 1 and torch.equal(run(X), -X)


# --- compiled graphs -------------------------------------------------------------------------------------------------


def compiled(device, function, *example, **options):
    with torch.no_grad():
        return graphed(function, example, devices=FakeDevices(device), kind="cpu", **options)


def linear(x, weight, factor):
    return (x @ weight * factor, factor)


def test_compiled_graphs_watch_capture_replay(device):
    weight = torch.nn.Parameter(torch.randn(6, 2))
    run = compiled(device, linear, X, weight, 2)
    with torch.no_grad():
        for i in range(4):
            x = torch.randn(4, 6)
            found = run(x, weight, 2)
            torch.testing.assert_close(found, (x @ weight * 2, 2))
            assert recorded(device) == (i > 0) and isinstance(found, tuple)
        weight.mul_(3)
        torch.testing.assert_close(run(x, weight, 2)[0], x @ weight * 2)
        torch.testing.assert_close(run(x, weight, 5)[0], x @ weight * 5)
        weight.data = torch.randn(6, 2)
        torch.testing.assert_close(run(x, weight, 2)[0], x @ weight * 2)
    assert recorded(device) == 1 and not run.reason and run.report.graphs[0][1].calls == 4


def test_results_of_compiled_graphs_are_new(device):
    run = compiled(device, lambda x: [x + 1], torch.zeros(2))
    with torch.no_grad():
        results = [run(torch.full((2,), float(i)))[0] for i in range(4)]
    assert [r.tolist() for r in results] == [[i + 1.0] * 2 for i in range(4)]


UNSAFE = {
    "in place": (lambda x: (x.add_(1),), "it writes input 0 in place"),
    "through a view": (lambda x: (x[1:].zero_().sum(),), "it writes input 0 in place"),
    "behind torch's back": (lambda x: (x.numpy().__iadd__(1).sum(),), "it writes input 0 in place"),
    "the input itself": (lambda x: (x, x + 1), "a result is an input or a view of one"),
    "a view": (lambda x: (x[:2],), "a result is an input or a view of one"),
}


@pytest.mark.parametrize(("function", "reason"), UNSAFE.values(), ids=UNSAFE)
def test_unsafe_graphs_run_as_they_are(device, function, reason):
    run = compiled(device, function, torch.ones(4))
    with torch.no_grad():
        for _ in range(3):
            x, y = torch.ones(4), torch.ones(4)
            assert str(run(x)) == str(function(y)) and torch.equal(x, y), "exactly one call had its effect"
    assert run.reason == reason and recorded(device) == 0 and run.report.refused == ((reason, 2),)
    assert f"2 calls without a graph: {reason}" in str(run.report)


@pytest.mark.parametrize("mutated", [(), (1,)], ids=["found", "told"])
def test_state_that_stays_is_written_once_a_call(device, mutated):
    def count(x, total):
        total += x
        return (total * 2,)

    state = torch.zeros(2)
    torch._dynamo.mark_static_address(state)
    device.untouched.append(state)
    run = compiled(device, count, torch.ones(2), state, mutated=mutated)
    with torch.no_grad():
        for i in range(1, 4):
            assert run(torch.ones(2), state)[0].tolist() == [2 * i] * 2 and state.tolist() == [i] * 2
    assert not run.reason and recorded(device) == 1


def test_reasons_that_are_known_before_the_first_call(device):
    x = torch.ones(4, requires_grad=True)
    assert "requires grad" in graphed(torch.neg, [x], devices=FakeDevices(device), kind="cpu").reason
    assert compiled(device, torch.neg, x).reason == ""
    assert compiled(device, torch.neg, torch.ones(4), mutated=[0]).reason == "it writes input 0 in place"
    apart = compiled(device, torch.add, torch.ones(4), torch.ones(4, device="meta"))
    assert "inputs are on cpu and meta" in apart.reason
    assert "no device" in compiled(device, lambda: torch.ones(4)).reason
    run = graphed(torch.neg, [torch.ones(4)])
    assert "inputs are on cpu" in run.reason and run(torch.ones(4)).tolist() == [-1] * 4


def test_a_call_that_records_gradients_runs_as_it_is(device):
    run = compiled(device, lambda x: (x * 3,), torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        x.grad = None
        run(x)[0].sum().backward()
        assert x.grad.tolist() == [3, 3]
    assert recorded(device) == 0 and not run.reason
    with torch.no_grad():
        assert [run(torch.ones(2))[0].tolist() for _ in range(3)] == [[3, 3]] * 3
    assert recorded(device) == 1


def test_a_capture_that_fails_is_not_tried_again(device):
    run = compiled(device, lambda x: (x + 1,), torch.zeros(2))
    device.fails = REFUSED
    with torch.no_grad():
        for i in range(4):
            assert run(torch.full((2,), float(i)))[0].tolist() == [i + 1] * 2
    assert recorded(device) == 1 and "the driver says no" in run.reason


def test_inside_the_callers_own_capture_the_function_runs(device):
    run = compiled(device, lambda x: (x + 1,), torch.zeros(2))
    with torch.no_grad():
        for _ in range(3):
            run(torch.zeros(2))
        device.under_way = True
        calls = device.log.count("replay")
        assert run(torch.zeros(2))[0].tolist() == [1, 1] and device.log.count("replay") == calls


def test_overlapping_inputs_run_as_they_are(device):
    run = compiled(device, lambda x: (x + 1,), torch.zeros(2, 3))
    x = torch.arange(6.0).as_strided((2, 3), (1, 1))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(x)[0], x + 1)
        assert run(torch.zeros(2, 3))[0].sum() == 6 and not run.reason
    assert "overlaps itself" in run.report.refused[0][0]


def test_behind_dynamo(device):
    """As a backend of torch.compile: parameters arrive as inputs and stay, batches are copied, shapes have graphs."""
    made = []

    def backend(module, inputs):
        made.append(graphed(module, inputs, devices=FakeDevices(device), kind="cpu"))
        return made[-1]

    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.BatchNorm1d(5)).eval()
    run = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (4, 4, 4, 7, 7, 7):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(run(x), model(x))
        model[0].weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))
    assert len(made) == 1 and not made[0].reason
    (first, _), (second, graph) = made[0].report.graphs
    assert "float32[4, 6]" in first and "float32[7, 6]" in second and graph.calls == 3
    assert graph.input_bytes == 7 * 6 * 4, "neither parameters nor buffers are copied"
    model.train()
    run(torch.randn(4, 6)).sum().backward()
    assert "requires grad" in made[-1].reason and model[0].weight.grad is not None


def test_a_pool_used_by_threads(device):
    run, pool = shaped(device, lambda x: x * 2, limit=2)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for i in range(30):
            rows = (seed + i) % 3 + 1
            if not (run(torch.full((rows,), float(seed))) == 2 * seed).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    report = pool.report
    assert not wrong and len(pool) == 2 and report.captured - report.evicted == 2
