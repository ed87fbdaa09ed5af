"""Captured calls on a device without a GPU: arguments, errors, results, order, reports."""

from __future__ import annotations

import collections
import re
import threading

import pytest
import torch
from fake_graph import REFUSED, FakeDevice, FakeDevices

import fusionreg
from fusionreg.core.errors import ArgumentError, LaunchError
from fusionreg.integrations.torch.graphs import Captured
from fusionreg.integrations.torch.graphs.device import Gpu
from fusionreg.integrations.torch.graphs.nodes import Nodes
from fusionreg.integrations.torch.graphs.report import GraphReport, median

Pair = collections.namedtuple("Pair", "left right")


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def capture(device):
    def make(function, *example, **options):
        return fusionreg.capture(function, *example, devices=FakeDevices(device), **options)

    return make


def ramp(*shape, start=0.0):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + start


# --- values ----------------------------------------------------------------------------------------------------------


def test_warms_up_aside_then_records(capture, device):
    calls = []

    def function(x):
        calls.append(device.under_way)
        return x + 1

    run = capture(function, ramp(4))
    assert calls == [False, False, False, True]
    assert [w for w in device.log if w != "synchronize"] == ["aside", "record", "back"]
    assert isinstance(run, Captured) and repr(run).startswith("<captured test_warms_up")


def test_replays_on_new_values(capture):
    run = capture(lambda x, y: x * y, ramp(3, 4), ramp(4))
    for start in (1.0, 5.0):
        x, y = ramp(3, 4, start=start), ramp(4, start=-start)
        assert torch.equal(run(x, y), x * y)
    assert run.report.calls == 2


def test_nested_arguments_and_results(capture):
    def function(pair, rest, *, scale, by):
        return {"sum": pair.left + rest[0]["z"], "all": (pair.right * scale, [by["k"] - 1, None, "word"])}

    z, k = torch.ones(2), torch.zeros(3)
    run = capture(function, Pair(ramp(2), ramp(3)), [{"z": z}], kwargs={"scale": 3, "by": {"k": k}})
    found = run(Pair(ramp(2, start=4), ramp(3, start=5)), [{"z": 2 * z}], scale=3, by={"k": k + 7})
    assert found["sum"].tolist() == [6, 7] and found["all"][0].tolist() == [15, 18, 21]
    assert found["all"][1][0].tolist() == [6, 6, 6] and found["all"][1][1:] == [None, "word"]
    with pytest.raises(ArgumentError, match=r"argument \[1\]\[0\]\['z'\].*shape \[3\] — \[2\]"):
        run(Pair(ramp(2), ramp(3)), [{"z": torch.ones(3)}], scale=3, by={"k": k})
    with pytest.raises(ArgumentError, match="arguments: nested as"):
        run(Pair(ramp(2), ramp(3)), [{"z": z}, {"z": z}], scale=3, by={"k": k})


def test_results_are_the_same_tensors_unless_cloned(capture):
    x = ramp(4)
    plain, cloned = capture(torch.neg, x), capture(torch.neg, x, clone=True)
    first, kept = plain(x), cloned(x)
    second, other = plain(x + 1), cloned(x + 1)
    assert first is second and torch.equal(first, -(x + 1))
    assert torch.equal(kept, -x) and torch.equal(other, -(x + 1)) and plain.outputs is first


def test_cloned_results_that_share_memory_share_it_again(capture):
    def halves(x):
        y = x * 2
        return [y[:2], y[2:], y, 5, x.sum()]

    run = capture(halves, ramp(4), clone=True)
    low, high, whole, number, total = run(ramp(4, start=1))
    assert whole.tolist() == [2, 4, 6, 8] and (number, total.item()) == (5, 10)
    low.zero_()
    high.fill_(9)
    assert whole.tolist() == [0, 0, 9, 9]
    assert run(ramp(4))[2].tolist() == [0, 2, 4, 6]


def test_buffers_can_be_written_directly(capture):
    run = capture(lambda x, scale: x * scale, ramp(4), 2.0)
    (buffer, scale), keywords = run.inputs
    assert scale == 2.0 and not keywords
    buffer.fill_(3)
    assert run().tolist() == [6, 6, 6, 6]
    assert run(buffer, 2.0).tolist() == [6, 6, 6, 6], "the buffer itself is not copied"


def test_expanded_and_transposed_arguments(capture):
    x, row = ramp(4, 3).t(), ramp(4).expand(3, 4)
    run = capture(torch.add, x, row)
    other, shift = ramp(4, 3, start=9).t(), ramp(4, start=1).expand(3, 4)
    assert torch.equal(run(other, shift), other + shift)
    assert run.report.input_bytes == 12 * 4 + 4 * 4, "an axis that is broadcast has one row of memory"
    with pytest.raises(ArgumentError, match="overlaps itself"):
        capture(torch.neg, ramp(6).as_strided((3, 4), (1, 1)))


