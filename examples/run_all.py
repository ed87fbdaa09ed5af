"""The main job, as ``make run`` starts it: every fusion in the simulator, then two real models end to end.

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


def main() -> int:
    fusionreg = [sys.executable, "-m", "fusionreg"]
    fusions = subprocess.run([*fusionreg, "run", "--device", "sim"]).returncode
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
