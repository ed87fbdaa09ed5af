"""``verify``, coverage locks and live models from the command line: what is printed, and the exit status."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import onnx
import plugin_kit
import pytest
from onnx_models import model, node

DOCS = Path(__file__).parents[3] / "docs"
SITE = "acme.add_relu"

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 32)

    def forward(self, x):
        print("running")
        h = self.fc(x)
        return torch.relu(h)

def build():
    print("building")
    torch.manual_seed(0)
    return Net().eval(), (torch.randn(8, 16),)

def bare():
    torch.manual_seed(0)
    return Net().eval()

class Plain(nn.Module):
    def forward(self, x):
        return -x

def plain():
    return Plain().eval(), (torch.ones(2, 3),)
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    name = "cli_net_of_a_test"
    (tmp_path / f"{name}.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


# --- verify --------------------------------------------------------------------------------------------------------


def test_verify(cli, acme, add_relu_model):
    ran = cli("verify", add_relu_model, "--device", "sim", "--runs", "2")
    assert ran.code == 0, ran.err
    (line,) = (line.split() for line in ran.out.splitlines() if line.startswith(SITE))
    assert line[:4] == [SITE, "plain", "PASSED", "relu"] and float(line[4]) == float(line[5]) < 1e-6
    assert "the whole against the original" in ran.out
    assert ran.out.rstrip().endswith(f"{add_relu_model}: kernels ran at 1 of 1 sites on sim, 2 runs")
    found = cli("verify", add_relu_model, "--device", "sim", "--json", "--seed", "7").json
    assert found["ok"] and found["runs"] == ["seed 7"] and found["sites"][0]["nodes"] == ["add", "relu"]
    assert found["drift"]["status"] == "PASSED"


def test_verify_names_the_site_of_a_wrong_kernel(cli, wrong_acme, add_relu_model):
    ran = cli("verify", add_relu_model, "--device", "sim")
    assert ran.code == 1 and "INCORRECT_NUMERICAL" in ran.out and ran.out.rstrip().endswith("1 wrong")
    lines = [line.split() for line in ran.out.splitlines() if line.startswith(SITE)]
    assert lines[0][:4] == [SITE, "plain", "INCORRECT_NUMERICAL", "relu"] and float(lines[0][4]) > 0.1
    assert lines[1][:4] == [SITE, "INCORRECT_NUMERICAL", "relu", "r:"] and "elements differ" in ran.out
    assert cli("verify", add_relu_model, "--device", "sim", "--json").json["ok"] is False
    assert cli("verify", add_relu_model, "--device", "sim", "--policy", "off").code == 5


def test_verify_on_inputs_of_a_file(cli, acme, add_relu_model, tmp_path):
    """A kernel that drops NaN shows on the file that has one, and the run is named."""
    acme.write({"fusionreg_acme/k.cu.j2": plugin_kit.ADD_RELU.replace("fr::relu(", "fmaxf(0.0f, ")})
    x = np.ones((4, 8), "f")
    np.savez(tmp_path / "good.npz", x=x)
    x[0, 0] = np.nan
    np.savez(tmp_path / "nan.npz", x=x)
    assert cli("verify", add_relu_model, "--device", "sim", "--data", tmp_path / "good.npz").code == 0
    both = ("--data", tmp_path / "good.npz", "--data", tmp_path / "nan.npz")
    ran = cli("verify", add_relu_model, "--device", "sim", *both)
    assert ran.code == 1 and "nan.npz: r: " in ran.out
    ran = cli("verify", add_relu_model, "--data", tmp_path / "missing.npz")
    assert ran.code == 1 and "missing.npz: No such file" in ran.err and "Traceback" not in ran.err


def test_verify_of_nothing_is_status_five(cli, acme, plain_model):
    ran = cli("verify", plain_model, "--device", "sim")
    assert ran.code == 5 and "PASSED" in ran.out  # the whole was compared all the same
    assert ran.err.strip() == f"nothing in {plain_model} is fused; `fusionreg match {plain_model} --explain` says why"


def test_verify_without_the_gpu_it_asks_for(cli, acme, add_relu_model, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = cli("verify", add_relu_model, "--device", "cuda")
    assert ran.code == 1 and ran.err.startswith("error: cannot use a GPU")


# --- locks ---------------------------------------------------------------------------------------------------------


def test_a_lock_holds_and_fails(cli, acme, add_relu_model, tmp_path):
    lock = tmp_path / "made" / "coverage.json"
    assert cli("match", add_relu_model, "--write-expect", lock).code == 0
    (row,) = json.loads(lock.read_text())["sites"]
    assert row == {"fusion": SITE, "count": 1, "nodes": ["Add @ add", "Relu @ relu"]}
    ran = cli("match", add_relu_model, "--expect", lock)
    assert ran.code == 0 and f"against {lock}: 1 kept" in ran.out

    nodes = [
        node("Add", ["x", "b"], ["s"], name="add"), node("Relu", ["s"], ["r"], name="relu"),
        node("Neg", ["r"], ["y"], name="neg"),
    ]  # fmt: skip
    proto = model(nodes, {"x": [4, 8]}, {"y": [4, 8], "s": [4, 8]}, {"b": np.ones(8, "f")})
    onnx.save(proto, tmp_path / "exposed.onnx")
    ran = cli("match", tmp_path / "exposed.onnx", "--expect", lock)
    assert ran.code == 1 and f"error: of the sites in {lock}, 1 is no longer fused" in ran.err
    assert f"- {SITE}: Add @ add, Relu @ relu: no interior value is a graph output" in ran.out
    found = cli("match", tmp_path / "exposed.onnx", "--expect", lock, "--json")
    assert found.code == 1 and found.json["expect"]["ok"] is False and found.json["expect"]["lost"][0]["count"] == 1
    assert found.json["failures"] == []  # which --explain asks for


def test_new_sites_are_told_and_do_not_fail(cli, acme, add_relu_model, plain_model, tmp_path):
    lock = tmp_path / "lock.json"
    assert cli("match", plain_model, "--write-expect", lock).code == 5
    ran = cli("match", add_relu_model, "--expect", lock)
    assert ran.code == 0 and f"+ {SITE}: Add @ add, Relu @ relu" in ran.out
    assert cli("match", plain_model, "--expect", lock).code == 5


def test_locks_that_cannot_be_used(cli, acme, add_relu_model, tmp_path):
    lock = tmp_path / "lock.json"
    ran = cli("match", add_relu_model, "--expect", lock, "--write-expect", lock)
    assert ran.code == 2 and "give one of them" in ran.err
    ran = cli("match", add_relu_model, "--expect", lock)
    assert ran.code == 1 and f"cannot use {lock}: No such file" in ran.err
    lock.write_text("{}")
    ran = cli("match", add_relu_model, "--expect", lock)
    assert ran.code == 1 and "cannot read lock" in ran.err and len(ran.err.strip().splitlines()) == 1
    assert cli("match", add_relu_model, "--write-expect", lock, "--policy", "aggressive").code == 0
    ran = cli("match", add_relu_model, "--expect", lock)
    assert ran.code == 1 and "Add --policy aggressive" in ran.err


# --- live models ---------------------------------------------------------------------------------------------------


def test_explain_shows_the_lines_of_a_live_model(cli, net):
    ran = cli("match", f"{net}:build", "--explain")
    assert ran.code == 0 and "building" in ran.err and "building" not in ran.out
    lines = ran.out.splitlines()
    at = next(i for i, text in enumerate(lines) if text.startswith("gemm.bias "))
    assert f" {net}.py:13 " in lines[at] and lines[at + 1].strip() == "return torch.relu(h)"
    assert "nearly" not in ran.out and "more failed within a site that is fused" in ran.out
    lines = cli("match", f"{net}:build", "--explain", "--policy", "off").out.splitlines()
    nearly = lines[next(i for i, text in enumerate(lines) if text.startswith("nearly")) :]
    assert any(f"{net}.py:12 (fc)" in text for text in nearly) and any("h = self.fc(x)" in text for text in nearly)
    assert "h = self.fc(x)" not in cli("match", f"{net}:build").out
    assert cli("match", f"{net}:build", "--json").json["chosen"][0]["fusion"] == "gemm.bias"


@pytest.mark.parametrize("command", ["match", "run", "verify"])
def test_a_module_takes_its_inputs_from_the_command_line(cli, net, command):
    device = () if command == "match" else ("--device", "sim")
    ran = cli(command, f"{net}:bare", "--input", "x=4x16:float32", "--json", *device)
    assert ran.code == 0 and "running" in ran.err, ran.err
    found = ran.json if command != "run" else ran.json["models"][0]
    assert [s["fusion"] for s in found["chosen" if command == "match" else "sites"]] == ["gemm.bias"]
    ran = cli(command, f"{net}:bare", *device)
    assert ran.code == 1 and "add --input NAME=SHAPE:DTYPE" in ran.err
    for wrong in ("x=4,16:float32", "x=4x16:flaot32"):
        ran = cli(command, f"{net}:bare", "--input", wrong, *device)
        assert ran.code == 2 and "--input" in ran.err and not ran.out
    ran = cli(command, f"{net}:nothing", *device)
    assert ran.code == 1 and "has no 'nothing'" in ran.err and not ran.out


def test_nothing_fused_says_what_to_do(cli, net):
    for command, code in (("match", 5), ("run", 0), ("verify", 5)):
        device = () if command == "match" else ("--device", "sim")
        ran = cli(command, f"{net}:plain", *device)
        assert ran.code == code and ran.err.count(f"`fusionreg match {net}:plain --explain` says why") == 1
    told = cli("match", f"{net}:plain", "--explain").err
    assert f"nothing in {net}:plain is fused" in told and "--explain`" not in told
    assert "is fused" not in cli("match", f"{net}:plain", "--policy", "off").err


def test_the_help_says_what_runs_code(cli):
    for command in ("match", "run", "verify"):
        assert "its code is run" in " ".join(re.findall(r"[\w.:]+", cli(command, "--help").out))


# --- the page ------------------------------------------------------------------------------------------------------


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def test_the_commands_of_the_page_do_what_it_says(cli, tmp_path, monkeypatch):
    """The page's model is written where the commands run; each exits with 0, or as the comment behind it says."""
    page = (DOCS / "verifying.md").read_text("utf-8")
    for text in blocks(page, "python"):
        if text.startswith("# "):
            name, _, code = text.partition("\n")
            (tmp_path / name.removeprefix("# ")).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions of a file within a second
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    assert len(lines) >= 5
    for line in lines:
        command, _, comment = line.partition("  #")
        words = shlex.split(command)
        status = re.search(r"exit status (\d)", comment)
        if words[0] == "fusionreg":
            device = ("--device", "sim") if words[1] in ("verify", "run") else ()
            ran = cli(*words[1:], *device)
            assert ran.code == int(status.group(1) if status else 0), (line, ran.out, ran.err)
        else:
            assert words[:2] == ["sed", "-i"], line
            old, new = words[2].split("/")[1:3]
            path = tmp_path / words[3]
            assert old in path.read_text()
            path.write_text(path.read_text().replace(old, new))
            sys.modules.pop(path.stem, None)
    for name in tmp_path.glob("*.py"):
        sys.modules.pop(name.stem, None)
