"""Point-wise operators around a match: what is taken, what it becomes, and what must stay outside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusionreg.core.errors import SpecError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ir import Graph, Value
from fusionreg.core.matcher.find import captured, find
from fusionreg.core.matcher.regions import PROGRAM, Maker
from fusionreg.core.matcher.slots import _Slot
from fusionreg.core.pattern.graph import Output
from fusionreg.core.pattern.instantiate import instantiate
from fusionreg.core.registry.catalog import Catalog, load
from fusionreg.core.render.pointwise import supported
from fusionreg.core.rewrite import extract
from fusionreg.core.spec import FusionSpec, KernelSpec, Region
from fusionreg.core.tensors import TensorType, bind

from .test_regions import OPS, Build

KERNEL = (
    '{{ slots }}{{ signature }} {{ "{" }} {{ slot("x") }}; {{ slot("y") }}; '
    '{{ "keep" if kept("x") else "" }} {{ "}" }}\n'
)


class Plugin:
    """Softmax over rows, whose kernel takes operators at both ends."""

    def __init__(self, regions: tuple[Region, ...] = (), keeps: tuple[str, ...] = ()) -> None:
        self.regions, self.keeps = regions, keeps

    def register_fusions(self):
        kernel = KernelSpec(
            name="k", template="k.cu.j2", grid="M", block="32", regions=("x", "y"), requires=("aligned(x, 16)",),
            keeps=self.keeps,
        )  # fmt: skip
        return [
            FusionSpec(
                api=1, name="rows.softmax", pattern="y = Softmax(x)", inputs={"x": "T[... M N]"},
                outputs={"y": "T[... M N]"}, dtypes={"T": ("float32", "float16")}, kernels=(kernel,),
                regions=self.regions,
            )
        ]  # fmt: skip


@pytest.fixture(scope="module")
def catalog(tmp_path_factory) -> Catalog:
    return _load(tmp_path_factory.mktemp("rows"))


def _load(folder, *regions: Region, keeps: tuple[str, ...] = ()) -> Catalog:
    import sys
    import types

    from fusionreg.hookspecs import hookimpl

    module = types.ModuleType("rows")
    module.__file__ = str(folder / "__init__.py")
    (folder / "__init__.py").touch()
    (folder / "k.cu.j2").write_text(KERNEL)
    plugin = Plugin(regions, keeps)
    module.register_fusions = hookimpl(lambda: plugin.register_fusions())
    module.__path__ = [str(folder)]
    sys.modules["rows"] = module
    found = load(entry_points=(), extra_plugins=[("rows", module)])
    assert not found.failures, list(map(str, found.failures))
    return found


def grown(graph: Graph, catalog: Catalog):
    found = find(graph, catalog.fusions.values(), catalog.ops, maker=Maker(catalog.derive, supported))
    return [m for m in found.matches if m.base == "rows.softmax"]


def same_values(graph: Graph, match, catalog: Catalog) -> None:
    entry = catalog[match.fusion]
    rng = np.random.default_rng(1)
    shapes = {n: graph.values[v].shape for n, v in match.inputs.items()}
    arrays = {n: rng.standard_normal(s).astype("float32") for n, s in shapes.items()}
    inside = instantiate(entry.patterns[0], entry.spec, dtypes=match.dtypes, shapes=shapes, ops=OPS)
    part = extract(graph, match.nodes, "part", list(match.inputs.values()), list(match.outputs.values()))
    mine = evaluate(inside, arrays, ops=OPS)
    theirs = evaluate(part, {match.inputs[n]: a for n, a in arrays.items()}, ops=OPS)
    assert set(mine) == set(match.outputs)
    for name, value in match.outputs.items():
        np.testing.assert_array_equal(mine[name], theirs[value])


def test_both_ends(catalog):
    g = Build()
    shape = (2, 3, 4)
    x, bias = g.input("x", shape), g.input("bias", (4,))
    a = g("Relu", g("Add", x, bias, shape=shape), shape=shape)
    s = g("Softmax", a, shape=shape)
    gate, row = g.input("gate", shape), g.input("row", (2, 3, 1))
    y = g("Mul", g("Mul", s, gate, shape=shape), row, shape=shape)
    graph = g.done(y)
    (match,) = grown(graph, catalog)
    entry = catalog[match.fusion]
    assert len(match.nodes) == 5 and match.root == graph.nodes[-1].name
    assert set(entry.slots) == {"x", "y"} and entry.slots["x"].at == Output(1, 0)
    assert dict(entry.spec.inputs) == {
        "in0": "float32[... M N]", "in1": "float32[N]", "in2": "float32[... M N]", "in3": "float32[... M 1]"
    }  # fmt: skip
    assert entry.slots["y"].outputs == ("out0",) and dict(entry.spec.dtypes) == {"T": ("float32",)}
    same_values(graph, match, catalog)
    assert [k.spec.requires for k in entry.kernels] == [("aligned(x, 16)",)]


def test_a_program_that_makes_no_fusion_is_a_near_miss(catalog):
    """The rest of the model matches all the same."""

    def refuse(base, region):
        raise SpecError("bad spec", region.name, "two tensors named K", "one of each name")

    g = Build()
    x = g.input("x", (3, 4))
    y = g("Relu", g("Softmax", x, shape=(3, 4)), shape=(3, 4))
    graph = g.done(g("Exp", g("Neg", y, shape=(3, 4)), shape=(3, 4)))
    maker = Maker(refuse, supported)
    found = find(graph, catalog.fusions.values(), catalog.ops, maker=maker)
    assert [m.fusion for m in found.matches] == ["rows.softmax"]
    (failure,) = found.failures
    assert failure.fusion == "rows.softmax" and failure.clause == PROGRAM and "two tensors named K" in failure.found
    opened = load(allow=("pointwise",))
    near = []
    assert not list(captured(graph, opened.fusions.values(), opened.ops, maker, near=near))
    assert [(f.fusion, f.clause) for f in near] == [("pointwise.region", PROGRAM)]


def test_value_that_others_read_stays_an_output(catalog):
    g = Build()
    s = g("Softmax", g.input("x"))
    graph = g.done(g("Neg", s), s)
    (match,) = grown(graph, catalog)
    assert set(match.outputs) == {"y", "out0"}
    assert catalog[match.fusion].slots["y"].outputs == ("y", "out0")
    same_values(graph, match, catalog)


def test_what_the_value_meets_comes_along_where_it_is_for_it_alone(catalog):
    g = Build()
    s = g("Softmax", g.input("x"))
    gate = g("Sigmoid", g("Neg", g.input("z")))
    other = g("Exp", g.input("w"))
    graph = g.done(g("Add", g("Mul", s, gate), other), g("ReduceSum", other, shape=(1, 1)))
    (match,) = grown(graph, catalog)
    assert sorted(graph.node_by_name[n].op for n in match.nodes) == ["Add", "Mul", "Neg", "Sigmoid", "Softmax"]
    assert other in match.inputs.values()
    same_values(graph, match, catalog)


def test_what_the_match_itself_reads_does_not_come_along_behind_it(catalog):
    g = Build()
    a = g("Relu", g.input("x"))
    graph = g.done(g("Mul", g("Softmax", a), a))
    (match,) = grown(graph, catalog)
    assert [graph.node_by_name[n].op for n in match.nodes] == ["Softmax", "Mul"] and a in match.inputs.values()
    same_values(graph, match, catalog)


def test_front_that_others_read_stays_outside(catalog):
    g = Build()
    a = g("Relu", g.input("x"))
    graph = g.done(g("Softmax", a), g("ReduceSum", a, shape=(1, 1)))
    assert grown(graph, catalog) == []


def test_front_that_others_read_is_an_output_where_a_kernel_keeps_it(tmp_path):
    """``h = x + r``, read by the fusion and by the next sum; what is in front of that is computed for it alone."""
    catalog = _load(tmp_path, keeps=("x",))
    g = Build()
    a = g("Neg", g.input("x"))
    h = g("Add", a, g.input("r"))
    s = g("Softmax", h)
    graph = g.done(g("Add", g("MatMul", s, g.input("w", (4, 4))), h))
    (match,) = grown(graph, catalog)
    assert [graph.node_by_name[n].op for n in match.nodes] == ["Neg", "Add", "Softmax"]
    assert dict(match.outputs) == {"y": s, "x": h}
    entry = catalog[match.fusion]
    assert entry.slots["x"].outputs == ("x",) and [k.name for k in entry.kernels] == ["k"]
    same_values(graph, match, catalog)


def test_an_output_is_not_kept(tmp_path):
    with pytest.raises(AssertionError, match="'y' is no input with a slot"):
        _load(tmp_path, keeps=("y",))


def test_what_is_kept_may_not_wait_for_the_fusion(tmp_path):
    """What the slot's value is computed from may be read by others; then it stays outside."""
    catalog = _load(tmp_path, keeps=("x",))
    g = Build()
    a = g("Neg", g.input("x"))
    h = g("Add", a, g.input("r"))
    graph = g.done(g("Softmax", h), a, h)
    (match,) = grown(graph, catalog)
    assert [graph.node_by_name[n].op for n in match.nodes] == ["Add", "Softmax"] and a in match.inputs.values()
    same_values(graph, match, catalog)


