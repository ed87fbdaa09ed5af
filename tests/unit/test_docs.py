"""Documentation is tested: generated parts are current, links lead somewhere, commands shown exist."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import typer.main

from fusionreg.cli import commands  # noqa: F401
from fusionreg.cli.app import app
from fusionreg.core.matcher import checks, legality, search

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.M | re.S)


def test_generated_parts_are_current(kernel_states, monkeypatch, capsys) -> None:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "tools" / "docs.py")
    docs = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "docs", docs)
    monkeypatch.setattr(sys, "argv", ["docs.py", "--check"])
    spec.loader.exec_module(docs)
    monkeypatch.setattr(docs.evidence, "state", lambda entry, kernel: kernel_states[kernel.key])
    code = docs.main()
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert all((page.parent / target).exists() for target in targets), targets


def shown() -> list[str]:
    lines = [line for page in PAGES for block in CONSOLE.findall(page.read_text()) for line in block.splitlines()]
    return sorted({line.split("  #")[0].strip() for line in lines if line.startswith("fusionreg ")})


def test_commands_are_shown() -> None:
    assert len(shown()) >= 12


@pytest.mark.parametrize("line", shown())
def test_commands_shown_parse(line: str) -> None:
    """Each command line in a page is one that the parser takes: the command exists and so does every option."""
    words = line.split()[1:]
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands"), f"no such command: {line}"
    options = {opt for p in command.params for opt in p.opts}
    assert {w for w in words if w.startswith("--")} <= options, line


def test_every_reason_not_to_match_is_explained() -> None:
    """Each clause that ``match --explain`` may print stands in the page on it."""
    page = (ROOT / "docs" / "why-did-it-not-match.md").read_text()
    words = {search.NONE, search.SKIPPED, search.DROPPED}  # of choices and steps, not of reasons
    texts = {v for m in (checks, legality, search) for k, v in vars(m).items() if k.isupper() and isinstance(v, str)}
    assert len(texts - words) >= 20
    assert sorted(c for c in texts - words if c not in page) == []


def test_the_readme_keeps_two_commands() -> None:
    assert re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.M) == ["run", "test"]


def test_makefile_has_the_two_commands() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert {"run", "test"} <= set(targets)
