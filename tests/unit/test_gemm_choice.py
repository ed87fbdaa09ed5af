"""Which kernel a product gets by its estimates, where an H200 has told: the fastest of those that were timed."""

from __future__ import annotations

import pytest
from catalogs import shipped

from fusionreg.core.bench import Subject
from fusionreg.core.spec import Workload

CATALOG = shipped("gemm")


@pytest.mark.parametrize(
    ("m", "n", "k", "kernels"),
    [
        (1, 4096, 4096, {"stream": {"BM": 8}}),
        (16, 14336, 4096, {"stream": {"BM": 16}}),
        (32, 4096, 4096, {"wgmma": {"BN": 64, "CLUSTER": 1}}),
        (64, 4096, 4096, {"wgmma": {"BN": 64, "CLUSTER": 1}}),
        (64, 28672, 4096, {"wgmma": {"CLUSTER": 1, "SPLIT": 1}}),
        (64, 8192, 28672, {"wgmma": {"BN": 128, "SPLIT": 2}}),
        (64, 10240, 8192, {"wgmma": {"BN": 192, "SPLIT": 2}}),
        (128, 8192, 28672, {"wgmma": {"BN": 128, "SPLIT": 2}}),
        (256, 4096, 4096, {"wgmma": {"BN": 128, "SPLIT": 2}}),
        (256, 28672, 4096, {"wgmma": {"BN": 224, "CLUSTER": 2}}),
        (512, 4096, 4096, {"wgmma": {"BN": 128, "CLUSTER": 2}}),
        (4096, 4096, 4096, {"wgmma": {"BN": 256, "CLUSTER": 2}}),
    ],
)
def test_the_fastest_is_taken(m, n, k, kernels):
    workload = Workload(
        name="rows", mode="g", axes={"M": m, "N": n, "K": k}, dtypes={"T": "bfloat16"}, attributes={"transB": 1},
        forms={"w": "T[N K]"},
    )  # fmt: skip
    subject = Subject.of(CATALOG["gemm.matmul"], workload, "sm_90a", CATALOG.ops, None, 132)
    best = subject.selection.accepted[0]
    assert {best.kernel.name: {name: best.params[name] for name in kernels[best.kernel.name]}} == kernels


@pytest.mark.parametrize(
    ("m", "kernel"), [(1, "stream"), (64, "cublaslt"), (128, "wgmma"), (1000, "cublaslt"), (4096, "wgmma")]
)
def test_the_library_is_taken_where_it_is_faster(m, kernel):
    n, k = (5128, 4104) if m == 1000 else (4096, 4096)
    workload = Workload(
        name="rows", mode="g", axes={"M": m, "N": n, "K": k}, dtypes={"T": "bfloat16"},
        attributes={"transB": 1, "activation": "none"}, forms={"w": "T[N K]", "bias": "T[N]"},
    )  # fmt: skip
    subject = Subject.of(CATALOG["gemm.bias"], workload, "sm_90a", CATALOG.ops, None, 132)
    assert subject.selection.accepted[0].kernel.name == kernel
