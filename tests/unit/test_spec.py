"""The records: closed, frozen, hashable, and the same after a round trip through JSON."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec, OpSpec, Record, Tolerance

IDENTIFIERS = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_]{0,8}\Z")
NAMES = st.from_regex(r"\A[a-z][a-z0-9_]{0,5}(\.[a-z][a-z0-9_]{0,5}){1,2}\Z")
TEXT = st.text(max_size=12)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT


def maps(keys, values):
    return st.dictionaries(keys, values, max_size=3)


def tuples(values, least=0):
    return st.lists(values, min_size=least, max_size=3).map(tuple)


ATTRIBUTES = st.builds(
    AttributeSpec, type=st.sampled_from(["int", "float", "bool", "str"]), default=st.none() | SCALARS,
    choices=tuples(SCALARS), static=st.booleans(), summary=TEXT,
)  # fmt: skip
CASES = st.builds(
    Case, name=TEXT, axes=maps(TEXT, st.integers(0, 99)), attributes=maps(TEXT, SCALARS), absent=tuples(TEXT),
    values=maps(TEXT, TEXT), batch=tuples(st.integers(0, 9)), summary=TEXT,
)  # fmt: skip
KERNELS = st.builds(
    KernelSpec, name=IDENTIFIERS, fusion=st.none() | NAMES, template=TEXT, targets=tuples(TEXT), requires=tuples(TEXT),
    params=maps(TEXT, tuples(SCALARS)), constants=maps(TEXT, TEXT), grid=tuples(TEXT, 1), block=tuples(TEXT, 1),
    cluster=tuples(TEXT), rounding=st.sampled_from(["once", "per_op"]), cooperative=st.booleans(),
    min_blocks=st.integers(0, 32), pending=TEXT,
)  # fmt: skip
TOLERANCES = st.builds(Tolerance, dtype=TEXT, ulp=st.floats(allow_nan=False), reason=TEXT)
FUSIONS = st.builds(
    FusionSpec, api=st.just(1), name=NAMES, version=st.from_regex(r"\A[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\Z"),
    pattern=tuples(TEXT, 1), inputs=maps(IDENTIFIERS, TEXT), outputs=maps(IDENTIFIERS, TEXT),
    dtypes=maps(IDENTIFIERS, tuples(TEXT)), axes=maps(IDENTIFIERS, TEXT), attributes=maps(IDENTIFIERS, ATTRIBUTES),
    constraints=tuples(TEXT), cases=tuples(CASES), tolerances=tuples(TOLERANCES), kernels=tuples(KERNELS),
    tags=tuples(TEXT),
)  # fmt: skip

MINIMAL = {"api": 1, "name": "acme.f", "pattern": "y = Relu(x)", "inputs": {"x": "T[M]"}, "outputs": {"y": "T[M]"},
           "dtypes": {"T": ("float32",)}}  # fmt: skip
KERNEL = {"name": "k", "template": "k.cu.j2", "grid": "1", "block": "32"}


def types_of(value):
    """The value with the type of every scalar beside it: 1, 1.0 and True are equal and must not become each other."""
    if isinstance(value, dict):
        return {k: types_of(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [types_of(v) for v in value]
    return (type(value).__name__, value)


@given(FUSIONS | KERNELS)
def test_json_round_trip(record):
    for again in (
        type(record).model_validate_json(record.model_dump_json()),
        type(record).model_validate(json.loads(json.dumps(record.model_dump(mode="json")))),
    ):
        assert again == record and hash(again) == hash(record)
        assert types_of(again.model_dump()) == types_of(record.model_dump())
        assert list(again.model_dump()) == list(record.model_dump())


def test_the_order_of_inputs_survives():
    spec = FusionSpec(**{**MINIMAL, "inputs": {"z": "T[M]", "a": "T[M]", "m": "T[M]"}})
    assert list(FusionSpec.model_validate_json(spec.model_dump_json()).inputs) == ["z", "a", "m"]


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 1e-45, 5e-324, 2**63 - 1, True, 1, 1.0, "1", "inf"])
def test_scalars_keep_value_and_type(value):
    again = AttributeSpec.model_validate_json(AttributeSpec(type="float", default=value).model_dump_json()).default
    assert again == value and type(again) is type(value) and str(again) == str(value)


def test_single_texts_and_whole_numbers():
    spec = KernelSpec(name="k", template="t", grid=("M", 1), block=256)
    assert spec.grid == ("M", "1") and spec.block == ("256",) and FusionSpec(**MINIMAL).pattern == ("y = Relu(x)",)
    for wrong in (True, 2.5, None, [[1]]):
        with pytest.raises(ValidationError):
            KernelSpec(name="k", template="t", grid="1", block=wrong)


@pytest.mark.parametrize(
    "changes",
    [
        {"api": 2},
        {"api": "1"},
        {"api": None},
        {"name": "acme"},
        {"name": "Acme.f"},
        {"name": "acme.f;rm"},
        {"name": "acme.f\n"},
        {"name": "acme..f"},
        {"name": "acme.f{{x}}"},
        {"name": "acme." + "f" * 80},
        {"version": "1"},
        {"version": "1.0.0-beta"},
        {"inputs": {"1x": "T[M]"}},
        {"inputs": {"x y": "T[M]"}},
        {"inputs": {"x}}": "T[M]"}},
        {"inputs": {"é": "T[M]"}},
        {"inputs": {"x\n": "T[M]"}},
        {"inputs": {'x"': "T[M]"}},
        {"dtypes": {"T;": ("float32",)}},
        {"dtypes": {"T": "float32"}},
        {"attributes": {"a b": {"type": "int"}}},
        {"attributes": {"a": {"type": "complex"}}},
        {"colour": "red"},
        {"kernels": [{**KERNEL, "name": "k-1"}]},
        {"kernels": [{**KERNEL, "name": "_k"}]},
        {"kernels": [{**KERNEL, "colour": "red"}]},
        {"kernels": [{**KERNEL, "rounding": "never"}]},
        {"kernels": [{**KERNEL, "min_blocks": -1}]},
        {"kernels": [{**KERNEL, "max_registers": 256}]},
        {"cases": [{"name": "c", "axes": {"M": 1.5}}]},
    ],
)
def test_refused(changes):
    assert FusionSpec(**MINIMAL)
    with pytest.raises(ValidationError):
        FusionSpec(**{**MINIMAL, **changes})


@pytest.mark.parametrize("missing", MINIMAL)
def test_required_fields(missing):
    with pytest.raises(ValidationError, match=missing):
        FusionSpec(**{k: v for k, v in MINIMAL.items() if k != missing})


def test_deeply_immutable():
    source = {"x": "T[M]"}
    spec = FusionSpec(**{**MINIMAL, "inputs": source, "kernels": [{**KERNEL, "params": {"B": [1, 2]}}]})
    source["x"] = "changed"
    assert spec.inputs == {"x": "T[M]"} and spec.kernels[0].params["B"] == (1, 2)
    with pytest.raises(ValidationError):
        spec.name = "acme.g"
    with pytest.raises(TypeError):
        spec.inputs["x"] = "T[N]"
    with pytest.raises(AttributeError):
        spec.inputs.clear()
    assert len({spec, FusionSpec(**spec.model_dump())}) == 1


RECORDS = [AttributeSpec, Case, Tolerance, KernelSpec, FusionSpec]


@pytest.mark.parametrize("record", RECORDS)
def test_schema_documents_every_field(record):
    schema = record.model_json_schema()
    assert schema["additionalProperties"] is False and schema["description"]
    properties = schema["properties"]
    assert set(properties) == set(record.model_fields)
    undocumented = [n for n, p in properties.items() if not p.get("description")]
    assert undocumented == []
    assert issubclass(record, Record)


def test_schema_accepts_what_the_model_accepts():
    """Checked by hand against the parts that differ from pydantic's defaults: one text or several, name patterns."""
    schema = FusionSpec.model_json_schema()
    kinds = {k.get("type") for k in schema["properties"]["pattern"]["anyOf"]}
    assert kinds == {"string", "integer", "array"} and schema["properties"]["api"]["const"] == 1
    assert "^[A-Za-z][A-Za-z0-9_]*$" in schema["properties"]["inputs"]["patternProperties"]
    assert {"api", "name", "pattern", "inputs", "outputs", "dtypes"} == set(schema["required"])
    json.dumps(schema, allow_nan=False)


@pytest.mark.parametrize("name", ["relu", "Relu::x", "a::relu", "a b::Relu", "Relu\n", "::Relu", "a::b::"])
def test_operator_names(name):
    with pytest.raises(ValidationError):
        OpSpec(name=name, inputs=("x",), meaning=None, infer=None)
    assert OpSpec(name="com.acme::Relu", inputs=("x",), meaning=None, infer=None)
