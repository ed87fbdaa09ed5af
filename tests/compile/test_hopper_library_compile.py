"""The Hopper part of the device library under NVRTC for sm_90a: each wrapper compiles, to its own instruction."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hopper import TYPES, unit

from fusionreg.core import headers
from fusionreg.core.bench.counting import disassembler
from fusionreg.core.compiler.cubin import resources
from fusionreg.core.compiler.nvrtc import compile_unit
from fusionreg.core.errors import CompileError

pytest.importorskip("cupy_backends", reason="CuPy brings the binding of NVRTC")

HEAD = """
  extern __shared__ __align__(1024) unsigned char s[];
  __shared__ fr::Mbarrier bar[2];
  const int t = threadIdx.x;
"""
PARAMETERS = "float* y, const __grid_constant__ fr::TensorMap m"
WIDTHS = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256)


def compiled(text: str, arch: str = "sm_90a") -> tuple[bytes, str]:
    options = ["--std=c++17", "--ptxas-options=-v", *(f"-I{d}" for d in headers.include_directories())]
    return compile_unit(text, "unit.cu", arch, options, "the device library")


def listing(cubin: bytes, tmp_path) -> str | None:
    """The kernel's instructions; None where no disassembler is installed."""
    tool = disassembler()
    if tool is None:
        return None
    (tmp_path / "unit.cubin").write_bytes(cubin)
    return subprocess.run([*tool, str(tmp_path / "unit.cubin")], capture_output=True, text=True, check=True).stdout


def each_rank(code: str) -> str:
    return " ".join(code.format(", ".join(f"t + {i}" for i in range(rank))) for rank in range(1, 6))


def of_each_rank(instruction: str) -> tuple[str, ...]:
    return tuple(instruction.format(rank) for rank in range(1, 6))


WRAPPERS = [
    ("fr::mbarrier_init(bar, 1); fr::mbarrier_fence_init();", r"SYNCS\.EXCH"),
    ("fr::mbarrier_arrive(bar);", r"SYNCS\.ARRIVE"),
    ("fr::mbarrier_arrive_cluster(bar, 1);", r"SYNCS\.ARRIVE.*RED|MAPA"),
    ("fr::mbarrier_expect_tx(bar, 64); fr::mbarrier_arrive_expect_tx(bar, 64);", r"SYNCS\.ARRIVE"),
    ("fr::mbarrier_wait(bar, 0);", r"SYNCS\.PHASECHK.*TRYWAIT"),
    ("fr::mbarrier_wait_cluster(bar, 0);", r"SYNCS\.PHASECHK.*TRYWAIT"),
    ("fr::mbarrier_inval(bar);", r"SYNCS\.CCTL"),
    ("fr::tma_prefetch(&m);", r"UTMACCTL\.PF"),
    ("fr::fence_proxy_async();", r"FENCE\.VIEW\.ASYNC"),
    (each_rank("fr::tma_load(s, &m, bar, {});"), of_each_rank(r"UTMALDG\.{}D")),
    (each_rank("fr::tma_load_multicast(s, &m, bar, 3, fr::Keep::kAgain, {});"), of_each_rank(r"UTMALDG\.{}D\.MULTI")),
    (each_rank("fr::tma_store(&m, s, {});"), of_each_rank(r"UTMASTG\.{}D")),
    ("fr::bulk_load(s, y, 64, bar);", r"UBLKCP"),
    ("fr::bulk_store(y, s, 64);", r"UBLKCP"),
    ("fr::bulk_load_once(s, y, 64, bar);", r"UBLKCP.*desc"),
    ("fr::prefetch_bulk(y, 64);", r"UBLKPF"),
    ("fr::store_commit(); fr::store_wait_read<1>(); fr::store_wait<0>();", (r"UTMACMDFLUSH", r"DEPBAR")),
    ("fr::barrier_sync(3, 64); fr::barrier_arrive(4, 128);", (r"BAR\.SYNC", r"BAR\.ARV")),
    ("if (fr::elect_one()) y[0] = fr::warp_index() + fr::warpgroup_index();", r"ELECT"),
    *(
        (
            "".join(f"{{ unsigned r[{n}] = {{}}; fr::stmatrix<{n}, {tr}>(s + 16 * t, r); }}" for n in (1, 2, 4)),
            tuple(rf"STSM\.16\.M{'T' * tr}88{count} " for count in ("", r"\.2", r"\.4")),
        )
        for tr in (0, 1)
    ),
]


