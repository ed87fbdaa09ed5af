"""The command line as a whole: exit statuses, help, errors, pipes, commands of plugins."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import fusionreg
from fusionreg.cli.output import table

COMMANDS = ("list", "show", "plugins", "schema", "run", "match", "validate", "new", "repro", "doctor", "cache")


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = command.replace("fusionreg", f"{sys.executable} -m fusionreg", 1)
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, env={**os.environ, **env}
    )


def test_version(cli):
    assert cli("--version").out == f"fusionreg {fusionreg.__version__}\n"


def test_help_names_every_command(cli):
    ran = cli("--help")
    assert ran.code == 0 and "Exit status: 0 ok, 1 failure, 2 usage, 5 nothing matched." in ran.out
    assert all(f" {name} " in ran.out for name in COMMANDS)
    assert cli("-h").out == ran.out


@pytest.mark.parametrize("command", [*COMMANDS, "cache status", "cache clear", "cache why"])
def test_every_command_has_help(cli, command):
    ran = cli(*command.split(), "--help")
    assert ran.code == 0 and "Usage:" in ran.out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["lst"], "list"),
        (["cache", "statsu"], "status"),
        (["list", "--nope"], "--nope"),
        (["show"], "name"),
        (["match"], "model"),
        (["run", "--device", "gpu"], "cuda"),
        (["run", "--cases", "some"], "quick"),
        (["match", "m.onnx", "--policy", "bold"], "balanced"),
        (["repro", "gemm.bias", "--kernel", "plain"], "--case"),
    ],
)
def test_wrong_usage_is_status_two(cli, args, says):
    ran = cli(*args)
    assert ran.code == 2 and says in ran.err and "Traceback" not in ran.err and not ran.out


@pytest.mark.parametrize(
    ("args", "offer"),
    [
        (["show", "gemm.bais"], "gemm.bias"),
        (["run", "gemm.bais"], "gemm.bias"),
        (["run", "gemm.bias", "--device", "sim", "--kernel", "plane"], "plain"),
        (["show", "gemm.bias", "--source", "--arch", "sm_91"], "sm_90"),
        (["show", "gemm.bias", "--source", "--kernel", "tensorcore"], "tensor_core"),
        (["show", "gemm.bias", "--source", "--dtype", "float61"], "float16"),
        (["cache", "why", "gemm.scal"], "gemm.scale"),
        (["cache", "why", "gemm.scale", "--arch", "sm90a"], "sm_90a"),
        (["schema", "kernels"], "kernel"),
        (["repro", "gemm.bais", "--kernel", "plain", "--case", "x"], "gemm.bias"),
        (["repro", "gemm.bias", "--kernel", "plane", "--case", "x"], "plain"),
        (["repro", "gemm.bias", "--kernel", "plain", "--case", "float32-bsae"], "float32-base"),
    ],
)
def test_unknown_names_get_an_offer(cli, args, offer):
    ran = cli(*args)
    assert ran.code == 2 and ran.err.startswith("error: unknown") and not ran.out
    assert offer in ran.err.partition("did you mean")[2], ran.err


def test_files_that_cannot_be_used_are_one_line(cli, acme, tmp_path):
    ran = cli("run", "acme.add_relu", "--device", "sim", "--report", "/proc/nothing/report.json")
    assert ran.code == 1 and "/proc/nothing" in ran.err and "Traceback" not in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_a_bug_keeps_its_traceback(monkeypatch, cli):
    from fusionreg.core import manifest

    def fails():
        raise ZeroDivisionError

    monkeypatch.setattr(manifest, "read", fails)
    with pytest.raises(ZeroDivisionError):
        cli("list")


@pytest.mark.parametrize("command", ["list", "list --json", "show gemm.bias --source", "schema fusion"])
def test_a_closed_pipe_is_silent(command):
    ran = shell(f"fusionreg {command} | head -c 1 > /dev/null")
    assert ran.stderr == "", ran.stderr
    assert ran.returncode in (0, 1)  # small outputs fit the pipe


def test_output_without_a_terminal_has_no_colours_and_whole_lines(cli):
    ran = shell("fusionreg list | cat", COLUMNS="20")
    assert ran.returncode == 0 and "\x1b" not in ran.stdout
    assert any("gemm.scale_bias" in line and "gemm" in line.split()[1] for line in ran.stdout.splitlines())


def test_module_and_script_are_the_same_program():
    ran = shell("fusionreg --version")
    assert ran.stdout == f"fusionreg {fusionreg.__version__}\n"
    script = os.path.join(os.path.dirname(sys.executable), "fusionreg")
    assert subprocess.run([script, "--version"], capture_output=True, text=True).stdout == ran.stdout


PLUGIN_COMMAND = """
import typer
from fusionreg import hookimpl

app = typer.Typer()

@app.command()
def greet(name: str) -> None:
    typer.echo(f"hello {name}")

@app.command()
def other() -> None:
    typer.echo("other")

@hookimpl
def register_commands():
    return {"acme": app, "list": app}
"""


def test_a_plugin_adds_commands_and_takes_none_of_ours(site):
    """Its module is imported for its own command alone; ``list`` stays ours."""
    site.plugin("acme", PLUGIN_COMMAND)
    path = os.pathsep.join(filter(None, [str(site.folder), os.environ.get("PYTHONPATH", "")]))
    env = {"PYTHONPATH": path, "FUSIONREG_LOAD_PLUGINS": "acme, gemm"}
    ran = shell("fusionreg acme greet you", **env)
    assert (ran.returncode, ran.stdout) == (0, "hello you\n"), ran.stderr
    assert shell("fusionreg list greet you", **env).returncode == 2
    listed = shell("fusionreg list", **env).stdout.split()
    assert "gemm.bias" in listed and "acme" not in listed


def test_a_pipe_gets_each_row_as_one_line_and_a_terminal_a_table_of_its_width(capsys, monkeypatch):
    rows = [("a", 1, "word " * 60 + "end"), ("long name", 22, "two\nlines")]
    table("", ("name", "count", "text"), rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "name       count  text",
        "a          1      " + "word " * 60 + "end",
        "long name  22     two",
        "                  lines",
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    table("", ("name", "count", "text"), rows)
    lines = re.sub("\x1b.*?m", "", capsys.readouterr().out).splitlines()
    assert len(lines) > 6 and max(map(len, lines)) <= 60
