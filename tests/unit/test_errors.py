"""Errors read ``what whom: found — expected. next step`` and keep their facts, across processes too."""

from __future__ import annotations

import inspect
import pickle

import pytest

from fusionreg.core import errors
from fusionreg.core.errors import ArgumentError, FusionregError, MissingDependencyError, SpecError, UnknownNameError

KINDS = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, FusionregError)]


def test_the_form():
    error = SpecError("bad spec", "acme.f", "block is 2048", "at most 1024", "Use fewer threads", field="block")
    assert str(error) == "bad spec acme.f: block is 2048 — at most 1024. Use fewer threads."
    assert error.facts == {"field": "block"} and error.found == "block is 2048" and error.expected == "at most 1024"
    assert str(SpecError("bad spec")) == "bad spec." and str(SpecError("bad", "x", "y")) == "bad x: y."
    assert str(SpecError("bad", "x", "", "z")) == "bad x: z."


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_a_process_boundary(kind):
    error = kind("what", "whom", "found", "expected", "Next", node="n", line=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and again.facts == error.facts
    assert str(error) == "what whom: found — expected. Next."


def test_kinds_are_also_what_python_calls_them():
    assert issubclass(UnknownNameError, KeyError) and issubclass(ArgumentError, ValueError)
    assert issubclass(MissingDependencyError, ImportError)
    assert all(k.__doc__ for k in KINDS)


def test_did_you_mean():
    error = UnknownNameError.among("fusion", "gemm.bais", ["gemm.bias", "gemm.scale", "norm.rms"])
    assert str(error).startswith("unknown fusion: 'gemm.bais' — did you mean gemm.bias")
    assert error.facts["close"][0] == "gemm.bias" and error.facts["name"] == "gemm.bais"
    far = UnknownNameError.among("fusion", "zzz", ["gemm.bias"], "Run `fusionreg list`")
    assert str(far) == "unknown fusion: 'zzz' — one of gemm.bias. Run `fusionreg list`."
    many = [f"family.f{i}" for i in range(40)]
    assert str(UnknownNameError.among("fusion", "zzz", many)) == "unknown fusion: 'zzz' — one of 40 known names."
    assert str(UnknownNameError.among("fusion", "zzz", [])) == "unknown fusion: 'zzz' — there is none."
    assert str(UnknownNameError.among("fusion", 3, ["f.a"])) == "unknown fusion: 3 — one of f.a."  # no text at all
    with pytest.raises(KeyError):
        raise far