def test_parameters_are_read_where_they_are(capture):
    weight = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        run = capture(torch.mul, ramp(4), weight)
        weight.mul_(3)
        assert torch.equal(run(ramp(4), weight), 3 * ramp(4))
        with pytest.raises(ArgumentError, match=r"argument 1.*other memory — the very tensor of the capture"):
            run(ramp(4), torch.nn.Parameter(torch.ones(4)))
        weight.data = torch.zeros(4)  # the same object, elsewhere
        with pytest.raises(ArgumentError, match="other memory"):
            run(ramp(4), weight)
    assert run.report.input_bytes == 16


# --- what does not fit -----------------------------------------------------------------------------------------------

MISFITS = {
    "dtype": (lambda x: (x.double(), 2), "argument 0: dtype float64 — float32"),
    "shape": (lambda x: (x[:2], 2), "argument 0: shape [2, 4] — [3, 4]"),
    "rank": (lambda x: (x[0], 2), "argument 0: shape [4] — [3, 4]"),
    "strides": (lambda x: (x.t().contiguous().t(), 2), "argument 0: strides [1, 3] — [4, 1]"),
    "a constant": (lambda x: (x, 3), "argument 1: 3 — 2, fixed at capture"),
    "its type": (lambda x: (x, 2.0), "argument 1: 2.0 — 2, fixed at capture"),
    "a tensor for a constant": (lambda x: (x, x), "argument 1: a tensor float32[3, 4] — 2, fixed at capture"),
    "a constant for a tensor": (lambda x: (2, 2), "argument 0: 2 — a tensor float32[3, 4]"),
    "nested": (lambda x: ([x], 2), "arguments: nested as"),
    "too few": (lambda x: (x,), "arguments: 1 that are not nested — 2 that are not nested"),
}


@pytest.mark.parametrize(("change", "says"), MISFITS.values(), ids=MISFITS)
def test_misfits(capture, change, says):
    run = capture(lambda x, n: x * n, ramp(3, 4), 2)
    with pytest.raises(ArgumentError) as caught:
        run(*change(ramp(3, 4)))
    assert says in str(caught.value) and "cannot replay test_misfits" in str(caught.value)
    assert "GraphPool" in caught.value.next_step
    assert torch.equal(run(ramp(3, 4), 2), 2 * ramp(3, 4)), "nothing was launched, nothing is broken"


@pytest.mark.parametrize(
    ("value", "same", "other"), [(float("nan"), float("nan"), 1.0), (0.0, 0.0, -0.0), (True, True, 1), (1j, 1j, 2j)]
)
def test_constants_are_told_apart_exactly(capture, value, same, other):
    run = capture(lambda x, c: x + 1, ramp(2), value)
    run(ramp(2), same)
    with pytest.raises(ArgumentError, match="fixed at capture"):
        run(ramp(2), other)


def test_a_cpu_tensor_without_axes_is_a_number(capture):
    factor = torch.tensor(3.0)
    run = capture(lambda x, f: x * f, ramp(4), factor)
    assert torch.equal(run(ramp(4), torch.tensor(3.0)), 3 * ramp(4)) and run.report.input_bytes == 16
    factor.fill_(5)
    assert torch.equal(run(ramp(4), torch.tensor(3.0)), 3 * ramp(4)), "the capture has a copy"
    with pytest.raises(ArgumentError, match=r"argument 1: tensor\(5.\) — tensor\(3.\), fixed at capture"):
        run(ramp(4), factor)


def test_gradients_are_refused(capture):
    x = ramp(4).requires_grad_()
    with pytest.raises(ArgumentError, match=r"argument 0 requires grad.*torch.no_grad"):
        capture(torch.neg, x)
    with torch.no_grad():
        run = capture(torch.neg, x)
        assert torch.equal(run(x), -ramp(4))
    with pytest.raises(ArgumentError, match="argument 0 requires grad"):
        run(x)
    assert torch.equal(run(x.detach()), -ramp(4)) and not run.inputs[0][0].requires_grad


def test_results_have_no_history(capture):
    weight = torch.ones(4, requires_grad=True)
    run = capture(lambda x: {"loss": (x * weight).sum()}, ramp(4))
    assert not run(ramp(4))["loss"].requires_grad


def test_written_arguments_are_refused(capture):
    x = ramp(4)
    with pytest.raises(ArgumentError, match="it writes argument 1 in place"):
        capture(lambda a, b: b.view(2, 2).add_(1), ramp(4), x)
    assert torch.equal(x, ramp(4)), "the caller's tensor was never touched"


def test_devices_and_kinds_of_tensor(capture):
    with pytest.raises(ArgumentError, match="tensors on cpu, meta — tensors on one GPU"):
        capture(torch.add, ramp(4), torch.ones(4, device="meta"))
    with pytest.raises(ArgumentError, match="argument 0 is on meta — a tensor on cpu"):
        capture(torch.neg, torch.ones(4, device="meta"))
    with pytest.raises(ArgumentError, match=r"layout torch\.sparse_coo"):
        capture(torch.neg, torch.eye(4).to_sparse())
    with pytest.raises(ArgumentError, match="lazy conjugate"):
        capture(torch.neg, torch.ones(2, dtype=torch.complex64).conj())


