"""One model and step: what is fused, how far the numbers are off, and what it takes."""

from __future__ import annotations

import copy
import datetime
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import fusionreg
from fusionreg.integrations.torch.timing import captured, replays
from fusionreg.torch import Report, backend
from whole_models.architectures import ARCHITECTURES, Subject, first

#: By short name: how a step is run.
WAYS = {
    "eager": "eager",
    "compile": "compile",
    "max-autotune": "compile, max-autotune",
    "inductor": "fused, rest by Inductor",
    "inductor-max": "fused, rest by Inductor, max-autotune",
    "inner-eager": "fused, rest eager",
}

#: What the way of that name is: replays of a whole step are captured here.
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"

#: Each way is timed in every turn, and each as often first as last, so that whatever else the machine does, and how
#: warm it is by then, meets all alike.
TURNS, ROUNDS, WARM = 6, 3, 2
#: Milliseconds of a step from which on it is timed half as often.
LONG = 20.0


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        name: one of :data:`ARCHITECTURES`.
        step: ``infer``, or ``train``: forward, loss and backward.
        dtype: of parameters and inputs.
        policy: of the fused ways.
        mode: of ``torch.compile``, for ``compile`` and for the ways that leave the rest to it; "" is its default.
        tiny: a small model on the CPU.
        measure: whether sites that nobody has measured on this machine are measured first.
        ways: those of :data:`WAYS` that are run, by their long names.
    """

    name: str
    step: str
    dtype: str = "bfloat16"
    policy: str = "balanced"
    mode: str = ""
    tiny: bool = False
    measure: bool = False
    ways: tuple[str, ...] = tuple(WAYS.values())


@dataclass
class Way:
    """One way to run a step: the module, what is called, and what was told of its graphs."""

    module: torch.nn.Module
    call: Any
    reports: list[Report] = field(default_factory=list)


def measure(plan: Plan, turn: Any) -> dict[str, Any]:
    """A row of the results; with times where there is a ``turn`` to wait for."""
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # the ways share code, each with its own graphs
    torch._dynamo.config.specialize_float = True  # rates of dropout are constants
    device = "cpu" if plan.tiny else "cuda"
    with torch.device(device):
        subject = ARCHITECTURES[plan.name](plan.tiny)
    subject.module.train(plan.step == "train")
    subject = Subject(subject.module.to(device), tuple(x.to(device) for x in subject.inputs), subject.loss)
    dropped = {n: m.p for n, m in subject.module.named_modules() if isinstance(m, torch.nn.Dropout)}
    _drop(subject.module, dict.fromkeys(dropped, 0.0))  # masks differ between libraries: numbers are compared without
    exact = _run(subject, Way(subject.module, subject.module), plan.step)
    target = getattr(torch, plan.dtype)
    _narrowed(subject.module, target)
    subject = replace(subject, inputs=tuple(x.to(target) if x.is_floating_point() else x for x in subject.inputs))
    _freed(device)
    row: dict[str, Any] = {
        "model": plan.name, "step": plan.step, "dtype": plan.dtype, "policy": plan.policy, "mode": plan.mode,
        "measure": plan.measure,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__, "fusionreg": fusionreg.__version__,
        "gpu": "" if plan.tiny else torch.cuda.get_device_name(), "driver": "" if plan.tiny else _driver(),
        "times": {}, "errors": {}, "fused": {}, "saved": {},
    }  # fmt: skip
    registry = fusionreg.load_registry(device="sim" if plan.tiny else "auto")
    steps: dict[str, Callable[[], Any]] = {}
    for name in plan.ways:
        if plan.tiny and "eager" not in name:
            continue
        way = _way(name, copy.deepcopy(subject.module), registry, plan)
        try:
            started = time.perf_counter()
            got = _run(subject, way, plan.step)
            row["times"][name] = {"first_s": round(time.perf_counter() - started, 2)}
            row["errors"][name] = _errors(got, exact)
            if plan.step == "train" and any(dropped.values()):
                way.reports.clear()
                _drop(way.module, dropped)
                _run(subject, way, plan.step)
            if way.reports:
                row["fused"][name] = _fused(way.reports)
            if plan.step == "train":
                row["saved"][name] = _saved(subject, way)
            steps[name] = partial(_step if plan.step == "train" else _result, subject, way, plan.step)
        except Exception as error:  # a way that fails is a result too
            row["times"].setdefault(name, {})["failed"] = _named(error)
        _freed(device)
    if turn is not None:
        with turn:
            for name, times in _times(steps).items():
                row["times"][name] |= times
    return row


def _narrowed(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """The module in a dtype, but for frequencies of positions, which models keep in float32."""
    wide = {n: b.clone() for n, b in module.named_buffers() if n.endswith("inv_freq")}
    module.to(dtype)
    for name, buffer in wide.items():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, buffer)


def _freed(device: str) -> None:
    """Gives back memory that other processes of a run may need meanwhile."""
    if device == "cuda":
        torch.cuda.empty_cache()


def _way(name: str, module: torch.nn.Module, registry: Any, plan: Plan) -> Way:
    way = Way(module, module)
    if name.startswith("compile"):
        way.call = torch.compile(module, mode=(plan.mode or None) if name == "compile" else MAX_AUTOTUNE)
    elif name != "eager":
        options = {"registry": registry, "report": way.reports.append, "device": "sim" if plan.tiny else "cuda"}
        options |= {"policy": plan.policy, "measure": plan.measure}
        options["inner"] = "inductor" if "Inductor" in name else "eager"
        if "Inductor" in name:
            options["mode"] = MAX_AUTOTUNE if name.endswith("max-autotune") else plan.mode or None
        way.call = torch.compile(module, backend=backend, options=options)
    return way


def _fused(reports: list[Report]) -> dict[str, Any]:
    """Of one way: how many sites, the deepest in operators by stage, the fusions, what lost and why, what could not be
    rewritten."""
    deepest = {stage: max(r.deepest for r in reports if r.stage == stage) for stage in {r.stage for r in reports}}
    return {
        "sites": sum(len(r.fused) for r in reports),
        "deepest": deepest,
        "fusions": dict(Counter(f"{r.stage}: {s.fusion}" for r in reports for s in r.fused)),
        "lost": dict(Counter(f"{r.stage}: {s.fusion}: {s.reason}" for r in reports for s in r.lost)),
        "refused": [t for r in reports for t in r.refused],
    }


def _run(subject: Subject, way: Way, step: str) -> dict[str, torch.Tensor]:
    """Result and loss, and for a training step the gradients, of one step; in float32."""
    way.module.zero_grad(set_to_none=True)
    result, loss = _step(subject, way, step)
    found = {"output": first(result).detach().float(), "loss": loss.detach().float()}
    if step == "train":
        found |= {n: p.grad.detach().float() for n, p in way.module.named_parameters() if p.grad is not None}
        way.module.zero_grad(set_to_none=True)
    return found


def _result(subject: Subject, way: Way, step: str) -> Any:
    with torch.set_grad_enabled(step == "train"):
        return way.call(*subject.inputs)


def _step(subject: Subject, way: Way, step: str) -> tuple[Any, torch.Tensor]:
    result = _result(subject, way, step)
    loss = subject.loss(result)
    if step == "train":
        loss.backward()
    return result, loss


def _saved(subject: Subject, way: Way) -> dict[str, float]:
    """What a training step keeps for its backward pass, beside parameters and inputs: megabytes, and how many masks."""
    own = {p.untyped_storage().data_ptr() for p in (*way.module.parameters(), *way.module.buffers(), *subject.inputs)}
    kept: dict[int, tuple[int, bool]] = {}

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor.dtype in (torch.bool, torch.uint8) and tensor.dim() > 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        _step(subject, way, "train")
    way.module.zero_grad(set_to_none=True)
    return {"mb": round(sum(n for n, _ in kept.values()) / 1e6, 3), "masks": sum(m for _, m in kept.values())}


def _driver() -> str:
    from fusionreg.core.runtime.driver import driver

    return driver().version()


def _drop(module: torch.nn.Module, rates: Mapping[str, float]) -> None:
    for name, rate in rates.items():
        module.get_submodule(name).p = rate  # type: ignore[assignment]


def _errors(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative distances from the eager model in float32: of the result, of the loss, of all gradients together."""
    if set(got) != set(exact):
        raise AssertionError(f"gradients of other parameters: {sorted(set(got) ^ set(exact))[:3]}")
    gradients = [n for n in exact if n not in ("output", "loss")]
    groups = {"output": ["output"], "loss": ["loss"]} | ({"gradients": gradients} if gradients else {})
    return {name: _distance(got, exact, names) for name, names in groups.items()}


