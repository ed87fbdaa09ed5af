"""Each fused site against the operators it replaced: right kernels, planted faults, and what a fault is blamed on."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import onnx
import plugin_kit
import pytest
from onnx_models import model, node

import fusionreg
from fusionreg.core.errors import ArgumentError, ModelError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.proof.report import Status
from fusionreg.core.spec import KernelSpec
from fusionreg.integrations import open_model
from fusionreg.verifying import verify_opened
from fusionreg.verifying.sites import _summed

RIGHT = plugin_kit.ADD_RELU
ONE_BIAS = RIGHT.replace("bias[i % N]", "bias[0]")
MUL_RELU = RIGHT.replace("+ fr::to_float", "* fr::to_float")


def registry(folder, template=RIGHT, other=MUL_RELU, **changes):
    """``acme.add_relu`` with ``template``, and ``acme.mul_relu``."""
    second = {"name": "acme.mul_relu", "pattern": "y = Relu(Mul(x, bias))"}
    specs = plugin_kit.add_relu(**changes), plugin_kit.add_relu(**second, kernel_template="m.cu.j2")
    return fusionreg.Registry(plugin_kit.catalog(folder, {"k.cu.j2": template, "m.cu.j2": other}, *specs), device="sim")


def two_sites(rows=4):
    """relu(x + b), −, relu(· × c): a site of each fusion, the second on what the first gives."""
    rng = np.random.default_rng(5)
    nodes = [
        node("Add", ["x", "b"], ["s"], name="plus"), node("Relu", ["s"], ["r"], name="bend"),
        node("Neg", ["r"], ["n"], name="neg"),
        node("Mul", ["n", "c"], ["m"], name="times"), node("Relu", ["m"], ["y"], name="bend_2"),
    ]  # fmt: skip
    constants = {"b": rng.normal(size=8).astype("f"), "c": -np.abs(rng.normal(size=8)).astype("f")}
    return model(nodes, {"x": [rows, 8]}, {"y": [rows, 8]}, constants), constants


def by_fusion(found):
    return {s.fusion: s for s in found.sites}


def test_errors_are_those_of_the_kernel_and_of_the_chain(tmp_path):
    """Against NumPy: the site's inputs, float64, and float32 rounded after each operator."""
    proto, constants = two_sites()
    found = fusionreg.verify(proto, registry=registry(tmp_path), seed=3)
    assert found.ok and found.executed == 2 and found.device == "sim" and found.runs == ("seed 3",)
    assert found.operators == 5 and found.policy == "balanced"
    x = open_model(proto, ops=registry(tmp_path).catalog.ops).example(3)["x"]
    first = np.maximum(x + constants["b"], 0)
    exact = np.maximum(x.astype("f8") + constants["b"].astype("f8"), 0)
    site = by_fusion(found)["acme.add_relu"]
    assert site.status is Status.PASSED and site.kernel == "acme.add_relu/plain" and site.run == -1
    assert site.nodes == ("plus", "bend") and site.operators == ("Add", "Relu") and site.source == "bend"
    assert site.max_abs == site.unfused_abs == np.abs(first - exact).max() > 0
    second = np.maximum(-first * constants["c"], 0)
    exact = np.maximum(-first.astype("f8") * constants["c"].astype("f8"), 0)  # on what the first site really gave
    site = by_fusion(found)["acme.mul_relu"]
    assert site.max_abs == site.unfused_abs == np.abs(second - exact).max() > 0
    assert found.drift.status is Status.PASSED and found.drift.max_abs == 0 and found.drift.fused > 0


def test_a_planted_wrong_kernel_is_named_and_the_next_site_is_not(tmp_path):
    """The second site gets wrong values and does right by them: it is not to blame."""
    proto, _ = two_sites()
    found = fusionreg.verify(proto, registry=registry(tmp_path, ONE_BIAS))
    sites = by_fusion(found)
    assert not found.ok and [s.fusion for s in found.failures] == ["acme.add_relu"]
    wrong = sites["acme.add_relu"]
    assert wrong.status is Status.INCORRECT_NUMERICAL and wrong.source == "bend" and wrong.run == 0
    assert "elements differ" in wrong.reason and wrong.reason.startswith("r: ")
    assert wrong.max_abs > 0.1 > wrong.unfused_abs
    assert sites["acme.mul_relu"].status is Status.PASSED and sites["acme.mul_relu"].kernel
    assert found.drift.status is Status.INCORRECT_NUMERICAL and found.drift.max_abs > 0.1


