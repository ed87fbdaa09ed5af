"""How long matching and planning take: ``python benchmarks/matching.py [--nodes 1000 10000] [--patterns 10 100]``.

Two kinds of graph: *layers* repeats one transformer-like block, as models do; *random* draws operators and operands
anew for every node, which is the matcher's bad case. Prints one line per size; times are processor
seconds, the best of three.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, GraphBuilder, Value
from fusionreg.core.matcher.find import find
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.pattern.instantiate import parse_pattern
from fusionreg.core.planner.costs import CostModel
from fusionreg.core.planner.plan import plan
from fusionreg.core.registry.entries import FusionEntry
from fusionreg.core.spec import FusionSpec
from fusionreg.core.tensors import TensorType

WIDTH = 64
UNARY = ("Relu", "Tanh", "Sigmoid", "Neg", "Exp", "Abs", "Sqrt", "Gelu", "Swish", "Erf")
BINARY = ("Add", "Mul", "Sub", "Div", "Max")


def layers(nodes: int) -> Graph:
    """Blocks of products, biases, activations, residual sums and a softmax: 12 nodes each."""
    b = GraphBuilder("layers")
    x = b.input("x", "float32", (WIDTH, WIDTH))
    w = b.input("w", "float32", (WIDTH, WIDTH))
    bias = b.input("bias", "float32", (WIDTH,))

    def op(name: str, *inputs: str) -> str:
        out = b.fresh("v")
        b.node(name, inputs, [Value(out, "float32", (WIDTH, WIDTH))])
        return out

    count = 0
    while count < nodes:
        h = op("Relu", op("Add", op("MatMul", x, w), bias))
        h = op("Gelu", op("Add", op("MatMul", h, w), bias))
        s = op("Softmax", op("Add", op("Mul", h, bias), bias))
        r = op("Add", op("MatMul", s, w), x)
        x = op("Mul", r, bias)
        count += 12
    return b.build([x])


def scattered(nodes: int, seed: int = 0) -> Graph:
    """Random operators over the last few dozen values."""
    rng = random.Random(seed)
    b = GraphBuilder("random")
    live = [b.input(f"x{i}", "float32", (WIDTH, WIDTH)) for i in range(4)]
    for _ in range(nodes):
        name = rng.choice((*UNARY, *BINARY, "MatMul", "Softmax"))
        count = 2 if name in BINARY or name == "MatMul" else 1
        out = b.fresh("v")
        b.node(name, rng.choices(live[-40:], k=count), [Value(out, "float32", (WIDTH, WIDTH))])
        live.append(out)
    return b.build(live[-3:])


def fusions(count: int) -> list[FusionEntry]:
    """``count`` different fusions of two to five operators; half are products with an epilogue."""
    ops = default_vocabulary()
    return [_entry(f"bench.p{i}", text, ops) for i, text in zip(range(count), _texts(), strict=False)]


def _texts() -> Iterator[str]:
    rng = random.Random(1)
    seen = set()
    while True:
        a, b = rng.choice(UNARY), rng.choice(UNARY)
        p, q = rng.choice(BINARY), rng.choice(BINARY)
        text = rng.choice(
            (
                f'y = optional({a}, "act")(optional(Add)(MatMul(x, w), b))',
                f"y = {a}({p}(MatMul(x, w), b))",
                f"y = {q}({a}({p}(MatMul(x, w), b)), x)",
                f"y = {p}({a}(x), {b}(x))",
                f"h = {p}(x, b)\ny = {q}(h, {a}(h))",
                f"y = Softmax({p}({q}(x, b), b), axis=-1)",
                f"y = {a}({b}({p}(x, w)))",
            )
        )
        if text not in seen:
            seen.add(text)
            yield text


def _entry(name: str, text: str, ops) -> FusionEntry:
    pattern = parse_pattern(text, ops, name, ("y",))
    kinds = (
        {"x": "T[M K]", "w": "T[K N]", "b": "T[N]"} if "MatMul" in text else {"x": "T[M N]", "w": "T[M N]", "b": "T[N]"}
    )
    inputs = {k: v for k, v in kinds.items() if k in pattern.inputs}
    spec = FusionSpec(
        api=1, name=name, pattern=text, inputs=inputs, outputs={"y": "T[M N]"}, dtypes={"T": ("float16", "float32")}
    )
    types = {k: TensorType.parse(v) for k, v in inputs.items()}
    return FusionEntry(
        spec, "bench", "bench", "1", (pattern,), FrozenDict(types), FrozenDict({"y": TensorType.parse("T[M N]")})
    )


def measure(kind: str, nodes: int, patterns: int, repeats: int = 3, explain: bool = False) -> dict[str, object]:
    """Best seconds of matching and of planning on a fresh graph each time."""
    ops = default_vocabulary()
    entries = fusions(patterns)
    best = {"match": float("inf"), "plan": float("inf")}
    for _ in range(repeats):
        graph = layers(nodes) if kind == "layers" else scattered(nodes)
        start = time.process_time()
        found = find(graph, entries, ops, explain=explain)
        middle = time.process_time()
        chosen = plan(graph, found, cost=CostModel(ops), policy="aggressive")
        end = time.process_time()
        best = {"match": min(best["match"], middle - start), "plan": min(best["plan"], end - middle)}
    sizes = {"kind": kind, "nodes": len(graph.nodes), "patterns": patterns, "explain": explain}
    return {**sizes, **best, "matches": len(found), "chosen": len(chosen), "exact": chosen.exact}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--patterns", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--kinds", nargs="+", choices=("layers", "random"), default=["layers", "random"])
    parser.add_argument("--explain", action="store_true", help="collect near misses too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for kind in args.kinds:
        for patterns in args.patterns:
            for nodes in args.nodes:
                row = measure(kind, nodes, patterns, 1 if nodes > 20_000 else 3, args.explain)
                rows.append(row)
                if not args.json:
                    print(
                        f"{kind:>7} {row['nodes']:>7} nodes {patterns:>4} patterns: "
                        f"match {row['match']:7.3f} s, plan {row['plan']:7.3f} s, "
                        f"{row['matches']} matches, {row['chosen']} chosen{'' if row['exact'] else ' (approximate)'}",
                        flush=True,
                    )
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
