"""``pytest --fusionreg``: what it collects, how it fails, and that it costs nothing when it is not asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--rootdir={folder}",
        *arguments,
    ]
    env = {**os.environ, "FUSIONREG_LOAD_PLUGINS": "acme, gemm"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, env=env)


def test_the_plugin_alone_imports_nothing_heavy():
    code = (
        "import sys, fusionreg.testing; "
        "bad = {'numpy', 'torch', 'onnx', 'cupy', 'pydantic', 'fusionreg.core'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_one_test_per_fusion_kernel_and_case(tmp_path):
    done = run_pytest(tmp_path, "--fusionreg=gemm.activation", "--fusionreg-device=sim", "--collect-only", "-q")
    names = [line for line in done.stdout.splitlines() if line.startswith("fusionreg::")]
    assert len(names) == len(set(names)) > 50, done.stdout + done.stderr
    assert any("gemm.activation/tensor_core[" in n and n.endswith("float16-K0]") for n in names)  # in one dtype
    assert all("gemm.activation/" in n for n in names)


def test_cases_pass_and_skip_with_reasons(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own():\n    assert True\n")
    selected = "own or (tensor_core and (float32-base or float16-K1]))"
    done = run_pytest(tmp_path, "--fusionreg=gemm.activation", "--fusionreg-device=sim", "-k", selected, "-rs", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_own PASSED" in done.stdout and "K % 8 == 0" in done.stdout and "2 skipped" in done.stdout


def test_without_the_option_nothing_is_collected(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own():\n    assert True\n")
    assert "1 passed" in run_pytest(tmp_path).stdout


def test_plugins_of_the_repository_are_the_default():
    done = run_pytest(
        ROOT, "--fusionreg", "--fusionreg-device=sim", "--collect-only", "-q", "tests/unit/test_frozen.py"
    )
    assert "fusionreg::gemm.scale_bias/plain[float32-base]" in done.stdout, done.stdout[-2000:] + done.stderr


@pytest.mark.parametrize(
    ("option", "expected"),
    [("--fusionreg=gemn", "no fusion or plugin 'gemn'"), ("--fusionreg", "no plugin's package lies in")],
)
def test_nothing_to_run_is_a_usage_error(tmp_path, option, expected):
    (tmp_path / "test_own.py").write_text("def test_own():\n    assert True\n")
    done = run_pytest(tmp_path, option, "--fusionreg-device=sim")
    assert (
        done.returncode == 4
        and expected in done.stderr + done.stdout
        and "installed plugins:" in done.stderr + done.stdout
    )


PLUGIN = """
from fusionreg import FusionSpec, KernelSpec, hookimpl
@hookimpl
def register_fusions():
    return [FusionSpec(api=1, name="acme.double", pattern="y = Add(x, x)", inputs={"x": "T[N]"}, outputs={"y": "T[N]"},
        dtypes={"T": ("float32",)}, kernels=[KernelSpec(name="plain", template="double.cu.j2",
        grid="ceildiv(N, 256)", block="256")])]
"""
KERNEL = "{{{{ signature }}}} {{ const long long i = blockIdx.x * 256LL + threadIdx.x; if (i < N) y[i] = {} * x[i]; }}"
CONFTEST = """
import sys
sys.path.insert(0, {folder!r})
from fusionreg.core.registry import catalog as registry
load = registry.load
def with_acme(**kwargs):
    import acme
    return load(entry_points=(), extra_plugins=[("acme", acme)], **kwargs)
registry.load = with_acme
"""


@pytest.mark.parametrize(("factor", "code"), [("2.0f", 0), ("2.1f", 1)])
def test_a_plugin_of_ones_own(tmp_path, factor, code):
    package = tmp_path / "acme"
    (package / "templates").mkdir(parents=True)
    (package / "__init__.py").write_text(PLUGIN)
    (package / "templates" / "double.cu.j2").write_text(KERNEL.format(factor))
    (tmp_path / "conftest.py").write_text(CONFTEST.format(folder=str(tmp_path)))
    lines = ["from fusionreg.testing import assert_conforms", "def test_acme():"]
    lines += ["    assert_conforms('acme.double', device='sim')", ""]
    (tmp_path / "test_acme.py").write_text("\n".join(lines))
    done = run_pytest(tmp_path, "--fusionreg", "--fusionreg-device=sim", "-q")
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert "acme.double: " in done.stdout and "INCORRECT_NUMERICAL" in done.stdout
        assert "FAILED fusionreg::acme.double/plain[float32-base]" in done.stdout
