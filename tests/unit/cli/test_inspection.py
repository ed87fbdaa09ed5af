"""``fusionreg inspect``: what it says stands in the cubin, and what it counts in the template."""

from __future__ import annotations

import re

import pytest

from fusionreg.core.bench import Ceilings, Spread, Subject
from fusionreg.core.bench.results import Column, Result, Results, Run
from fusionreg.core.compiler import compile_source
from fusionreg.core.registry.catalog import load
from fusionreg.core.render import render

TRANSPOSE = """\
{{ signature }} {
  __shared__ float tile[32][32 + PAD];
  const int column = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < 32; row += 8) tile[row][column] = float(row * column);
  __syncthreads();
  const long long i = blockIdx.x * 256LL + threadIdx.x;
  const float zero = tile[column][threadIdx.x / 32] * 0.0f;
  if (i < M * N) y[i] = fr::relu(x[i] + bias[i % N] + zero);
}
"""
SPEC = """
from fusionreg import FusionSpec, KernelSpec, Workload, hookimpl

SPEC = FusionSpec(
    api=1, name="acme.add_relu", pattern="y = Relu(Add(x, bias))",
    inputs={"x": "T[M N]", "bias": "T[N]"}, outputs={"y": "T[M N]"}, dtypes={"T": ("float32",)},
    workloads=(Workload(name="w", row="R1", axes={"M": 4096, "N": 4096}, dtypes={"T": "float32"}),),
    kernels=[KernelSpec(name="plain", template="k.cu.j2", params={"PAD": (0, 1, 2)}, grid="ceildiv(M * N, 256)",
                        block="256", estimate="1e-5 + 1e-6 * PAD")],
)

@hookimpl
def register_fusions():
    return [SPEC]
"""


@pytest.fixture
def transposing(site, monkeypatch, tmp_path):
    """A kernel that reads a tile by columns, its rows padded by 0, 1 or 2 words."""
    site.plugin("acme", SPEC, {"k.cu.j2": TRANSPOSE})
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "acme")
    monkeypatch.chdir(tmp_path)
    return site


def test_variants_of_a_kernel(cli, transposing) -> None:
    """Padding by two words leaves half of the conflicts: 16 rows fall on other banks, 16 on the same."""
    ran = cli("inspect", "acme.add_relu/plain", "--all", "--json")
    assert ran.code == 0, ran.err
    found = {v["params"]["PAD"]: v for v in ran.json}
    assert sorted(found) == [0, 1, 2]
    for pad, conflicts in ((0, 31), (1, 0), (2, 1)):
        sites = {s["where"]: s for s in found[pad]["shared"]["sites"]}
        load, store = sites["k.cu.j2:7"], sites["k.cu.j2:4"]
        assert load["wavefronts"] == load["instructions"] * (1 + conflicts) and load["ideal"] == load["instructions"]
        assert store["wavefronts"] == store["ideal"] == store["instructions"] == 4 * load["instructions"]
        assert sum(load["words"]) == 32 * load["instructions"]
        assert found[pad]["static_shared"] == 4 * 32 * (32 + pad)
        assert found[pad]["estimate_ms"] == pytest.approx(0.01 + 0.001 * pad)
        assert found[pad]["waves"] == pytest.approx(65536 / (132 * found[pad]["blocks"]))


def test_registers_are_those_of_the_cubin(cli, transposing) -> None:
    catalog = load()
    entry = catalog["acme.add_relu"]
    made = Subject.of(entry, entry.spec.workloads[0], "sm_80", catalog.ops)
    code = compile_source(render(entry, entry.kernels[0], made.problem, made.chosen.params))
    (seen,) = cli("inspect", "acme.add_relu", "--arch", "sm_80", "--no-banks", "--json").json
    # in the ELF: EIATTR_REGCOUNT is the section flags' upper byte of .text, as cuobjdump --dump-resource-usage reads it
    assert seen["registers"] == registers_of(code.cubin, code.entry) > 0
    assert (seen["target"], seen["spills"], seen["shared"]) == ("sm_80", 0, None)
    assert seen["warps"] == 8 * seen["blocks"] and seen["most"] == 64 and seen["limiting"]


def registers_of(cubin: bytes, entry: str) -> int:
    """Of the kernel's section header: the upper byte of ``sh_info``."""
    import struct

    offset, (size, count, names) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<HHH", cubin, 58)
    rows = [struct.unpack_from("<IIQQQQII", cubin, offset + i * size) for i in range(count)]
    for row in rows:
        at = rows[names][4] + row[0]
        if cubin[at : cubin.index(b"\0", at)] == f".text.{entry}".encode():
            return row[7] >> 24
    raise AssertionError(f"no code of {entry}")


def test_two_side_by_side(cli, transposing) -> None:
    ran = cli("inspect", "acme.add_relu/plain", "--params", "PAD=0", "--params", "PAD=1")
    lines = {line.split()[0]: line.split() for line in ran.out.splitlines() if line.strip()}
    assert lines["shared"] == ["shared", "4096", "4224", "+3%"] and lines["regs"][1].isdecimal()
    assert lines["conflicts"][-1] == "-100%"
    assert "1 with bank conflicts" in ran.out and "none with bank conflicts" in ran.out
    (row,) = (line.split() for line in ran.out.splitlines() if line.startswith("k.cu.j2:7"))
    assert row[2:4] == ["32", "1"]
    assert re.search(r"^bank +accesses +weight", ran.out, re.M) and re.search(r"^0–31 +\d+ +1\.0", ran.out, re.M)


