"""Where there is no GPU its tests are not collected; that their modules can be imported is what is known of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

MODULES = sorted((Path(__file__).parents[1] / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("path", MODULES, ids=[path.stem for path in MODULES])
def test_modules_of_gpu_tests_can_be_imported(path, monkeypatch):
    """One that asks for what is not installed is skipped with its own reason."""
    spec = importlib.util.spec_from_file_location(f"gpu_module_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert [name for name in vars(module) if name.startswith(("test_", "Test"))]
