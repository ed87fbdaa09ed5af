"""Workloads of a spec: checked at load, listed by ``show``, and all that are shipped are problems of their fusion."""

from __future__ import annotations

import json

import plugin_kit
import pytest
from catalogs import shipped
from pydantic import ValidationError

from fusionreg.core import describe
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.spec import Case, FusionSpec, Workload
from fusionreg.core.validate.fusion import check_fusion

GOOD = {"name": "16x32", "axes": {"M": 16, "N": 32}, "dtypes": {"T": "float16"}}


def problems(**changes) -> dict[str, str]:
    spec = plugin_kit.add_relu(workloads=(Workload(**GOOD | changes),), kernels=())
    _, found = check_fusion(spec, default_vocabulary(), "tests")
    return {str(e.facts["field"]): str(e) for e in found}


def test_a_workload_that_fits() -> None:
    assert not problems()
    assert not problems(values={"bias": "distinct 2 * N"})
    assert not problems(batch=(2, 3), forms={"bias": "T[N]"}, goal="min(eager, compile) * 0.9", row="S8")


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"axes": {"M": 16}}, "axes", "nothing for N"),
        ({"axes": {"M": 16, "N": 32, "Q": 1}}, "axes", "unknown 'Q'"),
        ({"dtypes": {}}, "dtypes", "nothing for T"),
        ({"dtypes": {"T": "int8"}}, "dtypes", "'int8'"),
        ({"dtypes": {"T": "float16", "U": "float16"}}, "dtypes", "unknown 'U'"),
        ({"attributes": {"activation": "Relu"}}, "attributes", "unknown 'activation'"),
        ({"forms": {"bias": "T[M]"}}, "forms", "T[N]"),
        ({"forms": {"bias": "U[N]"}}, "forms", "'U[N]'"),
        ({"forms": {"w": "T[N]"}}, "forms", "unknown 'w'"),
        ({"absent": ("bias",)}, "absent", "not optional"),
        ({"values": {"w": "below N"}}, "values", "unknown 'w'"),
        ({"values": {"bias": "above N"}}, "values", "one of below, distinct, rising"),
        ({"values": {"bias": "below Q"}}, "values", "'Q'"),
        ({"goal": "min(eager, cublas)"}, "goal", "cublas"),
        ({"goal": "eager *"}, "goal", "eager *"),
        ({"goal": "rank(x)"}, "goal", "rank"),
    ],
)
def test_what_does_not_fit(changes, field, said) -> None:
    found = problems(**changes)
    assert list(found) == [f"workloads[0].{field}"]
    assert said in found[f"workloads[0].{field}"]


def test_an_extent_is_not_negative() -> None:
    with pytest.raises(ValidationError, match=r"axes\.N"):
        Workload(**GOOD | {"axes": {"M": 16, "N": -1}})


def test_constraints_and_names() -> None:
    spec = plugin_kit.add_relu(constraints=("N % 5 == 0",), workloads=(Workload(**GOOD), Workload(**GOOD)), kernels=())
    _, found = check_fusion(spec, default_vocabulary(), "tests")
    text = "\n".join(map(str, found))
    assert "does not hold" in text and "two workloads have one name" in text


def test_round_trip() -> None:
    spec = plugin_kit.add_relu(workloads=(Workload(**GOOD, goal="floor / 0.9"),), cases=(Case(name="c"),))
    again = FusionSpec.model_validate(json.loads(spec.model_dump_json()))
    assert again == spec and again.workloads[0].goal == "floor / 0.9"


def test_show_lists_them(tmp_path) -> None:
    entry = plugin_kit.entry(tmp_path, workloads=(Workload(**GOOD, row="S8", mode="g", goal="floor / 0.9"),))
    line = next(x for x in describe.text(entry).splitlines() if "16x32" in x)
    assert all(word in line for word in ("S8", "CUDA graph", "T=float16", "M=16", "N=32", "goal floor / 0.9"))


def test_the_gemm_rows() -> None:
    shapes = {
        (*(w.axes[a] for a in "MNK"), w.mode): w.goal
        for w in shipped()["gemm.scale_bias"].spec.workloads
        if w.row == "S15"
    }
    product = "min(product, epilogue)"
    assert shapes == {
        (8192, 8192, 8192, "b"): product,
        (4096, 4096, 4096, "b"): product,
        (2048, 28672, 8192, "b"): product,
        (16, 14336, 4096, "g"): "floor / 0.88",
        (1, 14336, 4096, "g"): "floor / 0.90",
    }
