"""What the GPU bench does before it times: arrays, references, entrants and their checks, here on CPU tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
import graphs as kit  # noqa: E402
import plugin_kit  # noqa: E402
from catalogs import shipped  # noqa: E402
from torch._inductor.runtime import benchmarking  # noqa: E402

from fusionreg.benching import bench  # noqa: E402
from fusionreg.core.bench import Subject  # noqa: E402
from fusionreg.core.cache import Cache  # noqa: E402
from fusionreg.core.compiler import compile_source  # noqa: E402
from fusionreg.core.errors import LaunchError, MissingDependencyError, UnknownNameError  # noqa: E402
from fusionreg.core.frozen import FrozenDict  # noqa: E402
from fusionreg.core.render import render  # noqa: E402
from fusionreg.core.spec import Tolerance, Workload  # noqa: E402
from fusionreg.core.turns import turn  # noqa: E402
from fusionreg.integrations.torch import bench as home  # noqa: E402
from fusionreg.integrations.torch import bench_compile as ahead  # noqa: E402
from fusionreg.integrations.torch.bench import TorchBench, Workbench  # noqa: E402
from fusionreg.integrations.torch.bench_arrays import Verifier, arrays_of, behind  # noqa: E402
from fusionreg.integrations.torch.library_peers import library_peers  # noqa: E402
from fusionreg.integrations.torch.peers import torch_module  # noqa: E402
from fusionreg.integrations.torch.timing import Timer, _count  # noqa: E402

OPS = kit.vocabulary()
ROW = Workload(name="w", axes={"M": 16, "N": 64}, dtypes={"T": "float16"})
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def never(calls, mode, part):
    raise AssertionError("nothing is timed on a CPU")


def gemm(fusion: str = "gemm.scale_bias", mode: str = "b", activation: str = "Gelu", kind: str = "bfloat16") -> Subject:
    operands = {"scale": "T[N]", "bias": "T[N]"}
    entry = shipped()[fusion]
    workload = Workload(
        name="w", axes={"M": 16, "N": 64, "K": 32}, dtypes={"T": kind}, mode=mode,
        attributes={"transB": 1, "activation": activation},
        forms={"w": "T[N K]", **{k: v for k, v in operands.items() if k in entry.inputs}},
    )  # fmt: skip
    return Subject.of(entry, workload, "sm_90a", OPS)


def place_of(subject: Subject, catalog=None) -> Workbench:
    return Workbench(subject, catalog or shipped(), "cpu", None, never)


@no_gpu
def test_without_a_gpu_nothing_is_measured(tmp_path) -> None:
    with pytest.raises(MissingDependencyError, match="never a source of timings"):
        bench(["gemm.bias"], out=tmp_path)
    with pytest.raises(MissingDependencyError, match="no CUDA device"):
        TorchBench(shipped())
    assert not list(tmp_path.iterdir())


def test_an_unknown_fusion_is_told_first(tmp_path) -> None:
    with pytest.raises(UnknownNameError, match=r"gemm\.bias"):
        bench(["gemm.bais"], out=tmp_path)


def test_a_product_in_front_is_launched_with_the_kernel() -> None:
    entry = shipped()["gemm.lora_routed"]
    workload = Workload(
        name="w", axes={"M": 16, "N": 64, "K": 32, "E": 2, "R": 8}, dtypes={"T": "bfloat16", "I": "int64"},
        absent=("ranks", "scales"), values={"ids": "below E"}, products={"base": "x @ weight"},
    )  # fmt: skip
    place = place_of(Subject.of(entry, workload, "sm_90a", OPS))
    arrays = place.sets[0]

    def kernel() -> torch.Tensor:
        return arrays["base"] + 1

    both = behind(place.subject, kernel, arrays)
    assert torch.equal(both(), torch.matmul(arrays["x"], arrays["weight"].t()) + 1)
    assert behind(gemm(), kernel, {}) is kernel
    assert [p.computes for p in library_peers(place.subject.graph, OPS)] == ["x @ weight alone"]
    eager = {e.name: e for e in place.entrants(("eager", "product"))}
    assert eager["eager"].check().ok and eager["product"].check().ok


def test_inputs() -> None:
    subject = gemm()
    first, again, other = arrays_of(subject, "cpu", 0), arrays_of(subject, "cpu", 0), arrays_of(subject, "cpu", 1)
    assert {k: (tuple(a.shape), a.dtype) for k, a in first.items()} == {
        "x": ((16, 32), torch.bfloat16), "w": ((64, 32), torch.bfloat16), "scale": ((64,), torch.bfloat16),
        "bias": ((64,), torch.bfloat16),
    }  # fmt: skip
    assert all(torch.equal(first[k], again[k]) and not torch.equal(first[k], other[k]) for k in first)
    assert first["w"].float().std() == pytest.approx(32**-0.5, rel=0.1)
    assert first["x"].float().std() == pytest.approx(1.0, rel=0.2)


def test_integers_are_what_the_workload_says() -> None:
    """Adapters and experts that differ: as many matrices are read as a model reads."""

    def made(fusion: str, name: str, **axes: int) -> dict[str, torch.Tensor]:
        entry, ops = shipped()[fusion], shipped().ops
        workload = next(w for w in entry.spec.workloads if w.name == name)
        small = workload.model_copy(update={"axes": workload.axes | axes})
        return arrays_of(Subject.of(entry, small, "sm_90a", ops), "cpu", 0)

    ids = made("gemm.lora_routed", "64x4096x4096-r16", N=16, K=16)["ids"]
    assert ids.sort().values.tolist() == [*range(64)] and ids.tolist() != [*range(64)]
    grouped = made("moe.index_select_gemm", "qwen3-16", N=16, K=16, E=6)
    assert grouped["ends"].tolist() == [21, 42, 64, 85, 106, 128] and grouped["ends"].dtype == torch.int32
    assert set(grouped["index"].tolist()) == {*range(16)}
    small = {"H": 2, "G": 1, "D": 16, "R": 8, "L": 64, "C": 48}
    slots = made("attention.rope_kv_append", "prefill-8x2048", S=40, **small)["slots"]
    assert all(len({*row}) == 40 and max(row) < 48 for row in slots.tolist()) and slots[0].tolist() != slots[1].tolist()
    w = made("gemm.dequantize", "16x14336x4096-w8", N=64, K=64)["w"]
    assert (w.min(), w.max()) == (-128, 127)


def test_compiling_ahead(tmp_path, monkeypatch) -> None:
    """Cubins are in the cache then; what does not compile is told, and the rest still is."""
    asked = []

    def compiled(module, mode):
        asked.append(mode)
        return module if mode == "default" else fails

    monkeypatch.setattr(ahead, "compiled", compiled)
    entry, cache = shipped()["norm.gelu_dropout_layernorm"], Cache(tmp_path)
    workload = Workload(name="w", axes={"M": 4, "N": 64}, dtypes={"T": "bfloat16"}, attributes={"p": 0.5})
    subject = Subject.of(entry, workload, "sm_90a", OPS)
    only = replace(subject, selection=replace(subject.selection, accepted=subject.selection.accepted[-1:]))
    assert ahead.compile_all(only, "cpu", cache, ("eager", "compile")) == ("compile: no",)
    assert asked == [ahead.COMPILE_MODE, "default"]  # as it is, and with nothing dropped
    (candidate,) = only.selection.accepted
    source = render(entry, candidate.kernel, only.problem, candidate.params)
    assert compile_source(source, cache).cached and ahead.compile_all(only, "cpu", cache, ()) == ()
    monkeypatch.setattr(ahead, "render", fails)
    assert ahead.compile_all(only, "cpu", cache, ()) == (f"{candidate.kernel.key}: no",)


def fails(*_):
    raise RuntimeError("no\nway")


def test_channels_last() -> None:
    """The problem and the arrays lie in memory as the workload says."""
    entry = shipped()["norm.batchnorm_relu"]
    workload = Workload(
        name="w", axes={"N": 2, "C": 16, "S": 3}, dtypes={"T": "float16", "P": "float32"}, batch=(5,),
        layouts={"x": "channels_last"},
    )  # fmt: skip
    subject = Subject.of(entry, workload, "sm_90a", OPS)
    shape = subject.trial.shapes(entry)["x"]
    x = arrays_of(subject, "cpu", 0)["x"]
    assert tuple(x.shape) == tuple(shape) and x.stride(1) == 1 and not x.is_contiguous()
    plain = Subject.of(entry, workload.model_copy(update={"layouts": FrozenDict()}), "sm_90a", OPS)
    assert torch.equal(arrays_of(plain, "cpu", 0)["x"], x) and arrays_of(plain, "cpu", 0)["x"].is_contiguous()
    assert not subject.problem.tensors["x"].is_contiguous and plain.problem.tensors["x"].is_contiguous
    assert subject.problem.tensors["x"].strides[1] == 1 and subject.digest({}) != plain.digest({})


@pytest.mark.parametrize("fusion", ["attention.softmax_backward", "attention.causal_softmax_backward"])
def test_a_gradient_of_a_softmax_is_measured_on_probabilities(fusion) -> None:
    """0 for hidden keys: what is not is read, where none of it is in a model."""
    causal = "causal" in fusion
    axes = {"H": 2, "Q": 5, "K": 7} if causal else {"Q": 5, "K": 7}
    workload = Workload(name="w", axes=axes, dtypes={"T": "float32"}, absent=("scale",), attributes={"diagonal": 1})
    found = arrays_of(Subject.of(shipped()[fusion], workload, "sm_90a", OPS), "cpu", 0)
    y, dy = found["y"], found["dy"]
    assert torch.allclose(y.sum(-1), torch.ones(())) and (y >= 0).all() and not (dy >= 0).all()
    later = torch.arange(7) > torch.arange(5)[:, None] + 1
    assert ((y == 0) == (later if causal else torch.zeros_like(later))).all()


def test_a_gradient_of_attention_is_measured_on_what_attention_gives() -> None:
    axes = {"B": 1, "H": 4, "G": 2, "Q": 5, "K": 7, "D": 8, "E": 8}
    attributes = {"is_causal": 1, "scaling": "usual"}
    workload = Workload(name="w", axes=axes, dtypes={"T": "bfloat16"}, attributes=attributes)
    found = arrays_of(Subject.of(shipped()["attention.sdpa_backward"], workload, "sm_90a", OPS), "cpu", 0)
    q, k, v = (found[n].double() for n in "qkv")
    scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~torch.ones(5, 7).tril().bool(), -torch.inf)
    torch.testing.assert_close(found["lse"], scores.logsumexp(-1).float())
    want = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).bfloat16()
    torch.testing.assert_close(found["y"], want, rtol=8e-3, atol=1e-3)


def test_entrants_of_a_product_agree_with_float64() -> None:
    place = place_of(gemm())
    entrants = {e.name: e for e in place.entrants()}
    ours = [n for n, e in entrants.items() if e.ours]
    assert {"tensor_core", "skinny", "plain"} <= set(ours)
    assert list(entrants) == [*ours, "eager", "compile", "product", "epilogue"]
    assert entrants["product"].computes == "x @ w alone"
    assert entrants["epilogue"].computes == "gelu_tanh(x @ w + bias)"
    assert len(place.sets) == 4 and "torch.matmul" in place.code
    for name in ("plain", "eager", "product", "epilogue"):
        found = entrants[name].check()
        assert found.ok and 0 < found.error < 1e-2, (name, str(found))


def test_launches_that_a_turn_has() -> None:
    """As many as its time holds, between 8 and 400; one of what outlasts it."""
    assert [_count(60.0, [ms, 2 * ms]) for ms in (0.001, 0.5, 20.0)] == [400, 120, 8]
    timer, asked = object.__new__(Timer), []
    for took, wanted in ((61.0, [1]), (20.0, [1, 2, 8])):
        asked.clear()
        timer._series = lambda calls, count, took=took: asked.append(count) or [took] * count
        assert len(timer.cold([lambda: None], 60.0)) == wanted[-1] and asked == wanted


def test_graph_replays_have_one_set_of_inputs() -> None:
    assert len(place_of(gemm(mode="g")).sets) == 1


@pytest.mark.parametrize(
    ("fusion", "activation", "computes"),
    [
        ("gemm.bias", "Relu", ""),
        ("gemm.bias", "gelu_tanh", ""),
        ("gemm.bias", "Gelu", "gelu_tanh(x @ w + bias)"),
        ("gemm.bias", "none", ""),
        ("gemm.scale_bias", "none", "x @ w + bias"),
        ("gemm.scale_bias", "Relu", "relu(x @ w + bias)"),
        ("gemm.bias", "Tanh", None),
        ("gemm.scale", "Relu", None),
        ("gemm.activation", "Relu", None),
    ],
)
def test_epilogues(fusion, activation, computes) -> None:
    subject = gemm(fusion, activation=activation, kind="float32")
    found = {p.name: p for p in library_peers(subject.graph, OPS)}
    assert "product" in found and ("epilogue" in found) == (computes is not None)
    if computes is not None:
        peer, arrays = found["epilogue"], arrays_of(subject, "cpu", 0)
        assert peer.computes == computes
        given = [arrays[n] for n in peer.inputs]
        near = (
            1e-3 if "elu" in activation.replace("Relu", "") else 1e-5
        )  # on a CPU torch's epilogue is the erf form, on a GPU the tanh form
        torch.testing.assert_close(peer.call(*given).double(), peer.exact(*given)[0], rtol=near, atol=near)
        if not computes:
            torch.testing.assert_close(peer.exact(*given)[0], Verifier(subject.graph, OPS, arrays).exact[0])


def test_a_dtype_that_no_input_tells_is_the_workloads() -> None:
    row = Workload(
        name="small", row="", axes={"M": 3, "N": 32, "K": 64}, dtypes={"T": "bfloat16"},
        attributes={"transB": 1, "activation": "none"},
        forms={"w": "float8_e4m3fn[N K]", "scale_x": "float32[M 1]", "scale_w": "float32[N]"},
    )  # fmt: skip
    place = place_of(Subject.of(shipped()["gemm.scaled"], row, "sm_90a", OPS))
    found = {e.name: e.check() for e in place.entrants() if e.name in ("plain", "eager")}
    assert len(found) == 2 and all(check.ok for check in found.values()), found


def test_a_wrong_kernel_is_caught(tmp_path) -> None:
    wrong = plugin_kit.ADD_RELU.replace("bias[i % N]", "bias[0]")
    catalog = plugin_kit.catalog(tmp_path, {"k.cu.j2": wrong}, plugin_kit.add_relu(workloads=(ROW,)))
    place = place_of(Subject.of(catalog["acme.add_relu"], ROW, "sm_90a", OPS), catalog)
    ours, eager = place.entrants()[:2]
    assert not ours.check().ok and eager.check().ok


def test_a_kernel_that_leaves_elements_unwritten_is_caught(tmp_path) -> None:
    lazy = plugin_kit.ADD_RELU.replace("if (i >= M * N) return;", "if (i >= M * N - 1) return;")
    catalog = plugin_kit.catalog(tmp_path, {"k.cu.j2": lazy}, plugin_kit.add_relu(workloads=(ROW,)))
    found = place_of(Subject.of(catalog["acme.add_relu"], ROW, "sm_90a", OPS), catalog).entrants()[0].check()
    assert not found.ok and "1 elements are not finite" in found.reason


def test_a_pending_kernel_is_timed_too(tmp_path) -> None:
    spec = plugin_kit.add_relu(workloads=(ROW,), kernel_pending="not proven yet")
    catalog = plugin_kit.catalog(tmp_path, {"k.cu.j2": plugin_kit.ADD_RELU}, spec)
    place = place_of(Subject.of(catalog["acme.add_relu"], ROW, "sm_90a", OPS), catalog)
    ours = place.entrants()[0]
    assert ours.check().ok and ours.note == "pending: not proven yet"


def test_a_kernel_that_takes_too_long_is_not_compared(monkeypatch) -> None:
    """Neither checked nor timed, unless dispatch picks it."""
    monkeypatch.setattr(home, "LOST", -1.0)
    place = place_of(gemm("gemm.bias"))
    (plain,) = (c for c in place.subject.selection.accepted if c.kernel.name == "plain")
    assert place.subject.chosen != plain
    with pytest.raises(LaunchError, match="a launch is estimated"):
        place.ours(plain.kernel, plain.params).check()
    monkeypatch.setattr(home, "estimated", lambda *_: math.inf)  # a kernel without an estimate is launched
    with pytest.raises(LaunchError, match="a launch takes"):
        place.ours(plain.kernel, plain.params).check()
    alone = replace(place.subject.selection, accepted=(plain,))
    assert place_of(replace(place.subject, selection=alone)).ours(plain.kernel, plain.params).check().ok


def test_parameters_of_the_callers(tmp_path) -> None:
    """The kernel runs with the parameters it is tried with: this template is right for one of them only."""
    text = plugin_kit.ADD_RELU.replace("bias[i % N]", "bias[BLOCK == 256 ? i % N : 0]")
    spec = plugin_kit.add_relu(workloads=(ROW,), kernel_params={"BLOCK": (128, 256)})
    catalog = plugin_kit.catalog(tmp_path, {"k.cu.j2": text}, spec)
    place = place_of(Subject.of(catalog["acme.add_relu"], ROW, "sm_90a", OPS), catalog)
    kernel = catalog["acme.add_relu"].kernels[0]
    assert place.ours(kernel, {"BLOCK": 256}).check().ok
    assert not place.ours(kernel, {"BLOCK": 128}).check().ok


def test_a_fusion_that_drops_elements(monkeypatch) -> None:
    """torch's mask is another, so its code is checked with nothing dropped; a wrong formula is still caught."""
    workload = Workload(name="w", axes={"M": 16, "N": 64}, dtypes={"T": "float32"}, attributes={"p": 0.5})
    subject = Subject.of(shipped()["norm.gelu_dropout_layernorm"], workload, "sm_90a", OPS)
    eager = next(e for e in place_of(subject).entrants() if e.name == "eager")
    assert eager.note == "a random mask of its own" and eager.check().ok

    def wrong(graph, ops, device):
        nodes = (replace(n, op="Relu", attrs=FrozenDict()) if n.op == "Gelu" else n for n in graph.nodes)
        return torch_module(graph.with_(nodes=tuple(nodes)), ops, device)

    monkeypatch.setattr(home, "torch_module", wrong)
    eager = next(e for e in place_of(subject).entrants() if e.name == "eager")
    assert not eager.check().ok


