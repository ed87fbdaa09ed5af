"""The kernels of attention under NVRTC: no spills, and main loops are of the instructions that they are meant for."""

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
from fusionreg.core.targets import REGISTERS_SM, accepts, target

pytest.importorskip("cupy_backends", reason="CuPy brings the binding of NVRTC")

CATALOG = shipped("attention")
ENTRY = CATALOG["attention.sdpa"]
WORKLOADS = {w.axes["D"]: w for w in ENTRY.spec.workloads}


def compiled(kernel: str, width: int, arches: tuple[str, ...], fusion: str = ENTRY.name):
    """(device, launch, code) for each architecture that the kernel takes."""
    entry = CATALOG[fusion]
    declared, sources, launches = entry.kernel(kernel), [], []
    workload = WORKLOADS.get(width, WORKLOADS[64])
    workload = workload.model_copy(update={"axes": workload.axes | {"D": width, "E": width}})
    for arch in arches:
        if any(accepts(d, target(arch)) for d in declared.spec.targets):
            problem = Subject.of(entry, workload, arch, CATALOG.ops).problem
            chosen = next(iter(combinations(declared, problem)))
            sources.append(render(entry, declared, problem, chosen.params))
            launches.append((target(arch), chosen.launch))
    codes = compile_all(sources)
    for code in codes:
        assert not isinstance(code, Exception), code
    return [(*launch, code) for launch, code in zip(launches, codes, strict=True)]


def words_of(code, path) -> Counter[str]:
    (path / "k.cubin").write_bytes(code.cubin)
    tool = disassembler()
    assert tool is not None
    text = subprocess.run([*tool, str(path / "k.cubin")], capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"\s(HGMMA|HMMA|LDL|STL|WARPGROUP\.DEPBAR|UTMALDG|UTMASTG|MUFU\.EX2)\b", text))


@pytest.mark.parametrize(("width", "arches"), [(64, ("sm_80",)), (256, ("sm_80", "sm_120f"))])
def test_tensor_cores_of_every_architecture(width, arches) -> None:
    found = compiled("tensor_core", width, arches)
    assert len(found) == len(arches)
    for device, launch, code in found:
        assert code.registers * launch.threads <= REGISTERS_SM and code.spills == 0, (device.name, code.spills)


def test_three_warpgroups_keep_their_accumulators() -> None:
    """Where registers are scarcest: accumulators, scores and weights of 64 queries in 160 of them."""
    ((_, launch, code),) = compiled("wgmma", 64, ("sm_90a",))
    assert launch.threads == 512 and code.registers * launch.threads <= REGISTERS_SM and code.spills == 0, code.spills


@pytest.mark.skipif(disassembler() is None, reason="no disassembler is installed")
def test_products_are_asynchronous(tmp_path) -> None:
    """Of the first tile of keys and of the loop: 8 steps along the head and 4 along the keys each, four waits in all. A
    compiler that cannot follow the accumulators waits after each product instead."""
    ((_, _, code),) = compiled("wgmma", 128, ("sm_90a",))
    words = words_of(code, tmp_path)
    assert words["HGMMA"] == 24 and words["WARPGROUP.DEPBAR"] == 4, words
    assert not words["LDL"] and not words["STL"] and not words["HMMA"]
    assert words["UTMALDG"] and words["UTMASTG"] == 2


BACKWARD = "attention.sdpa_backward"


def test_gradients_on_tensor_cores_of_every_architecture() -> None:
    for device, launch, code in compiled("tensor_core", 128, ("sm_80", "sm_90a"), BACKWARD):
        assert code.registers * launch.threads <= REGISTERS_SM and code.spills == 0, (device.name, code.spills)


@pytest.mark.parametrize(("kernel", "width"), [("wgmma", 64), ("wgmma", 128), ("wgmma_wide", 256)])
def test_gradients_overlap_products_and_exponentials(kernel, width) -> None:
    """ptxas waits after every product, and says so, where it cannot follow registers, or has too few of them."""
    ((_, _, code),) = compiled(kernel, width, ("sm_90a",), BACKWARD)
    assert "serialized" not in code.log, code.log
