"""``list``, ``show``, ``plugins``, ``schema``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from catalogs import shipped

from fusionreg.core.spec import FusionSpec, KernelSpec


def test_list_as_a_table(cli):
    ran = cli("list")
    assert ran.code == 0 and ran.out.splitlines()[0].split() == [
        "fusion", "plugin", "version", "kernels", "evidence", "summary",
    ]  # fmt: skip
    row = re.search(r"^gemm\.scale_bias .*\n(?: .*\n)*", ran.out, re.M)  # a cell may take several lines
    assert row and {k.name for k in shipped()["gemm.scale_bias"].kernels} <= set(re.findall(r"\w+", row[0]))
    assert "1.0.0" in row[0]


def test_list_as_json_has_the_promised_fields(cli):
    rows = cli("list", "--json").json
    assert {r["name"] for r in rows} == set(shipped().fusions)
    for row in rows:
        assert {"name", "plugin", "version", "summary", "tags", "kernels", "evidence"} <= row.keys()
        assert row["kernels"] and all({"name", "targets"} <= k.keys() and k["targets"] for k in row["kernels"])
        assert type(row["evidence"]) is bool and type(row["tags"]) is list


def test_list_filters(cli, acme, monkeypatch):
    monkeypatch.delenv("FUSIONREG_LOAD_PLUGINS")
    both = {r["name"] for r in cli("list", "--json").json}
    assert {"acme.add_relu", "gemm.bias"} <= both
    assert [r["name"] for r in cli("list", "--json", "--plugin", "acme").json] == ["acme.add_relu"]
    assert [r["name"] for r in cli("list", "--json", "--tag", "demo").json] == ["acme.add_relu"]
    assert cli("list", "--json", "--tag", "demo", "--plugin", "gemm").code == 5
    ran = cli("list", "--json", "--plugin", "acne")
    assert ran.code == 5 and ran.json == [] and "plugins: acme, attention, " in ran.err and "demo" in ran.err


def test_list_imports_nothing_heavy(acme):
    """Neither the first time, when plugins are loaded, nor later, when the manifest is enough and none is imported."""
    code = (
        "import sys\nfrom fusionreg.cli.main import main\n"
        "try: main(['list'])\nexcept SystemExit as e: assert not e.code, e.code\n"
        "heavy = ('torch', 'onnx', 'onnx_ir', 'onnxruntime', 'cupy', 'numpy', 'scipy', 'ml_dtypes')\n"
        "print([m for m in (*heavy, 'fusionreg_acme') if m in sys.modules], file=sys.stderr)"
    )
    path = os.pathsep.join(filter(None, [str(acme.folder), os.environ.get("PYTHONPATH", "")]))
    for imported in (["fusionreg_acme"], []):
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        assert ran.returncode == 0 and ran.stderr.splitlines()[-1] == str(imported), ran.stderr
        assert "acme.add_relu" in ran.stdout


def test_show_tells_all(cli):
    ran = cli("show", "gemm.scale_bias")
    assert ran.code == 0 and ran.out.startswith("gemm.scale_bias 1.0.0 (gemm)\n")
    for word in (
        "MatMul(x, w, transB=transB)",
        "T[... M K]",
        "bfloat16",
        "activation",
        "kernel plain",
        "kernel tensor_core",
    ):
        assert word in ran.out


def test_show_as_json_is_the_spec(cli):
    for name, entry in sorted(shipped().fusions.items())[::5]:
        assert FusionSpec.model_validate_json(cli("show", name, "--json").out) == entry.spec


def test_show_names_the_gradients(cli):
    assert "\ngradients\n  norm.layernorm_backward\n" in cli("show", "norm.layernorm").out
    assert "\ngradients\n" not in cli("show", "norm.layernorm_backward").out


def test_show_as_json_survives_infinite_defaults(cli, site, monkeypatch):
    site.plugin(
        "clip",
        """
from fusionreg import AttributeSpec, FusionSpec, hookimpl

SPEC = FusionSpec(
    api=1, name="clip.elu", pattern="y = Elu(x, alpha=alpha)", inputs={"x": "T[N]"}, outputs={"y": "T[N]"},
    dtypes={"T": ("float32",)}, attributes={"alpha": AttributeSpec(type="float", default=float("inf"))},
)