def test_only_the_site_whose_extents_a_kernel_gets_wrong(tmp_path):
    """The same kernel twice; with four columns it drops the last one."""
    template = RIGHT.replace("y[i] =", "if (N == 4 && i % N == 3) return;\n  y[i] =")
    nodes = [
        node("Add", ["x", "b"], ["s"], name="plus_wide"), node("Relu", ["s"], ["y"], name="wide"),
        node("Add", ["z", "c"], ["t"], name="plus_narrow"), node("Relu", ["t"], ["w"], name="narrow"),
    ]  # fmt: skip
    proto = model(
        nodes, {"x": [2, 8], "z": [8, 4]}, {"y": [2, 8], "w": [8, 4]}, {"b": np.ones(8, "f"), "c": np.ones(4, "f")}
    )
    found = fusionreg.verify(proto, registry=registry(tmp_path, template))
    assert {s.source: s.status.failed for s in found.sites} == {"wide": False, "narrow": True}


def test_a_nan_that_disappears(tmp_path):
    """fmaxf drops it. Nothing shows on ordinary inputs, and the run that shows it is named."""
    template = RIGHT.replace("fr::relu(", "fmaxf(0.0f, ")
    proto, _ = two_sites()
    x = np.ones((4, 8), "f")
    x[2, 3] = np.nan
    right, wrong = registry(tmp_path / "a"), registry(tmp_path / "b", template)
    assert fusionreg.verify(proto, registry=right, data=[{"x": x}]).ok
    assert fusionreg.verify(proto, registry=wrong, runs=2).ok
    found = fusionreg.verify(proto, registry=wrong, runs=2, data=[{"x": x}])
    site = by_fusion(found)["acme.add_relu"]
    assert site.status is Status.INCORRECT_NUMERICAL and "nan" in site.reason and site.run == 2
    assert found.runs == ("seed 0", "seed 1", "inputs 0") and found.drift.status.failed


def test_infinities_follow_the_contract(tmp_path):
    proto, _ = two_sites()
    x = np.full((4, 8), np.inf, "f")
    x[1] = -np.inf
    found = fusionreg.verify(proto, registry=registry(tmp_path), data=[{"x": x}])
    assert found.ok and np.isfinite(found.sites[0].max_abs)


def test_a_kernel_that_writes_its_input(tmp_path):
    """Its result is right, and so is all that is made of it; what it did is a fault of this site."""
    template = RIGHT.replace("y[i] =", "if (i == 0) const_cast<T*>(bias)[1] = 0.5f;\n  y[i] =")
    found = fusionreg.verify(two_sites()[0], registry=registry(tmp_path, template))
    site = by_fusion(found)["acme.add_relu"]
    assert site.status.failed, site
    assert "input b" in site.reason or "bias" in site.reason, site.reason


def test_a_kernel_that_does_not_compile_costs_the_others_nothing(tmp_path):
    found = fusionreg.verify(two_sites()[0], registry=registry(tmp_path, RIGHT.replace("fr::relu", "fr::rleu")))
    sites = by_fusion(found)
    assert sites["acme.add_relu"].status is Status.COMPILE_ERROR and "rleu" in sites["acme.add_relu"].reason
    assert sites["acme.add_relu"].kernel == "" and sites["acme.mul_relu"].status is Status.PASSED
    assert found.drift.status is Status.PASSED and not found.ok and found.executed == 1


def test_a_kernel_that_the_simulator_stops(tmp_path):
    found = fusionreg.verify(two_sites()[0], registry=registry(tmp_path, RIGHT.replace("y[i] =", "y[i + M * N] =")))
    site = by_fusion(found)["acme.add_relu"]
    assert site.status is Status.RUNTIME_ERROR and "k.cu.j2" in site.reason
    assert by_fusion(found)["acme.mul_relu"].status is Status.PASSED