def _distance(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], names: list[str]) -> float:
    away = sum(float((got[n] - exact[n]).double().square().sum()) for n in names)
    size = sum(float(exact[n].double().square().sum()) for n in names)
    return (away / max(size, 1e-30)) ** 0.5


def _times(steps: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    """Of each way, medians in milliseconds: of a step called from the host, of the host's own part of it, of its
    replay as a CUDA graph where it can be captured, and of the host's part of that."""
    found: dict[str, dict[str, Any]] = {name: {} for name in steps}
    graphs = {}
    for name, step in steps.items():
        try:
            graphs[name] = captured(step, 1)
        except RuntimeError as error:  # a step with a synchronisation in it
            torch.cuda.synchronize()
            found[name]["not_captured"] = _named(error)
    seen: dict[str, dict[str, list[float]]] = {n: {} for n in steps}
    order = list(steps.items())
    long = any(_called(step)["ms"] > LONG for step in steps.values())
    turns, warm, rounds = (len(order), 1, ROUNDS - 1) if long else (TURNS, WARM, ROUNDS)
    for turn in range(turns):
        at = turn % max(1, len(order))
        for name, step in order[at:] + order[:at]:
            for _ in range(warm):
                step()
            for _ in range(rounds):
                for kind, ms in _called(step).items():
                    seen[name].setdefault(kind, []).append(ms)
            if name in graphs:
                seen[name].setdefault("graph_ms", []).extend(replays(graphs[name], warm + rounds)[warm:])
                seen[name].setdefault("graph_host_ms", []).append(_called(graphs[name].replay)["host_ms"])
    for name, times in seen.items():
        found[name] |= {kind: statistics.median(ms) for kind, ms in times.items()}
    return found


def _called(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a step called from the host, and of the host's part of it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    host = time.perf_counter()
    torch.cuda.synchronize()
    return {"host_ms": (host - start) * 1e3, "ms": (time.perf_counter() - start) * 1e3}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]