@hookimpl
def register_fusions():
    return [SPEC]
""",
    )
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "clip")
    ran = cli("show", "clip.elu", "--json")
    assert ran.code == 0, ran.err
    found = FusionSpec.model_validate_json(ran.out)
    assert found.attributes["alpha"].default == float("inf")
    assert json.loads(ran.out)["attributes"]["alpha"]["default"] == float("inf")
    assert cli("show", "clip.elu").code == 0


def test_show_source(cli):
    ran = cli("show", "gemm.bias", "--source", "--arch", "sm_80", "--kernel", "plain", "--dtype", "float32")
    assert ran.code == 0 and ran.out.startswith("// gemm.bias/plain for sm_80: ")
    assert "__global__" in ran.out and "using T = float;" in ran.out
    every = cli("show", "gemm.bias", "--source", "--json").json
    with_source = [k.key for k in shipped()["gemm.bias"].kernels if k.library is None]
    assert [u["kernel"] for u in every] == with_source and "gemm.bias/tensor_core" in with_source
    assert all(u["entry"] in u["text"] and u["target"] == "sm_90a" and u["options"] for u in every)


def test_show_source_of_what_no_kernel_takes(cli):
    ran = cli("show", "gemm.bias", "--source", "--kernel", "tensor_core", "--dtype", "float32")
    assert ran.code == 1 and "gemm.bias/tensor_core: no kernel for float32" in ran.err and not ran.out


@pytest.mark.parametrize("option", [("--arch", "sm_99"), ("--kernel", "plain"), ("--dtype", "float32")])
def test_options_of_the_source_need_it(cli, option):
    ran = cli("show", "gemm.bias", *option)
    assert ran.code == 1 and f"{option[0]} without --source" in ran.err and not ran.out


def test_a_fusion_that_lost_its_kernels_says_why(cli, acme):
    next(acme.folder.rglob("k.cu.j2")).unlink()
    for command in (("show", "acme.add_relu", "--source"), ("inspect", "acme.add_relu"), ("run", "acme.add_relu")):
        ran = cli(*command)
        assert ran.code == 1 and "no kernel" in ran.err and "Plugin acme failed to load it: " in ran.err, ran.err


def test_show_source_of_an_unknown_architecture(cli):
    ran = cli("show", "gemm.bias", "--source", "--arch", "sm_99")
    assert ran.code == 2 and "sm_99" in ran.err and "sm_90" in ran.err and not ran.out


def test_plugins(cli, acme):
    rows = cli("plugins", "--json").json
    assert rows == [
        {"name": "acme", "distribution": "fusionreg-acme", "version": "1.0", "status": "loaded",
         "fusions": ["acme.add_relu"], "kernels": ["acme.add_relu/plain"], "ops": [], "reason": ""}
    ]  # fmt: skip
    ran = cli("plugins", "--strict")
    assert ran.code == 0 and "acme" in ran.out and "loaded" in ran.out


BROKEN = {
    "import": "import no_such_module_at_all",
    "syntax": "def register_fusions(:",
    "exit": "import sys; sys.exit(0)",
    "spec": "from fusionreg import FusionSpec\nFusionSpec(api=1, name='broken.f')",
    "hook": "from fusionreg import hookimpl\n@hookimpl\ndef register_fusion():\n    return []",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_is_a_row(cli, acme, monkeypatch, how):
    acme.plugin("broken", BROKEN[how])
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "acme,broken")
    ran = cli("plugins")
    assert ran.code == 0 and "failed" in ran.out and "Traceback" not in ran.err
    rows = {r["name"]: r for r in cli("plugins", "--json").json}
    assert rows["acme"]["status"] == "loaded" and rows["broken"]["status"] == "failed"
    assert rows["broken"]["reason"] and rows["broken"]["distribution"] == "fusionreg-broken"
    assert cli("plugins", "--strict").code == 1
    assert cli("run", "acme.add_relu", "--strict").code == 1
    assert "acme.add_relu" in cli("list").out


def test_schema(cli):
    for name, record in (("fusion", FusionSpec), ("kernel", KernelSpec)):
        found = cli("schema", name).json
        assert set(found["properties"]) == set(record.model_fields) and found["additionalProperties"] is False
        assert all(p.get("description") for p in found["properties"].values())
    assert cli("schema").json["title"] == "FusionSpec"