def test_reader_that_waits_for_the_match_elsewhere_stays_outside(catalog):
    g = Build()
    s = g("Softmax", g.input("x"))
    m = g("ReduceMax", s, shape=(3, 1))
    graph = g.done(g("Sub", s, m))
    assert grown(graph, catalog) == []


def test_other_readers_are_taken_all_the_same(catalog):
    g = Build()
    s = g("Softmax", g.input("x"))
    m = g("ReduceMax", s, shape=(3, 1))
    graph = g.done(g("Sub", s, m), g("Neg", s))
    (match,) = grown(graph, catalog)
    assert sorted(graph.node_by_name[n].op for n in match.nodes) == ["Neg", "Softmax"]
    assert set(match.outputs) == {"y", "out0"}
    same_values(graph, match, catalog)


def test_cheap_operators_over_fewer_elements_come_along(catalog):
    """``x * (1 + scale)`` with a scale for each row; what costs more than a few instructions is computed once."""
    g = Build()
    row, shape = (3, 1), (3, 4)
    s = g("Softmax", g.input("x", shape), shape=shape)
    scale, shift = g("Neg", g.input("scale", row), shape=row), g("Exp", g.input("shift", row), shape=row)
    graph = g.done(g("Add", g("Mul", s, scale, shape=shape), shift, shape=shape))
    (match,) = grown(graph, catalog)
    assert sorted(graph.node_by_name[n].op for n in match.nodes) == ["Add", "Mul", "Neg", "Softmax"]
    assert shift in match.inputs.values()
    assert sorted(catalog[match.fusion].spec.inputs.values()) == ["T[... M N]", "float32[... M 1]", "float32[... M 1]"]
    same_values(graph, match, catalog)


