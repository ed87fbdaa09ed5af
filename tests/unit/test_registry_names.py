"""Who owns a name, in which order things load, and what metadata says."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from registry_kit import PLUGIN, TEMPLATE, good, module, only, spec

from fusionreg.core.errors import UnknownNameError
from fusionreg.core.registry.catalog import load
from fusionreg.core.spec import KernelSpec, OpSpec

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
