"""Architectures as data: which code runs on which device, and what a kernel's ``targets`` accept."""

from __future__ import annotations

import pytest

from fusionreg.core.errors import SpecError, UnknownNameError
from fusionreg.core.targets import SHIPPED, STATIC_SHARED, TARGETS, accepts, for_capability, target


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((6, 1), None),
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),  # code of a lower minor version runs
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100f"),
        ((10, 3), "sm_100f"),  # its family
        ((11, 0), None),
        ((12, 0), "sm_120f"),
        ((12, 1), "sm_120f"),
        ((12, 9), "sm_120f"),
        ((13, 0), None),
    ],
)
def test_best_target_of_a_device(capability, name):
    found = for_capability(*capability)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("declared", "accepted"),
    [
        ("sm_80+", set(TARGETS)),
        ("sm_90+", {"sm_90", "sm_90a", "sm_100f", "sm_120f"}),
        ("sm_90", {"sm_90"}),
        ("sm_90a", {"sm_90a"}),
        ("sm_100f+", {"sm_100f", "sm_120f"}),
        ("sm_75+", set(TARGETS)),
        ("sm_75", set()),
    ],
)
def test_accepts(declared, accepted):
    assert {t.name for t in TARGETS.values() if accepts(declared, t)} == accepted


@pytest.mark.parametrize(
    "declared", ["", "80", "sm80", "sm_", "sm_90b", "sm_90a ", "sm_90\n", "compute_90", "sm_90++", "+"]
)
def test_bad_declarations(declared):
    with pytest.raises(SpecError):
        accepts(declared, TARGETS["sm_80"])


def test_unknown_name():
    with pytest.raises(UnknownNameError, match="did you mean"):
        target("sm_90b")
    assert target("sm_90a").capability == 90


def test_the_table_is_consistent():
    assert set(SHIPPED) <= set(TARGETS)
    for name, row in TARGETS.items():
        assert row.name == name and row.specific == (name[-1] in "af")
        # CUDA reserves one KiB of each SM's shared memory per block
        assert STATIC_SHARED < row.shared_memory == row.shared_memory_sm - 1024
        assert ("cluster" in row.features) == (row.capability >= 90) and "mma" in row.features
    assert "wgmma" in TARGETS["sm_90a"].features and "wgmma" not in TARGETS["sm_100f"].features
