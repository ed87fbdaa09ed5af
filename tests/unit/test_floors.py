"""The floors of the architecture: a module imports its own floor or lower ones, imports inside functions included."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fusionreg"

#: Every module or package of fusionreg/core by floor.
CORE: dict[int, set[str]] = {
    0: {"errors", "dtypes", "targets", "frozen", "expressions", "intervals", "places", "occupancy"},
    1: {"ir", "ops", "records", "spec", "workload", "tensors", "evaluate"},
    2: {"pattern", "matcher", "rewrite"},
    3: {"registry", "validate", "manifest", "lift"},
    4: {"planner", "problem", "render"},
    5: {"compiler", "headers", "cache", "turns"},
    6: {"runtime", "simulator"},
    7: {"bench", "conformance", "proof", "describe", "doctor", "inspection", "scaffold"},
}  # fmt: skip
FLOORS = {f"fusionreg.core.{name}": floor for floor, names in CORE.items() for name in names}
FLOORS |= {
    "fusionreg": 0,  # lazy: what it names is imported on first use
    "fusionreg.core": 0,
    "fusionreg.hookspecs": 0,
    "fusionreg.model": 8,
    "fusionreg.integrations": 9,
    "fusionreg.api": 10,
    "fusionreg.checking": 10,
    "fusionreg.benching": 10,
    "fusionreg.measuring": 10,
    "fusionreg.spreading": 10,
    "fusionreg.bisecting": 11,
    "fusionreg.inspecting": 10,
    "fusionreg.verifying": 10,
    "fusionreg.testing": 11,
    "fusionreg.torch": 11,
    "fusionreg.cli": 11,
    "fusionreg.__main__": 12,
}

#: What core never imports, and what it imports from a floor on.
FRAMEWORKS = {"torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "jax", "tensorflow", "typer", "rich"}
DRIVERS = {"cupy", "cupy_backends", "cuda", "nvidia"}
DRIVER_FLOOR = 5
#: A table for CuPy arrays: whoever calls it has imported CuPy.
DRIVER_USERS = {"fusionreg.core.ops.tables"}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("fusionreg", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def floor_of(module: str) -> int | None:
    """The floor of the nearest listed ancestor; None for a module of core that nobody listed."""
    parts = module.split(".")
    for i in range(len(parts), 0, -1):
        name = ".".join(parts[:i])
        if name in FLOORS:
            listed_parent_only = name in ("fusionreg", "fusionreg.core") and i < len(parts)
            return None if listed_parent_only else FLOORS[name]
    return None


def imports(source: str, module: str, package: bool) -> Iterator[tuple[str, int]]:
    """(what is imported, line), by statement or by ``import_module`` of a literal; not what only type checkers see."""
    tree = ast.parse(source)
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    base = module.split(".") if package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = base[: len(base) - node.level + 1] if node.level else []
            stem = ".".join([*prefix, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{stem}.{alias.name}"
                yield (full if full in MODULES else stem), node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] in (
            "import_module",
            "__import__",
        ):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and not first.value.startswith("."):
                yield first.value, node.lineno


def violations(source: str, module: str, package: bool = False) -> list[str]:
    floor = floor_of(module)
    assert floor is not None, module
    in_core = module.startswith("fusionreg.core")
    found = []
    for name, line in imports(source, module, package):
        top = name.split(".")[0]
        where = f"{module}:{line} imports {name}"
        if top == "fusionreg":
            other = floor_of(name)
            if other is None or other > floor:
                found.append(f"{where} of floor {other} from floor {floor}")
        elif top.startswith("fusionreg_"):
            found.append(f"{where}, a family")
        elif in_core and top in FRAMEWORKS:
            found.append(f"{where}: core is not for it")
        elif in_core and top in DRIVERS and floor < DRIVER_FLOOR and module not in DRIVER_USERS:
            found.append(f"{where} below floor {DRIVER_FLOOR}")
        elif top in ("torch", "onnx", "onnx_ir", "onnxruntime") and not module.startswith("fusionreg.integrations."):
            found.append(f"{where}: only integrations import it")
    return found


def test_every_module_has_a_floor():
    assert [m for m in MODULES if floor_of(m) is None] == []


def test_every_listed_module_exists():
    assert [m for m in FLOORS if m not in MODULES] == []


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_lower_floors(module):
    path = MODULES[module]
    assert violations(path.read_text("utf-8"), module, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fusionreg.core.spec", "from .registry import load"),
        ("fusionreg.core.spec", "def f():\n    from .registry import load"),
        ("fusionreg.core.spec", "from . import registry"),
        ("fusionreg.core.ops.linear", "from ..pattern import parse_pattern"),
        ("fusionreg.core.ops.linear", "import fusionreg.core.runtime"),
        ("fusionreg.core.conformance.runner", "from fusionreg.api import Registry"),
        ("fusionreg.core.conformance.runner", "from fusionreg import cli"),
        ("fusionreg.core.runtime.driver", "import torch"),
        ("fusionreg.core.runtime.driver", "def f():\n    import torch.cuda"),
        ("fusionreg.core.runtime.driver", "import importlib\nimportlib.import_module('torch')"),
        ("fusionreg.core.spec", "import cupy"),
        ("fusionreg.core.lift.rules", "from fusionreg_gemm import specs"),
        ("fusionreg.core.doctor", "import typer"),
        ("fusionreg.api", "import onnx"),
        ("fusionreg.integrations.opening", "from fusionreg.cli.app import app"),
    ],
)
def test_planted_violations_are_found(module, source):
    assert len(violations(source, module)) == 1


def test_type_checking_imports_are_free():
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .registry import Catalog\n    import torch"
    assert violations(source, "fusionreg.core.spec") == []
    assert len(violations(source + "\nelse:\n    import torch", "fusionreg.core.spec")) == 1


# --- what starting costs ---------------------------------------------------------------------------------------

HEAVY = ("torch", "onnx", "onnx_ir", "onnxruntime", "cupy", "cuda", "numpy", "scipy", "fusionreg_gemm")


def loaded_by(code: str) -> list[str]:
    """Heavy modules that a fresh interpreter has after ``code``."""
    script = f"import sys\n{code}\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "code",
    [
        "import fusionreg",
        "import fusionreg; fusionreg.FusionSpec; fusionreg.hookimpl; dir(fusionreg)",
        "import fusionreg.core.registry.catalog, fusionreg.core.validate.paths",
        "from fusionreg.core.ops import default_vocabulary; default_vocabulary()",
    ],
)
def test_imports_are_light(code):
    assert loaded_by(code) == []


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["list"], ["list", "--json"]])
def test_cold_commands_are_light_and_quick(arguments, tmp_path):
    env = {**os.environ, "FUSIONREG_CACHE_DIR": str(tmp_path)}
    run = f"import sys; sys.argv = ['fusionreg', *{arguments!r}]\nfrom fusionreg.cli.main import main\n"
    script = (
        f"{run}try: main()\nexcept SystemExit as e: assert not e.code, e.code\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    seconds = []
    for attempt in range(8):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
        if attempt:  # the first one fills the cache
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            assert ast.literal_eval(done.stderr.strip().splitlines()[-1]) == []
            if seconds[-1] < 0.35:  # of processor time, which others on the same processor lengthen
                return
    raise AssertionError(seconds)
