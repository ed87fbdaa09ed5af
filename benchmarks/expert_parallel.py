"""Routed experts on several GPUs of a host: values against one GPU; times of exchange and compute, alone and together.

``python benchmarks/expert_parallel.py [--ranks 2] [--output benchmarks/results/expert_parallel.json]``; with
``--backend gloo --small`` on the CPU, in the simulator. Kernels are compiled first, in threads. Times are milliseconds,
the median over calls of the slowest rank; every rank has its share of tokens and experts. Whatever hangs says where.

compute: this rank's experts on the tokens that arrive. exchange: all of the layer but its experts. transfers: as many
tokens there and back, nothing else. in sequence: one chunk. overlapped: several, beside kernels that spare some of the
multiprocessors.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusionreg.torch import expert_parallel_ffn, ops


@dataclass(frozen=True)
class Model:
    name: str
    width: int
    hidden: int
    experts: int
    top_k: int

    @property
    def attributes(self) -> dict[str, Any]:
        return {"activation": "Swish", "top_k": self.top_k, "renormalise": 1}


MODELS = (Model("mixtral-8x7b", 4096, 14336, 8, 2), Model("qwen3-30b-a3b", 2048, 768, 128, 8))
TOKENS = (16384, 4096, 64)
SMALL = (Model("small", 32, 16, 4, 2),)
SMALL_TOKENS = (6,)
#: (chunks, multiprocessors that kernels spare and transfers have).
WAYS = ((2, 0), (2, 8), (4, 8), (2, 16))
CALLS = 7
THREADS = 8


class Rank:
    """One process: its device, its groups, and its way to take times."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.ranks, self.small = rank, options.ranks, options.small
        self.gpu = options.backend == "nccl"
        self.device = torch.device("cuda", rank) if self.gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.begin = time.monotonic()
        self.end = self.begin + options.seconds
        self.groups: dict[int, Any] = {0: None}
        for spare in sorted({s for _, s in self.ways} - {0}):
            limited = dist.ProcessGroupNCCL.Options()
            limited.config.max_ctas = spare
            self.groups[spare] = dist.new_group(pg_options=limited)

    @property
    def ways(self) -> tuple[tuple[int, int], ...]:
        return WAYS if self.gpu else ((2, 0),)

    def over(self, value: float, reduce: Any) -> float:
        """A number of all ranks in one."""
        held = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(held, reduce)
        return float(held)

    def time(self, call: Callable[[], Any], calls: int = CALLS) -> float:
        """Milliseconds of a call that every rank makes."""
        if not self.gpu:
            start = time.perf_counter()
            call()
            return self.over(1e3 * (time.perf_counter() - start), dist.ReduceOp.MAX)
        for _ in range(2):
            call()
        found = []
        for _ in range(calls):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found.append(self.over(begin.elapsed_time(end), dist.ReduceOp.MAX))
        return statistics.median(found)

    def late(self) -> bool:
        return self.over(time.monotonic() > self.end, dist.ReduceOp.MAX) > 0

    def say(self, words: str) -> None:
        if self.rank == 0:
            print(f"{time.monotonic() - self.begin:6.1f} s  {words}", flush=True)

    def compile(self, calls: list[Callable[[], Any]]) -> None:
        """Makes each call once, several at a time, so that none compiles later; ranks share a cache on disk."""
        first, then = calls[self.rank :: self.ranks], [c for i, c in enumerate(calls) if i % self.ranks != self.rank]
        with ThreadPoolExecutor(THREADS if self.gpu else 1, initializer=self.use) as pool:
            list(pool.map(lambda call: call(), first + then))
        self.say(f"compiled: {len(calls)} calls")
        self.over(0, dist.ReduceOp.MAX)

    def use(self) -> None:
        """The calling thread works on this rank's device."""
        if self.gpu:
            torch.cuda.set_device(self.device)