def test_against_another_fusion_on_the_problem_asked(cli) -> None:
    ran = cli("inspect", "gemm.bias/plain", "--against", "gemm.scale/plain", "--axes", "M=64,N=64,K=16",
              "--dtype", "float32", "--attributes", "activation=Relu,transB=0", "--json")  # fmt: skip
    assert [v["kernel"] for v in ran.json] == ["gemm.bias/plain", "gemm.scale/plain"]
    for v in ran.json:
        assert "x: float32[64, 16]" in v["problem"] and "activation=Relu" in v["problem"]
        assert v["shared"]["sites"] and not v["shared"]["reason"] and v["grid"] == [1, 1, 1]


def test_measured_times_stand_beside(cli, transposing, tmp_path) -> None:
    catalog = load()
    entry = catalog["acme.add_relu"]
    facts = {"gpu": "GPU 9", "target": "sm_90a", "multiprocessors": "132"}
    made = Subject.of(entry, entry.spec.workloads[0], "sm_90a", catalog.ops)
    time = Spread(median=0.25, min=0.2, p20=0.2, p80=0.3, n=9)
    column = Column(name="plain", ours=True, time=time, digest=made.kernel_digests(facts)["plain"])
    row = Result(
        fusion="acme.add_relu", workload="w", mode="b", problem="p", digest="0", run=0, status="measured", read=1,
        written=1, flops=1, floor_ms=0.1, bound="memory", chosen="plain", columns=(column,),
    )  # fmt: skip
    rates = Ceilings(copy_rate=4e12, read_rate=4e12, write_rate=3e12)
    results = Results(gpu="GPU 9", runs=(Run(date="d", environment=facts, ceilings=rates),), rows=(row,))
    results.write(tmp_path / "benchmarks" / "results" / "gpu-9.json")
    (tmp_path / "benchmarks" / "results" / "other.json").write_text("{}")
    asked = ("inspect", "acme.add_relu/plain", "--no-banks", "--json")
    default, other = cli(*asked, "--all").json[:2]
    assert default["measured"] == {"gpu": "GPU 9", "date": "d", "ms": 0.25, "floor_ms": 0.1, "current": True}
    assert other["measured"] is None  # those are other parameters
    (elsewhere,) = cli(*asked, "--axes", "M=8").json
    assert elsewhere["measured"] is None
    stale = row.model_copy(update={"columns": (column.model_copy(update={"digest": "x"}),)})
    results.model_copy(update={"rows": (stale,)}).write(tmp_path / "old.json")
    ran = cli("inspect", "acme.add_relu/plain", "--no-banks", "--results", tmp_path / "old.json")
    assert "0.25 (older)" in ran.out
    assert cli(*asked, "--results", tmp_path / "benchmarks" / "results" / "other.json").code == 1


def test_kernels_that_ship(cli) -> None:
    """One whose tile is swizzled, one that runs in clusters, one that uses no shared memory."""
    (swizzled,) = cli("inspect", "gemm.bias/tensor_core", "--json").json
    assert swizzled["shared"]["sites"] and all(s["wavefronts"] == s["ideal"] for s in swizzled["shared"]["sites"])
    assert any(s["where"].startswith("mma.cuh.j2") for s in swizzled["shared"]["sites"])
    (clusters,) = cli("inspect", "norm.groupnorm_swish_backward/cluster", "--json").json
    assert clusters["cluster"] and clusters["shared"]["sites"] and clusters["static_shared"] > 0
    (plain,) = cli("inspect", "norm.swish_dropout/elements", "--json").json
    assert plain["shared"] == {"problem": plain["shared"]["problem"], "sites": [], "reason": ""}
    assert plain["static_shared"] == plain["dynamic_shared"] == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("acme.ad_relu",), 2, "acme.add_relu"),
        (("acme.add_relu/plan",), 2, "plain"),
        (("acme.add_relu", "--workload", "x"), 2, "w"),
        (("acme.add_relu", "--axes", "Q=1"), 2, "axis of acme.add_relu"),
        (("acme.add_relu", "--axes", "M"), 2, "NAME=VALUE"),
        (("acme.add_relu", "--axes", "M=m"), 1, "axes.M='m'"),
        (("acme.add_relu", "--dtype", "float16"), 2, "float32"),
        (("acme.add_relu", "--attributes", "a=1"), 2, "attribute of acme.add_relu"),
        (("acme.add_relu", "--params", "PAD=7"), 1, "no kernel has"),
        (("acme.add_relu", "--arch", "sm_99"), 2, "sm_90a"),
    ],
)
def test_what_cannot_be(cli, transposing, words, code, said) -> None:
    ran = cli("inspect", *words, "--no-banks")
    assert ran.code == code and said in ran.err + ran.out, ran


def test_a_variant_that_does_not_compile(cli, transposing) -> None:
    transposing.write({"fusionreg_acme/k.cu.j2": TRANSPOSE.replace("32 + PAD", "32 / PAD")})
    ran = cli("inspect", "acme.add_relu", "--all", "--no-banks", "--json")
    assert ran.code == 1 and [v["params"]["PAD"] for v in ran.json] == [1, 2] and "PAD" in ran.err
