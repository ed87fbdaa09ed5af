"""References against declared types, and ``validate_path``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from validation import INPUTS, KERNEL, OPS, RELU, TEMPLATE, fusion

from fusionreg.core.errors import SpecError
from fusionreg.core.registry.catalog import load
from fusionreg.core.spec import KernelSpec
from fusionreg.core.validate.fusion import check_fusion
from fusionreg.core.validate.paths import validate_path
from fusionreg.core.validate.reference import check_reference

REPOSITORY = Path(__file__).parents[2]


# --- the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"inputs": {**INPUTS, "x": "T[M K]"}, "outputs": {"y": "T[N M]"}}, "outputs.y"),
        ({"outputs": {"y": "T[... M K]"}}, "outputs.y"),
        ({**RELU, "outputs": {"y": "float32[M]"}}, "float32, float32[M]"),
        ({**RELU, "pattern": "y = ReduceSum(x, (0,), keepdims=0)"}, "outputs.y"),
        ({"inputs": {**INPUTS, "x": "T[... K M]"}, "outputs": {"y": "T[... K N]"}}, "pattern"),
        ({**RELU, "pattern": "y = MatMul(x, x)", "inputs": {"x": "T[M N]"}}, "pattern"),
    ],
)
def test_declared_types_must_be_those_of_the_pattern(changes, word):
    entry, errors = check_fusion(fusion(**changes), OPS, "acme")
    assert entry is not None, errors
    found = check_reference(entry, OPS)
    assert found and word in str(found[0])


def test_a_spelling_may_be_of_some_dtypes():
    """A sum in float32 is the result where that is float32; each dtype needs a spelling, each spelling a dtype."""
    narrowed, wide = 'y = Cast(Cast(x, to="float32"), to=T)', 'y = Cast(x, to="float32")'
    types = {
        "inputs": {"x": "X[M]"}, "outputs": {"y": "T[M]"}, "dtypes": {"X": ("float16",), "T": ("float16", "float32")},
    }  # fmt: skip
    spellings = {"both": (narrowed, wide), "wide": (wide,), "int": (narrowed, 'y = Cast(x, to="int32")')}
    found = {}
    for name, pattern in spellings.items():
        entry, errors = check_fusion(fusion(**RELU | types | {"pattern": pattern}), OPS, "acme")
        assert entry is not None, errors
        found[name] = [str(error) for error in check_reference(entry, OPS)]
    assert found["both"] == []
    assert len(found["wide"]) == 1 and "T = float16" in found["wide"][0]
    assert len(found["int"]) == 1 and "pattern[1] gives y: int32" in found["int"][0]


# --- paths -----------------------------------------------------------------------------------------------------


def test_a_json_spec(tmp_path):
    data = fusion(kernels=[KernelSpec(**KERNEL)]).model_dump(mode="json")
    (tmp_path / "k.cu.j2").write_text(TEMPLATE)
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(data))
    assert [(r.name, r.status) for r in validate_path(path)] == [("acme.gemm", "ok"), ("acme.gemm/k", "ok")]
    data["constraints"] = ["Q > 1"]
    path.write_text(json.dumps([data, {"api": 2, "name": "a.b"}, {"api": 1, "name": "bad"}, 3]))
    results = validate_path(str(path))
    assert all(r.status == "failed" for r in results)
    by_field = {r.field: r for r in results}
    assert by_field["constraints[0]"].name == "acme.gemm" and "Upgrade" in by_field["api"].reason
    assert {"pattern", "inputs", "name"} <= set(by_field)
    assert by_field["api"].to_dict()["status"] == "failed"


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": 1', "\x00"])
def test_bad_json(tmp_path, text):
    path = tmp_path / "spec.json"
    path.write_text(text)
    with pytest.raises(SpecError, match="cannot read"):
        validate_path(path)


def test_empty_json_is_no_success(tmp_path):
    (tmp_path / "spec.json").write_text("[]")
    assert [r.status for r in validate_path(tmp_path / "spec.json")] == ["failed"]


def test_json_executes_nothing(tmp_path):
    marker = tmp_path / "marker"
    data = fusion(pattern=f"y = __import__('pathlib').Path({str(marker)!r}).touch()").model_dump(mode="json")
    (tmp_path / "spec.json").write_text(json.dumps(data))
    assert validate_path(tmp_path / "spec.json")[0].status == "failed" and not marker.exists()


PLUGIN = """\
from fusionreg import FusionSpec, KernelSpec, hookimpl
SPEC = FusionSpec(api=1, name="acme.relu", pattern="y = Relu(x)", inputs={"x": "T[M]"}, outputs={"y": "T[M]"},
                  dtypes={"T": ("float32",)},
                  kernels=[KernelSpec(name="k", template="k.cu.j2", grid="1", block="32")])