def test_a_fallback_is_no_proof(tmp_path):
    """An extent that only the call decides: where no kernel takes it the operators run, and that is told."""
    proto, _ = two_sites("rows")
    made = registry(tmp_path, kernel_requires=("M % 4 == 0",))
    four, six = (np.ones((n, 8), "f") for n in (4, 6))
    assert by_fusion(fusionreg.verify(proto, registry=made, data=[{"x": four}]))["acme.add_relu"].status == "PASSED"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fusionreg.verify(proto, registry=made, data=[{"x": four}, {"x": six}])
    site = by_fusion(found)["acme.add_relu"]
    assert site.status is Status.SKIPPED_UNSUPPORTED and site.run == 1 and "M % 4 == 0 (M = 6)" in site.reason
    assert found.ok and by_fusion(found)["acme.mul_relu"].status is Status.PASSED
    alone = by_fusion(fusionreg.verify(proto, registry=made, data=[{"x": six}]))["acme.add_relu"]
    assert alone.kernel == "" and alone.max_abs == alone.unfused_abs


def test_rounding_is_that_of_the_kernel(tmp_path):
    """float16, x + b beyond its range, × 2⁻¹⁰ inside it again: a kernel that rounds once says 64, one that rounds after
    each operator says inf, and each is right by its own word only."""
    template = """\
{{ signature }} {
  const long long i = blockIdx.x * 256LL + threadIdx.x;  // i: [M N]
  if (i >= M * N) return;
  const float sum = %s;
  y[i] = fr::from_float<T>(sum * fr::to_float(s[0]));
}
"""
    wide = "fr::to_float(x[i]) + fr::to_float(b[i])"
    proto = model(
        [node("Add", ["x", "b"], ["t"], name="plus"), node("Mul", ["t", "s"], ["y"], name="times")],
        {"x": ([2, 8], "float16"), "b": ([2, 8], "float16")}, {"y": ([2, 8], "float16")},
        {"s": np.float16(2.0**-10)},
    )  # fmt: skip
    x = np.full((2, 8), 60000, "float16")
    statuses = {}
    for words, text in (("once", wide), ("per_op", f"fr::to_float(fr::from_float<T>({wide}))")):
        for rounding in ("once", "per_op"):
            kernel = KernelSpec(
                name="k", template="k.cu.j2", grid="ceildiv(M * N, 256)", block="256", rounding=rounding
            )
            spec = plugin_kit.add_relu(
                pattern="y = Mul(Add(x, b), s)", inputs={"x": "T[M N]", "b": "T[M N]", "s": "T[]"},
                outputs={"y": "T[M N]"}, kernels=[kernel],
            )  # fmt: skip
            made = plugin_kit.catalog(tmp_path / words / rounding, {"k.cu.j2": template % text}, spec)
            found = fusionreg.verify(proto, registry=fusionreg.Registry(made), data=[{"x": x, "b": x}])
            statuses[words, rounding] = found.sites[0].status.failed
    assert statuses == {
        ("once", "once"): False, ("once", "per_op"): True, ("per_op", "once"): True, ("per_op", "per_op"): False
    }  # fmt: skip


def test_a_result_of_one_element_has_its_chain_tried_several_times(tmp_path):
    """One element of the chain may be right by luck: a kernel that is off by an ulp or two is no fault."""
    template = RIGHT.replace(
        "fr::relu(fr::to_float(x[i]) + fr::to_float(bias[i % N]))",
        "fr::relu(fr::to_float(x[i]) * 0.5f + fr::to_float(bias[i % N]))",
    )
    nodes = [node("Mul", ["x", "h"], ["t"]), node("Add", ["t", "b"], ["s"]), node("Relu", ["s"], ["y"])]
    proto = model(nodes, {"x": [1, 1]}, {"y": [1, 1]}, {"b": np.ones(1, "f"), "h": np.float32(0.5)})
    spec = plugin_kit.add_relu(pattern="y = Relu(Add(Mul(x, 0.5), bias))", inputs={"x": "T[M N]", "bias": "T[N]"},
                               outputs={"y": "T[M N]"})  # fmt: skip
    made = fusionreg.Registry(plugin_kit.catalog(tmp_path, {"k.cu.j2": template}, spec))
    found = fusionreg.verify(proto, registry=made, runs=5, policy="aggressive")
    assert [s.status for s in found.sites] == [Status.PASSED], found


