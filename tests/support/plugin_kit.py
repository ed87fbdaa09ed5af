"""A plugin made on the spot: specs and template texts → a catalog, as an installed distribution would give."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusionreg.core.registry.catalog import Catalog, FusionEntry, load
from fusionreg.core.spec import FusionSpec, KernelSpec
from fusionreg.hookspecs import hookimpl

_NUMBER = itertools.count()

#: y[i] = relu(x[i] + bias[i % N]); one thread per element.
ADD_RELU = """\
{{ signature }} {
  const long long i = blockIdx.x * 256LL + threadIdx.x;  // i: [M N], row-major
  if (i >= M * N) return;
  y[i] = fr::from_float<T>(fr::relu(fr::to_float(x[i]) + fr::to_float(bias[i % N])));
}
"""


def catalog(folder: Path, templates: Mapping[str, str], *specs: FusionSpec, prefix: str = "acme") -> Catalog:
    """Writes ``templates`` (path → text) as a package's files below ``folder`` and loads ``specs`` as its fusions."""
    name = f"{prefix}_kit_{next(_NUMBER)}"
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for path, text in templates.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text, encoding="utf-8")
    found = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert found is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    module.FUSIONREG_PREFIXES = (prefix,)
    module.register_fusions = hookimpl(lambda: specs)
    made = load(entry_points=(), extra_plugins=[(prefix, module)])
    assert not made.failures, [str(f) for f in made.failures]
    return made


def add_relu(**changes: Any) -> FusionSpec:
    """``acme.add_relu`` with one kernel; ``kernel_*`` keywords change the kernel, the others the fusion."""
    kernel = {"name": "plain", "template": "k.cu.j2", "grid": "ceildiv(M * N, 256)", "block": "256"}
    kernel |= {k.removeprefix("kernel_"): v for k, v in changes.items() if k.startswith("kernel_")}
    fusion = {
        "api": 1,
        "name": "acme.add_relu",
        "pattern": "y = Relu(Add(x, bias))",
        "inputs": {"x": "T[... M N]", "bias": "T[N]"},
        "outputs": {"y": "T[... M N]"},
        "dtypes": {"T": ("float16", "bfloat16", "float32", "float64")},
        "kernels": [KernelSpec(**kernel)],
    }
    return FusionSpec(**{**fusion, **{k: v for k, v in changes.items() if not k.startswith("kernel_")}})


def entry(folder: Path, template: str = ADD_RELU, others: Mapping[str, str] = {}, **changes: Any) -> FusionEntry:
    """``acme.add_relu`` with ``template`` as its kernel and ``others`` as further files of the package."""
    return catalog(folder, {"k.cu.j2": template, **others}, add_relu(**changes))["acme.add_relu"]
