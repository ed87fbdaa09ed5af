"""What a kernel says of its own time, and where its operands lie, counts in a plan: a slow kernel is no gain."""

from __future__ import annotations

import pytest
from onnx_models import model, node
from plugin_kit import ADD_RELU, catalog

from fusionreg.api import Registry, load_registry
from fusionreg.core.spec import FusionSpec, KernelSpec

STRIDED = ADD_RELU.replace("x[i]", "x[i / N * x_stride_0 + i % N * x_stride_1]")
ROWS, WIDTH = 4096, 1024
TRANSPOSED = {"x": (1, ROWS)}
FAST, SLOW = "3e-6 + 4 * M * N * 2 / 4e12", "3e-6 + 4 * M * N * 2 / 1e11"


def registry(folder, **estimates):
    """Kernels by name: ``dense`` takes row-major operands, ``any`` all."""
    kernels = [
        KernelSpec(
            name=name, template=f"{name}.cu.j2", grid="ceildiv(M * N, 256)", block="256", estimate=estimate,
            strides=("x",) if name == "any" else (),
        )
        for name, estimate in estimates.items()
    ]  # fmt: skip
    spec = FusionSpec(
        api=1, name="acme.add_relu", pattern="y = Relu(Add(x, bias))", inputs={"x": "T[M N]", "bias": "T[N]"},
        outputs={"y": "T[M N]"}, dtypes={"T": ("float32",)}, kernels=tuple(kernels),
    )  # fmt: skip
    return Registry(catalog(folder, {"dense.cu.j2": ADD_RELU, "any.cu.j2": STRIDED}, spec), device="sim")


@pytest.fixture(scope="module")
def two():
    nodes = [node("Add", ["x", "b"], ["a"], name="add"), node("Relu", ["a"], ["y"], name="relu")]
    return model(nodes, {"x": [ROWS, WIDTH], "b": [WIDTH]}, {"y": [ROWS, WIDTH]})


def planned(made, graph, strides=None, **given):
    return made.plan(graph, executor="eager", strides=(lambda m: strides) if strides else None, **given)


def test_a_kernel_that_says_it_is_slow_is_no_gain(tmp_path, two):
    fast, slow = (registry(tmp_path / n, any=e) for n, e in (("fast", FAST), ("slow", SLOW)))
    silent = registry(tmp_path / "silent", any="")
    assert len(planned(fast, two)) == len(planned(silent, two)) == 1
    assert planned(fast, two).saved == planned(silent, two).saved, "as fast as the model has it"
    plan = planned(slow, two)
    assert not plan and "µs more" in plan.losers[0].reason


def test_the_kernel_for_operands_as_they_lie_counts(tmp_path, two):
    made = registry(tmp_path, dense=FAST, any=SLOW)
    assert len(planned(made, two)) == 1 and not planned(made, two, TRANSPOSED)


def test_copies_in_front_of_a_kernel_count(tmp_path, two):
    made = registry(tmp_path, dense=FAST)
    (free,), (copied,) = (planned(made, two, s, policy="aggressive").savings for s in (None, TRANSPOSED))
    moved = 2 * 4 * ROWS * WIDTH
    nominal, said = 4e-6 + moved / 4.8e12, 3e-6 + moved / 4e12
    assert free.seconds - copied.seconds == pytest.approx(said + 4e-6 + moved / 2e12 - nominal, rel=0.01)


@pytest.mark.parametrize(("rows", "fused"), [(16, False), (100_352, False), (64, True)])
def test_products_need_a_measurement(rows, fused):
    """A stream of large weights for few rows, arithmetic for many: a matter of rates; little of all is a launch."""
    depth, width = (96, 384) if rows != 16 else (4096, 16384)
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["a"]), node("Gelu", ["a"], ["y"])]
    shapes = {"x": [rows, depth], "w": [depth, width], "b": [width]}
    half = {n: (s, "float16") for n, s in shapes.items()}
    graph = model(nodes, half, {"y": ([rows, width], "float16")}, opset=20)
    made = load_registry(device="sim", allow=("gemm",), frozen=True)
    plan = made.plan(graph, executor="inductor")
    assert [m.fusion.split(".")[0] for m in plan] == ["gemm"] * fused
    assert fused or any("needs a measurement" in x.reason for x in plan.losers)
