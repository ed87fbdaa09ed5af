"""The kernels of point-wise regions under NVRTC: every shipped architecture, no spills to speak of."""

from __future__ import annotations

import pytest
from catalogs import shipped

from fusionreg.core.compiler import compile_all
from fusionreg.core.problem import Tensor, bind, combinations
from fusionreg.core.render import render
from fusionreg.core.targets import REGISTERS_SM, SHIPPED, STATIC_SHARED, target

pytest.importorskip("cupy_backends", reason="CuPy brings the binding of NVRTC")

#: Bytes a thread may spill: a loop counter or two, where ptxas trades them for another block.
SPILLS = 32
#: Of ``ragged``, whose registers are capped: tiles under way pay for more than registers of programs of many operands.
SPILLS_RAGGED = 512

CATALOG = shipped("pointwise")
ENTRIES = CATALOG.entries(["pointwise.region"])


def problem(entry, arch, across=False):
    """Rows of 64, the first input in columns where ``across``; float16 where the dtype is open."""
    extents = dict.fromkeys(entry.axes, 64)
    tensors = {}
    for i, (name, type_) in enumerate(entry.inputs.items()):
        kinds = entry.spec.dtypes.get(type_.dtype, (type_.dtype,))
        kind = "float16" if "float16" in kinds else kinds[0]
        shape = tuple(extents.get(a, a) for a in type_.forms[0].axes)
        tensor = Tensor.contiguous(kind, shape)
        if across and not i and len(shape) > 1:
            tensor = Tensor(kind, shape, (*tensor.strides[:-2], 1, 64))
        tensors[name] = tensor
    return bind(entry, tensors, {}, arch)


@pytest.mark.parametrize("kernel", ["vector", "turns", "transposed", "ragged", "strided"])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name.rpartition(".")[2])
def test_every_shipped_architecture(entry, kernel):
    sources, launches = [], []
    for arch in SHIPPED:
        for across in (False, True):
            made = problem(entry, arch, across)
            chosen = next(combinations(entry.kernel(kernel), made), None)
            if chosen is not None:
                sources.append(render(entry, entry.kernel(kernel), made, chosen.params))
                launches.append(chosen.launch)
    assert sources or kernel == "vector"  # no axis, no run
    for source, code, launch in zip(sources, compile_all(sources), launches, strict=True):
        assert not isinstance(code, Exception), code
        assert code.registers * launch.threads <= REGISTERS_SM
        assert code.spills <= (SPILLS_RAGGED if kernel == "ragged" else SPILLS)
        assert code.shared <= STATIC_SHARED and launch.shared_memory <= target(source.target).shared_memory


def test_every_combination_of_parameters():
    entry = CATALOG["pointwise.region.twelve"]
    for kernel in entry.kernels:
        made = problem(entry, "sm_90a", across=True)
        found = list(combinations(kernel, made))
        assert len(found) == {"vector": 6, "turns": 9, "transposed": 4, "ragged": 1, "strided": 2}[kernel.name]
        codes = compile_all([render(entry, kernel, made, c.params) for c in found])
        assert not [c for c in codes if isinstance(c, Exception)]


def test_extents_share_a_unit():
    """One unit for all extents and strides of a structure, another one for another structure."""
    entry = CATALOG["pointwise.region.bias_relu"]

    def digest(rows, columns, pitch=0):
        x = Tensor("float16", (rows, columns), (pitch or columns, 1))
        made = bind(entry, {"x": x, "bias": Tensor.contiguous("float16", (columns,))}, {}, "sm_90a")
        kernel = entry.kernel("vector")
        return render(entry, kernel, made, next(combinations(kernel, made)).params).digest

    assert digest(4, 64) == digest(9, 1024) != digest(4, 64, 72)
    assert digest(4, 64, 72) == digest(7, 32, 40)
