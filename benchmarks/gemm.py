"""Our GEMM kernels against cuBLAS on a GPU: ``python benchmarks/gemm.py [--json FILE]``.

Each row is ``gelu(x @ w.T * scale + bias)``, M x N x K, cold L2, median: our kernel, torch eager (cuBLAS and two or
three point-wise kernels), the bare cuBLAS product, and the ratio of ours to the bare product. Every result is compared
with float64 on a sample of rows before it is timed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

import fusionreg

ROWS = [
    (8192, 8192, 8192, "bfloat16"),
    (4096, 4096, 4096, "float16"),
    (2048, 28672, 8192, "bfloat16"),
    (256, 4096, 4096, "bfloat16"),
    (16, 14336, 4096, "bfloat16"),
    (1000, 5128, 4104, "float16"),
    (1024, 1024, 1024, "float32"),
]


def measure() -> list[dict[str, Any]]:
    registry = fusionreg.load_registry(device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    for m, n, k, name in ROWS:
        dtype = getattr(torch, name)
        x, w = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5
        scale, bias = torch.rand(n, device="cuda", dtype=dtype) + 0.5, torch.randn(n, device="cuda", dtype=dtype)
        bound = registry.bind("gemm.scale_bias", x, w, scale, bias, transB=1, activation="Gelu")
        (y,) = bound.outputs
        rows = torch.arange(0, m, max(1, m // 64), device="cuda")
        wanted = torch.nn.functional.gelu(x[rows].double() @ w.double().T * scale.double() + bias.double())
        error = float((y[rows].double() - wanted).abs().max() / wanted.abs().max())
        assert error < {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5}[name], f"{m}x{n}x{k} {name}: error {error}"

        def eager(x=x, w=w, scale=scale, bias=bias):
            return torch.nn.functional.gelu((x @ w.T) * scale + bias)

        ours, unfused, product = (_ms(f) for f in (bound, eager, lambda x=x, w=w: x @ w.T))
        found.append(
            {
                "workload": f"{m}x{n}x{k} {name}",
                "kernel": bound.kernel,
                "ours_ms": ours,
                "eager_ms": unfused,
                "cublas_product_ms": product,
                "ratio_to_product": ours / product,
                "ratio_to_eager": ours / unfused,
                "tflops": 2e-9 * m * n * k / ours,
                "error": error,
            }
        )
    return found


def _ms(launch: Any) -> float:
    return float(triton.testing.do_bench(launch, warmup=30, rep=120, return_mode="median"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    rows = measure()
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "triton", "cupy-cuda13x")},
        "python": sys.version.split()[0],
    }
    for row in rows:
        print(
            f"{row['workload']:28} {row['kernel']:30} ours {row['ours_ms']:8.4f} ms  eager {row['eager_ms']:8.4f}  "
            f"cuBLAS product {row['cublas_product_ms']:8.4f}  ours/product {row['ratio_to_product']:5.2f}  "
            f"{row['tflops']:6.1f} TFLOP/s"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
