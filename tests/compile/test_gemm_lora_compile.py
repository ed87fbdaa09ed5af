"""The kernels of routed adapters under NVRTC: every shipped architecture and rank, no spills, 16 bytes a load."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

import pytest
from catalogs import shipped

from fusionreg.core.bench import Subject
from fusionreg.core.bench.counting import disassembler
from fusionreg.core.compiler import compile_all
from fusionreg.core.problem import combinations
from fusionreg.core.render import render
from fusionreg.core.targets import REGISTERS_SM, SHIPPED, STATIC_SHARED, accepts, target

pytest.importorskip("cupy_backends", reason="CuPy brings the binding of NVRTC")

CATALOG = shipped("gemm")
ENTRY = CATALOG["gemm.lora_routed"]
WORKLOAD = next(w for w in ENTRY.spec.workloads if w.name == "512x4096x4096-r16-32")


def compiled(kernel: str, rank: int, arches=SHIPPED, dtype: str = "bfloat16", **attributes: int):
    """(launch, code) for each architecture that the kernel takes."""
    declared = ENTRY.kernel(kernel)
    sources, launches = [], []
    forms = {"a": f"T[E {'R K' if attributes.get('transA', 1) else 'K R'}]",
             "b": f"T[E {'N R' if attributes.get('transB', 1) else 'R N'}]"}  # fmt: skip
    asked = WORKLOAD.model_copy(
        update={
            "axes": WORKLOAD.axes | {"R": rank}, "dtypes": WORKLOAD.dtypes | {"T": dtype}, "attributes": attributes,
            "forms": forms, "absent": (),
        }
    )  # fmt: skip
    for arch in arches:
        if any(accepts(d, target(arch)) for d in declared.spec.targets):
            made = Subject.of(ENTRY, asked, arch, CATALOG.ops)
            chosen = next(iter(combinations(declared, made.problem)))
            sources.append(render(ENTRY, declared, made.problem, chosen.params))
            launches.append((target(arch), chosen.launch))
    codes = compile_all(sources)
    for code in codes:
        assert not isinstance(code, Exception), code
    return [(*launch, code) for launch, code in zip(launches, codes, strict=True)]


@pytest.mark.parametrize("kernel", [k.name for k in ENTRY.kernels])
def test_every_shipped_architecture(kernel) -> None:
    found = compiled(kernel, 16)
    assert len(found) == (3 if kernel == "resident" or kernel.endswith("cluster") else 4)
    for device, launch, code in found:
        assert code.registers * launch.threads <= REGISTERS_SM and code.spills == 0, (device.name, code.spills)
        assert code.shared <= STATIC_SHARED and code.shared + launch.shared_memory <= device.shared_memory


@pytest.mark.parametrize("rank", [8, 32, 64, 128])
@pytest.mark.parametrize("kernel", ["decode_cluster", "grouped_cluster"])
def test_every_rank(kernel, rank) -> None:
    ((_, launch, code),) = compiled(kernel, rank, ("sm_90a",))
    assert code.registers * launch.threads <= REGISTERS_SM and code.spills == 0, code.spills


def test_other_layouts_and_dtypes() -> None:
    for dtype, transA, transB in (("float32", 1, 1), ("float16", 0, 0), ("bfloat16", 0, 1)):
        ((_, _, code),) = compiled("decode_cluster", 16, ("sm_90a",), dtype, transA=transA, transB=transB)
        assert code.spills <= 128, (dtype, code.spills)


@pytest.mark.skipif(disassembler() is None, reason="no disassembler is installed")
@pytest.mark.parametrize(("kernel", "stores"), [("decode_cluster", "STG.E.U16"), ("grouped_cluster", "STG.E.128")])
def test_matrices_are_read_16_bytes_at_a_time(kernel, stores, tmp_path) -> None:
    """All of a thread's first loads of both matrices are under way together; nothing goes through local memory."""
    ((_, _, code),) = compiled(kernel, 16, ("sm_90a",))
    (tmp_path / "k.cubin").write_bytes(code.cubin)
    tool = disassembler()
    assert tool is not None
    text = subprocess.run([*tool, str(tmp_path / "k.cubin")], capture_output=True, text=True, check=True).stdout
    words = Counter(re.findall(r"\s((?:LDG|STG|LDL|STL|HMMA)\.[.\w]*)", text))
    assert sum(n for word, n in words.items() if word.startswith("LDG.E.128")) >= 16
    assert words[stores] and not any(word.startswith(("LDL", "STL")) for word in words), words
    assert any(word.startswith("HMMA.1688.F32.TF32") for word in words) == (kernel == "grouped_cluster")
