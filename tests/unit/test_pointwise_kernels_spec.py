"""What a spec may say of kernels for whole regions, and what their templates see."""

from __future__ import annotations

import plugin_kit
import pytest

from fusionreg.core.errors import RenderError
from fusionreg.core.problem import Tensor, bind, combinations, select
from fusionreg.core.registry.catalog import load
from fusionreg.core.render import regions, render
from fusionreg.core.spec import ITERATION, FusionSpec, KernelSpec
from fusionreg_pointwise.kernels import KERNELS

TEMPLATE = '{{ include("region.cuh") }}\n{{ region.function }}\n{{ signature }} {}\n'


def fusion(pattern="v0 = Add(x, bias)\ny = Relu(v0)", **kernel):
    made = {"name": "plain", "template": "k.cu.j2", "regions": "*", "strides": "*", "grid": "ceildiv(elements, 256)"}
    return FusionSpec(
        api=1, name="acme.sum", pattern=pattern, inputs={"x": "float32[M N]", "bias": "float32[N]"},
        outputs={"y": "float32[M N]"}, dtypes={}, kernels=[KernelSpec(**{**made, "block": "256", **kernel})],
    )  # fmt: skip


def problems(tmp_path, spec, template=TEMPLATE):
    with pytest.raises(AssertionError) as found:
        plugin_kit.catalog(tmp_path, {"k.cu.j2": template}, spec)
    return str(found.value)


def test_every_stride_needs_a_region(tmp_path):
    assert "'*' without a region" in problems(tmp_path, fusion(regions=(), grid="1"))


def test_the_iteration_is_known_to_such_kernels_alone(tmp_path):
    assert "unknown name 'elements'" in problems(tmp_path, fusion(regions=(), strides=()))


def test_what_is_compiled_depends_on_no_extent(tmp_path):
    assert "unknown name 'columns'" in problems(tmp_path, fusion(constants={"VEC": "columns"}))


def test_what_is_compiled_may_depend_on_the_structure(tmp_path):
    catalog = plugin_kit.catalog(
        tmp_path, {"k.cu.j2": TEMPLATE + "// {{ VEC }}\n"}, fusion(constants={"VEC": "16 // element_bytes"})
    )
    entry, problem = bound(catalog)
    (candidate,) = select(entry, problem).accepted
    assert "// 4\n" in render(entry, candidate.kernel, problem, candidate.params).text


def test_names_of_the_iteration_are_taken(tmp_path):
    assert "'elements'" in problems(tmp_path, fusion(params={"elements": (1, 2)}))


def test_a_template_that_ignores_its_region(tmp_path):
    assert "never reads `region`" in problems(tmp_path, fusion(), "{{ signature }} {}\n")


def bound(catalog, x=None):
    entry = catalog["acme.sum"]
    x = x or Tensor.contiguous("float32", (4, 8))
    problem = bind(entry, {"x": x, "bias": Tensor.contiguous("float32", x.shape[1:])}, {}, "sm_90a")
    return entry, problem


def test_expressions_read_the_iteration(tmp_path):
    catalog = plugin_kit.catalog(
        tmp_path, {"k.cu.j2": TEMPLATE}, fusion(requires=("columns == 8", "elements == 32", "widest == 8"))
    )
    entry, problem = bound(catalog)
    (candidate,) = select(entry, problem).accepted
    assert candidate.launch.grid == (1, 1, 1)
    assert "requires columns == 8" in select(*bound(catalog, Tensor.contiguous("float32", (4, 9)))).reason


def test_every_name_has_a_value(tmp_path):
    terms = " + ".join(ITERATION)
    catalog = plugin_kit.catalog(tmp_path, {"k.cu.j2": TEMPLATE}, fusion(requires=(f"{terms} > 0",)))
    assert select(*bound(catalog))


def test_parameters_are_those_of_the_iteration(tmp_path):
    catalog = plugin_kit.catalog(tmp_path, {"k.cu.j2": TEMPLATE}, fusion())
    entry, problem = bound(catalog, Tensor("float32", (4, 8), (12, 1)))
    source = render(entry, entry.kernels[0], problem, next(combinations(entry.kernels[0], problem)).params)
    assert [a.parameter for a in source.arguments] == [
        "x", "bias", "y", "fr_elements", "fr_extent_0", "fr_extent_1", "fr_multiplier_1", "fr_shift_1",
        "x_stride_0", "y_stride_0",
    ]  # fmt: skip
    assert {a.ctype for a in source.arguments if not a.pointer} == {"int"}


def test_an_operator_without_a_cuda_form(tmp_path):
    catalog = plugin_kit.catalog(
        tmp_path, {"k.cu.j2": TEMPLATE}, fusion(pattern="v0 = Add(x, bias)\ny = Softmax(v0, axis=-1)")
    )
    entry, problem = bound(catalog)
    with pytest.raises(RenderError, match="Softmax is not point-wise"):
        regions.region(entry, problem, "acme.sum/plain")


def test_a_view_writes_its_offset(tmp_path):
    catalog = plugin_kit.catalog(tmp_path, {"k.cu.j2": TEMPLATE}, fusion())
    entry, problem = bound(catalog, Tensor("float32", (4, 8), (12, 1)))
    x, bias, y = regions.region(entry, problem, "").operands
    assert (x.offset(), bias.offset(), y.offset()) == ("i0 * x_stride_0 + i1", "i1", "i0 * y_stride_0 + i1")
    assert (x.offset(-1), bias.offset(-1)) == ("i0 * x_stride_0", "0")
    assert (bias.stride(0), bias.stride(-1), x.stride(0)) == ("0", "1", "x_stride_0")
    assert y.output and not x.output and not bias.scalar


def test_the_family_has_one_open_fusion():
    (entry,) = load(allow=("pointwise",)).fusions.values()
    assert entry.name == "pointwise.region"
    assert [k.name for k in entry.kernels] == ["ragged", "strided", "transposed", "turns", "vector"]
    assert entry.spec.kernels == KERNELS
