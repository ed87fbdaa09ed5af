"""Wrappers of instructions for global memory tell the simulator so, which then refuses pointers into other memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted([*ROOT.glob("templates/*.j2"), *ROOT.glob("plugins/*/*/templates/*.j2")])
GLOBAL = re.compile(r'"[^"\n]*\b(?:ld|st|red|atom)\.[\w.:]*global')
#: What stands in the place of such instructions and checks by itself, or takes no pointer.
KNOWN = ("fr_sim::global(", "fr::grid_sync()", "fr_sim::grid_sync()")
#: Their operand where it is no pointer of a caller: the driver's counter of a cooperative grid.
COUNTER = '"l"(meeting())'


def branches(text: str) -> list[tuple[str, str]]:
    """(for the simulator, for devices) of each conditional that tells them apart."""
    found: list[tuple[str, str]] = []
    sim, device, where, nested = "", "", "", 0
    for line in text.splitlines():
        word = line.strip()
        if not where and word in ("#ifdef FUSIONREG_SIM", "#ifndef FUSIONREG_SIM"):
            sim, device, where, nested = "", "", "sim" if word.startswith("#ifdef") else "device", 0
        elif where and word.startswith("#if"):
            nested += 1
        elif where and word.startswith("#endif"):
            if not nested:
                found.append((sim, device))
                where = ""
            nested -= bool(nested)
        elif where and not nested and word.startswith(("#else", "#elif")):
            where = "device" if where == "sim" or word.startswith("#elif") else "sim"
        elif where == "sim":
            sim += line + "\n"
        elif where == "device":
            device += line + "\n"
    assert not where
    return found


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in TEMPLATES])
def test_the_simulator_knows_of_instructions_for_global_memory(path):
    text = path.read_text()
    told = [(sim, device) for sim, device in branches(text) if GLOBAL.search(device)]
    for sim, device in told:
        own = len(GLOBAL.findall(device)) == device.count(COUNTER)
        assert own or any(known in sim for known in KNOWN), f"{path.name}: the simulator is not told of\n{device}"
    in_branches = sum(len(GLOBAL.findall(device)) for _, device in told)
    assert len(GLOBAL.findall(text)) == in_branches, "one has no branch for the simulator"


def test_some_are_found():
    assert len([p for p in TEMPLATES if GLOBAL.search(p.read_text())]) >= 4
