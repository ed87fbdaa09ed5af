"""Discovery and loading: every plugin stands alone, names have owners, nothing depends on order."""

from __future__ import annotations

import sys

import pytest
from registry_kit import good, module, only, spec

from fusionreg.core.errors import ArgumentError, PluginError, UnknownNameError
from fusionreg.core.registry.catalog import HookWarning, load
from fusionreg.core.registry.entries import row_of
from fusionreg.core.spec import Case

#: DESIGN's minimal third-party plugin, all of it but pyproject.toml.
MINIMAL = """\
from fusionreg import FusionSpec, KernelSpec, hookimpl

BIAS_RELU2 = FusionSpec(
    api=1, name="acme.bias_relu2",
    pattern="h = Relu(Add(x, bias))\\ny = Mul(h, h)",
    inputs={"x": "T[M N]", "bias": "T[N]"}, outputs={"y": "T[M N]"}, dtypes={"T": ("float16", "bfloat16", "float32")},
    kernels=[KernelSpec(name="plain", template="bias_relu2.cu.j2", grid="ceildiv(M * N, 256)", block="256")],
)

@hookimpl
def register_fusions():
    return [BIAS_RELU2]
"""
MINIMAL_CUDA = """\
{{ signature }} {
  const long long i = blockIdx.x * 256LL + threadIdx.x;
  if (i >= M * N) return;
  const float h = fr::relu(fr::to_float(x[i]) + fr::to_float(bias[i % N]));
  y[i] = fr::from_float<T>(h * h);
}
"""


def test_minimal_plugin_loads_from_its_entry_point(site):
    site.plugin("acme", MINIMAL, {"templates/bias_relu2.cu.j2": MINIMAL_CUDA})
    catalog = load(allow=("acme",))
    assert not catalog.failures and list(catalog.fusions) == ["acme.bias_relu2"]
    entry = catalog["acme.bias_relu2"]
    assert entry.plugin == "acme" and entry.distribution == "fusionreg-acme" and entry.version == "1.0"
    assert entry.kernels[0].key == "acme.bias_relu2/plain" and entry.kernels[0].template.name == "bias_relu2.cu.j2"
    assert len((MINIMAL + MINIMAL_CUDA).splitlines()) <= 45 - 12  # leaves twelve lines for pyproject.toml


def test_rows(site):
    good(site)
    (row,) = load(allow=("acme",)).plugins
    assert (row.name, row.distribution, row.version, row.module) == ("acme", "fusionreg-acme", "1.0", "fusionreg_acme")
    assert row.fusions == ("acme.relu",) and row.kernels == ("acme.relu/plain",) and row.prefixes == ("acme",)
    assert row.root == site.folder / "fusionreg_acme" and row.summary == "Relu with a bias."
    assert row_of(row)["status"] == "loaded"


# --- one plugin never takes another with it --------------------------------------------------------------------