# --- the whole -----------------------------------------------------------------------------------------------------


def opened_and_planned(tmp_path, **changes):
    made = registry(tmp_path)
    opened = replace(open_model(two_sites()[0], ops=made.catalog.ops), **changes)
    return made, opened, made.plan(opened.graph)


def test_a_missing_original_is_skipped_with_its_reason(tmp_path):
    found = verify_opened(*opened_and_planned(tmp_path / "a", reference=None, reason="no onnxruntime here"))
    assert found.drift.status is Status.SKIPPED_UNSUPPORTED and found.drift.reason == "no onnxruntime here"
    assert found.ok and all(s.status is Status.PASSED for s in found.sites)

    def refuses(inputs):
        raise ModelError("no reference", "m", "onnxruntime refuses it")

    found = verify_opened(*opened_and_planned(tmp_path / "b", reference=refuses))
    assert found.drift.status is Status.SKIPPED_UNSUPPORTED and found.drift.reason == "onnxruntime refuses it"


def test_a_wrong_reading_is_no_sites_fault(tmp_path):
    """Our graph has another constant than the file: every site is right, and the whole is not."""
    made, opened, _ = opened_and_planned(tmp_path)
    constants = FrozenDict({k: v * np.float32(1.01) for k, v in opened.graph.constants.items()})
    misread = replace(opened, graph=replace(opened.graph, constants=constants))
    found = verify_opened(made, misread, made.plan(misread.graph), name="m")
    assert not found.ok and not found.failures and found.drift.status is Status.INCORRECT_NUMERICAL
    assert "as read" in found.drift.reason


def test_without_sites_the_whole_is_compared_all_the_same(tmp_path):
    found = fusionreg.verify(two_sites()[0], registry=registry(tmp_path), policy="off")
    assert found.ok and found.sites == () and found.executed == 0 and found.drift.status is Status.PASSED


def test_it_is_a_value_that_prints_and_goes_through_json(tmp_path):
    found = fusionreg.verify(two_sites()[0], registry=registry(tmp_path, ONE_BIAS))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["ok"] is False and data["executed"] == 2 and len(data["sites"]) == 2
    assert data["sites"][0]["status"] == "INCORRECT_NUMERICAL" and data["sites"][0]["nodes"] == ["plus", "bend"]
    assert data["drift"]["status"] == "INCORRECT_NUMERICAL" and data["runs"] == ["seed 0"]
    lines = str(found).splitlines()
    assert lines[0] == "g: kernels ran at 2 of 2 sites on sim, 1 run, 1 wrong"
    assert "acme.add_relu at bend: INCORRECT_NUMERICAL" in lines[1] and "against the original" in lines[3]


# --- inputs --------------------------------------------------------------------------------------------------------


def test_inputs_from_files(tmp_path):
    proto, constants = two_sites()
    onnx.save(proto, tmp_path / "m.onnx")
    x = np.full((4, 8), 2, "f")
    np.savez(tmp_path / "x.npz", x=x)
    found = fusionreg.verify(str(tmp_path / "m.onnx"), registry=registry(tmp_path), data=[tmp_path / "x.npz"])
    assert found.runs == (str(tmp_path / "x.npz"),) and found.model == str(tmp_path / "m.onnx")
    exact = np.maximum(2 + constants["b"].astype("f8"), 0)
    assert found.sites[0].max_abs == np.abs(np.maximum(np.float32(2) + constants["b"], 0) - exact).max()


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"z": np.ones((4, 8), "f")}, "an array 'z', which is no input — one of x"),
        ({"x": np.ones((4, 8))}, "x is float64 — float32. Cast it"),
        ({"x": np.ones((4, 9), "f")}, "x is [4 9] — [4 8]"),
        ({"x": np.array([None] * 4)}, "Object arrays cannot be loaded"),
    ],
)
def test_files_that_do_not_fit(tmp_path, arrays, says):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ArgumentError) as caught:
        fusionreg.verify(two_sites()[0], registry=registry(tmp_path), data=[tmp_path / "x.npz"])
    assert says in str(caught.value) and "x.npz" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04cut"])
