"""Derived cases: complete, legal, deterministic, and laid out as they say."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.conformance import coverage, values
from fusionreg.core.conformance.cases import base_axes, derive
from fusionreg.core.conformance.trial import LAYOUTS, arrange, describe
from fusionreg.core.dtypes import dtype
from fusionreg.core.errors import SpecError, UnknownNameError
from fusionreg.core.problem import bind
from fusionreg.core.registry.catalog import FusionEntry
from fusionreg.core.spec import Case
from fusionreg.core.targets import target

TARGET = "sm_90a"


@pytest.mark.parametrize("extent", ["quick", "all"])
@pytest.mark.parametrize("kernel", ["plain", "tensor_core"])
def test_names_are_unique_and_every_trial_binds(catalog, kernel, extent):
    entry = catalog["gemm.scale_bias"]
    trials = derive(entry, entry.kernel(kernel), TARGET, extent)
    assert len({t.name for t in trials}) == len(trials)
    for t in trials:
        bind(entry, t.tensors(t.arrays(entry)), t.keywords, TARGET)


def test_edges_of_every_axis_are_there(catalog):
    entry = catalog["gemm.bias"]
    trials = derive(entry, entry.kernel("plain"), TARGET)
    for axis, extents in {"M": (0, 1, 63, 64, 65), "N": (0, 1, 63, 64, 65), "K": (0, 1, 15, 16, 17)}.items():
        assert set(extents) <= {t.axes[axis] for t in trials}
    assert {(), (2, 3), (0,)} <= {t.leading for t in trials}
    assert any(len(set(t.axes.values())) == 1 for t in trials)
    assert {layout for t in trials for layout in t.layouts.values()} == set(LAYOUTS) - {"contiguous", "channels_last"}
    assert {dtype for t in trials for dtype in t.dtypes.values()} == set(entry.spec.dtypes["T"])


def test_all_covers_every_pair_of_levels(catalog):
    entry = catalog["gemm.scale_bias"]
    plain, further, refused = coverage.rows(entry, entry.kernel("plain"), base_axes(entry), TARGET, None)
    assert not refused
    seen = set()
    for t in (*plain, *further):
        levels = {"T": t.dtypes["T"], **t.choices, **t.attributes, **{f"form {k}": v for k, v in t.forms.items()}}
        seen |= set(combinations(sorted(levels.items(), key=str), 2))
    factors = {"T": entry.spec.dtypes["T"], "activation": entry.choices["activation"], "transB": (0, 1)}
    for a, b in combinations(factors, 2):
        for pair in product([(a, v) for v in factors[a]], [(b, v) for v in factors[b]]):
            assert tuple(sorted(pair, key=str)) in seen


def test_quick_compiles_few_units_and_the_family_covers_more_than_one_kernel_does(catalog):
    chosen = {}
    for entry in (e for e in catalog.fusions.values() if "activation" in e.choices):
        for kernel in entry.kernels:
            plain, further, _ = coverage.rows(entry, kernel, base_axes(entry), TARGET, 2)
            assert len(further) <= 2
            chosen[kernel.key] = {t.choices["activation"] for t in (*plain, *further)}
    assert len(frozenset().union(*chosen.values())) == 7


def test_quick_tries_each_kernel_of_a_fusion_on_every_edge_of_another_dtype():
    for entry in shipped("gemm", "norm").entries():
        edged, every = [], set()
        for kernel in entry.kernels:
            trials = derive(entry, kernel, TARGET, "quick")
            full = {t.dtype for t in trials if t.name.endswith("-square")}
            assert len(full) == 1, "edges in one dtype alone"
            edged += full
            accepted = {t.dtype for t in trials if t.name.endswith("-tails")}
            every |= accepted
            for name in ("tails", "overflow", f"special-{next(iter(entry.inputs))}"):
                assert {t.dtype for t in trials if t.name.endswith(name)} == accepted
        # kernels that refuse a dtype go on to the next one, which another may have too
        assert len(set(edged)) >= min(len(edged), len(every), 2), entry.name


def test_quick_reaches_beyond_one_pass_of_a_block():
    """Rows that a kernel walks in several steps, while others stay few."""
    entry = shipped("gemm", "norm")["norm.layernorm"]
    for kernel in entry.kernels:
        trials = derive(entry, kernel, TARGET, "quick")
        assert {(3, 520), (9, 33)} <= {(t.axes["M"], t.axes["N"]) for t in trials}


def test_a_dtype_that_a_kernel_refuses_is_one_trial(catalog):
    entry = catalog["gemm.bias"]
    trials = derive(entry, entry.kernel("tensor_core"), TARGET)
    assert [t.name for t in trials if t.dtype == "float32"] == ["float32-base"]


def test_weight_form_follows_transB(catalog):
    entry = catalog["gemm.bias"]
    for t in derive(entry, entry.kernel("plain"), TARGET):
        k, n = t.axes["K"], t.axes["N"]
        assert t.shapes(entry)["w"] == ((n, k) if t.attributes["transB"] else (k, n))


def extended(entry: FusionEntry, *cases: Case) -> FusionEntry:
    return replace(entry, cases=cases)


def test_a_declared_case_runs_in_every_dtype_with_the_forms_it_needs(catalog):
    case = Case(name="mine", axes={"K": 7}, attributes={"transB": 1, "activation": "Relu"}, values={"x": "256"})
    entry = extended(catalog["gemm.bias"], case)
    mine = [t for t in derive(entry, entry.kernel("plain"), TARGET) if t.name.endswith("-mine")]
    assert {t.dtype for t in mine} == {"float16", "bfloat16", "float32"}
    quick = [t for t in derive(entry, entry.kernel("plain"), TARGET, "quick") if t.name.endswith("-mine")]
    assert quick == mine, "a number may be about the range of any of the dtypes"
    other = extended(catalog["gemm.bias"], case.model_copy(update={"values": {}}))
    quick = [t for t in derive(other, other.kernel("plain"), TARGET, "quick") if t.name.endswith("-mine")]
    assert len(quick) == 1, "a unit of its own for each further dtype"
    for t in mine:
        assert t.choices == {"activation": "Relu"}
        assert (t.arrays(entry)["x"].astype(float) == 256).all() and t.arrays(entry)["w"].shape == (t.axes["N"], 7)


def test_a_declared_case_that_fits_nothing_is_an_error(catalog):
    entry = extended(catalog["gemm.bias"], Case(name="mine", attributes={"transB": 2}))
    with pytest.raises(SpecError, match=r"'mine' of gemm\.bias"):
        derive(entry, entry.kernel("plain"), TARGET)
    entry = extended(catalog["gemm.bias"], Case(name="mine", values={"x": "nromal"}))
    with pytest.raises(UnknownNameError, match="did you mean normal"):
        derive(entry, entry.kernel("plain"), TARGET)


def test_trials_are_the_same_in_every_process(catalog):
    entry = catalog["gemm.bias"]
    a, b = (derive(entry, entry.kernel("plain"), TARGET) for _ in range(2))
    assert a == b
    for x, y in zip(a[5].arrays(entry).values(), b[5].arrays(entry).values(), strict=True):
        np.testing.assert_array_equal(x, y)
    replica = a[0].arrays(entry, 1)["x"]
    assert not np.array_equal(replica, a[0].arrays(entry)["x"])


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, kind):
    array = values.generate("normal", (1,), (4, 24), kind)
    laid = arrange(array, layout)
    source = np.broadcast_to(array[:1], array.shape) if layout == "expanded" else array
    np.testing.assert_array_equal(laid.astype(np.float64), source.astype(np.float64))
    found = describe(laid)
    width = array.itemsize
    assert found.alignment == (width if layout == "misaligned" else 256)
    strides = {"padded": (32, 1), "padded_odd": (25, 1), "transposed": (1, 4), "expanded": (0, 1)}
    assert found.strides == strides.get(layout, (24, 1))


def test_gaps_hold_nan():
    laid = arrange(np.ones((2, 4), np.float32), "padded")
    whole = np.lib.stride_tricks.as_strided(laid, (12,), (4,))
    assert np.isnan(whole[4:12]).all()


@pytest.mark.parametrize("name", values.GENERATORS)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int32", "uint8", "bool"])
def test_generators_fill_every_dtype(name, kind):
    made = values.generate(name, (7,), (3, 5), kind)
    assert made.shape == (3, 5) and made.dtype == dtype(kind).numpy
    assert values.generate(name, (7,), (0, 5), kind).size == 0 and values.generate(name, (7,), (), kind).shape == ()


def test_random_values_have_the_size_that_a_spec_tells():
    for name, scaled in (("normal", True), ("special", True), ("large", False), ("zeros", False), ("0.5", False)):
        whole, half = (values.generate(name, (7,), (3, 5), "float32", size) for size in (1.0, 0.5))
        np.testing.assert_array_equal(half, whole * 0.5 if scaled else whole)
    entry = shipped("moe")["moe.routed_ffn_w4a16"]
    trial = next(t for t in derive(entry, entry.kernel("plain"), TARGET) if t.name.endswith("base"))
    assert np.abs(trial.arrays(entry)["down_scale"]).max() < 0.1 < np.abs(trial.arrays(entry)["x"]).max()


def test_sweep_puts_one_point_into_every_row():
    swept = values.generate("sweep", (1,), (2, 20, 5), "float32")
    assert (swept[..., 1:] == 0).all() and {2.7, -2.7, -1e4} <= {round(float(v), 3) for v in swept[..., 0].ravel()}


def test_neutral_operands_of_a_sweep(catalog):
    entry = catalog["gemm.scale_bias"]
    swept = next(t for t in derive(entry, entry.kernel("plain"), TARGET) if t.name.endswith("-sweep"))
    assert dict(swept.values) == {"x": "sweep", "w": "ones", "scale": "ones", "bias": "zeros"}


def test_special_generators_hold_what_they_promise():
    special = values.generate("special", (1,), (64,), "float16").astype(np.float64)
    assert np.isnan(special).sum() == 1 and np.isposinf(special).sum() == 1 and np.isneginf(special).sum() == 1
    for kind in ("float16", "bfloat16", "float32"):
        tiny = values.generate("denormal", (1,), (64,), kind).astype(np.float64)
        assert (np.abs(tiny) < values.tiny(dtype(kind))).all() and (tiny != 0).sum() > 60
    cancel = values.generate("cancel", (1,), (2, 514), "bfloat16").astype(np.float64)
    np.testing.assert_array_equal(cancel[0, [0, 255, 256, 257, 512, 513]], [1, 1, 0.5, -1, -1, 0])
    assert values.generate("-1e-3", (1,), (2,), "float32")[1] == np.float32(-1e-3)


def test_a_trial_s_problem_is_that_of_the_target_and_device_asked_for():
    entry = shipped("gemm")["gemm.bias"]
    trial = derive(entry, entry.kernel("plain"), TARGET, "quick")[0]
    asked = [("sm_80", None), (TARGET, 3), ("sm_80", 5), (TARGET, None), ("sm_80", None)]
    found = [coverage.problem_of(entry, trial.with_(f"{i}"), *what) for i, what in enumerate(asked)]
    usual = {name: target(name).multiprocessors for name in ("sm_80", TARGET)}
    assert [(p.target, p.multiprocessors) for p in found] == [(name, n or usual[name]) for name, n in asked]
