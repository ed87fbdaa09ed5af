"""One model and step: what is fused, how far the numbers are off, and what it takes."""

from __future__ import annotations

import copy
import datetime
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import fusionreg
from fusionreg.torch import Report, backend
from whole_models.architectures import ARCHITECTURES, Subject

ROUNDS, WARM = 9, 3


def measure(name: str, step: str, dtype: str, tiny: bool) -> dict[str, Any]:
    """A row of the results.

    Args:
        name: one of :data:`ARCHITECTURES`.
        step: ``infer``, or ``train``: forward, loss and backward.
        dtype: of parameters and inputs.
        tiny: a small model on the CPU.
    """
    torch.manual_seed(0)
    subject = ARCHITECTURES[name](tiny)
    device = "cpu" if tiny else "cuda"
    subject.module.train(step == "train")
    subject = Subject(subject.module.to(device), tuple(x.to(device) for x in subject.inputs), subject.loss)
    dropped = {n: m.p for n, m in subject.module.named_modules() if isinstance(m, torch.nn.Dropout)}
    _drop(subject.module, dict.fromkeys(dropped, 0.0))  # masks differ between libraries: numbers are compared without
    exact = _run(subject, subject.module, torch.float32, step)
    target = getattr(torch, dtype)
    row: dict[str, Any] = {
        "model": name, "step": step, "dtype": dtype,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__, "fusionreg": fusionreg.__version__,
        "gpu": "" if tiny else torch.cuda.get_device_name(), "times": {}, "errors": {},
    }  # fmt: skip
    registry = fusionreg.load_registry(device="sim" if tiny else "auto")
    for way in ("eager", "compile", "fused, rest by Inductor", "fused, rest eager"):
        if tiny and "eager" not in way:
            continue
        torch._dynamo.reset()
        reports: list[Report] = []
        module = copy.deepcopy(subject.module).to(target)
        compiled = _compiled(way, module, registry, reports, tiny)
        try:
            started = time.perf_counter()
            got = _run(subject, compiled, target, step, module)
            row["times"][way] = {"first_s": round(time.perf_counter() - started, 2)}
            row["errors"][way] = _errors(got, exact)
            if step == "train" and any(dropped.values()):
                reports.clear()
                _drop(module, dropped)
                _run(subject, compiled, target, step, module)
            if reports:
                row["sites"] = sum(len(r.fused) for r in reports)
                row["deepest"] = max((r.deepest for r in reports), default=0)
                found = Counter(s.fusion for r in reports for s in r.fused)
                row.setdefault("fusions", {})[way] = dict(found)
                row.setdefault("refused", {})[way] = [t for r in reports for t in r.refused]
            if not tiny:
                row["times"][way] |= _times(lambda: _step(subject, compiled, target, step, module))  # noqa: B023
        except Exception as error:  # a way that fails is a result too
            row["times"].setdefault(way, {})["failed"] = f"{type(error).__name__}: {error}"[:400]
    row.setdefault("sites", 0)
    row.setdefault("deepest", 0)
    return row


def _compiled(way: str, module: torch.nn.Module, registry: Any, reports: list[Report], tiny: bool) -> Any:
    if way == "eager":
        return module
    if way == "compile":
        return torch.compile(module)
    options = {"registry": registry, "report": reports.append, "device": "sim" if tiny else "cuda"}
    inner = "inductor" if "Inductor" in way else "eager"
    return torch.compile(module, backend=backend, options={**options, "inner": inner})


def _run(
    subject: Subject, call: Any, dtype: torch.dtype, step: str, module: torch.nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """Loss, and for a training step the gradients, of one step; in float32."""
    owner = module if module is not None else call
    owner.zero_grad(set_to_none=True)
    loss = _step(subject, call, dtype, step, owner)
    found = {"loss": loss.detach().float()}
    if step == "train":
        found |= {n: p.grad.detach().float() for n, p in owner.named_parameters() if p.grad is not None}
        owner.zero_grad(set_to_none=True)
    return found


def _step(subject: Subject, call: Any, dtype: torch.dtype, step: str, module: torch.nn.Module) -> torch.Tensor:
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in subject.inputs]
    if step == "infer":
        with torch.no_grad():
            return subject.loss(call(*inputs))
    loss = subject.loss(call(*inputs))
    loss.backward()
    return loss


def _drop(module: torch.nn.Module, rates: dict[str, float]) -> None:
    for name, rate in rates.items():
        module.get_submodule(name).p = rate  # type: ignore[assignment]


def _errors(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative distances from the eager model in float32: of the loss, and of all gradients together."""
    loss = abs(float(got["loss"] - exact["loss"])) / max(abs(float(exact["loss"])), 1e-12)
    names = [n for n in exact if n != "loss"]
    if not names:
        return {"loss": loss}
    if set(got) != set(exact):
        raise AssertionError(f"gradients of other parameters: {sorted(set(got) ^ set(exact))[:3]}")
    away = sum(float((got[n] - exact[n]).double().square().sum()) for n in names)
    size = sum(float(exact[n].double().square().sum()) for n in names)
    return {"loss": loss, "gradients": (away / max(size, 1e-30)) ** 0.5}


def _times(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a step called from the host, of the host's own part of it, and of its replay as a CUDA graph."""
    from whole_models.__main__ import Turn

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    with Turn():
        called, host = [], []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            host.append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
            called.append((time.perf_counter() - start) * 1e3)
        return {"ms": statistics.median(called), "host_ms": statistics.median(host), **_replayed(step)}


def _replayed(step: Callable[[], Any]) -> dict[str, float]:
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        torch.cuda.synchronize()
        found = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - start) * 1e3)
        return {"graph_ms": statistics.median(found)}
    except RuntimeError:  # a step with a synchronisation in it cannot be captured
        torch.cuda.synchronize()
        return {}
