"""What validation refuses of a kernel."""

from __future__ import annotations

import math

import pytest
from validation import KERNEL, OPS, TEMPLATE, by_field, fusion

from fusionreg.core.spec import KernelSpec
from fusionreg.core.validate.fusion import check_fusion
from fusionreg.core.validate.kernel import check_kernel

# --- kernels ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    root = tmp_path_factory.mktemp("pkg") / "fusionreg_acme"
    (root / "templates").mkdir(parents=True)
    (root / "templates" / "k.cu.j2").write_text(TEMPLATE)
    (root / "bare.cu.j2").write_text("{{ signature }} {}")
    (root / "talks.cu.j2").write_text(TEMPLATE + "// fr::grid_dependency_wait() {# grid_dependency_wait() #}")
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
        ({"programmatic": True}, "programmatic", "never calls fr::grid_dependency_wait()"),
        ({"programmatic": True, "template": "talks.cu.j2"}, "programmatic", "never calls fr::grid_dependency_wait()"),
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
