"""The vocabulary as a value, and its declarations against ONNX's own schemas."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest

from fusionreg.core.errors import GraphError, SpecError, UnknownNameError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Value
from fusionreg.core.ops import (
    DTYPE_ATTRIBUTES,
    Vocabulary,
    complete,
    default_vocabulary,
    infer,
    named,
    normalise,
    operator,
)
from fusionreg.core.spec import REQUIRED

OPS = default_vocabulary()
ONNX_OPS = [name for name in OPS if "::" not in name]


def test_there_are_enough_operators() -> None:
    assert len(ONNX_OPS) >= 120
    assert len(OPS) - len(ONNX_OPS) >= 10


def test_importing_it_imports_no_array_library() -> None:
    code = (
        "import sys; from fusionreg.core.ops import default_vocabulary; default_vocabulary();"
        "print([m for m in ('numpy', 'scipy', 'torch', 'onnx', 'cupy', 'array_api_compat') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_second_claim_to_a_name_is_refused() -> None:
    twice = operator("Relu", "x")(lambda xp, x: x)
    with pytest.raises(SpecError, match="Relu"):
        OPS.with_ops([twice])
    new = operator("acme::Twice", "x")(lambda xp, x: 2 * x)
    larger = OPS.with_ops([new])
    assert larger["acme::Twice"] is new and "acme::Twice" not in OPS and len(larger) == len(OPS) + 1


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean Softmax"):
        OPS["Softmaxx"]
    assert "Softmaxx" not in OPS and OPS.get("Softmaxx") is None


def test_it_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        OPS["X"] = OPS["Relu"]  # type: ignore[index]
    assert isinstance(OPS, Vocabulary) and default_vocabulary() is OPS


#: Attributes that are ours, or written differently, with the reason.
OWN_ATTRIBUTES = {
    "MatMul": {"transA", "transB"},  # transposes are folded in by the frontends
    "BatchNormalization": {"unbiased"},  # torch's running variance
    "ConstantOfShape": {"dtype"},  # the tensor attribute is written as a number and a dtype
}
#: Outputs after those of ONNX.
OWN_OUTPUTS = {
    "Attention": ("log_sum_exp?",),
    "BatchNormalization": ("saved_mean?", "saved_inv_std_dev?"),
}
OWN_DEFAULTS = {
    ("ConstantOfShape", "value"),
    ("Dropout", "seed"),
    ("RotaryEmbedding", "num_heads"),
    ("Split", "num_outputs"),
}


@pytest.mark.parametrize("name", ONNX_OPS)
def test_declaration_matches_the_onnx_schema(name: str) -> None:
    try:
        spec, schema = OPS[name], onnx.defs.get_schema(name)
    except onnx.defs.SchemaError:
        pytest.skip(f"the installed onnx {onnx.__version__} is older than {name}")
    assert set(spec.attributes) - OWN_ATTRIBUTES.get(name, set()) == set(schema.attributes)
    for key, proto in schema.attributes.items():
        ours = spec.attributes[key]
        if proto.required:
            assert ours == REQUIRED, key
            continue
        if not proto.default_value.name:
            assert ours in (None, (), "") or (name, key) in OWN_DEFAULTS, key
            continue
        default = onnx.helper.get_attribute_value(proto.default_value)
        default = tuple(default) if isinstance(default, list) else default
        assert normalise(spec, {key: default}) == {}, f"{key}: {ours!r} against {default!r}"
    formal = onnx.defs.OpSchema.FormalParameterOption
    own = OWN_OUTPUTS.get(name, ())
    assert spec.outputs[len(spec.outputs) - len(own) :] == own
    outputs = spec.outputs[: len(spec.outputs) - len(own)]
    for ours, theirs in ((spec.inputs, schema.inputs), (outputs, schema.outputs)):
        assert len(ours) == len(theirs)
        for mine, param in zip(ours, theirs, strict=True):
            mark = {formal.Optional: "?", formal.Variadic: "*"}.get(param.option, "")
            assert mine.endswith(mark) if mark else mine[-1] not in "?*", f"{mine} against {param.name}"


@pytest.mark.parametrize("name", OPS)
def test_every_operator_says_what_it_is(name: str) -> None:
    spec = OPS[name]
    assert len(spec.summary) > 10
    if "::" in name:
        assert not spec.summary.startswith("As ONNX"), "a definition, since ONNX has none"
    assert not spec.cuda or spec.pointwise
    assert set(spec.host) <= {i.rstrip("?*") for i in spec.inputs}


def test_normalise_brings_onnx_values_to_our_form() -> None:
    assert normalise(OPS["Cast"], {"to": onnx.TensorProto.BFLOAT16, "saturate": 1}) == {"to": "bfloat16"}
    assert normalise(OPS["Transpose"], {"perm": [1, 0]}) == {"perm": (1, 0)}
    assert normalise(OPS["Gelu"], {"approximate": b"tanh"}) == {"approximate": "tanh"}
    assert normalise(OPS["Gelu"], {"approximate": b"none"}) == {}
    filled = normalise(OPS["ConstantOfShape"], {"value": np.array([7], np.int64)})
    assert filled == {"value": 7, "dtype": "int64"} and isinstance(filled, FrozenDict)
    assert {"to", "stash_type"} <= DTYPE_ATTRIBUTES


def test_float_defaults_match_their_float32_spelling() -> None:
    as_stored = float(np.float32(1e-5))
    assert normalise(OPS["LayerNormalization"], {"epsilon": as_stored}) == {}
    assert normalise(OPS["LayerNormalization"], {"epsilon": 1e-6}) == {"epsilon": 1e-6}


def test_complete_names_what_is_wrong() -> None:
    assert complete(OPS["Gelu"], {})["approximate"] == "none"
    with pytest.raises(GraphError, match="'approx' of Gelu — one of: approximate"):
        complete(OPS["Gelu"], {"approx": "tanh"})
    with pytest.raises(GraphError, match="no 'axis'"):
        complete(OPS["Concat"], {}, "node 'c'")


def test_infer_checks_operand_and_output_counts() -> None:
    x = Value("x", "float32", ("B", 4))
    with pytest.raises(GraphError, match="no 'b'"):
        infer(OPS["Add"], [x], {})
    with pytest.raises(GraphError, match="too many inputs"):
        infer(OPS["Relu"], [x, x], {})
    with pytest.raises(GraphError, match="too many outputs"):
        infer(OPS["Relu"], [x], {}, count=2)
    assert len(infer(OPS["LayerNormalization"], [x, Value("s", "float32", (4,))], {}, count=1)) == 1
    with pytest.raises(GraphError, match="node 'n'") as caught:
        infer(OPS["Softmax"], [x], {"axis": 5}, whom="node 'n'")
    assert caught.value.facts["node"] == "node 'n'"


def test_unknown_extents_are_named_after_their_value() -> None:
    types = infer(OPS["NonZero"], [Value("x", "float32", (3, 4))], {})
    assert named(["n"], types) == [Value("n", "int64", (2, "n.1"))]
