"""The hook contract: complete, documented, the only thing in its file, and what the core really calls."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import typing
from pathlib import Path

import pluggy
import pytest

from fusionreg import hookspecs
from fusionreg.core.registry.catalog import load
from fusionreg.core.spec import FusionSpec, KernelSpec

HOOKS = {n: f for n, f in vars(hookspecs).items() if hasattr(f, f"{hookspecs.PROJECT}_spec")}
SOURCE = Path(hookspecs.__file__).parents[1]


def test_all_hooks_are_there():
    assert set(HOOKS) == {
        "register_fusions", "register_kernels", "register_ops", "conformance_cases", "estimate", "kernel_compiled",
        "register_commands", "register_library_calls",
    }  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_typed_and_documented(name):
    signature = inspect.signature(HOOKS[name])
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())
    assert len(inspect.getdoc(HOOKS[name]) or "") > 40


def test_the_file_holds_nothing_else():
    functions = {n for n, v in vars(hookspecs).items() if inspect.isfunction(v)}
    assert functions == set(HOOKS)
    tree = ast.parse(Path(hookspecs.__file__).read_text("utf-8"))
    assert all(isinstance(s, ast.Expr) for f in tree.body if isinstance(f, ast.FunctionDef) for s in f.body)


@pytest.mark.parametrize("name", [n for n in HOOKS if "Example::" in (HOOKS[n].__doc__ or "")])
def test_examples_run(name):
    example = textwrap.dedent((inspect.getdoc(HOOKS[name]) or "").partition("Example::")[2])
    known = {"hookimpl": hookspecs.hookimpl, "KernelSpec": KernelSpec, "FusionSpec": FusionSpec, "BIAS_RELU2": "spec"}
    known |= {"BLAS_MATMUL": "call"}
    exec(example, known)
    answer = known[name]()
    assert len(answer) == 1
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)

    class Plugin:
        pass

    plugin = Plugin()
    setattr(plugin, name, staticmethod(known[name]).__func__)
    manager.register(plugin)
    manager.check_pending()
    assert getattr(manager.hook, name)() == [answer]


def test_annotations_resolve():
    from fusionreg.core import problem, spec, targets
    from fusionreg.core.compiler import ObjectCode
    from fusionreg.core.registry.library_calls import LibraryCall

    names = {**vars(spec), **vars(targets), "Problem": problem.Problem, "ObjectCode": ObjectCode, "typer": _Typer}
    names |= {"LibraryCall": LibraryCall}
    for name, hook in HOOKS.items():
        assert typing.get_type_hints(hook, {**vars(hookspecs), **names}), name


class _Typer:
    Typer = object


def test_every_hook_is_asked_somewhere():
    """A hook that nobody calls would be a promise broken: each is named in the core or the command line."""
    asked: set[str] = set()
    for path in SOURCE.glob("fusionreg/**/*.py"):
        if path.name != "hookspecs.py":
            asked |= set(re.findall(r"""(?:hook|ask)\((?:\w+, )?["'](\w+)["']""", path.read_text("utf-8")))
    assert asked == set(HOOKS)


def test_unknown_hooks_are_an_error_not_silence():
    catalog = load(entry_points=())
    with pytest.raises(AttributeError):
        load(entry_points=(), extra_plugins=[_plugin()]).hook("register_fusion")
    assert catalog.hook("register_fusions") == []


def _plugin():
    class Plugin:
        @hookspecs.hookimpl
        def register_fusions(self):
            return []

    return Plugin()
