"""Plugins for the registry's tests: installed ones and objects, right and with one thing changed."""

from __future__ import annotations

import types

from fusionreg.core.registry.catalog import load
from fusionreg.core.spec import FusionSpec
from fusionreg.hookspecs import hookimpl

TEMPLATE = "{{ signature }} { for (long long i = 0; i < M * N; ++i) y[i] = x[i]; }"

PLUGIN = '''\
"""Relu with a bias."""
from fusionreg import FusionSpec, KernelSpec, hookimpl

SPEC = FusionSpec(
    api=1, name="{name}", pattern="y = Relu(Add(x, bias))", inputs={{"x": "T[M N]", "bias": "T[N]"}},
    outputs={{"y": "T[M N]"}}, dtypes={{"T": ("float16", "float32")}},
    kernels=[KernelSpec(name="plain", template="k.cu.j2", grid="ceildiv(M * N, 256)", block="256")],
)


@hookimpl
def register_fusions():
    return [SPEC]
'''


def good(site, name="acme", fusion=None):
    site.plugin(name, PLUGIN.format(name=fusion or f"{name}.relu"), {"templates/k.cu.j2": TEMPLATE})


def spec(name="acme.relu", **changes) -> FusionSpec:
    fields = {"api": 1, "name": name, "pattern": "y = Relu(x)", "inputs": {"x": "T[M]"}, "outputs": {"y": "T[M]"},
              "dtypes": {"T": ("float32",)}}  # fmt: skip
    return FusionSpec(**{**fields, **changes})


def module(**hooks):
    """A plugin object that is no package: it may register anything but kernels. A hook is a function, or its answer."""
    made = types.ModuleType("made")
    for name, answer in hooks.items():
        setattr(made, name, answer if name.isupper() else hookimpl(answer if callable(answer) else _answering(answer)))
    return made


def _answering(answer):
    def hook():
        return answer

    return hook


def only(*extras, **options):
    return load(entry_points=(), extra_plugins=extras, **options)
