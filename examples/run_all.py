"""The main job, as ``make run`` starts it: fusions of every family in the simulator, then two real models end to end.

``fusionreg run --device sim`` proves all fusions, which takes several minutes where nothing is cached.

The models are the ONNX network that the package ``magika`` ships (a file-type classifier, with its trained weights) and
a bf16 transformer encoder exported from PyTorch by ``transformer_encoder.py``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import transformer_encoder

#: Of each family what it is about: tensor cores, rows kept in registers, a dropout mask that nobody stores, twelve
#: point-wise operators in one kernel, tokens of which each has an expert, scores that nobody stores, and a convolution
#: with what stands behind it. Of the last two one kernel each, since theirs are many.
SHOWN = (
    "gemm.bias", "norm.layernorm", "norm.gelu_dropout_layernorm", "pointwise.region.twelve", "moe.expert_gemv",
)  # fmt: skip
SHOWN_KERNELS = {"attention.sdpa": "tensor_core", "conv.conv_bn_relu": "tensor_core"}


def main() -> int:
    fusionreg = [sys.executable, "-m", "fusionreg"]
    fusions = subprocess.run([*fusionreg, "run", *SHOWN, "--device", "sim"]).returncode
    for name, kernel in SHOWN_KERNELS.items():
        fusions |= subprocess.run([*fusionreg, "run", name, "--kernel", kernel, "--device", "sim"]).returncode
    with tempfile.TemporaryDirectory() as folder:
        encoder = Path(folder) / "transformer_encoder.pt2"
        transformer_encoder.main(str(encoder))
        magika = max(Path(str(files("magika"))).glob("models/*/model.onnx"))
        models = subprocess.run(
            [*fusionreg, "run", str(magika), str(encoder), "--device", "sim", "--explain", "--expect", "*/tensor_core"]
        ).returncode
    return fusions or models


if __name__ == "__main__":
    sys.exit(main())