class Layer:
    """The experts of a model, all of them on every rank, for one GPU to be compared with."""

    def __init__(self, rank: Rank, model: Model) -> None:
        self.rank, self.model = rank, model
        e, d, i = model.experts, model.width, model.hidden
        self.gate_up = self.random(1, e, 2 * i, d) * d**-0.5
        self.down = self.random(2, e, d, i) * i**-0.5

    def random(self, seed: int, *shape: int) -> torch.Tensor:
        """The same on every rank."""
        generator = torch.Generator(self.rank.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.rank.device, dtype=self.rank.dtype)

    def part(self, sizes: list[int]) -> slice:
        start = sum(sizes[: self.rank.rank])
        return slice(start, start + sizes[self.rank.rank])

    def one(self, x: Any, logits: Any) -> Any:
        """On one GPU."""
        return ops.moe.routed_ffn(x, logits, self.gate_up, self.down, **self.model.attributes)

    def parallel(self, x: Any, logits: Any, own: slice, chunks: int = 1, spare: int = 0, **given: Any) -> Any:
        return expert_parallel_ffn(
            x, logits, self.gate_up[own], self.down[own], spare=spare, chunks=chunks, group=self.rank.groups[spare],
            **self.model.attributes, **given,
        )  # fmt: skip


def even(count: int, ranks: int) -> list[int]:
    return [count * (r + 1) // ranks - count * r // ranks for r in range(ranks)]


def check(layer: Layer) -> list[dict[str, Any]]:
    """Values of this rank's tokens against one GPU with all experts."""
    rank, model = layer.rank, layer.model
    tokens = 12 if rank.small else 600
    x, logits = layer.random(3, tokens, model.width), layer.random(4, tokens, model.experts)
    one = torch.full_like(logits, -9.0)
    one[:, : model.top_k] = torch.arange(model.top_k, 0, -1, device=rank.device).to(one.dtype)  # all on the first ones
    lone, most = [tokens, *[0] * (rank.ranks - 1)], [1, *even(model.experts - 1, rank.ranks - 1)]
    experts, halves = even(model.experts, rank.ranks), even(tokens, rank.ranks)
    cases = {
        "even": (logits, halves, experts), "all tokens on the first experts": (one, halves, experts),
        "ranks without tokens": (logits, lone, experts), "one expert on the first rank": (logits, halves, most),
        "ranks without experts": (logits, halves, [model.experts, *[0] * (rank.ranks - 1)]),
    }  # fmt: skip
    found = []
    for name, (scores, sizes, owned) in cases.items():
        mine, own = layer.part(sizes), layer.part(owned)
        exact = x[mine]
        if exact.numel():
            exact = layer.one(exact, scores[mine])
        for chunks, spare in ((1, 0), *rank.ways):
            y = layer.parallel(x[mine], scores[mine], own, chunks, spare)
            error = float((y - exact).abs().max() / exact.abs().max()) if y.numel() else 0.0
            found.append({
                "model": model.name, "case": name, "chunks": chunks, "spare": spare,
                "error": rank.over(error, dist.ReduceOp.MAX),
                "same bits": rank.over(torch.equal(y, exact), dist.ReduceOp.MIN) > 0,
            })  # fmt: skip
    return found


def gradients(layer: Layer) -> dict[str, Any]:
    """Gradients of this rank's tokens, logits and experts against one GPU with all tokens and experts."""
    rank, model = layer.rank, layer.model
    tokens = 12 if rank.small else 256
    sizes, experts = even(tokens, rank.ranks), even(model.experts, rank.ranks)
    mine, own = layer.part(sizes), layer.part(experts)
    whole = [layer.random(3, tokens, model.width), layer.random(4, tokens, model.experts), layer.gate_up, layer.down]
    slope = layer.random(5, tokens, model.width)
    places = (mine, mine, own, own)
    parts = [t[at].detach().requires_grad_() for t, at in zip(whole, places, strict=True)]
    chunks, spare = rank.ways[-1]
    y = expert_parallel_ffn(*parts, spare=spare, chunks=chunks, group=rank.groups[spare], **model.attributes)
    y.backward(slope[mine])
    whole = [t.detach().requires_grad_() for t in whole]
    ops.moe.routed_ffn(*whole, **model.attributes).backward(slope)
    errors = {}
    for name, got, right, at in zip(("x", "logits", "gate_up", "down"), parts, whole, places, strict=True):
        exact = right.grad[at].float()
        errors[name] = rank.over(float((got.grad.float() - exact).norm() / exact.norm()), dist.ReduceOp.MAX)
    return {"model": model.name, "chunks": chunks, "spare": spare, "error": errors}


class Share:
    """This rank's tokens, of so many of all ranks."""

    def __init__(self, layer: Layer, tokens: int) -> None:
        self.layer, self.tokens = layer, tokens
        rank, model = layer.rank, layer.model
        self.own = layer.part(even(model.experts, rank.ranks))
        whole, scores = layer.random(3, tokens, model.width), layer.random(4, tokens, model.experts)
        mine = layer.part(even(tokens, rank.ranks))
        self.x, self.logits = whole[mine].contiguous(), scores[mine].contiguous()
        self.one = partial(layer.one, whole, scores)

    def parallel(self, chunks: int = 1, spare: int = 0, **given: Any) -> Any:
        return self.layer.parallel(self.x, self.logits, self.own, chunks, spare, **given)

    def experts(self, chunks: int = 1) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """What arrives at this rank's experts in each chunk, and the call that they make."""
        given: list[tuple[Any, Any]] = []

        def remembering(*tensors: Any, **attributes: Any) -> torch.Tensor:
            given.append((tensors, attributes))
            return tensors[0]

        self.parallel(chunks, ffn=remembering)
        for tensors, attributes in given:
            yield tensors[0], partial(ops.moe.expert_ffn, *tensors, **attributes)


def measure(share: Share) -> dict[str, Any]:
    rank, model = share.layer.rank, share.layer.model
    ((arrived, experts),) = share.experts()
    busiest = int(rank.over(arrived.shape[0], dist.ReduceOp.MAX))
    each = -(-busiest // rank.ranks)  # as many from every rank to every rank
    there, back = (arrived.new_empty(each * rank.ranks, model.width) for _ in range(2))

    def transfers() -> None:
        dist.all_to_all_single(there, back)
        dist.all_to_all_single(back, there)

    row: dict[str, Any] = {"model": model.name, "tokens": share.tokens, "most tokens of a rank": busiest}
    row["MB of transfers"] = 2e-6 * there.nbytes
    calls: dict[str, Callable[[], Any]] = {
        "one GPU": share.one, "compute": experts,
        "exchange": partial(share.parallel, ffn=lambda rows, *_, **__: rows),
        "transfers": transfers, "in sequence": share.parallel,
    }  # fmt: skip
    for chunks, spare in rank.ways:
        calls[f"overlapped, {chunks} chunks, {spare} spared"] = partial(share.parallel, chunks, spare)
    for name, call in calls.items():
        row[name] = rank.time(call)
        rank.say(f"{model.name}, {share.tokens} tokens: {name} {row[name]:.3f} ms")
    return row


def work(index: int, options: argparse.Namespace, store: str) -> None:
    """One rank."""
    faulthandler.dump_traceback_later(options.seconds + options.patience, exit=True)
    if options.backend == "nccl":
        torch.cuda.set_device(index)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(options.backend, init_method=f"file://{store}", rank=index, world_size=options.ranks)
    rank = Rank(index, options)
    result: dict[str, Any] = {"ranks": options.ranks, "backend": options.backend, **facts(rank)}
    result |= {"values": [], "gradients": [], "times": []}

    def tell(kind: str, rows: list[dict[str, Any]]) -> None:
        result[kind] += rows
        if index == 0:
            for row in rows if kind != "times" else ():
                rank.say(json.dumps(row))
            Path(options.output).write_text(json.dumps(result, indent=1) + "\n")

    rank.say("all ranks are there")
    layers = [Layer(rank, model) for model in (SMALL if options.small else MODELS)]
    counts = () if rank.late() else SMALL_TOKENS if options.small else TOKENS
    shares = [Share(layer, tokens) for tokens in counts for layer in layers]
    calls: list[Callable[[], Any]] = [share.one for share in shares]
    for share in shares:
        for chunks in sorted({1, *(chunks for chunks, _ in rank.ways)}):
            calls += [call for arrived, call in share.experts(chunks) if arrived.shape[0]]
    rank.compile(calls)
    for share in shares:
        if not rank.late():
            tell("times", [measure(share)])
    for layer in layers:
        tell("values", check(layer))
        if options.gradients:
            tell("gradients", [gradients(layer)])
    dist.destroy_process_group()


def facts(rank: Rank) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if rank.gpu:
        found |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found | {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--small", action="store_true", help="a layer that the simulator can compute")
    parser.add_argument("--gradients", action="store_true", help="gradients, too")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which nothing further is begun")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds more, after which ranks hang, and end")
    parser.add_argument("--output", default="benchmarks/results/expert_parallel.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, f"{folder}/store"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
