"""Slots in a kernel, executed: operands of every form, casts, several outputs, with and without operators there."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from fusionreg import Registry
from fusionreg.core.conformance import run
from fusionreg.core.proof.report import Status
from fusionreg.core.registry.catalog import load
from fusionreg.core.spec import FusionSpec, KernelSpec, Region
from fusionreg.hookspecs import hookimpl

TEMPLATE = """\
{{ slots }}
{{ signature }} {
  const fr::i64 row = blockIdx.x;
  if (threadIdx.x != 0) return;
  const auto source = {{ slot("x") }};  // x: [M N]
  const auto sink = {{ slot("y") }};  // y: [M N]
  float most = -fr::infinity(), v[VEC];
  double total = 0.0;
  for (fr::i64 n = 0; n < N; n += VEC) {
    source.values(source.fetch<VEC>(row * N + n, row, n), v);
    for (int j = 0; j < VEC; ++j) most = fr::max(most, v[j]);
  }
  for (fr::i64 n = 0; n < N; n += VEC) {
    source.values(source.fetch<VEC>(row * N + n, row, n), v);
    for (int j = 0; j < VEC; ++j) total += expf(v[j] - most);
  }
  for (fr::i64 n = 0; n < N; n += VEC) {
    source.values(source.fetch<VEC>(row * N + n, row, n), v);
    for (int j = 0; j < VEC; ++j) v[j] = static_cast<float>(expf(v[j] - most) / total);
    sink.write(row * N + n, row, n, v);
  }
}
"""

WHOLE = "T[... M N]"
REGIONS = (
    Region(
        name="behind", pattern="...\nv0 = Mul(y, gain)\nz = Add(v0, shift)", slots=("y",),
        inputs={"x": WHOLE, "gain": "T[N]", "shift": "T[... M 1]"}, outputs={"z": WHOLE}, dtypes={"T": ("float16",)},
    ),
    Region(
        name="both", pattern='v0 = Mul(a, shrink)\nx = Cast(v0, to="bfloat16")\n...\nv1 = Cast(y, to="float32")\n'
        'keep = Greater(v1, limit)\nz = Where(keep, v1, 0.0)', slots=("x", "y"),
        inputs={"a": "float32[... M N]", "shrink": "float32[]", "limit": "float32[N]"},
        outputs={"y": WHOLE, "keep": "bool[... M N]", "z": "float32[... M N]"}, dtypes={"T": ("bfloat16",)},
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slotted")
    (folder / "__init__.py").touch()
    (folder / "k.cu.j2").write_text(TEMPLATE)
    kernel = KernelSpec(
        name="k", template="k.cu.j2", grid="M", block="32", regions=("x", "y"), params={"VEC": (8, 1)},
        valid=("VEC == 1 or N % VEC == 0 and aligned(x, 16) and aligned(y, 16)",),
    )  # fmt: skip
    spec = FusionSpec(
        api=1, name="slotted.softmax", pattern="y = Softmax(x)", inputs={"x": WHOLE}, outputs={"y": WHOLE},
        dtypes={"T": ("float32", "float16", "bfloat16")}, kernels=(kernel,), regions=REGIONS,
    )  # fmt: skip
    module = types.ModuleType("slotted")
    module.__file__, module.__path__ = str(folder / "__init__.py"), [str(folder)]
    module.register_fusions = hookimpl(lambda: [spec])
    sys.modules["slotted"] = module
    found = load(entry_points=(), extra_plugins=[("slotted", module)], strict=True)
    yield found
    del sys.modules["slotted"]


def test_conforms(catalog):
    report = run(catalog, device="sim", cases="quick")
    failed = [e for e in report.evaluations if e.status.failed]
    assert not failed, [(e.fusion, e.case, e.status, e.reason) for e in failed[:3]]
    passed = {e.fusion for e in report.evaluations if e.status is Status.PASSED}
    assert passed == {"slotted.softmax", "slotted.softmax.behind", "slotted.softmax.both"}


def test_vectors_and_single_elements_agree(catalog):
    registry = Registry(catalog, device="sim")
    rng = np.random.default_rng(3)
    for n in (24, 7):
        a = rng.standard_normal((2, 3, n), dtype="float32")
        shrink, limit = np.array(0.5, dtype="float32"), rng.random(n, dtype="float32") / n
        y, keep, z = registry.call("slotted.softmax.both", a, shrink, limit)
        x = (a * 0.5).astype(y.dtype).astype("float64")
        e = np.exp(x - x.max(-1, keepdims=True))
        want = (e / e.sum(-1, keepdims=True)).astype("float32")
        np.testing.assert_allclose(y.astype("float32"), want, rtol=2**-8)
        np.testing.assert_allclose(z[keep], want[keep], rtol=1e-5)
        assert not z[~keep].any() and keep.dtype == bool and keep.any() and not keep.all()
        assert registry.runtime.kernels_used == {"slotted.softmax.both/k": 1 if n == 24 else 2}


def test_a_result_that_nobody_reads_is_written_all_the_same():
    """The sum before a last RMSNorm: no other operator reads it, but the kernel has it among its results."""
    from fusionreg import load_registry
    from fusionreg.core.ir import GraphBuilder, Value
    from fusionreg.model import FusedModel

    g = GraphBuilder("last")
    for name in ("x", "r", "gate"):
        g.input(name, "float32", (5, 40))
    g.input("w", "float32", (40,))
    row = (5, 40)
    g.node("Add", ("x", "r"), (Value("h", "float32", row),))
    g.node("RMSNormalization", ("h", "w"), (Value("n", "float32", row),), attrs={"axis": -1, "epsilon": 1e-6})
    g.node("Mul", ("n", "gate"), (Value("y", "float32", row),))
    registry = load_registry(device="sim")
    graph = registry.graph(g.build(["y"]))

    def refuses(match):
        return None if match.base == "norm.residual_rmsnorm" else "not this one"

    plan = registry.plan(graph, policy="aggressive", refuses=refuses)
    (match,) = plan.chosen
    assert set(match.outputs.values()) == {"h", "y"}
    rng = np.random.default_rng(0)
    x, r, gate = (rng.standard_normal(row, np.float32) for _ in range(3))
    w = rng.random(40, np.float32)
    model = FusedModel.build(graph, plan, registry.catalog, registry.runtime)
    y = model(x=x, r=r, gate=gate, w=w)["y"]
    h = (x + r).astype(np.float64)
    expected = h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-6) * w * gate
    assert np.abs(y - expected).max() < 1e-5
    assert model.sites[0].status == "fused"