@pytest.mark.parametrize(("code", "instructions"), WRAPPERS, ids=lambda v: v.split("(")[0] if "fr::" in v else "_")
def test_wrappers(code, instructions, tmp_path):
    cubin, _ = compiled(unit(PARAMETERS, f"{HEAD} {code} y[t] = s[t];"))
    text = listing(cubin, tmp_path)
    for instruction in (instructions,) if isinstance(instructions, str) else instructions:
        assert text is None or re.search(instruction, text), f"{instruction}\n{text}"


def test_registers_move_where_the_launch_bounds_fix_them(tmp_path):
    body = "if (fr::warpgroup_index()) fr::registers_increase<240>(); else fr::registers_decrease<24>(); y[0] = 1;"
    for bounds, moved in (("384", 0), ("384, 1", 1)):
        cubin, log = compiled(unit("float* y", body, bounds))
        assert ("'setmaxnreg' ignored" in log) == (not moved)
        text = listing(cubin, tmp_path)
        assert text is None or [text.count(f"USETMAXREG.{w}ALLOC") for w in ("TRY_", "DE")] == [moved, moved]


def test_warps_take_no_more_registers_than_their_block_has():
    """`setmaxnreg` waits without end for what the block was not launched with: of 65536, in steps of 8 a thread."""
    call = re.compile(r"fr::registers_(in|de)crease<(?:\{\{ )?(\d+)(?: if [^}]+ else (\d+) \}\})?>")
    pairs = []
    for path in sorted(Path(__file__).parents[2].glob("plugins/*/*/templates/*.j2")):
        ways = {way: [int(n) for n in numbers if n] for way, *numbers in call.findall(path.read_text())}
        pairs += [(path.name, *pair) for pair in zip(ways.get("in", ()), ways.get("de", ()), strict=True)]
    assert len(pairs) >= 8
    for name, more, fewer in pairs:
        pools = {threads: 65536 // threads // 8 * 8 * threads for threads in (384, 512)}
        assert any(more * (t - 128) + fewer * 128 <= pool for t, pool in pools.items()), name


@pytest.mark.parametrize("ctype", [t for t in TYPES if t != "float"])
@pytest.mark.parametrize("source", ["shared", "registers"])
def test_products_of_every_width(ctype, source, tmp_path):
    """One kernel for all: products of each width, all four ways to lay operands out where the type has them."""
    ways = [(a, b) for a in (0, 1) for b in (0, 1)] if TYPES[ctype].itemsize == 2 else [(0, 0)]
    body, count = [HEAD, "unsigned words[4] = {1, 2, 3, t};"], 0
    for n in WIDTHS:
        lines = []
        for a, b in ways if source == "shared" else [w for w in ways if not w[0]]:
            first = f"{a}, {b}>(d, fr::wgmma_k_major<128>(s)" if source == "shared" else f"{b}>(d, words"
            lines.append(f"fr::wgmma<{ctype}, {n}, {first}, fr::wgmma_mn_major<64>(s + 1024, 4096), n > {count});")
            count += 1
        keep = "fr::wgmma_commit(); fr::wgmma_wait<0>(); fr::wgmma_keep(d);"
        body.append(f"{{ float d[{n // 2}] = {{}}; fr::wgmma_fence(); {' '.join(lines)} {keep}")
        body.append(f"for (int i = 0; i < {n // 2}; ++i) y[{n} * 128 + t * {n // 2} + i] = d[i]; }}")
    cubin, log = compiled(unit("float* y, int n", "\n".join(body)))
    assert resources(log, "k").spills == 0
    text = listing(cubin, tmp_path)
    if text is not None:
        name, k = ("QGMMA", 32) if TYPES[ctype].itemsize == 1 else ("HGMMA", 16)
        found = re.findall(rf"{name}\.64x(\d+)x{k}\.F32", text)
        assert len(found) == count and {int(n) for n in found} == set(WIDTHS)


@pytest.mark.parametrize(("arch", "part"), [("sm_90", "wgmma"), ("sm_80", "mbarrier"), ("sm_100", "wgmma")])
def test_other_architectures_refuse_it(arch, part):
    with pytest.raises(CompileError, match="needs sm_90"):
        compiled(unit("float* y", "", parts=("fusionreg", part)), arch)
