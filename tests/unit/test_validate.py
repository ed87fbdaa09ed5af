"""What validation refuses, each at load and each with plugin, fusion and field; and ``validate_path``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from fusionreg.core.errors import SpecError
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.registry.catalog import load
from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec, Tolerance
from fusionreg.core.validate.fusion import check_fusion
from fusionreg.core.validate.kernel import check_kernel
from fusionreg.core.validate.paths import validate_path
from fusionreg.core.validate.reference import check_reference

OPS = default_vocabulary()
REPOSITORY = Path(__file__).parents[2]

PATTERN = """\
h = MatMul(x, w, transB=transB)
b = optional(Add)(h, bias)
y = optional(any_of(Relu, Tanh), "act")(b)
"""
TRANSB = AttributeSpec(type="int", default=0, choices=(0, 1), static=True)


def fusion(**changes) -> FusionSpec:
    fields = {
        "api": 1,
        "name": "acme.gemm",
        "pattern": PATTERN,
        "inputs": {"x": "T[... M K]", "w": "T[K N] | T[N K]", "bias": "T[N]"},
        "outputs": {"y": "T[... M N]"},
        "dtypes": {"T": ("float16", "bfloat16")},
        "attributes": {"transB": TRANSB},
        "constraints": ("shape(w, -1) == (K if transB else N)",),
    }
    return FusionSpec(**{**fields, **changes})


def by_field(errors) -> dict[str, str]:
    found: dict[str, str] = {}
    for e in errors:
        found[e.facts["field"]] = f"{found.get(e.facts['field'], '')} {e}"
    return found


def faults(**changes) -> dict[str, str]:
    _, errors = check_fusion(fusion(**changes), OPS, "acme")
    for e in errors:
        assert isinstance(e, SpecError) and e.facts["plugin"] == "acme" and e.facts["fusion"] == "acme.gemm"
        assert "acme.gemm" in str(e) and "plugin acme" in str(e) and e.facts["field"] in str(e)
    return by_field(errors)


def test_the_spec_under_test_is_right():
    assert faults() == {}
    entry, _ = check_fusion(fusion(), OPS, "acme")
    assert entry is not None and check_reference(entry, OPS) == []


INPUTS = {"x": "T[... M K]", "w": "T[K N] | T[N K]", "bias": "T[N]"}
RELU = {
    "pattern": "y = Relu(x)",
    "inputs": {"x": "T[M]"},
    "outputs": {"y": "T[M]"},
    "attributes": {},
    "constraints": (),
}
FLOAT = AttributeSpec(type="float", default=1.0)
NAN = math.nan
WORD = AttributeSpec(type="str", choices=("none", "tanh"))
CLASH = {"x": "T[... M K]", "w": "T[K N] | T[N K]", "act_Relu": "T[N]"}
STATIC = {"type": "str", "static": True}
OPTIONAL_INT = AttributeSpec(type="int")


@pytest.mark.parametrize(
    ("changes", "field", "word"),
    [
        # names that nothing declares
        ({"pattern": PATTERN.replace("bias", "bais")}, "pattern", "'bais' is read but neither assigned nor declared"),
        ({"pattern": PATTERN.replace("=transB", "=trans")}, "pattern", "'trans' is bound but not declared"),
        ({"outputs": {"z": "T[... M N]"}}, "pattern", "'z' is never assigned"),
        ({"constraints": ("Q % 8 == 0",)}, "constraints[0]", "unknown name 'Q'"),
        ({"constraints": ("rank(q) == 2",)}, "constraints[0]", "unknown tensor 'q'"),
        ({"constraints": ("K % 8 == 0", "M +",)}, "constraints[1]", "column"),
        ({"inputs": {**INPUTS, "x": "U[... M K]"}}, "inputs.x", "dtype 'U' is not declared"),
        ({"inputs": {**INPUTS, "x": "T[... M K"}}, "inputs.x", "no form"),
        ({"axes": {"M": "rows", "Q": "none"}}, "axes.Q", "no tensor has it"),
        ({"dtypes": {"T": ("float61",)}}, "dtypes.T", "did you mean float64 or float16"),
        ({"dtypes": {"T": ("string",)}}, "dtypes.T", "unknown dtype 'string'"),
        # what nobody reads
        ({"inputs": {**INPUTS, "extra": "T[N]"}}, "inputs.extra", "does not read it"),
        ({"dtypes": {"T": ("float16",), "U": ("float16",)}}, "dtypes.U", "no tensor has it"),
        ({"attributes": {"transB": TRANSB, "alpha": FLOAT}}, "attributes.alpha", "no pattern binds it"),
        ({"tolerances": [Tolerance(dtype="float64", ulp=1, reason="r")]}, "tolerances[0]", "no output is 'float64'"),
        # what cannot be
        ({"constraints": ("K < 64", "K >= 128")}, "constraints[1]", "holds for no problem"),
        ({"constraints": ("K % 8 == 9",)}, "constraints[0]", "holds for no problem"),
        ({"constraints": ('T == "float32"',)}, "constraints[0]", "compared with 'float32'"),
        ({"constraints": ('act in ("Relu", "Gelu")',)}, "constraints[0]", "compared with 'Gelu'"),
        ({"constraints": ("T == 16",)}, "constraints[0]", "compared with 16"),
        ({"constraints": ("T * 1000000000 != T",)}, "constraints[0]", "arithmetic on 'T'"),
        ({"constraints": ("1 // 0 == 1",)}, "constraints[0]", "by zero"),
        ({"constraints": ("transB == 2",)}, "constraints[0]", "holds for no problem"),
        ({"constraints": ("contiguous(x)",)}, "constraints[0]", "contiguous() is not known here"),
        ({"constraints": ("has(wgmma)",)}, "constraints[0]", "has() is not known here"),
        ({"outputs": {"y": "T[... M Z]"}}, "outputs.y", "no input tells axis Z"),
        ({"outputs": {"y": "T[... M N] pinned_host"}}, "outputs.y", "only inputs"),
        ({"inputs": {**INPUTS, "w": "T[... K N]"}}, "inputs", "folds into"),
        ({"inputs": {}}, "inputs", "empty"),
        ({"pattern": ()}, "pattern", "empty"),
        ({"pattern": "import os"}, "pattern", "import statement"),
        # names that cannot be
        ({**RELU, "inputs": {"float": "T[M]"}, "pattern": "y = Relu(float)"}, "inputs", "'float'"),
        ({**RELU, "inputs": {"x": "T[class]"}, "outputs": {"y": "T[class]"}}, "axes", "'class'"),
        ({**RELU, "inputs": {"entry": "T[M]"}, "pattern": "y = Relu(entry)"}, "inputs", "'entry'"),
        ({**RELU, "inputs": {"a__b": "T[M]"}, "pattern": "y = Relu(a__b)"}, "inputs", "`__`"),
        ({**RELU, "inputs": {"x": "T[min]"}, "outputs": {"y": "T[min]"}}, "axes", "'min'"),
        ({**RELU, "inputs": {"x": "x[M]"}, "outputs": {"y": "x[M]"}, "dtypes": {"x": ("int8",)}}, "dtypes", "stands"),
        ({**RELU, "inputs": {"x": "T[x]"}, "outputs": {"y": "T[x]"}}, "axes", "stands in inputs too"),
        ({"pattern": PATTERN.replace(', "act"', "")}, "pattern", "'y' stands in outputs too"),
        ({"pattern": PATTERN.replace("bias", "act_Relu"), "inputs": CLASH}, "pattern", "'act_Relu' stands in"),
        ({**RELU, "inputs": {"range": "T[M]"}, "pattern": "y = Relu(range)"}, "inputs", "'range'"),
        ({"dtypes": {"float16": ("float32",)}, "inputs": {"x": "float16[M]"}}, "dtypes.float16", "name of a dtype"),
        # attributes
        ({"attributes": {"transB": AttributeSpec(type="int", default=1.5)}}, "attributes.transB", "1.5 is no int"),
        ({"attributes": {"transB": AttributeSpec(type="int", default=True)}}, "attributes.transB", "True is no int"),
        ({"attributes": {"transB": AttributeSpec(type="int", choices=(0, 0))}}, "attributes.transB", "twice"),
        ({"attributes": {"transB": AttributeSpec(type="int", default=3, choices=(0, 1))}}, "attributes.transB", "t 3"),
        ({"attributes": {"transB": AttributeSpec(type="float", default=0.0)}}, "pattern", "gets a float"),
        ({"attributes": {"transB": AttributeSpec(type="int", default=2**64)}}, "attributes.transB", "no int"),
        ({"pattern": PATTERN.replace("=transB", '="yes"'), "attributes": {}}, "pattern", "gets a str"),
        ({**RELU, "pattern": "y = Gelu(x, approximate=how)", "attributes": {"how": WORD}},
         "attributes.how", "static"),
        ({**RELU, "pattern": "y = Elu(x, alpha=a)", "attributes": {"a": AttributeSpec(type="float", choices=(NAN,))}},
         "attributes.a", "NaN"),
        ({**RELU, "pattern": "y = Gelu(x, approximate=how)", "attributes": {"how": AttributeSpec(**STATIC)}},
         "attributes.how", "the words it may be"),
        ({**RELU, "pattern": "y = Gelu(x, approximate=how)",
          "attributes": {"how": AttributeSpec(**STATIC, choices=('tanh"; evil',))}}, "attributes.how", "the words"),
        ({"pattern": PATTERN.replace("(Relu, Tanh)", "(Relu, é=Exp)").replace(', "act"', "")}, "pattern", "keys of"),
        # spellings
        ({"pattern": (PATTERN, PATTERN)}, "pattern", "two spellings are the same"),
        ({"pattern": (PATTERN, "y = Add(MatMul(x, w, transB=transB), bias)")}, "pattern[1]", "'act' is not made"),
        ({"pattern": (PATTERN, PATTERN.replace("Tanh", "Exp"))}, "pattern[1]", "choice 'act' with keys"),
        ({"pattern": (PATTERN, PATTERN.replace("MatMul", "MatMull"))}, "pattern[1]", "did you mean MatMul"),
        ({"pattern": ("y = Add(MatMul(x, w, transB=transB), bias)", PATTERN)}, "pattern[1]", "may be absent here"),
        ({"pattern": (PATTERN, PATTERN.replace(", transB=transB", "")), "attributes": {"transB": OPTIONAL_INT},
          "constraints": ()}, "pattern[1]", "'transB' is not bound"),
        # cases and tolerances
        ({"cases": [Case(name="c", axes={"Q": 1})]}, "cases[0].axes", "unknown 'Q'"),
        ({"cases": [Case(name="c", attributes={"act": "Gelu"})]}, "cases[0].attributes", "one of Relu, Tanh, none"),
        ({"cases": [Case(name="c", attributes={"transB": 2})]}, "cases[0].attributes", "transB = 2"),
        ({"cases": [Case(name="c", absent=("x",))]}, "cases[0].absent", "'x' is not optional"),
        ({"cases": [Case(name="c", values={"z": "normal"})]}, "cases[0].values", "unknown 'z'"),
        ({"cases": [Case(name="c", axes={"M": -1})]}, "cases[0].axes", "M = -1"),
        ({"cases": [Case(name="c"), Case(name="c")]}, "cases", "one name"),
        ({"cases": [Case(name="c", axes={"K": 4})], "constraints": ("K % 8 == 0",)}, "cases[0]", "does not hold"),
        ({**RELU, "cases": [Case(name="c", batch=(2,))]}, "cases[0].batch", "no batch"),
        ({"tolerances": [Tolerance(dtype="float16", ulp=0, reason="r")]}, "tolerances[0]", "ulp = 0"),
        ({"tolerances": [Tolerance(dtype="float16", ulp=math.inf, reason="r")]}, "tolerances[0]", "ulp = inf"),
        ({"tolerances": [Tolerance(dtype="float16", ulp=1, reason=" ")]}, "tolerances[0]", "no reason"),
    ],
)  # fmt: skip
def test_fusion_refused(changes, field, word):
    found = faults(**changes)
    assert field in found, found
    assert word in found[field]


def test_a_batched_case_sees_the_folded_axis():
    case = Case(name="c", axes={"M": 4}, batch=(3,))
    assert faults(cases=[case], constraints=("M % 3 == 0",)) == {}
    assert "cases[0]" in faults(cases=[case], constraints=("M % 5 == 0",))


def test_every_problem_is_reported_at_once():
    found = faults(axes={"Q": "x", "R": "y"}, dtypes={"T": ("float61",)}, constraints=("Z > 1",))
    assert set(found) == {"axes.Q", "axes.R", "dtypes.T", "constraints[0]"}


def test_an_output_extent_may_come_from_an_attribute():
    spec = fusion(
        pattern="y = EyeLike(x, k=D)",
        inputs={"x": "T[M N]"}, outputs={"y": "T[M N]"}, attributes={"D": OPTIONAL_INT}, constraints=(),
    )  # fmt: skip
    assert check_fusion(spec, OPS, "acme")[1] == []


# --- kernels ---------------------------------------------------------------------------------------------------

TEMPLATE = "{{ signature }} { constexpr int t = BM * C; x[x_stride_0] = STAGES; workspace[0] = K; }"
KERNEL = {
    "name": "k",
    "fusion": "acme.gemm",
    "template": "k.cu.j2",
    "targets": ("sm_80+",),
    "requires": ("K % 8 == 0", "aligned(x, 16)"),
    "strides": ("x",),
    "params": {"BM": (64, 128), "STAGES": (2, 3)},
    "valid": ("BM * STAGES * bits(T) < 8192",),
    "constants": {"C": "BM // 2"},
    "specialize": ("K",),
    "grid": ("ceildiv(M, BM)", "N"),
    "block": "C * 2",
    "shared_memory": "BM * STAGES",
    "workspace": "M * 4",
    "estimate": "M * N / 1e12",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    root = tmp_path_factory.mktemp("pkg") / "fusionreg_acme"
    (root / "templates").mkdir(parents=True)
    (root / "templates" / "k.cu.j2").write_text(TEMPLATE)
    (root / "bare.cu.j2").write_text("{{ signature }} {}")
    (root / "uses.cu.j2").write_text(
        '{{ include("part.cuh.j2") }} {{ signature }} { BM; C; STAGES; x_stride_1; workspace; K; }'
    )
    (root / "templates" / "part.cuh.j2").write_text("int f() { return STAGES; }")
    (root / "binary.cu.j2").write_bytes(b"\xff\xfe{{ signature }}")
    (root.parent / "outside.cu.j2").write_text(TEMPLATE)
    (root / "link.cu.j2").symlink_to(root.parent / "outside.cu.j2")
    return root


def kernel_faults(package, changes, **fusion_changes) -> dict[str, str]:
    entry, errors = check_fusion(fusion(**fusion_changes), OPS, "acme")
    assert entry is not None, errors
    _, errors = check_kernel(KernelSpec(**{**KERNEL, **changes}), entry, "acme", package)
    for e in errors:
        assert e.facts["kernel"] == "k" and "acme.gemm/k" in str(e) and "plugin acme" in str(e)
    return by_field(errors)


def test_the_kernel_under_test_is_right(package):
    assert kernel_faults(package, {}) == {}
    entry, _ = check_fusion(fusion(), OPS, "acme")
    made, _ = check_kernel(KernelSpec(**KERNEL), entry, "acme", package, "fusionreg-acme", "1.0")
    assert made.key == "acme.gemm/k" and made.template == package / "templates" / "k.cu.j2" and made.version == "1.0"
    env = {"M": 100, "N": 3, "BM": 64, "STAGES": 2, "C": 32}
    assert made.geometry(env) == {"grid0": 2, "grid1": 3, "block0": 64, "shared_memory": 128, "workspace": 400}
    assert made.constants({"BM": 64}) == {"C": 32} and made.estimate({"M": 1e6, "N": 1e6}) == 1.0
    assert [str(r.text) for r in made.requires] == ["K % 8 == 0", "aligned(x, 16)"] and len(made.targets) == 7


@pytest.mark.parametrize(
    ("changes", "field", "word"),
    [
        # names that nothing declares
        ({"requires": ("Q > 1",)}, "requires[0]", "unknown name 'Q'"),
        ({"requires": ("BM > 1",)}, "requires[0]", "unknown name 'BM'"),  # conditions on the problem alone
        ({"valid": ("BN > 1",)}, "valid[0]", "or BM"),
        ({"grid": ("ceildiv(M, BN)",)}, "grid0", "unknown name 'BN'"),
        ({"block": ("multiprocessors",)}, "block0", "unknown name 'multiprocessors'"),  # would be compiled in
        ({"constants": {"C": "multiprocessors"}}, "constants.C", "unknown name 'multiprocessors'"),
        ({"block": ("C", "D")}, "block1", "unknown name 'D'"),
        ({"constants": {"C": "BM", "E": "F"}}, "constants.E", "unknown name 'F'"),
        ({"constants": {"C": "E", "E": "BM"}}, "constants.C", "unknown name 'E'"),  # only those before it
        ({"shared_memory": "SMEM"}, "shared_memory", "unknown name"),
        ({"workspace": "M +"}, "workspace", "column"),
        ({"estimate": "Q"}, "estimate", "unknown name"),
        ({"strides": ("x", "q")}, "strides", "unknown tensor 'q'"),
        ({"specialize": ("K", "Q")}, "specialize", "unknown axis 'Q'"),
        ({"requires": ("has(wgmmma)",)}, "requires[0]", "did you mean wgmma"),
        # what is not known when a kernel is compiled
        ({"block": "M"}, "block0", "unknown name 'M'"),
        ({"constants": {"C": "N * BM"}}, "constants.C", "unknown name 'N'"),
        ({"constants": {"C": "shape(x, 0) * BM"}}, "constants.C", "shape() is not known here"),
        # what nobody reads
        ({"params": {**KERNEL["params"], "UNUSED": (1, 2)}}, "params", "nobody reads 'UNUSED'"),
        ({"constants": {"C": "BM // 2", "D": "1"}}, "constants", "nobody reads 'D'"),
        ({"template": "bare.cu.j2"}, "workspace", "never reads it"),
        ({"template": "bare.cu.j2"}, "strides", "never reads x_stride_0"),
        ({"template": "bare.cu.j2", "specialize": ("K",), "requires": ()}, "specialize", "nobody reads 'K'"),
        # what cannot be
        ({"requires": ('T == "float32"',)}, "requires[0]", "compared with 'float32'"),
        ({"requires": ('T == "float16"', 'T == "bfloat16"')}, "requires[0]", "unreachable"),
        ({"requires": ("K % 16 == 8", "K % 32 == 0")}, "requires[1]", "unreachable"),
        ({"requires": ("has(wgmma)",), "targets": ("sm_80",)}, "requires[0]", "unreachable"),
        ({"requires": ('act == "none"', 'act == "Relu"')}, "requires[1]", "unreachable"),
        ({"targets": ("sm_70",)}, "targets", "matches no known architecture"),
        ({"targets": ("sm_121+",)}, "targets", "matches no known architecture"),
        ({"targets": ("turing",)}, "targets", "no architecture"),
        ({"targets": ()}, "targets", "empty"),
        ({"valid": ("BM > 999",)}, "valid", "no combination"),
        ({"valid": ("BM < 128",)}, "params.BM", "128 is valid in no combination"),
        ({"cluster": ("2",), "targets": ("sm_80", "sm_86")}, "cluster", "no target"),
        ({"programmatic": True, "targets": ("sm_80",)}, "programmatic", "no target"),
        # geometry
        ({"grid": ("1",) * 4}, "grid", "4 expressions"),
        ({"grid": ()}, "grid", "0 expressions"),
        ({"block": ("1",) * 4}, "block", "4 expressions"),
        ({"cluster": ("1",) * 4}, "cluster", "4 expressions"),
        ({"block": "2048"}, "block", "2048 threads"),
        ({"block": ("C", "C")}, "block", "threads"),
        ({"block": "0"}, "block0", "positive"),
        ({"block": "C - 64"}, "block0", "positive"),
        # parameters and constants
        ({"params": {"BM": (), "STAGES": (2,)}}, "params.BM", "at least one value"),
        ({"params": {"BM": (64, 64), "STAGES": (2,)}}, "params.BM", "none twice"),
        ({"params": {"BM": (64, "x"), "STAGES": (2,)}}, "params.BM", "one type"),
        ({"params": {"BM": (64,), "STAGES": ("a; evil",)}}, "params.STAGES", "words of letters"),
        ({"params": {"BM": (64,), "STAGES": ("a}}",)}}, "params.STAGES", "words of letters"),
        ({"params": {"BM": (64,), "STAGES": (math.nan,)}}, "params.STAGES", "NaN"),
        ({"params": {"BM": (64,), "STAGES": (2,), "M": (1,)}}, "params", "stands in the fusion too"),
        ({"params": {"BM": (64,), "STAGES": (2,), "for_": (1,)}}, "params", "nobody reads"),
        ({"params": {"BM": (64,), "STAGES": (2,), "int": (1,)}}, "params", "'int'"),
        ({"constants": {"C": "BM", "BM": "1"}}, "constants", "stands in params too"),
        ({"requires": ("K % 8 == 0", "K % 8 == 0")}, "requires", "twice"),
        # templates
        ({"template": "absent.cu.j2"}, "template", "no file"),
        ({"template": "kk.cu.j2"}, "template", "did you mean"),
        ({"template": "k.cu"}, "template", "ends in .cu.j2"),
        ({"template": "../outside.cu.j2"}, "template", "relative path"),
        ({"template": "templates/../../outside.cu.j2"}, "template", "relative path"),
        ({"template": "/etc/passwd.cu.j2"}, "template", "relative path"),
        ({"template": "a\\b.cu.j2"}, "template", "relative path"),
        ({"template": "link.cu.j2"}, "template", "no file"),  # a link out of the package
        ({"template": "binary.cu.j2"}, "template", "UTF-8"),
    ],
)
def test_kernel_refused(package, changes, field, word):
    found = kernel_faults(package, changes)
    assert field in found, found
    assert word in found[field]


def test_includes_of_the_package_count_as_read(package):
    assert kernel_faults(package, {"template": "uses.cu.j2"}) == {}


def test_a_kernel_must_fit_the_fusions_constraints(package):
    found = kernel_faults(package, {"requires": ("K < 16",)}, constraints=("K >= 32",))
    assert "unreachable" in found["requires[0]"]


def test_a_valid_combination_must_exist_where_the_kernel_is_reachable(package):
    changes = {"requires": ('T == "float16"',), "valid": ('T == "bfloat16" or BM == 64',)}
    assert "128" in kernel_faults(package, changes)["params.BM"]


def test_a_template_needs_a_package():
    entry, _ = check_fusion(fusion(), OPS, "acme")
    _, errors = check_kernel(KernelSpec(**KERNEL), entry, "acme", None)
    assert any("no package" in str(e) for e in errors)


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


def test_shipped_fusions_are_what_they_say():
    catalog = load(deny=(), allow=None)
    assert catalog.fusions
    for entry in catalog.fusions.values():
        assert check_reference(entry, catalog.ops) == []


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
def test_a_project(tmp_path, layout):
    package = project(tmp_path, layout)
    before = list(sys.path)
    for path in (tmp_path, package):
        assert [(r.name, r.status) for r in validate_path(path)] == [("acme.relu", "ok"), ("acme.relu/k", "ok")]
    assert sys.path == before and "fusionreg_acme" not in sys.modules


def test_a_project_is_validated_as_it_is_now_not_as_installed(site, tmp_path):
    site.plugin("acme", PLUGIN.replace("Relu", "Tanh"), {"k.cu.j2": ""})
    assert load(allow=("acme",)).fusions["acme.relu"].spec.pattern == ("y = Tanh(x)",)
    installed = sys.modules["fusionreg_acme"]
    project(tmp_path / "p", code=PLUGIN.replace("Relu(x)", "Rellu(x)"))
    assert [r.status for r in validate_path(tmp_path / "p")] == ["failed"]
    assert sys.modules["fusionreg_acme"] is installed


@pytest.mark.parametrize("code", ["raise SystemExit(2)", "import nothing_there", "x ="])
def test_a_project_that_cannot_be_imported(tmp_path, code):
    project(tmp_path, code=code)
    (result,) = validate_path(tmp_path)
    assert result.status == "failed" and result.reason.startswith("import: ")


def test_a_project_that_registers_nothing(tmp_path):
    project(tmp_path, code=PLUGIN.replace("[SPEC]", "[]"))
    (result,) = validate_path(tmp_path)
    assert result.status == "failed" and "registers nothing" in result.reason


def test_this_repository(capsys):
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
