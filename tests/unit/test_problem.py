"""Problems: what a call's shapes, dtypes, strides and keywords come to, and what they are refused for."""

from __future__ import annotations

import pickle

import numpy as np
import plugin_kit
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionreg.core.errors import ArgumentError, LaunchError
from fusionreg.core.problem import Tensor, bind, combinations, select
from fusionreg.core.problem.geometry import Launch
from fusionreg.core.spec import AttributeSpec, KernelSpec
from fusionreg.core.targets import target
from fusionreg.core.tensors import Form

F16 = "float16"


def dense(*shape: int, dtype: str = F16, alignment: int = 256) -> Tensor:
    return Tensor.contiguous(dtype, shape, alignment)


def strided(array: np.ndarray) -> Tensor:
    return Tensor(array.dtype.name, array.shape, tuple(s // array.itemsize for s in array.strides))


@pytest.fixture
def plain(tmp_path):
    return plugin_kit.entry(tmp_path)


def problem_of(entry, x=None, bias=None, target="sm_90a", **keywords):
    return bind(entry, {"x": x or dense(2, 3, 8), "bias": bias or dense(8)}, keywords, target)


# --- tensors ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=0, max_size=4), st.permutations(range(4)), st.booleans())
def test_contiguity_agrees_with_numpy(shape, order, sliced):
    array = np.zeros(shape, np.float32).transpose([o for o in order if o < len(shape)])
    if sliced and array.ndim:
        array = np.zeros([n * 2 for n in array.shape], np.float32)[tuple(slice(0, n) for n in array.shape)]
    assert strided(array).is_contiguous == array.flags.c_contiguous


@given(st.lists(st.integers(1, 3), min_size=3, max_size=4), st.permutations(range(4)))
def test_leading_axes_fold_exactly_when_one_stride_visits_them(shape, order):
    axes = [o for o in order if o < len(shape)]
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape).transpose(axes)
    tensor = strided(array).folded(Form(("M", "N"), leading=True))
    rows = array.reshape(-1, array.shape[-1])  # a copy where no view exists
    assert tensor.shape == rows.shape
    if tensor.foldable:
        flat = np.lib.stride_tricks.as_strided(array, rows.shape, tuple(4 * s for s in tensor.strides))
        assert np.array_equal(flat, rows)
    else:
        with pytest.raises((ValueError, AttributeError)):
            view = array.view()
            view.shape = rows.shape  # NumPy agrees: no view has this shape


def test_leading_axes_multiply_into_the_first(plain):
    p = problem_of(plain)
    assert dict(p.axes) == {"M": 6, "N": 8} and p.leading == (2,)
    assert p.shapes["y"] == (2, 3, 8) and p.tensors["y"].shape == (6, 8)


@pytest.mark.parametrize("x", [(8,), (3, 7), (3, 8, 1)])
def test_shapes_that_do_not_fit(plain, x):
    with pytest.raises(ArgumentError) as caught:
        problem_of(plain, dense(*x))
    assert caught.value.facts["tensor"] in ("x", "bias") and "acme.add_relu" in str(caught.value)


def test_extra_leading_ones_of_an_unfolded_tensor(plain):
    assert problem_of(plain, bias=dense(1, 1, 8)).tensors["bias"].shape == (8,)
    with pytest.raises(ArgumentError, match="bias"):
        problem_of(plain, bias=dense(2, 8))


def test_forms_are_tried_in_order_and_agree(tmp_path):
    e = plugin_kit.entry(tmp_path, inputs={"x": "T[... M N]", "bias": "T[] | T[N] | T[M 1]"})
    assert problem_of(e, dense(4, 8), dense()).forms["bias"] == 0
    assert problem_of(e, dense(4, 8), dense(1)).forms["bias"] == 0
    assert problem_of(e, dense(4, 8), dense(8)).forms["bias"] == 1
    assert problem_of(e, dense(4, 8), dense(4, 1)).forms["bias"] == 2
    with pytest.raises(ArgumentError, match="fold into M"):  # a per-row bias under two leading axes means another thing
        problem_of(e, dense(2, 4, 8), dense(4, 1))
    env = problem_of(e, dense(4, 8), dense(4, 1)).env()
    assert env["form"]("bias") == 2 and env["rank"]("bias") == 2


# --- dtypes, attributes, choices -------------------------------------------------------------------------------------


def test_dtypes_must_agree_and_be_declared(plain):
    with pytest.raises(ArgumentError, match="bias is float32 — float16, as x is"):
        problem_of(plain, bias=dense(8, dtype="float32"))
    with pytest.raises(ArgumentError, match="x is int8"):
        problem_of(plain, dense(2, 8, dtype="int8"), dense(8, dtype="int8"))


def attributed(tmp_path, **kinds):
    """``alpha * clip`` as a pattern that binds attributes of every type, on one Swish and one Softmax."""
    return plugin_kit.entry(
        tmp_path,
        pattern="h = Swish(Add(x, bias), alpha=alpha)\ny = Softmax(h, axis=axis)",
        attributes={
            "alpha": AttributeSpec(type="float", default=1.0),
            "axis": AttributeSpec(type="int", default=-1, choices=(-1, 1)),
        },
    )


@pytest.mark.parametrize(
    ("keywords", "word"),
    [
        ({"alpha": "1"}, "alpha"), ({"alpha": True}, "alpha"), ({"axis": 1.5}, "axis"), ({"axis": 2}, "-1, 1"),
        ({"axis": True}, "axis"),
        ({"alpha": [1.0]}, "alpha"), ({"alpha": np.array(1.0)}, "alpha"),
        ({"axes": 1}, "did you mean axis"), ({"alpha": None, "axis": 2**70}, "axis"),
    ],
)  # fmt: skip
def test_attributes_of_the_wrong_kind(tmp_path, keywords, word):
    with pytest.raises(ArgumentError, match=word):
        problem_of(attributed(tmp_path), dense(4, 8), **keywords)


def test_attributes_take_numbers_of_numpy_and_defaults(tmp_path):
    e = attributed(tmp_path)
    p = problem_of(e, dense(4, 8), alpha=np.float32(0.5), axis=np.int64(1))
    assert dict(p.attributes) == {"alpha": 0.5, "axis": 1} and type(p.attributes["axis"]) is int
    assert dict(problem_of(e, dense(4, 8)).attributes) == {"alpha": 1.0, "axis": -1}


def chosen(tmp_path):
    return plugin_kit.entry(
        tmp_path,
        pattern='b = optional(Add)(Relu(x), bias)\ny = optional(any_of(Relu, Tanh), "activation")(b)',
    )


def test_choices_and_optional_inputs(tmp_path):
    e = chosen(tmp_path)
    assert dict(problem_of(e).choices) == {"activation": "none"}
    assert problem_of(e, activation="Tanh").choices["activation"] == "Tanh"
    absent = bind(e, {"x": dense(4, 8)}, {}, "sm_90a")
    assert absent.tensors["bias"] is None and not absent.env()["present"]("bias")
    with pytest.raises(ArgumentError, match="did you mean Tanh"):
        problem_of(e, activation="tanh")
    with pytest.raises(ArgumentError, match="bias is passed by keyword — arrays by position: x, bias"):
        bind(e, {"x": dense(4, 8)}, {"bias": dense(8)}, "sm_90a")
    with pytest.raises(ArgumentError, match="x is missing"):
        bind(e, {"bias": dense(8)}, {}, "sm_90a")


def test_a_problem_is_a_value(plain):
    a, b = problem_of(plain), problem_of(plain)
    assert a == b and hash(a) == hash(b) and a != problem_of(plain, target="sm_80")
    a.env()
    assert pickle.loads(pickle.dumps(a)) == a


def test_the_device_at_hand_or_the_usual_part(tmp_path):
    e = kernels(
        tmp_path,
        {"name": "big", "requires": ("multiprocessors >= 100",), "grid": "min(M, 2 * multiprocessors)"},
        {"name": "small", "grid": "multiprocessors"},
    )
    x, bias = dense(1000, 8), dense(8)
    usual, slice_ = (bind(e, {"x": x, "bias": bias}, {}, "sm_90a", n) for n in (None, 16))
    assert usual == bind(e, {"x": x, "bias": bias}, {}, "sm_90a", 132) != slice_
    assert [(c.kernel.name, c.launch.grid[0]) for c in select(e, usual).accepted] == [("big", 264), ("small", 132)]
    found = select(e, slice_)
    assert [(c.kernel.name, c.launch.grid[0]) for c in found.accepted] == [("small", 16)]
    assert "multiprocessors = 16" in found.refused[0].reason
    assert slice_.with_target("sm_80").multiprocessors == 108


# --- selection and geometry ------------------------------------------------------------------------------------------


def kernels(tmp_path, *specs):
    """The fusion with these kernels, each with a template that reads the strides and params it declares."""
    common = {"grid": "ceildiv(M * N, 256)", "block": "256"}
    made, templates = [], {}
    for s in specs:
        template = f"{s['name']}.cu.j2"
        strides = [f"{t}_stride_{i}" for t in (s.get("strides"),) if t for i in range(2)]
        reads = "".join(f"  if ({word} < 0) return;\n" for word in (*strides, *s.get("params", ())))
        templates[template] = plugin_kit.ADD_RELU.replace("{\n", "{\n" + reads, 1)
        made.append(KernelSpec(**{**common, "template": template, **s}))
    return plugin_kit.entry(tmp_path, others=templates, kernels=made)


def test_kernels_refuse_with_reasons(tmp_path):
    e = kernels(
        tmp_path,
        {"name": "wide", "requires": "N % 16 == 0 and aligned(x, 16)"},
        {"name": "hopper", "targets": "sm_90a", "requires": "has(wgmma)"},
        {"name": "later", "pending": "no evidence yet"},
        {"name": "rows", "strides": "x", "requires": "stride(x, 1) == 1"},
    )  # fmt: skip
    found = select(e, problem_of(e, target="sm_80"))
    reasons = {r.kernel.name: r.reason for r in found.refused}
    assert [c.kernel.name for c in found.accepted] == ["rows"]
    assert "N = 8" in reasons["wide"] and "sm_90a, not sm_80" in reasons["hopper"] and "no evidence" in reasons["later"]
    assert [c.kernel.name for c in select(e, problem_of(e, target="sm_90a")).accepted] == ["hopper", "rows"]
    transposed = Tensor(F16, (3, 8), (1, 3))
    found = select(e, problem_of(e, transposed))
    assert not found and "x is not contiguous" in found.reason and "stride(x, 1) == 1" in found.reason
    padded = Tensor(F16, (3, 8), (9, 1))
    assert [c.kernel.name for c in select(e, problem_of(e, padded)).accepted] == ["rows"]
    assert "common stride" in select(e, problem_of(e, Tensor(F16, (2, 3, 8), (8, 16, 1)))).reason


def test_order_is_measured_then_estimate_then_name(tmp_path):
    e = kernels(
        tmp_path, {"name": "b", "estimate": "2e-6"}, {"name": "a", "estimate": "3e-6"}, {"name": "d"}, {"name": "c"}
    )

    def names(**options):
        return [c.kernel.name for c in select(e, problem_of(e), **options).accepted]

    assert names() == ["b", "a", "c", "d"]
    assert names(measured={"acme.add_relu/d": 1e-3}) == ["d", "b", "a", "c"]


def test_parameters_default_first_then_tuned(tmp_path):
    e = kernels(
        tmp_path,
        {"name": "p", "params": {"A": (256, 64, 128), "B": (1, 2)}, "valid": "A * B >= 128",
         "grid": "ceildiv(M * N, A)", "block": "A"},
    )  # fmt: skip
    p = problem_of(e)
    assert dict(select(e, p).accepted[0].params) == {"A": 256, "B": 1}
    tuned = {"acme.add_relu/p": {"A": 64, "B": 2}}
    assert dict(select(e, p, tuned=tuned).accepted[0].params) == {"A": 64, "B": 2}
    assert dict(select(e, p, tuned={"acme.add_relu/p": {"A": 64, "B": 1}}).accepted[0].params) == {"A": 256, "B": 1}
    assert dict(select(e, p, tuned={"acme.add_relu/p": {"A": 65}}).accepted[0].params) == {"A": 256, "B": 1}
    assert [(c.params["A"], c.params["B"]) for c in combinations(e.kernels[0], p)] == [
        (256, 1), (256, 2), (64, 2), (128, 1), (128, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [65_535, 65_536, 70_000])
def test_grid_limits_refuse_before_a_launch(tmp_path, batch):
    """A batch on grid y is fine up to 65,535 and no further (mlx#3858, flash-linear-attention#172)."""
    e = kernels(tmp_path, {"name": "batched", "grid": ("1", "M")}, {"name": "folded", "grid": "M"})
    found = select(e, problem_of(e, dense(batch, 8)))
    assert [c.kernel.name for c in found.accepted] == (["batched", "folded"] if batch <= 65_535 else ["folded"])
    if batch > 65_535:
        assert f"grid y is {batch}, the limit is 65535" in found.reason


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (Launch((2**31, 1, 1), (32, 1, 1)), "grid x"), (Launch((1, 1, 65_536), (32, 1, 1)), "grid z"),
        (Launch((1, 1, 1), (1025, 1, 1)), "1025 threads"), (Launch((1, 1, 1), (1, 1, 65)), "block z"),
        (Launch((1, 1, 1), (32, 1, 1), shared_memory=232_449), "shared memory"),
        (Launch((3, 1, 1), (32, 1, 1), cluster=(2, 1, 1)), "no multiple"),
        (Launch((16, 1, 1), (32, 1, 1), cluster=(16, 1, 1)), "8 blocks"), (Launch((1, 1, 1), (0, 1, 1)), "positive"),
    ],
)  # fmt: skip
def test_limits(launch, words):
    with pytest.raises(LaunchError, match=words):
        launch.check(target("sm_90a"), "acme")
    assert not Launch((2**31 - 1, 65_535, 1), (1024, 1, 1), shared_memory=232_448).violation(target("sm_90a"))


def test_clusters_need_hopper():
    launch = Launch((2, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    assert "sm_80 lacks" in launch.violation(target("sm_80")) and not launch.violation(target("sm_90a"))


def test_an_empty_output_is_empty(plain):
    assert problem_of(plain, dense(0, 8)).empty and not problem_of(plain).empty
    assert problem_of(plain, dense(0, 3, 8)).shapes["y"] == (0, 3, 8)