class TestVerifier:
    subject = gemm("gemm.activation", activation="Relu", kind="float16")
    arrays = arrays_of(subject, "cpu", 0)
    verifier = Verifier(subject.graph, OPS, arrays)
    right = verifier.exact[0].half()

    def said(self, *outputs) -> str:
        found = self.verifier.check(outputs)
        assert not found.ok
        return str(found)

    def test_right(self) -> None:
        found = self.verifier.check((self.right,))
        assert found.ok and 0 < found.error < 1e-3

    def test_one_wrong_element(self) -> None:
        wrong = self.right.clone()
        wrong[3, 5] += 1.0
        assert "an element" in self.said(wrong)

    def test_all_slightly_wrong(self) -> None:
        assert "from float64" in self.said(self.right * 1.004)

    def test_nan_zero_shape_dtype_count(self) -> None:
        wrong = self.right.clone()
        wrong[0, 0] = float("nan")
        assert "not finite" in self.said(wrong)
        assert "an element is 1 of the largest" in self.said(torch.zeros_like(self.right))
        assert "shape" in self.said(self.right[:-1])
        assert "float32" in self.said(self.right.float())
        assert "0 outputs" in self.said()

    def test_tolerances_of_the_spec_count(self) -> None:
        """One that adds four units of float16's last place to the bound of this output."""
        loose = Verifier(self.subject.graph, OPS, self.arrays, (Tolerance(dtype="float16", ulp=4.0, reason="r"),))
        other = Verifier(self.subject.graph, OPS, self.arrays, (Tolerance(dtype="float32", ulp=4.0, reason="r"),))
        assert loose.allowed[0][0] == pytest.approx(self.verifier.allowed[0][0] + 4 * 2.0**-10)
        assert other.allowed == self.verifier.allowed
        wrong = (self.right * 1.004,)
        assert loose.check(wrong).ok and not other.check(wrong).ok

    def test_an_anchor_has_its_own_reference(self) -> None:
        assert self.verifier.check((self.right * 2,), (self.verifier.exact[0] * 2,)).ok
        assert not self.verifier.check((self.right * 2,)).ok


def test_one_process_tunes_at_a_time(tmp_path) -> None:
    cache, alone = Cache(tmp_path), getattr(benchmarking, "maybe_gpu_benchmark_lock", None)
    timed = []

    def candidate(*_, **__):
        with pytest.raises(LaunchError), turn(cache, "cpu", 0.0):
            pass
        timed.append(candidate)
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        if alone is None:
            patch.setattr(type(benchmarking.benchmarker), "benchmark_gpu", candidate)
        with ahead.tuning_alone(cache, "cpu"):
            if alone is None:
                benchmarking.benchmarker.benchmark_gpu(candidate)
            else:
                with alone(), alone():  # its helpers call one another
                    candidate()
            with turn(cache, "cpu", 0.0):  # between candidates others may
                pass
    assert timed == [candidate]
