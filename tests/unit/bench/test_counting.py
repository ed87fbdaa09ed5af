"""Instructions of kernels: read from a profiler's log, from listings of code, and never guessed."""

from __future__ import annotations

import stat
import sys

import pytest
from tuning_kit import made, subject_of

from fusionreg.core.bench import counting
from fusionreg.core.bench.counting import elements, from_code, profile, read_log, straight
from fusionreg.core.compiler import compile_source, instructions
from fusionreg.core.compiler.cubin import section
from fusionreg.core.errors import FusionregError
from fusionreg.core.render import render

LOG = """\
==PROF== Connected to process 7
==PROF== Profiling "fr_a__plain_0" - 0: 0%....100% - 1 pass
"ID","Process ID","Kernel Name","Block Size","smsp__inst_executed.sum"
"","","","","inst"
"0","7","fr_a__plain_0(const float *, float *)","(256, 1, 1)","1,234,567"
"1","7","fr_b__rows_1","(256, 1, 1)","42"
==PROF== Disconnected
"""

BRANCH = """\
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ISETP.GE.AND P0, PT, R0, R2, PT ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
        /*0030*/                   FADD R3, R3, R4 ;
        /*0040*/               @P1 EXIT ;
.L_x_0:
        /*0050*/                   STG.E desc[UR4][R6.64], R3 ;
        /*0060*/                   EXIT ;
.L_x_1:
        /*0070*/                   BRA `(.L_x_1);
        /*0080*/                   NOP;
"""
ADDRESSES = """\
        /*0000*/                   MOV R1, c[0x0][0x28] ;    /* 0x00000a0000017a02 */
                                                             /* 0x003fde0000000f00 */
        /*0010*/              @!P0 BRA 0x30 ;                /* 0x0 */
        /*0020*/                   BRA P1, 0x40 ;            /* 0x0 */
        /*0030*/                   NOP ;                     /* 0x0 */
        /*0040*/                   EXIT ;                    /* 0x0 */
"""


def test_a_log() -> None:
    assert read_log(LOG) == [("fr_a__plain_0", 1234567), ("fr_b__rows_1", 42)]
    assert read_log("==ERROR== ERR_NVGPUCTRPERM - no permission\n") == [] and read_log("") == []


def test_code_without_loops() -> None:
    assert straight(BRANCH) == 7 and straight(ADDRESSES) == 4


@pytest.mark.parametrize(
    "line", ["@P1 BRA `(.L_x_0)", "CALL.REL.NOINC `($f)", "BRX R4 -0x10", "BRA `(.L_x_9)"], ids=str
)
def test_code_that_tells_nothing(line) -> None:
    """Loops, calls, and jumps to where nobody knows."""
    text = f".L_x_0:\n        /*0000*/   FADD R0, R0, R1 ;\n        /*0010*/   {line} ;\n        /*0020*/   EXIT ;\n"
    assert straight(text) is None and straight("") is None


def test_a_cubin_tells_its_instructions(tmp_path) -> None:
    barrier = "  __syncthreads();\n"
    text = f"{{{{ signature }}}} {{\n{barrier}  if (threadIdx.x < M * N) y[threadIdx.x] = x[0];\n{barrier}}}\n"
    counts = {}
    for name, body in (("two", text), ("none", text.replace(barrier, ""))):
        subject = subject_of(made(tmp_path / name, body, blocks=(64,)))
        chosen = subject.chosen
        code = compile_source(render(subject.entry, chosen.kernel, subject.problem, chosen.params))
        counts[name] = instructions(code.cubin, code.entry)
        size = len(section(code.cubin, f".text.{code.entry}"))
        assert size % 16 == 0 and 0 < counts[name][0] <= size // 16
        assert instructions(code.cubin, "other") == (0, 0) and section(code.cubin[:-8], ".text") == b""
    assert counts["two"][1] == 2 and counts["none"][1] == 0 and counts["two"][0] >= counts["none"][0] + 2


def test_elements(tmp_path) -> None:
    assert elements(subject_of(made(tmp_path))) == 64 * 256


def tool(path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_a_disassembler_where_nothing_counts(tmp_path, monkeypatch) -> None:
    """Seven instructions of each of the 512 warps of 64 x 256 threads."""
    subject = subject_of(made(tmp_path / "plugin", blocks=(64,)))
    text = f"import sys\nassert open(sys.argv[-1], 'rb').read(4) == b'\\x7fELF'\nprint('''{BRANCH}''')\n"
    fake = tool(tmp_path / "nvdisasm", text)
    monkeypatch.setattr(counting, "disassembler", lambda: (fake,))
    found = from_code(subject)
    assert (found.instructions, found.by) == (7 * 64 * 256 // 32, "code")
    monkeypatch.setattr(counting, "disassembler", lambda: (tool(tmp_path / "silent", "pass"),))
    assert from_code(subject) is None
    monkeypatch.setattr(counting, "disassembler", lambda: None)
    assert from_code(subject) is None


def test_a_profiler(tmp_path, monkeypatch) -> None:
    text = f"import sys\nopen(sys.argv[sys.argv.index('--log-file') + 1], 'w').write('''{LOG}''')\n"
    text += f"open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(sys.argv[1:]))\n"
    monkeypatch.setattr(counting, "profiler", lambda: tool(tmp_path / "ncu", text))
    assert profile(["program", "argument"], 60) == [("fr_a__plain_0", 1234567), ("fr_b__rows_1", 42)]
    seen = (tmp_path / "seen").read_text()
    assert seen.endswith("program argument") and "smsp__inst_executed.sum" in seen and "regex:^fr_" in seen


def test_a_profiler_that_may_not_count(tmp_path, monkeypatch) -> None:
    refusing = tool(tmp_path / "ncu", "import sys\nsys.exit('==ERROR== no rights')\n")
    monkeypatch.setattr(counting, "profiler", lambda: refusing)
    with pytest.raises(FusionregError, match="no rights"):
        profile(["x"], 60)
    monkeypatch.setattr(counting, "profiler", lambda: tool(tmp_path / "ncu", "import time\ntime.sleep(60)\n"))
    with pytest.raises(FusionregError, match="timed out"):
        profile(["x"], 0.5)
    monkeypatch.setattr(counting, "profiler", lambda: None)
    with pytest.raises(FusionregError, match="not installed"):
        profile(["x"], 60)


def test_tools_are_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert counting.profiler() is None and counting.disassembler() is None
    (tmp_path / "bin").mkdir()
    tool(tmp_path / "bin" / "cuobjdump", "")
    tool(tmp_path / "bin" / "ncu", "")
    assert counting.disassembler() == (str(tmp_path / "bin" / "cuobjdump"), "-sass")
    assert counting.profiler() == str(tmp_path / "bin" / "ncu")