@pytest.mark.parametrize(
    "wrong",
    [{"warmup": -1}, {"warmup": "3"}, {"kwargs": [1]}, {"shapes": 3}, {"generators": 3}, {"generators": ["cuda"]}],
)
def test_wrong_options(capture, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ArgumentError, match=re.escape(f".neg: {name} {value!r} — ")):
        capture(torch.neg, ramp(4), **wrong)
    with pytest.raises(ArgumentError, match="a NoneType — a function"):
        capture(None, ramp(4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so it is not refused")
def test_without_a_gpu():
    with pytest.raises(ArgumentError, match="torch finds no GPU"):
        fusionreg.capture(torch.neg, ramp(4))
    with pytest.raises(ArgumentError, match="torch finds no GPU"):
        Gpu(0)


# --- state, errors ---------------------------------------------------------------------------------------------------


def test_generators_and_modes_are_put_back(capture):
    own = torch.Generator().manual_seed(1)
    states = torch.get_rng_state(), own.get_state()

    def function(x):
        seen.append(torch.is_autocast_cache_enabled())
        return x + torch.rand(4) + torch.rand(4, generator=own)

    seen: list[bool] = []
    capture(function, ramp(4), generators=[own])
    assert torch.equal(torch.get_rng_state(), states[0]) and torch.equal(own.get_state(), states[1])
    assert not any(seen) and torch.is_autocast_cache_enabled(), "casts of weights must not outlive their memory"


def test_a_capture_that_fails_leaves_nothing(capture, device):
    device.fails = REFUSED
    with pytest.raises(LaunchError, match="cannot capture it"):
        capture(torch.neg, ramp(4))
    assert torch.is_autocast_cache_enabled() and not device.under_way
    assert torch.equal(capture(torch.neg, ramp(4))(ramp(4)), -ramp(4))


def test_inside_the_callers_own_capture(capture, device):
    run = capture(torch.neg, ramp(4))
    device.under_way = True
    with pytest.raises(LaunchError, match=r"cannot replay.*Call the function itself"):
        run(ramp(4))
    with pytest.raises(LaunchError, match=r"cannot capture.*Call the function itself"):
        capture(torch.neg, ramp(4))


# --- order, memory ---------------------------------------------------------------------------------------------------


def test_replays_of_several_streams_wait_for_each_other(capture, device):
    run = capture(torch.add, ramp(4), ramp(4))
    other = capture(torch.neg, ramp(4), pool=run)
    for stream in ("stream 0", "stream 1", "stream 1", "stream 2"):
        device.current = stream
        run(ramp(4), ramp(4))
    other(ramp(4))
    device.current = "stream 0"
    other(ramp(4))
    waits = [entry for entry in device.log if isinstance(entry, tuple)]
    assert [w[1:] for w in waits] == [
        ("stream 0", "stream 1", 2), ("stream 1", "stream 2", 2), ("stream 2", "stream 0", 1),
    ]  # fmt: skip


def test_graphs_share_a_pool_when_asked(capture, device):
    first = capture(torch.neg, ramp(4))
    capture(torch.neg, ramp(4), pool=first)
    capture(torch.neg, ramp(4), pool="handle")
    capture(torch.neg, ramp(4))
    assert device.pools == [None, first.pool, "handle", None]


def test_replays_from_threads(capture):
    run = capture(lambda x: x * 2 + 1, ramp(1000), clone=True)
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not (run(torch.full((1000,), float(i))) == 2 * i + 1).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# --- reports ---------------------------------------------------------------------------------------------------------


def test_reports(capture):
    run = capture(torch.neg, ramp(1024))
    before = run.report
    assert (before.replayed, before.calls, before.saved) == (None, 0, None) and before.launched > 0
    assert "not timed replayed (0 replays so far)" in str(before)
    run(ramp(1024))
    assert run.report.calls == 1 and run.report.replayed > 0 and not run.report.measured
    measured = run.measure(5)
    assert measured.measured and measured.launched > 0 and measured.replayed > 0 and "in turn" in str(measured)
    assert (measured.input_bytes, measured.pool_bytes) == (4096, 2**21)


def test_a_report_in_words():
    report = GraphReport("step", Nodes(12, 3, 1, 4), 2**21, 3 * 2**30, 100e-6, 8e-6, 7)
    assert report.saved == pytest.approx(0.92)
    assert str(report) == (
        "step: 12 kernels, 4 of them start early, 3 copies or fills, 1 others\n"
        "  host time a call: 100.0 µs launched, 8.0 µs replayed, 92% less (7 replays so far)\n"
        "  memory: 2.0 MiB of input buffers, 3072.0 MiB of the graph's pool"
    )
    assert "no less" in str(GraphReport("step", None, 0, 0, 1e-6, 8e-6))
    assert "100 B of input buffers" in str(GraphReport("step", None, 100, 0))
    assert [median(v) for v in ([], [3.0], [1.0, 4.0], [9.0, 1.0, 2.0])] == [None, 3.0, 2.5, 2.0]
