"""The CUDA texts of point-wise operators, compiled for the host and compared with their meanings."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fusionreg.core.ops import complete, cuda_expression, default_vocabulary, numpy_backend

OPS = default_vocabulary()
COMPILER = shutil.which("g++") or shutil.which("clang++")
VALUES = np.array(
    [
        np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-3, -1e-3, 0.3, -0.3, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, -2.7, 3.0, -3.0,
        12.0, -12.0, 40.0, -40.0, 1e4, -1e4,
    ],
    np.float32,
)  # fmt: skip
PRELUDE = r"""
#include <cmath>
#include <cstdio>
#include <cstring>
static float __int_as_float(unsigned v) { float f; std::memcpy(&f, &v, 4); return f; }
namespace fr {  // independent of the device library: only what the texts call
static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
static float gelu_erf(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
static float gelu_tanh(float x) { return 0.5f * x * (1.0f + tanhf(0.797884561f * (x + 0.044715f * x * x * x))); }
}
"""


def _cases():
    """Name, attributes and operands of every text: text attributes in both values, optional inputs with and without."""
    for name, spec in OPS.items():
        if not spec.cuda:
            continue
        inputs = ["a", "b"] if spec.inputs[0].endswith("*") else [n.rstrip("?") for n in spec.inputs]
        variants = [{"approximate": "none"}, {"approximate": "tanh"}] if "approximate" in spec.attributes else [{}]
        for attributes in variants:
            yield name, attributes, inputs
        if any(n.endswith("?") for n in spec.inputs):
            yield name, {}, [inputs[0]]
            yield name, {}, inputs[:2]


CASES = list(_cases())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """Every text evaluated by one C++ program: rows of results per case, operands being rotations of VALUES."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder: Path = tmp_path_factory.mktemp("cuda")
    numbers = ", ".join(f"__int_as_float({v:#x}u)" for v in VALUES.view(np.uint32).tolist())
    lines = [
        PRELUDE,
        f"static float v[{len(VALUES)}] = {{{numbers}}};",
        "int main() {",
        "for (int i = 0; i < 24; i++) {",
    ]
    for name, attributes, inputs in CASES:
        operands = {n: f"v[(i + {5 * k}) % 24]" for k, n in enumerate(inputs)}
        text = cuda_expression(OPS[name], operands, attributes)
        lines.append(f'std::printf("%.9g ", static_cast<float>({text}));')
    (folder / "t.cpp").write_text("\n".join([*lines, 'std::printf("\\n");', "}", "}"]))
    subprocess.run([COMPILER, "-O0", "-std=c++17", "-w", "-o", "t", "t.cpp"], cwd=folder, check=True)
    text = subprocess.run([folder / "t"], capture_output=True, text=True, check=True).stdout
    return list(np.array([line.split() for line in text.splitlines()], dtype=np.float64).T)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{n}-{len(i)}{''.join(a.values())}" for n, a, i in CASES])
def test_text_means_what_the_meaning_does(index: int, results: list[np.ndarray]) -> None:
    name, attributes, inputs = CASES[index]
    spec = OPS[name]
    assert len(VALUES) == 24
    operands = [np.roll(VALUES, -5 * k) for k in range(len(inputs))]
    if name == "Where" or name in ("And", "Or", "Xor", "Not"):
        logical = operands if name != "Where" else operands[:1]
        operands = [o != 0 for o in logical] + operands[len(logical) :]
    with np.errstate(all="ignore"):
        want = spec.meaning(numpy_backend(), *operands, **complete(spec, attributes)).astype(np.float64)
    np.testing.assert_allclose(results[index], want, rtol=3e-5, atol=2e-6)
    zero = want == 0
    np.testing.assert_array_equal(np.signbit(results[index][zero]), np.signbit(want[zero]))
