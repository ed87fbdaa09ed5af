"""Discovery and loading: every plugin stands alone, names have owners, nothing depends on order."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from fusionreg.core.errors import ArgumentError, PluginError, UnknownNameError
from fusionreg.core.registry.catalog import HookWarning, load
from fusionreg.core.registry.entries import row_of
from fusionreg.core.spec import Case, FusionSpec, KernelSpec, OpSpec
from fusionreg.hookspecs import hookimpl

TEMPLATE = "{{ signature }} { for (long long i = 0; i < M * N; ++i) y[i] = x[i]; }"

PLUGIN = '''\
"""Relu with a bias."""
from fusionreg import FusionSpec, KernelSpec, hookimpl

SPEC = FusionSpec(
    api=1, name="{name}", pattern="y = Relu(Add(x, bias))", inputs={{"x": "T[M N]", "bias": "T[N]"}},
    outputs={{"y": "T[M N]"}}, dtypes={{"T": ("float16", "float32")}},
    kernels=[KernelSpec(name="plain", template="k.cu.j2", grid="ceildiv(M * N, 256)", block="256")],
)


@hookimpl
def register_fusions():
    return [SPEC]
'''

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


def good(site, name="acme", fusion=None):
    site.plugin(name, PLUGIN.format(name=fusion or f"{name}.relu"), {"templates/k.cu.j2": TEMPLATE})


def spec(name="acme.relu", **changes) -> FusionSpec:
    fields = {"api": 1, "name": name, "pattern": "y = Relu(x)", "inputs": {"x": "T[M]"}, "outputs": {"y": "T[M]"},
              "dtypes": {"T": ("float32",)}}  # fmt: skip
    return FusionSpec(**{**fields, **changes})


def module(**hooks):
    """A plugin object that is no package: it may register anything but kernels. A hook is a function, or its answer."""
    made = types.ModuleType("made")
    for name, answer in hooks.items():
        setattr(made, name, answer if name.isupper() else hookimpl(answer if callable(answer) else _answering(answer)))
    return made


def _answering(answer):
    def hook():
        return answer

    return hook


def only(*extras, **options):
    return load(entry_points=(), extra_plugins=extras, **options)


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
    assert "field api" in reasons["api_2"] and "1" in reasons["api_2"]
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


# --- names -----------------------------------------------------------------------------------------------------


def test_a_name_belongs_to_its_entry_point(site):
    good(site, "aaa", fusion="acme.stolen")
    good(site, "acme")
    catalog = load(allow=("aaa", "acme"))
    assert list(catalog.fusions) == ["acme.relu"]
    (failure,) = catalog.failures
    assert failure.plugin == "aaa" and failure.fusion == "acme.stolen" and "plugin acme owns it" in failure.reason


def test_a_prefix_may_be_declared_but_not_taken():
    a = module(FUSIONREG_PREFIXES=("extra", "b", "fusionreg", "Bad"), register_fusions=[spec("extra.f"), spec("b.f")])
    b = module(FUSIONREG_PREFIXES="extra", register_fusions=[spec("b.g")])
    catalog = only(("a", a), ("b", b))
    assert set(catalog.fusions) == {"extra.f", "b.g"}
    claims = {(f.plugin, f.fusion or f.reason.split("'")[1]) for f in catalog.failures}
    assert claims == {("a", "b"), ("a", "b.f"), ("a", "fusionreg"), ("a", "Bad"), ("b", "extra")}


def test_an_unowned_prefix_is_refused_with_the_way_out():
    catalog = only(("acme", module(register_fusions=[spec("other.f")])))
    assert "nobody owns it" in catalog.failures[0].reason and "FUSIONREG_PREFIXES" in catalog.failures[0].reason


def test_the_same_entry_point_name_from_two_distributions(site):
    good(site, "acme")
    site.write({"imposter/__init__.py": PLUGIN.format(name="acme.other")})
    site.dist("zz-imposter", "acme = imposter")
    catalog = load(allow=("acme",))
    assert list(catalog.fusions) == ["acme.relu"]
    (failure,) = catalog.failures
    assert failure.distribution == "zz-imposter" and "is taken by fusionreg-acme" in failure.reason


def test_one_module_under_two_names(site):
    good(site, "acme")
    site.dist("alias", "zzz = fusionreg_acme")
    (failure,) = load(allow=("acme", "zzz")).failures
    assert failure.plugin == "zzz" and "same object" in failure.reason


def test_a_fusion_registered_twice():
    catalog = only(("acme", module(register_fusions=[spec(), spec(summary="again")])))
    assert [f.stage for f in catalog.failures] == ["claim"] and catalog["acme.relu"].spec.summary == ""


def test_kernels_of_another_plugin(site):
    good(site, "acme")
    code = """\
from fusionreg import KernelSpec, hookimpl
@hookimpl
def register_kernels():
    common = dict(template="k.cu.j2", grid="1", block="32")
    made = [("fast", "acme.relu"), ("plain", "acme.relu"), ("lost", "acme.rellu"), ("free", None)]
    return [KernelSpec(name=name, fusion=fusion, **common) for name, fusion in made]
