"""The probes that ceilings are measured with: what they are counted as is what their code holds."""

from __future__ import annotations

import struct

import pytest

pytest.importorskip("torch")

from fusionreg.core.compiler import compile_source
from fusionreg.core.compiler.cubin import section
from fusionreg.integrations.torch import probes

#: Low 9 bits of the operations of every architecture since Volta.
FFMA, LOAD, STORE = 0x023, 0x181, 0x186


def words(unit) -> list[int]:
    code = compile_source(unit)
    assert code.spills == 0
    text = section(code.cubin, f".text.{unit.entry}")
    return [struct.unpack_from("<Q", text, at)[0] & 0x1FF for at in range(0, len(text), 16)]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_the_loop_holds_the_multiply_adds_that_are_counted(target) -> None:
    defines = {"CHAINS": probes.CHAINS, "UNROLLED": probes.UNROLLED, "TURNS": probes.TURNS}
    found = words(probes.source("issue", probes._ISSUE, target, defines))
    counted = probes.CHAINS * probes.UNROLLED
    assert found.count(FFMA) == counted and len(found) < 1.25 * counted


@pytest.mark.parametrize(("reads", "writes"), [(1, 0), (0, 1), (1, 1), *probes.MIXES])
def test_streams_move_what_their_mix_says(reads, writes) -> None:
    """A thread moves as many vectors of 16 bytes as the block's share says, over all streams."""
    units = list(probes.mixes("sm_90a", reads, writes))
    assert len(units) >= 2
    for unit, block in units:
        depth = block // 512
        found = words(unit)
        never = 0 if writes else depth  # what keeps loads alive
        assert found.count(LOAD) == depth * reads and found.count(STORE) == depth * writes + never
