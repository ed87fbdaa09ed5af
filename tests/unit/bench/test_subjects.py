"""Workloads, chosen by name and row and made concrete."""

from __future__ import annotations

import graphs as kit
import plugin_kit
import pytest

from fusionreg.core.bench import Subject, subjects
from fusionreg.core.errors import FusionregError, UnknownNameError
from fusionreg.core.spec import Workload

OPS = kit.vocabulary()


def test_which_workloads(tmp_path) -> None:
    rows = [Workload(name=n, row=r, axes={"M": 8, "N": 32}, dtypes={"T": "float32"})
            for n, r in (("a1", "S8"), ("a2", "S8 more"), ("b1", ""))]  # fmt: skip
    catalog = plugin_kit.catalog(tmp_path, {"k.cu.j2": plugin_kit.ADD_RELU}, plugin_kit.add_relu(workloads=tuple(rows)))

    def names(*only: str, fusions=()) -> list[str]:
        return [s.workload.name for s in subjects(catalog, "sm_90a", fusions, only)]

    assert names() == ["a1", "a2", "b1"] and names("a*") == ["a1", "a2"] and names("S8") == ["a1"]
    assert names("S8*", "b1", fusions=["acme.add_relu"]) == ["a1", "a2", "b1"]
    with pytest.raises(UnknownNameError):
        names("zzz")
    with pytest.raises(UnknownNameError):
        names(fusions=["acme.nothing"])


def test_a_workload_that_nothing_admits(tmp_path) -> None:
    entry = plugin_kit.entry(tmp_path, constraints=("N % 5 == 0",))
    workload = Workload(name="w", axes={"M": 8, "N": 32}, dtypes={"T": "float32"})
    with pytest.raises(FusionregError, match=r"unusable workload 'w' of acme.add_relu: .*N % 5"):
        Subject.of(entry, workload, "sm_90a", OPS)
