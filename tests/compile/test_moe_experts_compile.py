"""Kernels of experts' products under NVRTC: architectures, registers, and what they are made of."""

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
from fusionreg.core.spec import Workload
from fusionreg.core.targets import REGISTERS_SM, STATIC_SHARED, accepts, target

pytest.importorskip("cupy_backends", reason="CuPy brings the binding of NVRTC")

CATALOG = shipped("moe")
NAMES = ("moe.expert_gemv", "moe.index_select_gemm", "moe.gemm_scatter_add", "moe.grouped_gemm")
EXTENTS = {"M": 64, "N": 256, "K": 4096, "P": 512, "E": 8}
DTYPES = {"T": "bfloat16", "I": "int64", "J": "int32"}


def compiled(fusion: str, kernel: str, arch: str, trans: int = 1, **dtypes: str):
    """(architecture, launch, code) at the default parameters, or None where the kernel is for others."""
    entry, device = CATALOG[fusion], target(arch)
    declared = entry.kernel(kernel)
    if not any(accepts(d, device) for d in declared.spec.targets):
        return None
    workload = Workload(
        name="compiled",
        axes={axis: n for axis, n in EXTENTS.items() if axis in entry.axes},
        dtypes={k: v for k, v in (DTYPES | dtypes).items() if k in entry.spec.dtypes},
        attributes={"trans": trans} | ({"indices": "none"} if entry.choices else {}),
        forms={"w": "T[E N K]" if trans else "T[E K N]"},
    )  # fmt: skip
    subject = Subject.of(entry, workload, arch, CATALOG.ops)
    chosen = next(combinations(declared, subject.problem), None)
    if chosen is None:
        return None
    (code,) = compile_all([render(entry, declared, subject.problem, chosen.params)])
    assert not isinstance(code, Exception), code
    return device, chosen.launch, code


@pytest.mark.parametrize("arch", ["sm_80", "sm_100f", "sm_120f"])
@pytest.mark.parametrize(("fusion", "kernel"), [(f, k.name) for f in NAMES[:3] for k in CATALOG[f].kernels])
def test_other_architectures(fusion, kernel, arch) -> None:
    found = compiled(fusion, kernel, arch, **({"T": "float32"} if kernel == "resident" else {}))
    if found is None:  # of clusters, and of more shared memory than sm_120 has; or of Hopper's instructions
        assert kernel == "wgmma" or (kernel in ("stream_cluster", "resident", "resident_narrow") and arch != "sm_100f")
        return
    device, launch, code = found
    assert code.registers * launch.threads <= REGISTERS_SM
    assert code.shared <= STATIC_SHARED and code.shared + launch.shared_memory <= device.shared_memory


@pytest.mark.parametrize(
    ("fusion", "kernel", "trans", "dtype"),
    [
        (NAMES[0], "stream_cluster", 0, "float32"),
        (NAMES[0], "decode", 1, "bfloat16"),
        (NAMES[1], "tensor_core", 1, "bfloat16"),
        (NAMES[2], "tensor_core", 0, "float16"),
        (NAMES[3], "tensor_core", 1, "bfloat16"),
    ],
)
def test_hopper(fusion, kernel, trans, dtype, tmp_path) -> None:
    """Matrices are copied 16 bytes at a time; products of 16 bits are those of tensor cores; registers do not spill."""
    found = compiled(fusion, kernel, "sm_90a", trans, T=dtype)
    assert found is not None
    _, launch, code = found
    assert code.registers * launch.threads <= REGISTERS_SM and code.spills <= 16, code.spills
    tool = disassembler()
    if tool is None:
        pytest.skip("no disassembler is installed")
    (tmp_path / "k.cubin").write_bytes(code.cubin)
    text = subprocess.run([*tool, str(tmp_path / "k.cubin")], capture_output=True, text=True, check=True).stdout
    words = Counter(re.findall(r"\s((?:LDGSTS|LDSM|HMMA|FFMA|RED|ATOMG)\.?[.\w]*)", text))
    assert sum(n for word, n in words.items() if word.startswith("LDGSTS") and ".128" in word) >= 8
    assert any(word.startswith("HMMA.16816.F32") for word in words) == (kernel == "tensor_core")
    assert not any("F32" in word and word.startswith(("RED", "ATOMG")) for word in words), "sums have a fixed order"
