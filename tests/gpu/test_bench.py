"""``fusionreg bench`` on a GPU: figures that hang together, a resumed run, a refused comparison."""

from __future__ import annotations

import plugin_kit
import pytest

torch = pytest.importorskip("torch")

from fusionreg.core.bench import Preparation, Subject, measure, prepare  # noqa: E402
from fusionreg.core.bench.counting import elements  # noqa: E402
from fusionreg.core.bench.tuned import TunedParameters  # noqa: E402
from fusionreg.core.bench.tuning import tune  # noqa: E402
from fusionreg.core.cache import Cache  # noqa: E402
from fusionreg.core.errors import FusionregError  # noqa: E402
from fusionreg.core.ops import default_vocabulary  # noqa: E402
from fusionreg.core.registry.catalog import load  # noqa: E402
from fusionreg.core.runtime import Runtime  # noqa: E402
from fusionreg.core.spec import Workload  # noqa: E402
from fusionreg.integrations.torch.bench import TorchBench  # noqa: E402
from fusionreg.integrations.torch.counting import Job, executed  # noqa: E402
from fusionreg.integrations.torch.timing import Timer, fastest  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS = (
    Workload(name="large", axes={"M": 8192, "N": 4096}, dtypes={"T": "bfloat16"}, goal="best"),
    Workload(name="small", mode="g", axes={"M": 64, "N": 256}, dtypes={"T": "float32"}, goal="min(eager, compile)"),
)


def made(folder, text: str = plugin_kit.ADD_RELU):
    catalog = plugin_kit.catalog(folder, {"k.cu.j2": text}, plugin_kit.add_relu(workloads=ROWS))
    bench = TorchBench(catalog, mode="default")
    entry = catalog["acme.add_relu"]
    return bench, [Subject.of(entry, w, bench.target, default_vocabulary()) for w in ROWS]


def test_a_run_and_its_resumption(tmp_path, alone) -> None:
    bench, subjects = made(tmp_path)
    found = measure(subjects, bench, tmp_path / "results")
    assert found.ok and found.measured == 2
    run = found.results.runs[0]
    assert 1e11 < run.ceilings.copy_rate < 2e13 and run.ceilings.matmul["bfloat16"] > run.ceilings.matmul["float32"]
    ceilings = run.ceilings
    assert set(ceilings.mixes) == {"3:1", "2:1", "1:2"}
    assert all(0.7 < rate / ceilings.copy_rate < 1.3 for rate in ceilings.mixes.values())
    per_cycle = ceilings.issue_rate / (bench.multiprocessors * 4)
    assert 0.8e9 < per_cycle < 2.6e9  # a warp instruction a cycle and scheduler, at the clock of such a chip
    for row in found.rows:
        assert {c.name for c in row.columns} == {"plain", "eager", "compile"}
        assert all(c.time and c.error is not None and not c.reason for c in row.columns), row.columns
        assert row.goal_ms and row.ours_ms
    large = found.rows[0]
    assert 0.05 < large.of_floor < 1.1  # nothing is faster than the memory, and one simple kernel is not hopeless
    assert large.ms("eager") > large.ms("compile") * 0.9
    again = measure(subjects, bench, tmp_path / "results")
    assert (again.measured, again.kept) == (0, 2)


def test_preparing_leaves_nothing_to_compile(tmp_path, monkeypatch) -> None:
    cache = Cache(tmp_path / "cache")
    bench, subjects = made(tmp_path)
    ready = TorchBench(bench.catalog, cache, mode="default")
    assert prepare(subjects[:1], ready, tmp_path / "results") == Preparation(ready=1)
    monkeypatch.setattr("fusionreg.core.compiler.nvrtc.compile_unit", None)  # not a kernel is compiled any more
    with TorchBench(bench.catalog, cache, mode="default").prepare(subjects[0]) as place:
        assert [e.check().ok for e in place.entrants if e.ours] == [True]


def test_instructions_as_the_device_counts_them() -> None:
    """A row of 4096 in registers takes some ten instructions an element; the profiler counts the launch that counts."""
    catalog = load()
    bench = TorchBench(catalog)
    entry = catalog["norm.rmsnorm"]
    subject = Subject.of(entry, entry.spec.workloads[0], bench.target, catalog.ops, None, bench.multiprocessors)
    try:
        (count,) = executed([Job.of(subject)])
    except FusionregError as e:
        pytest.skip(f"no profiler may count here: {e}")
    assert 3 < 32 * count / elements(subject) < 60


def test_a_wrong_kernel_is_never_timed(tmp_path) -> None:
    bench, subjects = made(tmp_path, plugin_kit.ADD_RELU.replace("bias[i % N]", "bias[0]"))
    found = measure(subjects[:1], bench, tmp_path / "results")
    assert not found.ok and found.rows[0].status == "differs" and not any(c.time for c in found.rows[0].columns)


def test_tuning_finds_parameters_that_calls_then_use(tmp_path, alone) -> None:
    """Blocks of one warp waste most of the device; the found ones are kept, and give right results."""
    text = plugin_kit.ADD_RELU.replace("256LL", "(long long)BLOCK")
    spec = plugin_kit.add_relu(
        workloads=ROWS[:1], kernel_params={"BLOCK": (32, 256, 1024)}, kernel_block="BLOCK",
        kernel_grid="ceildiv(M * N, BLOCK)",
    )  # fmt: skip
    catalog = plugin_kit.catalog(tmp_path, {"k.cu.j2": text}, spec)
    bench, cache = TorchBench(catalog, mode="default"), Cache(tmp_path / "cache")
    subject = Subject.of(catalog["acme.add_relu"], ROWS[0], bench.target, default_vocabulary())
    (found,) = tune([subject], bench, cache)
    assert found.tried == 3 and found.params["BLOCK"] != 32 and found.ms < found.default_ms
    assert tune([subject], bench, cache)[0].kept
    tuned = TunedParameters(lambda: cache)
    x, bias = torch.randn(8192, 4096, device="cuda").bfloat16(), torch.randn(4096, device="cuda").bfloat16()
    entry = catalog["acme.add_relu"]
    assert tuned(entry, subject.problem, torch.cuda.current_device()) == {"acme.add_relu/plain": found.params}
    y = Runtime(catalog, "cuda", cache, tuned=tuned).call("acme.add_relu", x, bias)
    torch.testing.assert_close(y.float(), torch.relu(x.float() + bias.float()), rtol=1e-2, atol=1e-2)


def test_both_clocks_agree_on_a_long_kernel(alone) -> None:
    a = torch.randn(1 << 28, device="cuda")
    b = torch.empty_like(a)

    def add() -> None:  # no copy: inside a graph that is another kind of node, with a speed of its own
        torch.add(a, 1.0, out=b)

    timer = Timer()
    cold, replayed = sorted(timer.cold([add], budget=20)), sorted(timer.replayed(add, budget=20))
    assert cold[len(cold) // 2] == pytest.approx(replayed[len(replayed) // 2], rel=0.1)
    assert fastest(add) * 1e3 == pytest.approx(cold[0], rel=0.1)