def test_operands_a_kernel_could_not_index_stay_outside(catalog):
    g = Build()
    shape = (2, 3, 4)
    s = g("Softmax", g.input("x", shape), shape=shape)
    graph = g.done(g("Mul", s, g.input("heads", (2, 1, 1)), shape=shape))
    assert grown(graph, catalog) == []


def test_other_shapes_stay_outside(catalog):
    g = Build()
    s = g("Softmax", g.input("x", (1, 4)), shape=(1, 4))
    graph = g.done(g("Add", s, g.input("z")))
    assert grown(graph, catalog) == []


def test_a_spec_proves_its_slots_on_regions_of_its_own(tmp_path):
    row = {"inputs": {"x": "T[... M N]", "b": "T[N]"}, "outputs": {"z": "T[... M N]"}, "dtypes": {"T": ("float16",)}}
    region = Region(name="biased", pattern="...\nz = Add(y, b)", slots=("y",), **row)
    catalog = _load(tmp_path, region)
    assert [e.name for e in catalog.entries()] == ["rows.softmax", "rows.softmax.biased"]
    assert catalog["rows.softmax.biased"].kernels[0].key == "rows.softmax.biased/k"
    base = catalog["rows.softmax"]
    for changes, reason in (
        ({"slots": ()}, "slots"),
        ({"pattern": "z = Add(x, b)"}, "slots"),
        ({"slots": ("q",)}, "'q'"),
        ({"slots": ("x",)}, "nothing computes 'x'"),
    ):
        with pytest.raises(SpecError, match=reason):
            catalog.derive(base, region.model_copy(update={"name": "wrong", **changes}))


def test_kernels_without_the_slot_are_left_out(tmp_path):
    catalog = _load(tmp_path)
    base = catalog["rows.softmax"]
    kernel = replace(base.kernels[0], spec=base.kernels[0].spec.model_copy(update={"regions": ("x",)}))
    row = {"inputs": {"x": "T[... M N]"}, "outputs": {"z": "T[... M N]"}, "dtypes": {"T": ("float16",)}}
    region = Region(name="behind", pattern="...\nz = Neg(y)", slots=("y",), **row)
    assert catalog.derive(replace(base, kernels=(kernel,)), region).kernels == ()


SPACE = (2, 6, 4, 5)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((2, 6, 1, 1), "N C 1 ..."), ((6, 1, 1), "C 1 ..."), ((1, 6, 1, 1), "1 C 1 ..."), ((4, 5), "S ..."),
        ((1, 1, 4, 5), "1 1 S ..."), ((2, 1, 1, 1), "N 1 1 ..."), ((2, 1, 4, 5), "N 1 S ..."), ((1, 1, 1), ""),
        (SPACE, "N C S ..."), ((5,), None), ((2, 6, 4, 1), None), ((6,), None), ((1, *SPACE), None),
    ],
)  # fmt: skip
def test_operands_by_their_axes(shape, text):
    """What is broadcast is told by text, and the text binds the shape that it was made for."""
    form = TensorType.parse("T[N C S ...]").forms[0]
    found = _Slot("y", Value("y", "T", SPACE), form).text(Value("o", "T", shape))
    assert found == (None if text is None else f"T[{text}]")
    if text is not None:
        types = {"y": TensorType.parse("T[N C S ...]"), "o": TensorType.parse(found)}
        assert bind(types, {"y": SPACE, "o": shape}).leading == (5,)
