"""CUDA graphs on a real device: values, random numbers, training, errors inside a capture, streams, lifetimes."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import plugin_kit
import pytest

import fusionreg
from fusionreg.api import Registry
from fusionreg.core.cache import Cache
from fusionreg.core.errors import ArgumentError, LaunchError
from fusionreg.core.runtime import Runtime
from fusionreg.core.spec import AttributeSpec, FusionSpec, KernelSpec

torch = pytest.importorskip("torch", reason="graphs are captured through torch")
pytestmark = pytest.mark.gpu

FUSION = "acme.add_relu"

#: y = dropout(x), eight elements to a thread, which share a block of random words.
DROPOUT = """\
{{ include("philox.cuh") }}
{{ signature }} {
  const long long block = blockIdx.x * 256LL + threadIdx.x, first = block * 8;  // first: [M N], row-major
  if (first >= M * N) return;
  const fr::Dropout dropout(rng, p);
  unsigned words[4];
  dropout.draw(block, words);
  for (int j = 0; j < 8 && first + j < M * N; ++j)
    y[first + j] = fr::from_float<T>(dropout.apply(fr::to_float(x[first + j]), words, j));
}
"""


@pytest.fixture
def runtime(tmp_path):
    found = plugin_kit.catalog(tmp_path, {"k.cu.j2": plugin_kit.ADD_RELU}, plugin_kit.add_relu())
    return Runtime(found, cache=Cache(tmp_path / "cache"))


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(device="cuda")


@pytest.fixture
def dropout(tmp_path):
    """A fused dropout that draws its seed and offset as ``registry.rng`` does."""
    spec = FusionSpec(
        api=1, name="acme.dropout", pattern="y = fusionreg.Dropout(x, rng, p=p)",
        inputs={"x": "T[... M N]", "rng": "int64[2]"}, outputs={"y": "T[... M N]"}, dtypes={"T": ("bfloat16",)},
        attributes={"p": AttributeSpec(type="float", default=0.5)},
        kernels=[KernelSpec(name="eight", template="k.cu.j2", grid="ceildiv(M * N, 2048)", block="256")],
    )  # fmt: skip
    registry = Registry(plugin_kit.catalog(tmp_path, {"k.cu.j2": DROPOUT}, spec), device="cuda")

    def function(x):
        return registry.call("acme.dropout", x, registry.rng(x), p=0.5)

    yield function
    assert dict(registry.runtime.kernels_used).keys() == {"acme.dropout/eight"}, "the fused kernel ran"


def chain(runtime, times=4):
    def run(x, bias):
        for _ in range(times):
            x = runtime.call(FUSION, x, bias)
        return x

    return run


def usable() -> None:
    """The device, its generator and its allocator work as ever, and nothing is being captured."""
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.rand(1000, device="cuda").sum().item() > 0
    assert torch.zeros(1 << 20, device="cuda").sum().item() == 0
    torch.cuda.synchronize()


# --- values ----------------------------------------------------------------------------------------------------------


def test_new_values_at_every_replay(runtime):
    x, bias = torch.randn(64, 256, device="cuda"), torch.randn(256, device="cuda")
    run = fusionreg.capture(chain(runtime), x, bias)
    for _ in range(3):
        x, bias = torch.randn(64, 256, device="cuda"), torch.randn(256, device="cuda")
        right = x
        for _ in range(4):
            right = (right + bias).relu()
        assert torch.equal(run(x, bias), right)
    assert run.report.nodes.kernels == 4 and run.report.calls == 3


def test_nested_arguments_and_results(runtime):
    def function(pair, *, bias, twice):
        y = runtime.call(FUSION, pair["a"], bias)
        return {"y": y, "rest": [pair["b"] * (2 if twice else 1), "word"]}

    a, b, bias = (torch.randn(8, 64, device="cuda") for _ in range(3))
    run = fusionreg.capture(function, {"a": a, "b": b}, kwargs={"bias": bias[0], "twice": True})
    a, b = torch.randn(8, 64, device="cuda"), torch.randn(8, 64, device="cuda")
    found = run({"a": a, "b": b}, bias=bias[1], twice=True)
    assert torch.equal(found["y"], (a + bias[1]).relu()) and torch.equal(found["rest"][0], 2 * b)
    assert found["rest"][1] == "word"
    with pytest.raises(ArgumentError, match=r"twice.*False.*True, fixed at capture"):
        run({"a": a, "b": b}, bias=bias[1], twice=False)


def test_results_are_overwritten_unless_cloned(runtime):
    x, bias = torch.ones(8, 64, device="cuda"), torch.zeros(64, device="cuda")
    plain, cloned = fusionreg.capture(chain(runtime), x, bias), fusionreg.capture(chain(runtime), x, bias, clone=True)
    first, kept = plain(x, bias), cloned(x, bias)
    second = plain(3 * x, bias)
    cloned(3 * x, bias)
    assert first is second and (first == 3).all() and (kept == 1).all()


def test_broadcast_and_strided_arguments():
    bias = torch.randn(64, device="cuda").expand(8, 64)
    x = torch.randn(64, 8, device="cuda").t()
    run = fusionreg.capture(torch.add, x, bias)
    other, shift = torch.randn(64, 8, device="cuda").t(), torch.randn(64, device="cuda").expand(8, 64)
    assert torch.equal(run(other, shift), other + shift)
    with pytest.raises(ArgumentError, match=r"strides \[64, 1\] — \[1, 8\]"):
        run(other.contiguous(), shift)


def test_arguments_are_checked(runtime):
    x, bias = torch.ones(8, 64, device="cuda"), torch.zeros(64, device="cuda")
    run = fusionreg.capture(chain(runtime), x, bias)
    for wrong, said in ((x[:4], r"shape \[4, 64\] — \[8, 64\]"), (x.half(), "dtype float16"), (x.cpu(), "device cpu")):
        with pytest.raises(ArgumentError, match=said):
            run(wrong, bias)
    with pytest.raises(ArgumentError, match="requires grad"):
        run(x.clone().requires_grad_(), bias)
    with pytest.raises(ArgumentError, match="arguments: 1 that are not nested"):
        run(x)


# --- random numbers --------------------------------------------------------------------------------------------------


def test_masks_follow_the_generator(dropout):
    x, function = torch.ones(64, 1024, device="cuda", dtype=torch.bfloat16), dropout
    torch.manual_seed(5)
    right = [function(x) for _ in range(4)]
    torch.manual_seed(5)
    run = fusionreg.capture(function, x, clone=True)
    found = [run(x), run(x), function(x), run(x)]  # an eager call in between takes its own words
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True)), "capturing drew nothing"
    assert not torch.equal(found[0], found[1]) and (found[0] == 0).float().mean().item() == pytest.approx(0.5, abs=0.01)
    torch.manual_seed(6)
    other = run(x)
    torch.manual_seed(5)
    assert torch.equal(run(x), right[0]) and not torch.equal(other, right[0])


def test_a_generator_of_ones_own(registry):
    x = torch.ones(16, 256, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(3)
    right = [torch.randint(100, (64,), device="cuda", generator=generator) for _ in range(2)]
    generator.manual_seed(3)
    run = fusionreg.capture(
        lambda _: torch.randint(100, (64,), device="cuda", generator=generator), x, generators=[generator], clone=True
    )
    assert [run(x).tolist(), run(x).tolist()] == [r.tolist() for r in right]


# --- training --------------------------------------------------------------------------------------------------------


def training(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=True)

    def step(x, target):
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def test_a_training_step():
    batches = [(torch.randn(16, 32, device="cuda"), torch.randn(16, 8, device="cuda")) for _ in range(8)]
    eager, step = training()
    losses = [step(*batches[0]).item() for _ in range(3)] + [step(*b).item() for b in batches]
    model, step = training()
    run = fusionreg.capture(step, *batches[0], warmup=3)
    found = [run(*b).item() for b in batches]
    assert found == pytest.approx(losses[3:], rel=1e-5) and found[-1] != found[0]
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    run(*batches[0])
    assert addresses == [p.grad.data_ptr() for p in model.parameters()], "gradients stay where they are"
    assert not run.outputs.requires_grad


# --- errors inside a capture -----------------------------------------------------------------------------------------


def test_a_first_call_inside_a_capture_says_so(runtime):
    x, bias = torch.ones(8, 64, device="cuda"), torch.zeros(64, device="cuda")
    stream = torch.cuda.current_stream()
    with pytest.raises(LaunchError, match="Call it once"):
        fusionreg.capture(chain(runtime), x, bias, warmup=0)
    usable()
    assert torch.cuda.current_stream() == stream
    assert (fusionreg.capture(chain(runtime), x, bias)(x, bias) == 1).all()


def test_work_that_no_graph_can_hold(runtime):
    x, bias = torch.ones(8, 64, device="cuda"), torch.zeros(64, device="cuda")
    before = fusionreg.capture(dropped_by_torch, x)
    stream = torch.cuda.current_stream()
    for wrong in (lambda x: x * x.sum().item(), lambda x: x.cpu(), lambda x: torch.cuda.synchronize() or x):
        with pytest.raises(LaunchError, match="cannot capture"):
            fusionreg.capture(wrong, x)
        usable()
        assert torch.cuda.current_stream() == stream
    assert not torch.equal(before(x).clone(), before(x)), "earlier graphs still draw anew"
    assert (fusionreg.capture(chain(runtime), x, bias)(x, bias) == 1).all()


def dropped_by_torch(x):
    return torch.nn.functional.dropout(x, 0.5)


def test_errors_of_the_function_pass_as_they_are():
    calls = []

    def function(x):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("of its own")
        return x + 1

    x = torch.ones(4, device="cuda")
    with pytest.raises(KeyError, match="of its own"):
        fusionreg.capture(function, x, warmup=2)
    usable()


def test_errors_that_the_function_swallows():
    def function(x):
        try:
            return x * x.sum().item()
        except RuntimeError:
            return x

    with pytest.raises(LaunchError, match="cannot capture"):
        fusionreg.capture(function, torch.ones(4, device="cuda"))
    usable()


def test_written_arguments_are_refused():
    with pytest.raises(ArgumentError, match="writes argument 1 in place"):
        fusionreg.capture(lambda x, y: y.add_(x), torch.ones(4, device="cuda"), torch.ones(4, device="cuda"))
    usable()


def test_no_state_is_left_changed(dropout):
    x = torch.ones(8, 256, device="cuda", dtype=torch.bfloat16)
    state = torch.cuda.get_rng_state(), torch.get_rng_state(), torch.cuda.current_stream(), torch.is_grad_enabled()
    fusionreg.capture(dropout, x)
    assert torch.equal(torch.cuda.get_rng_state(), state[0]) and torch.equal(torch.get_rng_state(), state[1])
    assert torch.cuda.current_stream() == state[2] and torch.is_grad_enabled() == state[3]
    assert torch.is_autocast_cache_enabled() and gc.isenabled()


# --- streams, threads, lifetimes -------------------------------------------------------------------------------------


def test_replays_on_many_streams_stay_in_order(runtime):
    x, bias = torch.zeros(2048, 2048, device="cuda"), torch.zeros(2048, device="cuda")
    run = fusionreg.capture(chain(runtime, 8), x, bias, clone=True)
    given = [torch.full_like(x, float(i)) for i in range(6)]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for i, value in enumerate(given):
        with torch.cuda.stream(streams[i % 3]):
            found.append(run(value, bias))
    torch.cuda.synchronize()
    assert [y.unique().tolist() for y in found] == [[float(i)] for i in range(6)]


def test_replays_from_threads(runtime):
    x, bias = torch.zeros(64, 64, device="cuda"), torch.zeros(64, device="cuda")
    run = fusionreg.capture(chain(runtime), x, bias, clone=True)
    wrong = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y = run(torch.full((64, 64), float(i), device="cuda"), bias)
                if not (y == i).all().item():
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_what_a_graph_reads_lives_on(runtime):
    bias = torch.ones(256, device="cuda")
    run = fusionreg.capture(lambda x, held=bias: runtime.call(FUSION, x, held), torch.zeros(64, 256, device="cuda"))
    del bias
    gc.collect()
    junk = [torch.full((256,), 7.0, device="cuda") for _ in range(100)]
    assert (run(torch.zeros(64, 256, device="cuda")) == 1).all() and junk
    allocated = torch.cuda.memory_allocated()
    for _ in range(100):
        run(torch.zeros(64, 256, device="cuda"))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated


# --- several shapes ---------------------------------------------------------------------------------------------------


def test_a_graph_for_each_shape(runtime):
    pool = fusionreg.GraphPool(limit=2)
    bias = torch.ones(64, device="cuda")
    run = fusionreg.capture(chain(runtime), torch.zeros(4, 64, device="cuda"), bias, shapes=pool)
    for rows in (4, 8, 16, 4, 16):
        x = torch.full((rows, 64), float(rows), device="cuda")
        assert (run(x, bias) == rows + 4).all() and len(pool) <= 2
    report = pool.report
    assert (report.captured, report.evicted) == (4, 2) and "float32[16, 64]" in str(report)
    assert len({graph.pool_bytes for _, graph in report.graphs}) <= 2


# --- a fused model ---------------------------------------------------------------------------------------------------


def test_a_fused_transformer_costs_one_launch(registry):
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from examples.transformer_encoder import build

    module, (x,) = build()
    module, x = module.cuda(), x.cuda()
    fused = registry.fuse(module, x)
    run = fusionreg.capture(fused, x)
    torch.testing.assert_close(run(x), fused(x), rtol=0, atol=0)
    torch.testing.assert_close(run(2 * x), module(2 * x), rtol=0.05, atol=0.05)
    report = run.measure(30)
    assert any(s.status == "fused" for s in fused.sites) and report.nodes.kernels >= 10
    assert report.saved > 0.8, str(report)
