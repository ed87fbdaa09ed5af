"""Tensor maps of a kernel: what validation refuses, what a problem makes of them, and what TMA cannot take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mapped import MAPPED, mapped
from plugin_kit import catalog as kit

from fusionreg.core.describe import text
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.problem import Tensor, TensorMapLayout, bind, select
from fusionreg.core.proof import evidence
from fusionreg.core.registry.entries import FusionEntry
from fusionreg.core.render import render
from fusionreg.core.spec import FusionSpec, KernelSpec, TensorMap
from fusionreg.core.validate.fusion import check_fusion
from fusionreg.core.validate.kernel import check_kernel

H = "float16"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    root = tmp_path_factory.mktemp("pkg") / "fusionreg_acme"
    root.mkdir()
    (root / "k.cu.j2").write_text(MAPPED + "// BM SLICE", encoding="utf-8")
    (root / "bare.cu.j2").write_text("{{ signature }} { x_stride_0; }", encoding="utf-8")
    return root


def faults(package, map_=None, **changes) -> str:
    spec = mapped(map_=map_, **changes)
    entry, errors = check_fusion(spec, default_vocabulary(), "acme")
    assert entry is not None, errors
    made, errors = check_kernel(KernelSpec(**{**dict(spec.kernels[0]), "fusion": spec.name}), entry, "acme", package)
    assert (made is None) == bool(errors)
    return "\n".join(map(str, errors))


def entry_of(folder, **options) -> FusionEntry:
    return kit(folder, {"k.cu.j2": MAPPED}, mapped(**options))["acme.add_relu"]


def chosen(entry: FusionEntry, x: Tensor, bias: Tensor | None = None, y: Tensor | None = None, arch="sm_90a"):
    bias = bias or Tensor.contiguous(x.dtype, (x.shape[-1],))
    tensors = {"x": x, "bias": bias} | ({"y": y} if y else {})
    return select(entry, bind(entry, tensors, {}, arch))


def test_the_spec_is_right_and_survives_json(package):
    spec = mapped()
    assert faults(package) == "" and FusionSpec.model_validate_json(spec.model_dump_json()) == spec
    assert "tensor_maps" in KernelSpec.model_json_schema()["properties"]


@pytest.mark.parametrize(
    ("map_", "changes", "words"),
    [
        ({"operand": "z"}, {}, "tensor_maps[0].operand: unknown tensor 'z'"),
        ({"box": ("64",)}, {}, "tensor_maps[0].box: 1 expressions — 2"),
        ({"box": ()}, {}, "tensor_maps[0].box: 0 expressions"),
        ({"box": ("64", "257")}, {}, "tensor_maps[0].box: 257 — 1 to 256"),
        ({"box": ("64", "BN")}, {}, "unknown name 'BN'"),
        ({"dims": ("N", "Q")}, {}, "unknown name 'Q'"),
        ({"dims": ("N", "M", "1"), "box": ("1",) * 3, "strides": ("N",)}, {}, "tensor_maps[0].strides: 1 expressions"),
        ({"dims": ("N",) * 6, "box": ("1",) * 6}, {}, "tensor_maps[0].box: 6 expressions — 1 to 5"),
        ({"swizzle": "48"}, {}, "tensor_maps[0].swizzle: 48 — one of 0, 32, 64, 128"),
        ({"name": "x"}, {}, "the name 'x' stands in the fusion too"),
        ({"name": "fr_map"}, {}, "the name 'fr_map'"),
        ({"name": "other"}, {}, "the template never reads 'other'"),
        ({}, {"kernel_targets": ("sm_80", "sm_86")}, "no target of sm_80, sm_86 has tma"),
        (
            {}, {"kernel_tensor_maps": (TensorMap(name="map_x", operand="x", box=("8", "8")),) * 2},
            "the name 'map_x' stands twice",
        ),
    ],
)  # fmt: skip
def test_refused(package, map_, changes, words):
    assert words in faults(package, map_, **changes)


def test_params_and_constants_may_stand_in_a_map_alone(package):
    options = {"kernel_params": {"BM": (32, 64)}, "kernel_constants": {"SLICE": "BM // 2"}}
    assert faults(package, {"box": ("SLICE", "BM")}, **options) == ""


def test_a_map_tells_the_operand_s_own_layout(tmp_path):
    entry = entry_of(tmp_path, map_={"l2_promotion": 256, "fill": "nan"})
    (candidate,) = chosen(entry, Tensor(H, (2, 3, 40), (144, 48, 1))).accepted  # folds into 6 rows, 48 apart
    assert candidate.maps == (
        TensorMapLayout("map_x", "x", H, (40, 6), (96,), (64, 16), 128, l2_promotion=256, fill="nan"),
    )


def test_expressions_say_another_view(tmp_path):
    map_ = {"dims": ("N // 8", "8", "M"), "strides": ("N // 8", "stride(x, 0)"), "box": ("8", "BM // 16", "BM")}
    entry = entry_of(tmp_path, map_={**map_, "swizzle": "bits(T) * 2"}, kernel_params={"BM": (32,)})
    (candidate,) = chosen(entry, Tensor("bfloat16", (5, 256), (512, 1))).accepted
    assert candidate.maps == (TensorMapLayout("map_x", "x", "bfloat16", (32, 8, 5), (64, 1024), (8, 2, 32), 32),)
    dense = entry_of(tmp_path, map_={"dims": ("N // 8", "8", "M"), "box": ("8", "2", "16")})
    (candidate,) = chosen(dense, Tensor.contiguous(H, (5, 256))).accepted
    assert candidate.maps[0].strides == (64, 512)


@pytest.mark.parametrize(
    ("x", "map_", "words"),
    [
        (Tensor(H, (4, 64), (64, 1), alignment=8), {}, "its address is aligned to 8 bytes, TMA needs 16"),
        (Tensor.contiguous(H, (4, 60)), {}, "axis 1 has a stride of 120 bytes, TMA takes multiples of 16"),
        (Tensor(H, (4, 64), (-64, 1)), {}, "axis 1 has a stride of -128 bytes"),
        (Tensor(H, (4, 64), (0, 1)), {}, "axis 1 has a stride of 0 bytes"),
        (Tensor(H, (4, 64), (1 << 40, 1)), {}, "below 2^40"),
        (Tensor(H, (64, 64), (1, 64)), {}, "its last axis has stride 64, TMA needs 1"),
        (Tensor(H, (1 << 32, 8), (8, 1)), {}, "axis 1 has extent 4294967296, TMA takes 1 to 2^32 - 1"),
        (Tensor.contiguous(H, (4, 64)), {"box": ("M * 64", "8")}, "have 512 bytes, a swizzle of 128 takes no more"),
        (Tensor.contiguous(H, (4, 64)), {"box": ("M * 65", "8")}, "the box has extent 260 on axis 0, TMA takes 1"),
        (Tensor.contiguous(H, (4, 64)), {"box": ("8", "0 * M")}, "the box has extent 0 on axis 1"),
        (Tensor.contiguous(H, (4, 64)), {"box": ("128", "8")}, "have 256 bytes, a swizzle of 128 takes no more"),
        (Tensor.contiguous(H, (4, 64)), {"box": ("12", "8")}, "have 24 bytes, TMA needs a multiple of 16"),
        (Tensor.contiguous(H, (4, 64)), {"swizzle": "M * 4"}, "a swizzle of 16 bytes, TMA has 0, 32, 64, 128"),
    ],
    ids=lambda v: None,
)  # fmt: skip
def test_what_tma_cannot_address_is_refused_with_operand_and_rule(tmp_path, x, map_, words):
    entry = entry_of(tmp_path, map_={"box": ("64", "8"), **map_})
    found = chosen(entry, x)
    (refusal,) = found.refused
    assert not found and words in refusal.reason and not refusal.broken
    assert refusal.reason.startswith("tensor map map_x of x: ")


def test_rules_of_dtypes():
    layout = TensorMapLayout("m", "x", "int32", (64, 8), (256,), (8, 8), fill="nan")
    assert "NaN beyond the ends of int32" in layout.violation(256)
    assert replace(layout, fill="zeros").violation(16) == "" and "aligned" in replace(layout, fill="zeros").violation(8)
    assert "complex64" in replace(layout, dtype="complex64", fill="zeros").violation(256)
    assert "6 axes" in replace(layout, dims=(8,) * 6, fill="zeros").violation(256)


def test_an_axis_of_extent_1_may_have_any_stride(tmp_path):
    entry = entry_of(tmp_path)
    for stride in (0, 7, 64):
        (candidate,) = chosen(entry, Tensor(H, (1, 60), (stride, 1))).accepted
        assert candidate.maps[0].dims == (60, 1) and candidate.maps[0].strides == (128,)  # 120 bytes, rounded up


def test_the_next_kernel_and_the_next_parameters_serve_the_rest(tmp_path):
    entry = entry_of(tmp_path, kernel_params={"BM": (128, 64)}, map_={"box": ("BM", "8")})
    (candidate,) = chosen(entry, Tensor.contiguous(H, (4, 64))).accepted
    assert candidate.params == {"BM": 64}  # rows of 128 elements are wider than the swizzle
    other = KernelSpec(name="portable", template="k.cu.j2", grid="1", block="256", strides="x", tensor_maps=())
    spec = mapped()
    both = spec.model_copy(update={"kernels": (*spec.kernels, other)})
    entry = kit(tmp_path / "both", {"k.cu.j2": MAPPED}, both)["acme.add_relu"]
    assert [c.kernel.name for c in chosen(entry, Tensor.contiguous(H, (4, 64))).accepted] == ["plain", "portable"]
    assert [c.kernel.name for c in chosen(entry, Tensor.contiguous(H, (4, 60))).accepted] == ["portable"]


def test_targets_without_tma_and_empty_problems(tmp_path):
    entry = entry_of(tmp_path, kernel_targets="sm_80+")
    (refusal,) = chosen(entry, Tensor.contiguous(H, (4, 64)), arch="sm_80").refused
    assert "tensor maps, which sm_80 lacks" in refusal.reason
    (candidate,) = chosen(entry, Tensor.contiguous(H, (0, 64))).accepted
    assert candidate.maps == ()  # nothing is launched


def test_an_expression_without_a_whole_number_is_the_kernel_s_fault(tmp_path):
    entry = entry_of(tmp_path, map_={"box": ("64", "M / 8")})
    (refusal,) = chosen(entry, Tensor.contiguous(H, (4, 64))).refused
    assert refusal.broken and "map_x.box1 is 0.5" in refusal.reason


def test_it_is_the_last_parameter(tmp_path):
    entry = entry_of(tmp_path)
    problem = bind(entry, {"x": Tensor.contiguous(H, (4, 64)), "bias": Tensor.contiguous(H, (64,))}, {}, "sm_90a")
    source = render(entry, entry.kernels[0], problem, {})
    assert "long long M, long long N, const __grid_constant__ fr::TensorMap map_x)" in source.text
    last = source.arguments[-1]
    assert (last.kind, last.name, last.parameter, last.pointer) == ("tensor_map", "map_x", "map_x", False)


def test_show_and_digest_tell_of_it(tmp_path):
    entry = entry_of(tmp_path)
    assert "map_x of x, box (64, 16), swizzle 128" in text(entry)
    digests = {evidence.digest(entry, entry.kernels[0])}
    for change in ({"swizzle": "64", "box": ("32", "16")}, {"box": ("64", "8")}, {"l2_promotion": 0}, {"fill": "nan"}):
        other = entry_of(tmp_path, map_=change)
        digests.add(evidence.digest(other, other.kernels[0]))
    assert len(digests) == 5