BROKEN = {
    "import_error": "import nothing_of_this_name",
    "syntax_error": "def f(:",
    "system_exit": "raise SystemExit(3)",
    "os_error": "open('/nonexistent/file')",
    "base_exception": "class Odd(BaseException): pass\nraise Odd('odd')",
    "generator_exit": "raise GeneratorExit",
    "recursion": "def f(): f()\nf()",
    "bad_spec": "from fusionreg import FusionSpec\nFusionSpec(api=1, name='x')",
    "api_2": "import fusionreg as f\nf.FusionSpec(api=2, name='a.b', pattern='', inputs={}, outputs={}, dtypes={})",
    "no_hooks": "x = 1",
    "unmarked_hook": "def register_fusions(): return []",
    "misspelled_hook": "from fusionreg import hookimpl\n@hookimpl\ndef register_fusion(): return []",
    "wrong_arguments": "from fusionreg import hookimpl\n@hookimpl\ndef register_fusions(registry): return []",
    "raises_in_hook": "from fusionreg import hookimpl\n@hookimpl\ndef register_fusions(): raise SystemExit('bye')",
    "answers_nonsense": "from fusionreg import hookimpl\n@hookimpl\ndef register_fusions(): return 7",
    "answers_text": "from fusionreg import hookimpl\n@hookimpl\ndef register_fusions(): return 'ab'",
    "answers_wrong_records": "from fusionreg import hookimpl\n@hookimpl\ndef register_fusions(): return [{}]",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_a_row_and_the_others_load(site, name):
    site.plugin("broken", BROKEN[name])
    good(site, "acme")
    good(site, "zeta")
    catalog = load(allow=("acme", "broken", "zeta"))
    assert set(catalog.fusions) == {"acme.relu", "zeta.relu"}
    (failure,) = catalog.failures
    assert failure.plugin == "broken" and failure.distribution == "fusionreg-broken" and failure.reason
    assert "\n" not in failure.reason
    assert row_of(failure) in catalog.plugin_rows() and row_of(failure)["status"] == "failed"
    with pytest.raises(PluginError, match="plugin broken") as caught:
        load(allow=("acme", "broken", "zeta"), strict=True)
    assert (caught.value.__cause__ is None) == (name == "answers_wrong_records")


def test_reasons_name_the_cause(site):
    for name in ("import_error", "misspelled_hook", "bad_spec", "api_2", "system_exit"):
        site.plugin(name, BROKEN[name])
    reasons = {f.plugin: f"{f.stage}: {f.reason}" for f in load(allow=tuple(BROKEN)).failures}
    assert "nothing_of_this_name" in reasons["import_error"]
    assert "register_fusion" in reasons["misspelled_hook"] and reasons["misspelled_hook"].startswith("register")
    assert "FusionSpec field pattern" in reasons["bad_spec"]
    assert reasons["api_2"].endswith("field api: 2 — this version reads 1. Upgrade fusionreg or the plugin")
    assert reasons["system_exit"] == "import: SystemExit: 3"


def test_keyboard_interrupt_passes(site):
    site.plugin("stop", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load(allow=("stop",))
    site.plugin("later", "from fusionreg import hookimpl\n@hookimpl\ndef register_fusions(): raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load(allow=("later",))


def test_an_attribute_that_is_missing_or_none(site):
    site.write({"odd.py": "nothing = None"})
    site.dist("odd", "a = odd:nothing\nb = odd:absent\nc = odd:nothing.deeper\nd = not a module")
    failures = {f.plugin: f for f in load(allow=("a", "b", "c", "d")).failures}
    assert set(failures) == {"a", "b", "c", "d"} and "is None" in failures["a"].reason


def test_one_invalid_spec_loses_only_itself():
    catalog = only(("acme", module(register_fusions=[spec("acme.bad", pattern="y = Rellu(x)"), spec("acme.good")])))
    assert list(catalog.fusions) == ["acme.good"]
    (failure,) = catalog.failures
    assert (failure.plugin, failure.fusion, failure.field, failure.stage) == ("acme", "acme.bad", "pattern", "validate")
    assert "did you mean Relu" in failure.reason
    with pytest.raises(UnknownNameError, match="failed to load it"):
        catalog["acme.bad"]
    assert catalog.lost("acme.good") and not catalog.lost("other.good")  # the plugin's failure may be why


def test_a_plugin_that_is_lost_says_so_wherever_its_fusions_are_asked_for(site):
    site.plugin("acme", MINIMAL.replace("block=", "blok="), {"templates/bias_relu2.cu.j2": MINIMAL_CUDA})
    with pytest.raises(UnknownNameError, match=r"Plugin acme failed in import: KernelSpec field .*blok"):
        load(allow=("acme",))["acme.bias_relu2"]


def test_the_lists_are_no_text():
    with pytest.raises(ArgumentError, match="allow = 'gemm' — a collection of names"):
        load(allow="gemm")


def test_hooks_are_asked_plugin_by_plugin_and_a_raise_loses_one_answer():
    def raises(fusion):
        raise ValueError("no cases today")

    a = module(register_fusions=[spec("a.f")], conformance_cases=raises)
    b = module(conformance_cases=lambda fusion: [Case(name=f"of_b_{fusion.name[0]}", axes={"M": 3})])
    catalog = only(("b", b), ("a", a))
    assert [c.name for c in catalog["a.f"].cases] == ["of_b_a"]
    assert [(f.plugin, f.stage) for f in catalog.failures] == [("a", "conformance_cases")]
    with pytest.warns(HookWarning, match="no cases today"):
        answers = catalog.hook("conformance_cases", fusion=catalog["a.f"].spec)
    assert [(p, [c.name for c in cases]) for p, cases in answers] == [("b", ["of_b_a"])]
    assert catalog.hook("estimate", fusion=None, problem=None, target=None) == []


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"a": 2e-6, "b": 1e-6}, 1e-6),  # the owner's word counts
        ({"a": 2e-6, "b": None, "c": 3e-6}, 2e-6),
        ({"a": float("nan"), "b": -1.0, "c": "fast"}, None),
        ({}, None),
    ],
)
def test_estimates(answers, expected):
    def estimator(answer):
        return lambda fusion, problem, target: answer

    plugins = [(n, module(estimate=estimator(a))) for n, a in answers.items() if n != "b"]
    b = {"estimate": estimator(answers["b"])} if "b" in answers else {}
    catalog = only(*plugins, ("b", module(register_fusions=[spec("b.f")], **b)))
    assert catalog.implements("estimate") == bool(answers)
    assert catalog.estimate(catalog["b.f"], None, None) == expected


def test_a_wrong_case_of_another_plugin_is_its_failure():
    b = module(conformance_cases=lambda fusion: [Case(name="c", axes={"Q": 3}), Case(name="d"), Case(name="d")])
    catalog = only(("a", module(register_fusions=[spec("a.f")])), ("b", b))
    assert [c.name for c in catalog["a.f"].cases] == ["d"]
    assert sorted((f.plugin, f.fusion) for f in catalog.failures) == [("b", "a.f"), ("b", "a.f")]


# --- lists -----------------------------------------------------------------------------------------------------


def test_blocked_plugins_are_nowhere_and_unblocking_restores(site, monkeypatch):
    good(site, "acme")
    good(site, "zeta")
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "acme, zeta,unknown_name")
    assert set(load().fusions) == {"acme.relu", "zeta.relu"}
    monkeypatch.setenv("FUSIONREG_DISABLE_PLUGINS", " acme ,nobody")
    catalog = load()
    assert set(catalog.fusions) == {"zeta.relu"} and [p.name for p in catalog.plugins] == ["zeta"]
    assert "acme" in catalog.blocked and not catalog.failures and "acme" not in str(catalog.plugin_rows())
    assert all(k.plugin != "acme" for k in catalog.kernels) and "fusionreg_acme" in sys.modules  # blocked after loading
    monkeypatch.setenv("FUSIONREG_DISABLE_PLUGINS", "acm")  # names are exact
    assert set(load().fusions) == {"acme.relu", "zeta.relu"}
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "")  # allows nothing
    assert not load().fusions


def test_a_blocked_plugin_is_not_imported(site):
    site.plugin("evil", "raise RuntimeError('imported')")
    assert not load(allow=(), deny=()).failures and not load(allow=("evil",), deny=("evil",)).failures
    assert load(allow=("evil",), deny=()).failures