"""
    site.plugin("zeta", code, {"templates/k.cu.j2": TEMPLATE})
    catalog = load(allow=("acme", "zeta"))
    entry = catalog["acme.relu"]
    assert [(k.plugin, k.name) for k in entry.kernels] == [("acme", "plain"), ("zeta", "fast")]
    assert entry.kernels[1].root.name == "fusionreg_zeta" and catalog.kernel("acme.relu/fast").plugin == "zeta"
    reasons = {f.fusion: f.reason for f in catalog.failures}
    assert (
        "first by plugin acme" in reasons["acme.relu/plain"] and "did you mean acme.relu" in reasons["acme.rellu/lost"]
    )
    assert "names no fusion" in reasons["free"] and all(f.plugin == "zeta" for f in catalog.failures)


def test_operators_of_a_plugin():
    def op(name):
        return OpSpec(
            name=name, inputs=("x",), meaning=lambda xp, x: x, infer=lambda i, a, c: [(i[0].dtype, i[0].shape)]
        )

    a = module(register_ops=[op("acme::Same"), op("acme::Same"), op("Same"), op("other::Same")],
               register_fusions=[spec(pattern="y = acme.Same(x)")])  # fmt: skip
    catalog = only(("acme", a))
    assert "acme::Same" in catalog.ops and list(catalog.fusions) == ["acme.relu"]
    assert catalog.plugins[0].ops == ("acme::Same",) and len(catalog.failures) == 3
    assert "acme::Same" not in only(("acme", module(register_fusions=[spec()]))).ops  # nothing is kept between loads


def test_order_never_matters():
    plugins = [
        ("a", module(register_fusions=[spec("a.z"), spec("a.b")])),
        ("b", module(FUSIONREG_PREFIXES=("c",), register_fusions=[spec("b.f"), spec("c.f")])),
        ("c", module(register_fusions=[spec("c.f"), spec("c.a", pattern="y = Nope(x)")])),
        ("d", module(FUSIONREG_PREFIXES=("e", "f"), register_fusions=[spec("e.f"), spec("f.f")])),
        ("g", module(FUSIONREG_PREFIXES=("e",), register_fusions=[spec("e.g")])),
    ]
    seen = set()
    for order in itertools.permutations(plugins):
        if random.Random(str(order[0][0]) + order[1][0]).random() < 0.5:
            catalog = only(*order)
            seen.add(
                (tuple(catalog.fusions), tuple(map(str, catalog.failures)), tuple(p.prefixes for p in catalog.plugins))
            )
    assert len(seen) == 1 and next(iter(seen))[0] == ("a.b", "a.z", "b.f", "c.f", "e.f", "f.f")


# --- metadata --------------------------------------------------------------------------------------------------


def test_broken_metadata_is_tolerated(site):
    good(site)
    (site.folder / "empty-1.0.dist-info").mkdir()
    site.dist("ghost", "ghost = nothing_there", metadata=False)
    (site.folder / "bin-1.0.dist-info").mkdir()
    (site.folder / "bin-1.0.dist-info" / "entry_points.txt").write_bytes(b"[fusionreg]\n\xff\xfe = x\n")
    site.dist("torn", "= =\nno separator", version="2.0")
    catalog = load(deny=("gemm",))
    assert "acme.relu" in catalog.fusions
    failures = {f.plugin: f for f in catalog.failures}
    assert failures["ghost"].stage == "import" and failures["ghost"].distribution == "ghost"
    assert failures["torn"].stage == "discover" and "entry_points.txt" in failures["torn"].reason


def test_a_distribution_twice_on_the_path_counts_once(site, tmp_path, monkeypatch):
    good(site)
    shadow = tmp_path / "shadow"
    (shadow / "fusionreg_acme-0.9.dist-info").mkdir(parents=True)
    (shadow / "fusionreg_acme-0.9.dist-info" / "entry_points.txt").write_text("[fusionreg]\nacme = old_acme\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(shadow)])
    catalog = load(allow=("acme",))
    assert not catalog.failures and catalog["acme.relu"].version == "1.0"


def test_explicit_entry_points(site):
    good(site)
    catalog = load(entry_points=[EntryPoint("acme", "fusionreg_acme", "fusionreg")])
    assert list(catalog.fusions) == ["acme.relu"] and catalog.plugins[0].distribution == ""


def test_unknown_names_offer_the_nearest():
    catalog = only(("acme", module(register_fusions=[spec()])))
    with pytest.raises(UnknownNameError, match=r"did you mean acme\.relu"):
        catalog["acme.rellu"]
    with pytest.raises(UnknownNameError):
        catalog.kernel("acme.relu/plain")
    assert "acme.relu" in catalog and "x.y" not in catalog


def test_kernels_need_a_package():
    made = spec(kernels=[KernelSpec(name="k", template="k.cu.j2", grid="1", block="1")])
    catalog = only(("acme", module(register_fusions=[made])))
    assert catalog["acme.relu"].kernels == () and catalog.failures[0].field == "template"


def test_loading_imports_nothing_heavy(site):
    good(site)
    code = (
        "import sys; from fusionreg.core.registry.catalog import load; c = load(); assert c.fusions;"
        "print([m for m in ('torch', 'onnx', 'cupy', 'numpy', 'scipy', 'jinja2', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plugin_is_not_imported_twice_and_loads_are_independent(site):
    good(site)
    first, second = load(allow=("acme",)), load(allow=("acme",))
    assert first["acme.relu"] is not second["acme.relu"] and first["acme.relu"].spec is second["acme.relu"].spec
