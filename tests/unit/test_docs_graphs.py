"""The code of docs/cuda-graphs.md runs: in order, in one namespace; without a GPU on a device that records."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch
from fake_graph import FakeDevices

import fusionreg

PAGE = Path(__file__).parents[2] / "docs" / "cuda-graphs.md"


def test_the_code_runs(monkeypatch, capsys) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(blocks) == 5
    if not torch.cuda.is_available():
        blocks = [block.replace('"cuda"', '"cpu"') for block in blocks]
        monkeypatch.setattr(fusionreg, "capture", partial(fusionreg.capture, devices=FakeDevices()))
    names: dict[str, object] = {}
    for i, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {i}", "exec"), names)
    assert tuple(names["y"].shape) == (32, 64) and names["train"].report.calls == 4
    said = capsys.readouterr().out
    assert "host time a call" in said and "3 of at most 4 graphs, 3 captured, 0 evicted" in said
