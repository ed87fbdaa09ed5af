"""The code of docs/torch-compile.md runs, and its table has every option with its default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import torch

from fusionreg.torch import Options

PAGE = Path(__file__).parents[2] / "docs" / "torch-compile.md"


def test_the_code_runs(capsys) -> None:
    torch._dynamo.reset()
    names: dict = {"options": {"device": "sim", "inner": "eager", "policy": "aggressive", "strict": True}}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        torch._dynamo.reset()
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["model"][0].weight.grad is not None
    assert names["site"] is names["reports"][0].fused[0]
    (site,) = [s for s in names["reports"][0].fused if s.fusion == "norm.gelu_dropout_layernorm"]
    assert site.operators == ("aten.gelu", "aten.dropout", "aten.layer_norm") and site.differentiable
    assert site.backward == "norm.gelu_dropout_layernorm_backward"
    assert "norm.gelu_dropout_layernorm" in capsys.readouterr().out


def test_every_option_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", PAGE.read_text(), re.MULTILINE)
    found = {f.name: getattr(Options(), f.name) for f in fields(Options)}
    shown = {name: eval(text) for name, text in rows}
    assert shown == {n: dict(v) if n == "inner_options" else v for n, v in found.items()}
