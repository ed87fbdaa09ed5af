"""References of attention in parts are those of the whole."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import graphs as kit  # noqa: E402

from fusionreg.core.evaluate.evaluator import evaluate  # noqa: E402
from fusionreg.integrations.torch import bench_parts  # noqa: E402

OPS = kit.vocabulary()
B, H, G, Q, K, D, E = 2, 6, 2, 5, 7, 16, 8
SHAPES = {
    "q": (B, H, Q, D), "k": (B, G, K, D), "v": (B, G, K, E), "dy": (B, H, Q, E), "y": (B, H, Q, E), "lse": (B, H, Q),
    "lengths": (B,),
}  # fmt: skip


def graph_of(op: str, operands: str, outputs: int, mask: tuple[int, ...] = ()):
    net = kit.Net()
    shapes = {**SHAPES, "mask": mask}
    kinds = {"lse": "float32", "lengths": "int64"}
    values = ["" if n == "-" else net.input(n, kinds.get(n, "bfloat16"), shapes[n]) for n in operands.split()]
    made = net.op(op, *values, outputs=outputs, is_causal=1)
    return net.build(list(made) if outputs > 1 else [made])


def counted(monkeypatch) -> list[int]:
    """Elements of q in each call of ``evaluate``."""
    seen = []

    def spy(graph, arrays, **given):
        seen.append(arrays["q"].numel())
        return evaluate(graph, arrays, **given)

    monkeypatch.setattr(bench_parts, "evaluate", spy)
    return seen


@pytest.mark.parametrize(
    ("op", "operands", "outputs", "mask"),
    [
        ("Attention", "q k v", 1, ()),
        ("Attention", "q k v mask", 1, (B, H, Q, K)),
        ("Attention", "q k v mask", 1, (H, 1, K)),
        ("Attention", "q k v mask", 1, (B, 1, 1, K)),
        ("Attention", "q k v mask", 1, (Q, K)),
        ("Attention", "q k v - - - lengths", 1, ()),
        ("fusionreg::AttentionGrad", "dy q k v y lse", 3, ()),
    ],
)
@pytest.mark.parametrize("mode", ["exact", "step"])
def test_parts_give_what_the_whole_gives(monkeypatch, op, operands, outputs, mask, mode) -> None:
    graph = graph_of(op, operands, outputs, mask)
    made = torch.Generator().manual_seed(3)
    arrays = {n: torch.randn(tuple(graph.values[n].shape), generator=made) for n in graph.inputs}
    arrays = {n: a if n == "lse" else a.to(torch.bfloat16) for n, a in arrays.items()}
    if "lengths" in arrays:
        arrays["lengths"] = torch.tensor([K, K - 2])
    seen = counted(monkeypatch)
    whole = bench_parts.evaluated(graph, arrays, OPS, mode)
    monkeypatch.setattr(bench_parts, "MOST", 8 * B * H * Q * K - 1)
    parts = bench_parts.evaluated(graph, arrays, OPS, mode)
    assert seen == [B * H * Q * D, *[H // G * Q * D] * (B * G)]
    assert list(parts) == list(whole) == list(graph.outputs)
    for name, found in parts.items():
        assert found.dtype == whole[name].dtype and found.shape == whole[name].shape
        near = 1e-3 if mode == "step" else 1e-10
        torch.testing.assert_close(found, whole[name], rtol=10 * near, atol=near)


def test_what_is_no_attention_alone_stays_whole(monkeypatch) -> None:
    net = kit.Net()
    q, k, v = (net.input(n, "float32", SHAPES[n]) for n in "qkv")
    graph = net.build([net.op("Relu", net.op("Attention", q, k, v))])
    seen = counted(monkeypatch)
    monkeypatch.setattr(bench_parts, "MOST", 0)
    bench_parts.evaluated(graph, {n: torch.ones(SHAPES[n]) for n in "qkv"}, OPS, "exact")
    assert len(seen) == 1