def test_files_that_are_no_archives(tmp_path, content):
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"cannot use .*x.npz"):
        fusionreg.verify(two_sites()[0], registry=registry(tmp_path), data=[tmp_path / "x.npz"])
    np.save(tmp_path / "one.npy", np.ones(3))
    with pytest.raises(ArgumentError, match="a single array"):
        fusionreg.verify(two_sites()[0], registry=registry(tmp_path), data=[tmp_path / "one.npy"])


def test_no_runs_are_no_verification(tmp_path):
    with pytest.raises(ArgumentError, match="0 runs — at least one"):
        fusionreg.verify(two_sites()[0], registry=registry(tmp_path), runs=0)


# --- sums ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [7, 3000])
def test_long_products_are_summed_in_blocks(monkeypatch, depth):
    """In order where that is quick, else in blocks of the summed axis: near float64 either way, and not BLAS's sum."""
    from fusionreg.verifying import sites

    monkeypatch.setattr(sites, "IN_ORDER", 4096)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, depth)).astype("f"), rng.normal(size=(depth, 5)).astype("f")
    exact = a.astype("f8") @ b.astype("f8")
    got = _summed(a, b)
    assert got.dtype == np.float32 and got.shape == (2, 3, 5)
    np.testing.assert_allclose(got, exact, atol=1e-5 * depth**0.5)
    assert _summed(a.astype("f8"), b.astype("f8")).dtype == np.float64


def test_a_cast_of_the_graphs_own_that_overflows(tmp_path):
    """float32 → float16 → float32: a kernel that rounds there gives what the chain gives, one that does not is right,
    too, and a third value is wrong."""
    body = "{{ signature }} {\n  const int i = blockIdx.x * 256 + threadIdx.x;\n  if (i >= M * N) return;\n%s}\n"
    texts = {
        "rounds": "  y[i] = __half2float(__float2half(x[i] + b[i])) * 0.5f;\n",
        "once": "  y[i] = (x[i] + b[i]) * 0.5f;\n",
        "wrong": "  y[i] = -1.0f;\n",
    }
    proto = model(
        [
            node("Add", ["x", "b"], ["s"]), node("Cast", ["s"], ["h"], to=10), node("Cast", ["h"], ["w"], to=1),
            node("Mul", ["w", "half"], ["y"]),
        ],
        {"x": [8, 8], "b": [8, 8]}, {"y": [8, 8]}, {"half": np.float32(0.5)},
    )  # fmt: skip
    x = np.full((8, 8), 50000, "f")
    failed = {}
    for name, text in texts.items():
        spec = plugin_kit.add_relu(
            pattern='h = Cast(Add(x, b), to="float16")\ny = Mul(Cast(h, to="float32"), 0.5)',
            inputs={"x": "T[M N]", "b": "T[M N]"}, outputs={"y": "T[M N]"}, dtypes={"T": ("float32",)},
        )  # fmt: skip
        made = fusionreg.Registry(plugin_kit.catalog(tmp_path / name, {"k.cu.j2": body % text}, spec))
        found = fusionreg.verify(proto, registry=made, data=[{"x": x, "b": x}], policy="aggressive")
        failed[name] = [s.status.failed for s in found.sites if s.kernel]
    assert failed == {"rounds": [False], "once": [False], "wrong": [True]}


def test_two_results_say_little_of_the_chain():
    """On any of thirty inputs the chain may be right by luck in both; what it does on inputs nearby counts, too."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 2).eval()
    found = fusionreg.verify(module, torch.randn(1, 8), runs=30, policy="aggressive", device="sim")
    assert [(s.fusion, s.status) for s in found.sites] == [("gemm.bias", Status.PASSED)], str(found)
    assert len(found.runs) == 30 and 0 < found.sites[0].max_abs < 1e-6