@hookimpl
def register_fusions():
    return [SPEC]
"""


@pytest.fixture
def alone(monkeypatch):
    """What is installed beside a project takes a second to load."""
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "none")


def project(folder: Path, layout: str = "", code: str = PLUGIN) -> Path:
    package = folder / layout / "fusionreg_acme"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    (package / "k.cu.j2").write_text("{{ signature }} {}")
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "acme"\n[project.entry-points.fusionreg]\nacme = "fusionreg_acme"\n'
    )
    return package


@pytest.mark.parametrize("layout", ["", "src", "plugins/acme"])
@pytest.mark.usefixtures("alone")
def test_a_project(tmp_path, layout):
    package = project(tmp_path, layout)
    before = list(sys.path)
    for path in (tmp_path, package):
        assert [(r.name, r.status) for r in validate_path(path)] == [("acme.relu", "ok"), ("acme.relu/k", "ok")]
    assert sys.path == before and "fusionreg_acme" not in sys.modules


def test_a_project_is_validated_as_it_is_now_not_as_installed(site, alone, tmp_path):
    site.plugin("acme", PLUGIN.replace("Relu", "Tanh"), {"k.cu.j2": ""})
    assert load(allow=("acme",)).fusions["acme.relu"].spec.pattern == ("y = Tanh(x)",)
    installed = sys.modules["fusionreg_acme"]
    project(tmp_path / "p", code=PLUGIN.replace("Relu(x)", "Rellu(x)"))
    assert [r.status for r in validate_path(tmp_path / "p")] == ["failed"]
    assert sys.modules["fusionreg_acme"] is installed


@pytest.mark.parametrize("code", ["raise SystemExit(2)", "import nothing_there", "x ="])
@pytest.mark.usefixtures("alone")
def test_a_project_that_cannot_be_imported(tmp_path, code):
    project(tmp_path, code=code)
    (result,) = validate_path(tmp_path)
    assert result.status == "failed" and result.reason.startswith("import: ")


@pytest.mark.usefixtures("alone")
def test_a_project_that_registers_nothing(tmp_path):
    project(tmp_path, code=PLUGIN.replace("[SPEC]", "[]"))
    (result,) = validate_path(tmp_path)
    assert result.status == "failed" and "registers nothing" in result.reason


def test_this_repository(capsys):
    """Fusions that ship are what they say, references too."""
    results = validate_path(REPOSITORY)
    assert results and [r for r in results if r.status != "ok"] == []


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({}, "neither a spec, a package nor a project"),
        ({"pyproject.toml": "[project]\nname='x'\n"}, "no entry point"),
        ({"pyproject.toml": "[project\n"}, "cannot read"),
        ({"pyproject.toml": '[project.entry-points.fusionreg]\nacme = "nowhere"\n'}, "no module 'nowhere'"),
    ],
)
def test_nothing_to_validate(tmp_path, files, word):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=word):
        validate_path(tmp_path)
    with pytest.raises(SpecError, match="no such file"):
        validate_path(tmp_path / "absent")
